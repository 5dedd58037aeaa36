"""The host optimizers against the limit of this machine's memory, and against others. Flags: see `--help`."""

from __future__ import annotations

import sys

from wherry.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "adam", *sys.argv[1:]]))
