"""Tests of ledger.money."""

import unittest

from ledger.money import format_amount, parse_amount


class MoneyTest(unittest.TestCase):
    def test_parse(self):
        self.assertEqual(parse_amount("12.50"), 1250)
        self.assertEqual(parse_amount("-48.20"), -4820)

    def test_format(self):
        self.assertEqual(format_amount(1250), "12.50")


if __name__ == "__main__":
    unittest.main()
