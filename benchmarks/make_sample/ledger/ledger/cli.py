"""Command line: python3 -m ledger COMMAND FILE."""

import argparse

from ledger import report
from ledger.entry import read_entries
from ledger.money import format_amount


def main(argv=None):
    parser = argparse.ArgumentParser(prog="ledger")
    parser.add_argument("command", choices=["balance", "monthly"])
    parser.add_argument("file")
    args = parser.parse_args(argv)
    with open(args.file, encoding="utf-8") as lines:
        entries = read_entries(lines)
    totals = getattr(report, args.command)(entries)
    for name in sorted(totals):
        print(f"{name:<10}{format_amount(totals[name]):>10}")
    return 0
