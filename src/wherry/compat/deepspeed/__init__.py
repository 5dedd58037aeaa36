"""Scripts written for DeepSpeed, run by Wherry: the engine under the names that they import.

Nothing is aliased until a program asks for it, in one of three ways:

    import wherry.compat.deepspeed as c; c.install()                       # before the first `import deepspeed`
    wherry run --as-deepspeed train.py --deepspeed_config config.json      # an unchanged script, on every rank
    PYTHONPATH=$(python -m wherry.compat.deepspeed --path) python train.py # and whatever it starts

The names themselves are in the folder `alias`; they hold no logic of their own.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder, MetadataPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from wherry.errors import WherryError
from wherry.observe.log import logger

__all__ = ["FOLDER", "NAME", "VERSION", "find_absent", "install", "installed", "uninstall"]

NAME = "deepspeed"
VERSION = "0.19.6+wherry"
"""What the alias answers to whoever asks for a version: the release whose interface it follows."""

FOLDER = Path(__file__).parent / "alias"
"""The folder that holds the alias package and its metadata; on `sys.path` or PYTHONPATH it needs no hook."""

PROGRAMS = FOLDER / "bin"
"""The folder of the `deepspeed` command."""


class AliasFinder(DistributionFinder):
    """Finds the alias package, and its distribution, before anything of that name on `sys.path`."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return PathFinder.find_spec(fullname, [str(FOLDER)]) if fullname == NAME else None

    def find_distributions(self, context: Any = None) -> Iterable[Distribution]:
        wanted = getattr(context, "name", None)
        if wanted not in (None, NAME):
            return []
        return MetadataPathFinder.find_distributions(DistributionFinder.Context(name=NAME, path=[str(FOLDER)]))


def installed() -> bool:
    """Whether `import deepspeed` gives the alias in this process."""
    if NAME in sys.modules:
        return _is_alias(sys.modules[NAME])
    spec = importlib.util.find_spec(NAME)
    return spec is not None and spec.origin is not None and FOLDER in Path(spec.origin).parents


def install() -> None:
    """Make `import deepspeed` give Wherry, in this process and in those it forks.

    Call it before anything imports deepspeed; frameworks look for it when they are imported, so before them too.
    Processes that are started anew do not inherit it: see `environment`, or `wherry run --as-deepspeed`.
    """
    present = sys.modules.get(NAME)
    if present is not None and not _is_alias(present):
        where = getattr(present, "__file__", None) or "an unknown place"
        raise WherryError(
            f"the package deepspeed is imported already, from {where}: two engines under one name would mix; call "
            "wherry.compat.deepspeed.install() before the first import of deepspeed"
        )
    if any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        return
    _warn_of_frameworks_that_have_looked()
    sys.meta_path.insert(0, AliasFinder())
    importlib.invalidate_caches()


def uninstall() -> None:
    """Take the alias away again. Modules that hold names of it keep them."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, AliasFinder | AbsentFinder)]
    if NAME in sys.modules and _is_alias(sys.modules[NAME]):
        for name in [name for name in sys.modules if name == NAME or name.startswith(NAME + ".")]:
            del sys.modules[name]
    importlib.invalidate_caches()


def environment() -> dict[str, str]:
    """What to add to the environment of a new process so that it, and whatever it starts, finds the alias."""
    return {
        variable: os.pathsep.join([str(folder), *filter(None, [os.environ.get(variable)])])
        for variable, folder in (("PYTHONPATH", FOLDER), ("PATH", PROGRAMS))
    }


def _is_alias(module: ModuleType) -> bool:
    origin = getattr(module, "__file__", None)
    return origin is not None and FOLDER in Path(origin).parents


def _warn_of_frameworks_that_have_looked() -> None:
    framework = sys.modules.get("transformers.integrations.deepspeed")
    if framework is not None and getattr(framework, "DeepSpeedConfig", None) is object:
        logger.warning(
            "transformers was imported before the alias was installed and has concluded that deepspeed is missing; "
            "call wherry.compat.deepspeed.install() first if its Trainer is to use it"
        )


class AbsentFinder(MetaPathFinder, Loader):
    """Finds the modules that DeepSpeed has and Wherry has not, as modules whose names refuse to be used."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if self._instead(fullname) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        from wherry.compat.deepspeed.parts import AbsentModule

        return AbsentModule(spec.name, self._instead(spec.name))

    def exec_module(self, module: ModuleType) -> None:
        """It is whole already."""

    @staticmethod
    def _instead(fullname: str) -> str:
        from wherry.compat.deepspeed.parts import ABSENT_MODULES

        below = fullname.removeprefix(NAME + ".")
        if below == fullname:
            return ""
        return next((why for name, why in ABSENT_MODULES.items() if below == name or below.startswith(name + ".")), "")


def find_absent() -> None:
    """Called by the alias package when it is imported, by whichever way it was found."""
    if not any(isinstance(finder, AbsentFinder) for finder in sys.meta_path):
        sys.meta_path.append(AbsentFinder())
