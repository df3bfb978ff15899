"""Amounts are integers of cents."""


def parse_amount(text):
    """'12.50' -> 1250."""
    units, _, cents = text.partition(".")
    value = int(units) * 100
    return value + int(cents or 0) if value >= 0 else value - int(cents or 0)


def format_amount(cents):
    """1250 -> '12.50'."""
    return f"{cents // 100}.{cents % 100:02d}"
