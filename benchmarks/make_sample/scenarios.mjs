// What the person says and what the model answers, session by session. Tools run for real on the toy repository `ledger/`,
// which every session starts with as it is in this folder (a fork: as its parent left it); their results are not scripted.
//
// A scenario is {name, title, fork?: name, resume?: name, keepRecentTokens?, steps}. Its steps are those of `takeStep` in
// record.mjs; a prompt takes as many replies as the model makes turns.

const reply = (think, text, ...calls) => ({ think, text, calls });
const read = (path) => ({ name: "read", args: { path } });
const bash = (command) => ({ name: "bash", args: { command } });
const write = (path, content) => ({ name: "write", args: { path, content } });
const edit = (path, ...pairs) => ({ name: "edit", args: { path, edits: pairs.map(([oldText, newText]) => ({ oldText, newText })) } });

const prompt = (text, ...replies) => ({ do: "prompt", text, replies });
const mark = (name) => ({ do: "mark", name });
const goto = (name, summary) => ({ do: "goto", name, ...(summary && { replies: [reply("", summary)] }) });
const compact = (...summaries) => ({ do: "compact", replies: summaries.map((summary) => reply("", summary)) });
const restore = (name) => ({ do: "restore", name });

const TESTS = "python3 -m unittest discover -s tests 2>&1";
const runTests = bash(TESTS);

// One exploration, then four tasks from it as branches of one session; the last begins with a summary of the one before.
const tree = {
  name: "tree",
  title: "explore, then four tasks",
  steps: [
    prompt(
      "Get to know this repository: read the code and the tests, then tell me in a few lines how it works. Change nothing yet.",
      reply("First an overview of the files.", "I'll look at the files first.", bash("find . -type f -not -path './.*' | sort")),
      reply("The command line shows how the parts fit together.", "", read("ledger/cli.py"), read("ledger/entry.py")),
      reply("Amounts come from `money`.", "", read("ledger/money.py")),
      reply("", "Now the sums.", read("ledger/report.py")),
      reply("What is covered by tests?", "", bash("grep -n 'def test\\|assert' tests/*.py"), runTests),
      reply("Try the program itself.", "", bash("python3 -m ledger balance data/march.txt"), bash("grep -n books data/march.txt")),
      reply(
        "The books entry is -0.50 in the file, but the report says 0.50.",
        "`ledger/entry.py` parses one entry per line, `ledger/money.py` turns amounts into integers of cents and back, `ledger/report.py` sums, and `ledger/cli.py` prints the sums. Three tests pass. One thing looks wrong: `books` is -0.50 in `data/march.txt`, yet the report prints 0.50.",
      ),
    ),
    mark("explored"),
    prompt(
      "Fix the sign of amounts like -0.50, with a test.",
      reply('`int("-0")` is 0, so the sign is lost when units are zero.', "The sign is lost because `int(\"-0\")` is 0. A test first.",
        edit("tests/test_money.py", ["    def test_format", '    def test_parse_below_one(self):\n        self.assertEqual(parse_amount("-0.50"), -50)\n\n    def test_format'])),
      reply("", "", runTests),
      reply("It fails as expected. Take the sign off before parsing.", "The test fails as it should. Now the fix.",
        edit("ledger/money.py", [
          '    units, _, cents = text.partition(".")\n    value = int(units) * 100\n    return value + int(cents or 0) if value >= 0 else value - int(cents or 0)',
          '    sign = -1 if text.startswith("-") else 1\n    units, _, cents = text.lstrip("+-").partition(".")\n    return sign * (int(units) * 100 + int(cents or 0))'])),
      reply("", "", runTests),
      reply("", "`parse_amount` in `ledger/money.py` now takes the sign from the text, so -0.50 is -50 cents. The new test fails without the fix and passes with it."),
    ),
    prompt(
      "Does 3.5 mean 3.50 or 3.05?",
      reply("cents = \"5\" -> int 5, so 3.05. Check it.", "", bash("python3 -c 'from ledger.money import parse_amount as p; print(p(\"3.5\"))'")),
      reply("305: one digit is read as cents.", "It is read as 3.05, which is a bug too: one digit after the point should be tens of cents. Padding with `cents.ljust(2, \"0\")` in `parse_amount` would fix it. Shall I?"),
    ),
    goto("explored"),
    restore("explored"),
    prompt(
      "The monthly report sorts 2024-10 before 2024-2. Fix that, with a test.",
      reply("The key has no leading zero, so it sorts as text the wrong way.", "",
        edit("ledger/report.py", ['f"{entry.day.year}-{entry.day.month}"', 'f"{entry.day.year}-{entry.day.month:02d}"']),
        edit("tests/test_report.py",
          ["import balance\n", "import balance, monthly\n"],
          ['{"food": -6070})\n', '{"food": -6070})\n\n    def test_months_sort_as_text(self):\n        entries = read_entries(["2024-10-01 food 1.00", "2024-02-01 food 2.00"])\n        self.assertEqual(sorted(monthly(entries)), ["2024-02", "2024-10"])\n'])),
      reply("", "", runTests),
      reply("", "", bash("python3 -m ledger monthly data/march.txt")),
      reply("", "Months are now written with two digits (`ledger/report.py`), so they sort in order of time. A test covers it."),
    ),
    goto("explored"),
    restore("explored"),
    prompt(
      "Add a --csv option that prints the report as CSV.",
      reply("The csv module takes care of quoting. Print amounts with format_amount.", "",
        edit("ledger/cli.py",
          ["import argparse\n", "import argparse\nimport csv\nimport sys\n"],
          ['    parser.add_argument("file")\n', '    parser.add_argument("file")\n    parser.add_argument("--csv", action="store_true", help="print comma-separated values")\n'],
          ["    for name in sorted(totals):\n        print(", "    if args.csv:\n        rows = ((name, format_amount(totals[name])) for name in sorted(totals))\n        csv.writer(sys.stdout, lineterminator=\"\\n\").writerows(rows)\n        return 0\n    for name in sorted(totals):\n        print("])),
      reply("", "", bash("python3 -m ledger balance --csv data/march.txt")),
      reply("", "", runTests),
      reply("", "`python3 -m ledger balance --csv FILE` prints one `name,amount` line per account. The change is in `ledger/cli.py`; the old output is as it was."),
    ),
    goto("explored", "## Goal\nAdd a --csv option to the ledger command line.\n\n## Progress\n### Done\n- [x] `--csv` in `ledger/cli.py`, written with the csv module\n- [x] Tests pass\n\n## Next Steps\n1. Document the option"),
    prompt(
      "Document that option in the README.",
      reply("The summary says what was added; the README ends with the balance command.", "",
        edit("README.md", ["    python3 -m ledger balance data/march.txt\n", "    python3 -m ledger balance data/march.txt\n\nThe same as comma-separated values:\n\n    python3 -m ledger balance --csv data/march.txt\n"])),
      reply("", "", bash("tail -n 7 README.md && python3 -m ledger balance --csv data/march.txt | head -n 2")),
      reply("", "The README now shows `--csv` below the balance command; I ran the line it shows."),
    ),
  ],
};

// A review with tasks as branches, one of which branches again.
const review = {
  name: "review",
  title: "review and repairs",
  steps: [
    prompt(
      "Review this code base: read every module and the tests, try the edge cases, and number what you find. Repair nothing yet.",
      reply("Size first.", "", bash("wc -l ledger/*.py tests/*.py")),
      reply("", "I'll read the modules in the order in which they depend on each other.", read("ledger/money.py"), read("ledger/entry.py")),
      reply("", "", read("ledger/report.py"), read("ledger/cli.py")),
      reply("Now what the tests cover.", "", read("tests/test_money.py"), read("tests/test_report.py")),
      reply("Edge cases of money: zero units, one digit, small negative numbers.", "", bash("python3 -c 'from ledger.money import parse_amount as p, format_amount as f; print(p(\"-0.50\"), p(\"3.5\"), p(\"1.234\"), f(-5), f(-1250))'")),
      reply(
        "p(-0.50)=50 wrong sign; p(3.5)=305; p(1.234)=334; f(-5)=-1.95; f(-1250)=-13.50.",
        "1. `parse_amount(\"-0.50\")` is 50: the sign is lost when units are zero.\n2. `parse_amount(\"3.5\")` is 305 and `\"1.234\"` is 334: digits after the point are not checked.\n3. `format_amount(-5)` is \"-1.95\": floor division.\n4. `monthly` writes months without a leading zero, and has no test.\n5. `main` in `ledger/cli.py` has no test.\n6. There is no `pyproject.toml`, so the program cannot be installed.",
      ),
    ),
    mark("reviewed"),
    prompt(
      "Repair number 2 for one digit: 3.5 means 3.50.",
      reply("Pad the cents on the right.", "",
        edit("ledger/money.py",
          ['    value = int(units) * 100\n', '    cents = int(cents.ljust(2, "0"))\n    value = int(units) * 100\n'],
          ["    return value + int(cents or 0) if value >= 0 else value - int(cents or 0)", "    return value + cents if value >= 0 else value - cents"]),
        edit("tests/test_money.py", ["    def test_format", '    def test_parse_one_digit(self):\n        self.assertEqual(parse_amount("3.5"), 350)\n        self.assertEqual(parse_amount("3"), 300)\n\n    def test_format'])),
      reply("", "", runTests),
      reply("", "Number 2 is repaired for one digit: the cents are padded to two digits, so 3.5 is 350 cents. `1.234` is still read, as 334."),
    ),
    mark("padded"),
    prompt(
      "Now refuse more than two digits.",
      reply("int(cents) of three digits must be an error, a ValueError like the others.", "",
        edit("ledger/money.py", ['    cents = int(cents', '    if len(cents) > 2:\n        raise ValueError(f"more than two digits after the point: {text!r}")\n    cents = int(cents']),
        edit("tests/test_money.py", ["    def test_format", '    def test_parse_three_digits(self):\n        with self.assertRaisesRegex(ValueError, "two digits"):\n            parse_amount("1.234")\n\n    def test_format'])),
      reply("", "", runTests),
      reply("", "`parse_amount(\"1.234\")` now raises a `ValueError` that names the text. 5 tests pass."),
    ),
    goto("padded"),
    restore("padded"),
    prompt(
      "Rather round to the nearest cent when there are more digits.",
      reply("Integers only: AGENTS.md forbids float. Round half up on the third digit.", "", read("ledger/money.py")),
      reply("", "",
        edit("ledger/money.py", ['    cents = int(cents.ljust(2, "0"))\n', '    cents = (int(cents.ljust(3, "0")[:3]) + 5) // 10\n']),
        edit("tests/test_money.py", ["    def test_format", '    def test_parse_rounds(self):\n        self.assertEqual(parse_amount("1.234"), 123)\n        self.assertEqual(parse_amount("1.235"), 124)\n        self.assertEqual(parse_amount("1.999"), 200)\n\n    def test_format'])),
      reply("", "", runTests),
      reply("", "Further digits are now rounded, half up, with integers only: 1.234 is 123 cents, 1.235 is 124, 1.999 is 200."),
    ),
    goto("reviewed"),
    restore("reviewed"),
    prompt(
      "Repair number 3.",
      reply("", "",
        edit("ledger/money.py", ['    return f"{cents // 100}.{cents % 100:02d}"', '    units, rest = divmod(abs(cents), 100)\n    return f"{\'-\' if cents < 0 else \'\'}{units}.{rest:02d}"']),
        edit("tests/test_money.py", ['        self.assertEqual(format_amount(1250), "12.50")\n', '        self.assertEqual(format_amount(1250), "12.50")\n        self.assertEqual(format_amount(-5), "-0.05")\n'])),
      reply("", "", runTests),
      reply("", "Number 3 is repaired: `format_amount` splits the absolute value. -5 prints as -0.05."),
    ),
    goto("reviewed"),
    restore("reviewed"),
    prompt(
      "Take number 5: test the command line.",
      reply("Capture stdout; use a file in a temporary folder.", "",
        write("tests/test_cli.py", 'import contextlib\nimport io\nimport tempfile\nimport unittest\nfrom pathlib import Path\n\nfrom ledger.cli import main\n\n\nclass CliTest(unittest.TestCase):\n    def test_balance(self):\n        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as out:\n            path = Path(folder, "a.txt")\n            path.write_text("2024-03-01 food 12.50\\n2024-03-02 rent 7.00\\n", encoding="utf-8")\n            self.assertEqual(main(["balance", str(path)]), 0)\n        self.assertEqual(out.getvalue().split(), ["food", "12.50", "rent", "7.00"])\n')),
      reply("", "", runTests),
      reply("Does the test fail when the program is wrong? Break it once.", "It passes. I'll see whether it can fail.", bash("sed -i 's/sorted(totals)/list(totals)[:1]/' ledger/cli.py; " + TESTS + " | grep -c '^FAIL'; sed -i 's/list(totals)\\[:1\\]/sorted(totals)/' ledger/cli.py; " + TESTS + " | tail -n 1")),
      reply("", "`tests/test_cli.py` runs `main` on a small file and compares the printed table. I broke the program once: the test failed, and passes again now that it is as before."),
    ),
    goto("reviewed"),
    restore("reviewed"),
    prompt(
      "And number 6, with a command `ledger`.",
      reply("", "", write("pyproject.toml", '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n\n[project]\nname = "ledger"\nversion = "0.1.0"\nrequires-python = ">=3.9"\n\n[project.scripts]\nledger = "ledger.cli:main"\n\n[tool.setuptools]\npackages = ["ledger"]\n')),
      reply("Check that it parses.", "", bash("python3 -c 'import tomllib; print(tomllib.load(open(\"pyproject.toml\", \"rb\"))[\"project\"][\"scripts\"])'")),
      reply("", "`pyproject.toml` is written; `pip install .` gives a command `ledger` that runs `main` in `ledger/cli.py`. `main` returns 0, which becomes the exit code."),
    ),
  ],
};

// One exploration in a session of its own, forked into two further files; the first goes on as well.
const forkBase = {
  name: "errors",
  title: "what happens on a bad line",
  steps: [
    prompt(
      "What happens when a line of a ledger file is malformed? Find out, change nothing.",
      reply("Look at the parser.", "", read("ledger/entry.py")),
      reply("", "I'll see who calls it.", bash("grep -rn 'read_entries\\|parse_line' --include=*.py . | sort")),
      reply("Try three kinds of bad lines.", "", write("data/bad.txt", "2024-03-01 food -12.50\n2024-03-40 food -1.00\n2024-03-02 food\n2024-03-03 food x.50\n"), read("ledger/money.py")),
      reply("", "", bash("python3 -m ledger balance data/bad.txt 2>&1 | tail -n 1")),
      reply("One line at a time, to see each error.", "", bash("tail -n +2 data/bad.txt | while read -r line; do echo \"$line\" > data/one.txt; python3 -m ledger balance data/one.txt 2>&1 | tail -n 1; done; rm data/one.txt")),
      reply("All are ValueError, with texts that do not name the line.", "Every malformed line ends the program with a traceback of a `ValueError`: a bad date (\"day is out of range for month\"), too few fields (\"not enough values to unpack\"), a bad amount (\"invalid literal for int()\"). None of them says which file or line it was. I left `data/bad.txt` for trying."),
    ),
  ],
};

const forkNamed = {
  name: "errors-named",
  fork: "errors",
  title: "name the line in errors",
  steps: [
    prompt(
      "Make the error name the line number and the line, and let the program print it without a traceback.",
      reply("Wrap the ValueError where line numbers are known: read_entries.", "",
        edit("ledger/entry.py", [
          '    """Parse all lines but blank ones and comments."""\n    return [parse_line(line) for line in lines if line.strip() and not line.startswith("#")]',
          '    """Parse all lines but blank ones and comments."""\n    entries = []\n    for number, line in enumerate(lines, 1):\n        if not line.strip() or line.startswith("#"):\n            continue\n        try:\n            entries.append(parse_line(line))\n        except ValueError as error:\n            raise ValueError(f"line {number}: {line.strip()!r}: {error}") from None\n    return entries']),
        read("ledger/cli.py")),
      reply("The command line turns it into a message and exit code 2.", "",
        edit("ledger/cli.py", [
          '    with open(args.file, encoding="utf-8") as lines:\n        entries = read_entries(lines)\n',
          '    try:\n        with open(args.file, encoding="utf-8") as lines:\n            entries = read_entries(lines)\n    except ValueError as error:\n        parser.error(f"{args.file}: {error}")\n'])),
      reply("", "", bash("python3 -m ledger balance data/bad.txt; echo \"exit code $?\""), runTests),
      reply("", "A bad line now ends with a message that names file, line number and line, and exit code 2; no traceback. The changes are in `ledger/entry.py` and `ledger/cli.py`."),
    ),
    prompt(
      "Add a test for it.",
      reply("", "",
        edit("tests/test_report.py", ['{"food": -6070})\n', '{"food": -6070})\n\n    def test_error_names_the_line(self):\n        with self.assertRaisesRegex(ValueError, "line 2: .2024-03-02 food."):\n            read_entries(["2024-03-01 food 1.00", "2024-03-02 food"])\n'])),
      reply("", "", runTests),
      reply("", "`test_error_names_the_line` in `tests/test_report.py` checks the number and the text of the bad line. All 4 tests pass."),
    ),
  ],
};

const forkSkip = {
  name: "errors-skip",
  fork: "errors",
  title: "skip bad lines",
  steps: [
    prompt(
      "I would rather skip bad lines and have a warning on stderr for each.",
      reply("Use the warnings? No: plain stderr lines are what a command line user expects. Put it in read_entries with a callback.", "",
        edit("ledger/entry.py", [
          'def read_entries(lines):\n    """Parse all lines but blank ones and comments."""\n    return [parse_line(line) for line in lines if line.strip() and not line.startswith("#")]',
          'def read_entries(lines, on_error=None):\n    """Parse all lines but blank ones and comments; on_error(number, error) is told of bad ones."""\n    entries = []\n    for number, line in enumerate(lines, 1):\n        if not line.strip() or line.startswith("#"):\n            continue\n        try:\n            entries.append(parse_line(line))\n        except ValueError as error:\n            if on_error is None:\n                raise\n            on_error(number, error)\n    return entries'])),
      reply("", "", edit("ledger/cli.py",
        ["import argparse\n", "import argparse\nimport sys\n"],
        ["        entries = read_entries(lines)\n", '        entries = read_entries(lines, lambda number, error: print(f"{args.file}:{number}: skipped: {error}", file=sys.stderr))\n'])),
      reply("", "", bash("python3 -m ledger balance data/bad.txt")),
      reply("The warnings appear, the sum of the good line too.", "", runTests),
      reply("", "Bad lines are skipped, each with a `file:line: skipped: reason` line on stderr. `read_entries` still raises when no `on_error` is given, so code that relies on the error is not surprised."),
    ),
  ],
};

const forkGoesOn = {
  name: "errors-tests",
  resume: "errors",
  steps: [
    prompt(
      "Leave it as it is, but write tests that hold today's behaviour.",
      reply("", "", write("tests/test_bad_lines.py", 'import unittest\n\nfrom ledger.entry import parse_line\n\nBAD = ["2024-03-40 food -1.00", "2024-03-02 food", "2024-03-03 food x.50"]\n\n\nclass BadLineTest(unittest.TestCase):\n    def test_value_error(self):\n        for line in BAD:\n            with self.subTest(line), self.assertRaises(ValueError):\n                parse_line(line)\n')),
      reply("", "", runTests),
      reply("data/bad.txt is no longer needed.", "", bash("rm -f data/bad.txt && ls data tests")),
      reply("", "`tests/test_bad_lines.py` holds that each of the three kinds raises `ValueError`. I removed `data/bad.txt`."),
    ),
  ],
};

// A long session: a feature in steps, compacted in the middle.
const long = {
  name: "budget",
  title: "budgets",
  keepRecentTokens: 250,
  steps: [
    prompt(
      "I want budgets: a file with one `account limit` per line, and a command `budget` that shows what is left. Start with the parser.",
      reply("See how entries are parsed, to do it alike.", "", read("ledger/entry.py")),
      reply("A module of its own.", "",
        write("ledger/budget.py", '"""Limits per account."""\n\nfrom ledger.money import parse_amount\n\n\ndef read_limits(lines):\n    """\'food 100.00\' -> {\'food\': 10000}."""\n    limits = {}\n    for line in lines:\n        account, limit = line.split()\n        limits[account] = parse_amount(limit)\n    return limits\n')),
      reply("", "", write("data/budget.txt", "food 100.00\nrent 780.00\nbooks 20.00\n"), bash("python3 -c 'from ledger.budget import read_limits; print(read_limits(open(\"data/budget.txt\")))'")),
      reply("", "`ledger/budget.py` has `read_limits`; `data/budget.txt` is an example. Next would be the sum of what is left."),
    ),
    prompt(
      "Go on with what is left per account.",
      reply("Spending is negative, so left = limit + balance. Accounts without a limit are left out.", "",
        edit("ledger/budget.py", ["    return limits\n", '    return limits\n\n\ndef remaining(limits, totals):\n    """Account -> limit less what was spent (spending is negative)."""\n    return {account: limit + totals.get(account, 0) for account, limit in limits.items()}\n'])),
      reply("", "", write("tests/test_budget.py", 'import unittest\n\nfrom ledger.budget import read_limits, remaining\n\n\nclass BudgetTest(unittest.TestCase):\n    def test_read(self):\n        self.assertEqual(read_limits(["food 100.00"]), {"food": 10000})\n\n    def test_remaining(self):\n        limits = {"food": 10000, "books": 2000}\n        self.assertEqual(remaining(limits, {"food": -7045}), {"food": 2955, "books": 2000})\n')),
      reply("", "", runTests),
      reply("", "`remaining(limits, totals)` is in `ledger/budget.py`, with tests in `tests/test_budget.py`. 5 tests pass."),
    ),
    prompt(
      "Blank lines and comments in the budget file should be allowed.",
      reply("The same rule as in read_entries.", "",
        edit("ledger/budget.py", ["    for line in lines:\n", '    for line in lines:\n        if not line.strip() or line.startswith("#"):\n            continue\n']),
        edit("tests/test_budget.py", ['read_limits(["food 100.00"])', 'read_limits(["# limits", "", "food 100.00"])'])),
      reply("", "", runTests),
      reply("", "Done: blank lines and lines that start with `#` are passed over, as in ledger files."),
    ),
    compact(
      "## Goal\nBudgets for the ledger program: a file of `account limit` lines and a command `budget` that shows what is left.\n\n## Progress\n### Done\n- [x] `ledger/budget.py`: `read_limits(lines)`, `remaining(limits, totals)`\n- [x] `data/budget.txt` as an example, `tests/test_budget.py`\n- [x] Blank lines and comments allowed\n\n## Next Steps\n1. The `budget` command in `ledger/cli.py`\n2. README\n\n## Critical Context\n- Spending is negative: left = limit + balance",
      "The user asked that blank lines and comments be allowed in the budget file; the parser and its test were edited.",
    ),
    prompt(
      "Now the command: `python3 -m ledger budget FILE --limits LIMITS`.",
      reply("I need the present command line.", "", read("ledger/cli.py")),
      reply("`getattr(report, command)` does not fit budget; branch on it.", "",
        edit("ledger/cli.py",
          ["from ledger import report\n", "from ledger import report\nfrom ledger.budget import read_limits, remaining\n"],
          ['choices=["balance", "monthly"]', 'choices=["balance", "monthly", "budget"]'],
          ['    args = parser.parse_args(argv)\n', '    parser.add_argument("--limits", help="file of `account limit` lines")\n    args = parser.parse_args(argv)\n    if args.command == "budget" and args.limits is None:\n        parser.error("budget needs --limits")\n'],
          ["    totals = getattr(report, args.command)(entries)\n", '    if args.command == "budget":\n        with open(args.limits, encoding="utf-8") as lines:\n            totals = remaining(read_limits(lines), report.balance(entries))\n    else:\n        totals = getattr(report, args.command)(entries)\n'])),
      reply("", "", bash("python3 -m ledger budget data/march.txt --limits data/budget.txt"), bash("python3 -m ledger budget data/march.txt; echo \"exit code $?\"")),
      reply("books: 20.00 + 0.50 = 20.50, although 0.50 was spent. That is parse_amount's sign bug, not the budget's.", "", bash("python3 -c 'from ledger.money import parse_amount as p; print(p(\"-0.50\"), p(\"-1.50\"))'")),
      reply("", "The command works. One figure is wrong: `books` shows 20.50 left although 0.50 was spent, because `parse_amount(\"-0.50\")` gives +50. That bug is older than the budget. Shall I fix it?"),
    ),
    prompt(
      "Yes, fix it, with a test.",
      reply("", "", read("ledger/money.py")),
      reply("", "",
        edit("ledger/money.py", [
          '    units, _, cents = text.partition(".")\n    value = int(units) * 100\n    return value + int(cents or 0) if value >= 0 else value - int(cents or 0)',
          '    units, _, cents = text.partition(".")\n    value = abs(int(units)) * 100 + int(cents or 0)\n    return -value if units.startswith("-") else value']),
        edit("tests/test_money.py", ['    def test_format', '    def test_parse_below_one(self):\n        self.assertEqual(parse_amount("-0.50"), -50)\n\n    def test_format'])),
      reply("", "", runTests, bash("python3 -m ledger budget data/march.txt --limits data/budget.txt | head -n 1")),
      reply("", "Fixed in `ledger/money.py`: the sign comes from the text. `books` now shows 19.50, and all tests pass."),
    ),
    prompt(
      "And two lines in the README.",
      reply("", "", edit("README.md", ["    python3 -m ledger balance data/march.txt\n", "    python3 -m ledger balance data/march.txt\n\nPrint what is left of the limits in a budget file:\n\n    python3 -m ledger budget data/march.txt --limits data/budget.txt\n"])),
      reply("", "The README shows the `budget` command."),
    ),
  ],
};

// Short sessions that have nothing in common but the system prompt and the tools.
const short = [
  {
    name: "spent",
    title: "where the money went",
    steps: [
      prompt(
        "How much did I spend on food in data/march.txt?",
        reply("The program can tell.", "", bash("python3 -m ledger balance data/march.txt | grep food"), bash("grep -c food data/march.txt")),
        reply("-12.50 - 48.20 - 9.75 = -70.45, but the program says -71.55. format_amount uses floor division: -7045 // 100 = -71 and -7045 % 100 = 55.", "",
          bash("python3 -c 'print(-7045 // 100, -7045 % 100, 1250 + 4820 + 975)'")),
        reply("", "70.45 in three entries. The program prints -71.55, which is wrong: `format_amount` in `ledger/money.py` divides negative cents with `//`, which rounds down."),
      ),
    ],
  },
  {
    name: "format",
    title: "negative amounts print wrong",
    steps: [
      prompt(
        "format_amount(-1250) gives -13.50. Fix it and add a test.",
        reply("", "", read("ledger/money.py"), read("tests/test_money.py")),
        reply("Format the absolute value and put the sign before it.", "",
          edit("ledger/money.py", ['    return f"{cents // 100}.{cents % 100:02d}"', '    units, rest = divmod(abs(cents), 100)\n    return f"{\'-\' if cents < 0 else \'\'}{units}.{rest:02d}"']),
          edit("tests/test_money.py", ['        self.assertEqual(format_amount(1250), "12.50")\n', '        self.assertEqual(format_amount(1250), "12.50")\n        self.assertEqual(format_amount(-1250), "-12.50")\n        self.assertEqual(format_amount(-5), "-0.05")\n'])),
        reply("", "", runTests, bash("python3 -m ledger balance data/march.txt")),
        reply("", "`format_amount` now splits the absolute value and writes the sign before it: -1250 is \"-12.50\", -5 is \"-0.05\". Both are tested."),
      ),
    ],
  },
  {
    name: "list",
    title: "a list command",
    steps: [
      prompt(
        "Add a command `list` that prints the entries of one account, given with --account.",
        reply("", "", read("ledger/cli.py")),
        reply("`list` prints entries, not totals, so it returns early.", "",
          edit("ledger/cli.py",
            ['choices=["balance", "monthly"]', 'choices=["balance", "monthly", "list"]'],
            ['    args = parser.parse_args(argv)\n', '    parser.add_argument("--account", help="show this account only")\n    args = parser.parse_args(argv)\n'],
            ["    totals = getattr", '    if args.command == "list":\n        for entry in entries:\n            if args.account in (None, entry.account):\n                print(f"{entry.day} {entry.account:<10}{format_amount(entry.amount):>10} {entry.note}".rstrip())\n        return 0\n    totals = getattr'])),
        reply("", "", bash("python3 -m ledger list data/march.txt --account books"), bash("python3 -m ledger list data/march.txt | wc -l")),
        reply("It works; -0.50 shows as 0.50, which is a bug of parse_amount and not asked for. Mention it.", "", runTests),
        reply("", "`python3 -m ledger list FILE --account books` prints the entries of that account, without `--account` all of them. Beside the task: the library fine of -0.50 is printed as 0.50, since `parse_amount` loses the sign when the units are zero."),
      ),
    ],
  },
  {
    name: "floats",
    title: "any floats?",
    steps: [
      prompt(
        "Is money ever a float in this code?",
        reply("", "", bash("grep -rnE 'float|round\\(| / ' --include=*.py . ; echo \"exit code $?\"")),
        reply("No match. Division appears only as //.", "", bash("grep -rn '//' --include=*.py .")),
        reply("", "No. There is no `float`, no `/` and no `round` in the code; `ledger/money.py` works on integers of cents throughout."),
      ),
    ],
  },
  {
    name: "thousands",
    title: "thousands separators",
    steps: [
      prompt(
        "My bank writes 1,250.00. Let the parser accept that.",
        reply("", "", bash("sed -n '4,8p' ledger/money.py"), bash("python3 -m ledger balance - 2>&1 | tail -n 1")),
        reply("Only commas between groups of three digits should be accepted, so that 1,5 is still an error.", "",
          edit("ledger/money.py",
            ['"""Amounts are integers of cents."""\n', '"""Amounts are integers of cents."""\n\nimport re\n\nGROUPED = re.compile(r"[+-]?\\d{1,3}(,\\d{3})+(\\.\\d+)?")\n'],
            ['    units, _, cents', '    if GROUPED.fullmatch(text):\n        text = text.replace(",", "")\n    units, _, cents'])),
        reply("", "",
          edit("tests/test_money.py", ["    def test_format", '    def test_parse_grouped(self):\n        self.assertEqual(parse_amount("1,250.00"), 125000)\n        with self.assertRaises(ValueError):\n            parse_amount("1,5")\n\n    def test_format'])),
        reply("", "", runTests),
        reply("", "`parse_amount` takes commas between groups of three digits: \"1,250.00\" is 125000 cents. \"1,5\" is still an error, so a decimal comma is not misread."),
      ),
    ],
  },
  {
    name: "unicode",
    title: "account names with accents",
    steps: [
      prompt(
        "Do account names like café or 食費 work? Columns should stay aligned.",
        reply("Try both.", "", bash("printf '2024-03-01 café 3.20\\n2024-03-02 食費 8.00\\n2024-03-03 food 1.00\\n' > data/names.txt; python3 -m ledger balance data/names.txt")),
        reply("café is fine; 食費 takes two columns per character, so the amount is two columns too far right.", "", bash("python3 -c 'import unicodedata as u; print([(c, u.east_asian_width(c)) for c in \"é食費\"])'; rm data/names.txt")),
        reply("", "Names with accents work and line up. 食費 is parsed and summed correctly too, but its characters are two columns wide in a terminal, so its amount is printed two columns too far to the right. `unicodedata.east_asian_width` would tell the width; say if you want it. ✓"),
      ),
    ],
  },
];

// What goes wrong in real sessions: a failed request that is retried, an aborted answer, a tool error, a command of the user.
const rough = {
  name: "rough",
  title: "an interrupted session",
  steps: [
    { do: "bash", command: "python3 -m ledger monthly data/march.txt" },
    prompt(
      "Why does the first row say 2024-2?",
      { fail: 503 },
      reply("", "", read("ledger/reports.py")),
      reply("The file is report.py.", "", read("ledger/report.py")),
      reply("", "`data/march.txt` has one entry of 2024-02-29, the February salary. The month is printed as `2024-2` because `monthly` in `ledger/report.py` writes it without a leading zero."),
    ),
    { do: "abort", text: "Should the salary count for March?", replies: [{ think: "That depends on how the user keeps books.", text: "There are several schools of accounting on this, beginning with", hang: true }] },
    prompt(
      "Short, please: yes or no?",
      reply("", "No. The entry is dated 2024-02-29, so it counts for February; change the date if you want it in March."),
    ),
    prompt(
      "Then write the month with two digits.",
      reply("", "", edit("ledger/report.py", ["{entry.day.month}", "{entry.day.month:02d}"])),
      reply("", "", bash("python3 -m ledger monthly data/march.txt"), runTests),
      reply("", "The rows are now `2024-02` and `2024-03`."),
    ),
  ],
};

export const scenarios = [tree, review, forkBase, forkNamed, forkSkip, forkGoesOn, long, ...short, rough];
