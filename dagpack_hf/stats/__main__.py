"""`python -m dagpack_hf.stats`: the same as `dagpack stats`."""

import sys

from dagpack_hf.cli import main

if __name__ == "__main__":
    sys.exit(main(["stats", *sys.argv[1:]]))
