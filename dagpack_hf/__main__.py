"""`python -m dagpack_hf`: the command `dagpack`."""

import sys

from dagpack_hf.cli import main

if __name__ == "__main__":
    sys.exit(main())
