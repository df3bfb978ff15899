"""Entry point of python3 -m ledger."""

from ledger.cli import main

raise SystemExit(main())
