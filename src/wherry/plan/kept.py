"""Profiles that were made before, in files: who plans the same model again needs neither torch nor the model.

A profile is what code made of a model, so each file is of one state of both: of Wherry's own files, and of torch.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import tempfile
import zlib
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from wherry.observe.log import logger
from wherry.plan.memory import UnitSizes
from wherry.plan.profile import Moment, Operations, Profile

MOST = 128
"""So many files are kept; the oldest go."""


def cache_folder() -> Path:
    """Where Wherry keeps what it has found out about this machine, and about models."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wherry"


class KeptProfiles:
    """Profiles of one model, by what they depend on besides it. Without a `model`'s name nothing is kept."""

    def __init__(self, model: str | None) -> None:
        self._model = model

    def read(self, *key: object) -> Profile | None:
        """The profile of this key, if there is one."""
        if self._model is None:
            return None
        try:
            return _from_json(json.loads(gzip.decompress(self._file(key).read_bytes())))
        except (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError, AttributeError):
            return None  # not made yet, or not whole: it is made now

    def write(self, profile: Profile, *key: object) -> None:
        if self._model is None:
            return
        file = self._file(key)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            # A name that no other process has, of this machine or of another that shares the folder.
            handle, unfinished = tempfile.mkstemp(dir=file.parent, prefix=file.name)
            with open(handle, "wb") as out:
                out.write(gzip.compress(json.dumps(_as_json(profile)).encode(), mtime=0))
            Path(unfinished).replace(file)
            _leave_the_newest(file.parent)
        except OSError as error:
            logger.debug("the profile of %s is not kept: %s", self._model, error)

    def _file(self, key: tuple[object, ...]) -> Path:
        name = hashlib.sha256(repr((_code(), self._model, *key)).encode()).hexdigest()[:24]
        return cache_folder() / "profiles" / f"{name}.json.gz"


@lru_cache(maxsize=1)
def _code() -> str:
    """What stands for the code that makes profiles: torch's version, and what each file of Wherry's says."""
    root = Path(__file__).parents[1]
    found = hashlib.sha256(metadata.version("torch").encode())
    for file in sorted(root.rglob("*.py")):
        found.update(f"{file.relative_to(root)} {file.stat().st_size} ".encode() + file.read_bytes())
    return found.hexdigest()


def _leave_the_newest(folder: Path) -> None:
    files = list(folder.iterdir())
    if len(files) > MOST:
        for file in sorted(files, key=lambda file: file.stat().st_mtime)[:-MOST]:
            with suppress(FileNotFoundError):  # another process may do the same
                file.unlink()


def _as_json(profile: Profile) -> dict[str, Any]:
    operations = {name: values.tolist() for name, values in vars(profile.operations).items()}
    return vars(profile) | {"units": [asdict(unit) for unit in profile.units], "operations": operations}


def _from_json(told: dict[str, Any]) -> Profile:
    units = (UnitSizes(**unit | {part: tuple(unit[part]) for part in ("trained", "frozen")}) for unit in told["units"])
    operations = {
        name: np.array(values, dtype=bool if name == "backward" else float)
        for name, values in told["operations"].items()
    }
    return Profile(
        **told
        | {
            "units": tuple(units),
            "moments": tuple(Moment(*moment) for moment in told["moments"]),
            "operations": Operations(**operations),
        }
    )
