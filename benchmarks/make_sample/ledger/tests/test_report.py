"""Tests of ledger.report."""

import unittest

from ledger.entry import read_entries
from ledger.report import balance

LINES = ["# comment", "", "2024-03-01 food -12.50 lunch", "2024-03-05 food -48.20"]


class ReportTest(unittest.TestCase):
    def test_balance(self):
        self.assertEqual(balance(read_entries(LINES)), {"food": -6070})


if __name__ == "__main__":
    unittest.main()
