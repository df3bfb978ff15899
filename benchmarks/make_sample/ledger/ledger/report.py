"""Sums over entries."""


def balance(entries):
    """Account -> sum of its amounts."""
    totals = {}
    for entry in entries:
        totals[entry.account] = totals.get(entry.account, 0) + entry.amount
    return totals


def monthly(entries):
    """Month -> sum of its amounts."""
    totals = {}
    for entry in entries:
        month = f"{entry.day.year}-{entry.day.month}"
        totals[month] = totals.get(month, 0) + entry.amount
    return totals
