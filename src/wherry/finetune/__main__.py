"""`python -m wherry.finetune`: what a launcher starts on each rank."""

import sys

from wherry.finetune.job import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
