"""Measurements of Wherry beside what people would use instead. Every script here works alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn


def alone(main: Callable[[], int]) -> NoReturn:
    """A script that is run by itself ends as `wherry bench` does: a user's mistake is one line."""
    from wherry.cli import INTERRUPTED, USER_ERROR
    from wherry.errors import WherryError

    try:
        sys.exit(main())
    except WherryError as error:
        print(f"{sys.argv[0]}: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
