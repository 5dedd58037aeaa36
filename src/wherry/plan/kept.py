"""Profiles that were made before, in files: who plans with one needs neither torch nor the model.

Those of the presets come with Wherry, for the torch that made them. All others are kept in a folder of the user's: a
profile is what code made of a model, so each file there is of one state of both: of Wherry's own files, and of torch.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tempfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any
from zipfile import ZIP_LZMA, ZipFile, ZipInfo

import numpy as np

from wherry.observe.log import logger
from wherry.plan.memory import UnitSizes
from wherry.plan.profile import Moment, Operations, Profile

MOST = 128
"""So many files are kept; the oldest go."""

SHIPPED = Path(__file__).with_name("profiles.zip")
"""The presets' profiles. `python -m tests.plan.shipped --update` makes them, and a test compares."""


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
        found = shipped(self._model, self.name(*key))
        if found is not None:
            return found
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

    def name(self, *key: object) -> str:
        """What stands for the model and the key."""
        return _digest(self._model, *key)

    def _file(self, key: tuple[object, ...]) -> Path:
        return cache_folder() / "profiles" / f"{_digest(_code(), self._model, *key)}.json.gz"


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def shipped(model: str, name: str) -> Profile | None:
    """The profile of this name that came with Wherry, if one did for the torch that is here."""
    text = _shipped_of(model).get(name)
    return None if text is None or release_of_shipped() != torch_release() else _from_json(json.loads(text))


def ship(profiles: Mapping[str, Mapping[str, Profile]], path: Path = SHIPPED) -> None:
    """Write what is to come with Wherry: by model, profiles by name, made by the torch that is here."""
    with ZipFile(path, "w") as archive:
        archive.comment = torch_release().encode()
        for model, found in profiles.items():
            lines = (f"{name} {json.dumps(_as_json(profile))}" for name, profile in found.items())
            # Together, as one tells much of what is in the next: an eighth of what they take one by one.
            archive.writestr(ZipInfo(_digest(model)), "\n".join(lines), ZIP_LZMA)


def release_of_shipped() -> str:
    """The release of torch that made what came with Wherry."""
    return _archive().comment.decode()


def torch_release() -> str:
    """The first two numbers of torch's version: what operators a model comes to does not depend on the others."""
    return ".".join(metadata.version("torch").split(".")[:2])


@lru_cache(maxsize=1)
def _archive() -> ZipFile:
    return ZipFile(io.BytesIO(SHIPPED.read_bytes()))


@lru_cache(maxsize=1)
def _shipped_of(model: str) -> dict[str, str]:
    """The profiles of one model that came with Wherry, as JSON by name."""
    try:
        lines = _archive().read(_digest(model)).decode().splitlines()
    except (KeyError, RuntimeError):
        return {}  # of another model, or for a Python that was built without lzma
    return dict(line.split(" ", 1) for line in lines)


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
