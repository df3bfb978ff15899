"""One line of a ledger file."""

from dataclasses import dataclass
from datetime import date

from ledger.money import parse_amount


@dataclass(frozen=True)
class Entry:
    day: date
    account: str
    amount: int
    note: str = ""


def parse_line(line):
    """'2024-03-01 food -12.50 lunch' -> Entry."""
    day, account, amount, *note = line.split()
    return Entry(date.fromisoformat(day), account, parse_amount(amount), " ".join(note))


def read_entries(lines):
    """Parse all lines but blank ones and comments."""
    return [parse_line(line) for line in lines if line.strip() and not line.startswith("#")]
