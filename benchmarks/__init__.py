"""Measurements of Wherry beside what people would use instead. Every script here works alone."""

from __future__ import annotations

import sys
import textwrap
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


def explain(text: str) -> None:
    """Print what words of a table mean, no wider than the table."""
    from wherry.observe import bench

    print(textwrap.fill(text, bench.WIDTH))
