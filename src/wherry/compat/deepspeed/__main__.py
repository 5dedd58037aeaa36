"""`python -m wherry.compat.deepspeed`: print the folders of the alias for PYTHONPATH and PATH, or its version."""

from __future__ import annotations

import argparse

from wherry.compat.deepspeed import FOLDER, PROGRAMS, VERSION


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m wherry.compat.deepspeed", description=__doc__)
    printed = parser.add_mutually_exclusive_group(required=True)
    printed.add_argument("--path", action="store_true", help="print the folder for PYTHONPATH")
    printed.add_argument("--bin", action="store_true", help="print the folder for PATH, with the deepspeed command")
    printed.add_argument("--version", action="store_true", help="print the version that the alias answers to")
    arguments = parser.parse_args()
    print(FOLDER if arguments.path else PROGRAMS if arguments.bin else VERSION)


if __name__ == "__main__":
    main()
