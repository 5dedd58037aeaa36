"""The disk tier against fio and DeepSpeed's aio: python benchmarks/disk.py --path FOLDER [--quick]."""

from __future__ import annotations

import sys

from wherry.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "disk", *sys.argv[1:]]))
