"""`python -m wherry`: the `wherry` command."""

import sys

from wherry.cli import main

sys.exit(main())
