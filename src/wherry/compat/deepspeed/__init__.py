"""Scripts written for DeepSpeed, run by Wherry: the engine under the names that they import.

Nothing is aliased until a program asks for it, in one of three ways:

    import wherry.compat.deepspeed as c; c.install()                       # before the first `import deepspeed`
    wherry run --as-deepspeed train.py --deepspeed_config config.json      # an unchanged script, on every rank
    PYTHONPATH=$(python -m wherry.compat.deepspeed --path) python train.py # and whatever it starts

The folder `alias` holds a package of that name; its modules, and where each of their names lives, are in `names`.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from abc import ABCMeta
from collections.abc import Iterable
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder, MetadataPathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from wherry.compat.deepspeed import names
from wherry.errors import WherryError
from wherry.observe.log import is_rank_zero, logger, show_unless_shown

__all__ = ["FOLDER", "NAME", "VERSION", "become_alias", "install"]

NAME = "deepspeed"
VERSION = "0.19.6+wherry"
"""What the alias answers to whoever asks for a version: the release whose interface it follows."""

FOLDER = Path(__file__).parent / "alias"
"""The folder that holds the alias package and its metadata; on `sys.path` or PYTHONPATH it needs no `install`."""

PROGRAMS = FOLDER / "bin"
"""The folder of the `deepspeed` command."""


class NotPartOfWherry(WherryError, NotImplementedError):
    """A name of DeepSpeed's that has no counterpart here was used."""


class NotThere(NotPartOfWherry, AttributeError):
    """An attribute of such a name was read: to `hasattr` it is not there, and else it is an error that says why."""


def not_part_of_wherry(name: str, instead: str) -> NotPartOfWherry:
    return NotPartOfWherry(_says(name, instead))


def _says(name: str, instead: str) -> str:
    return f"{name} is not part of Wherry; {instead}"


class _Refuses(ABCMeta):
    """A class that can be named, imported, subclassed and compared with; making one, or reaching into it, refuses."""

    _instead: str
    _path: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise not_part_of_wherry(cls._path, cls._instead)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotThere(_says(f"{cls._path}.{name}", cls._instead))

    def __eq__(cls, other: object) -> bool:
        cls._refuse_constant()
        return cls is other

    def __hash__(cls) -> int:
        cls._refuse_constant()
        return type.__hash__(cls)

    def __bool__(cls) -> bool:
        cls._refuse_constant()
        return True

    def __str__(cls) -> str:
        cls._refuse_constant()
        return repr(cls)

    def _refuse_constant(cls) -> None:
        """Refuse to be a value: a name in capitals is that of a string or a number."""
        if cls._path.rpartition(".")[2].isupper():
            raise not_part_of_wherry(cls._path, cls._instead)


def absent(path: str, instead: str) -> Any:
    """Stands where DeepSpeed has a class or a function, so that scripts which only name it can be imported."""
    module, _, name = path.rpartition(".")
    return _Refuses(name, (), {"_path": path, "_instead": instead, "__module__": module})


def unlisted(module: str, name: str) -> Any:
    """Stand in for a public name that no table has, so that a script which only imports it runs."""
    path = f"{NAME}.{module}".rstrip(".")
    if name.startswith("_"):
        raise AttributeError(f"module {path!r} has no attribute {name!r} in Wherry's alias")
    close = difflib.get_close_matches(name, names.of_module(module), n=1, cutoff=0.85)
    instead = f"did you mean {close[0]}?" if close else names.why_absent(module) or names.UNLISTED
    return absent(f"{path}.{name}", instead)


class AliasModule(ModuleType):
    """A module of the alias. Each name is looked up, by the table, when it is first asked for."""

    def __getattr__(self, name: str) -> Any:
        value = self._look_up(name)
        setattr(self, name, value)
        return value

    def _look_up(self, name: str) -> Any:
        module = _below(self.__name__)
        full, path = f"{self.__name__}.{name}", f"{module}.{name}".lstrip(".")
        if name == "__all__":
            return [each for each in names.of_module(module) if not each.startswith("_")]
        if name in names.of_module(module):
            where, ours = names.of_module(module)[name]
            listed = f"{where}.{ours}"
            return importlib.import_module(full) if listed == full else getattr(importlib.import_module(where), ours)
        if path in names.ABSENT_NAMES:
            return absent(full, names.ABSENT_NAMES[path])
        if not name.startswith("_") and not names.why_absent(module) and _is_module(path):
            return importlib.import_module(full)
        if module in names.OPEN and hasattr(home := importlib.import_module(names.OPEN[module]), name):
            return getattr(home, name)
        return unlisted(module, name)

    def __dir__(self) -> list[str]:
        module = _below(self.__name__)
        absent_here = [path.rpartition(".")[2] for path in names.ABSENT_NAMES if path.rpartition(".")[0] == module]
        return sorted({*super().__dir__(), *names.of_module(module), *absent_here})


class AliasFinder(DistributionFinder, Loader):
    """Finds the alias package, the modules below it and its distribution, before any of that name on `sys.path`."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname == NAME:
            return PathFinder.find_spec(fullname, [str(FOLDER)])
        module = _below(fullname)
        if module == fullname or not _is_module(module):
            return None
        below = any(each.startswith(module + ".") for each in (*names.MODULES, *names.ABSENT_MODULES))
        has_modules = below or bool(names.why_absent(module))
        spec = ModuleSpec(fullname, self, is_package=has_modules and not module.endswith(".__main__"))
        if spec.submodule_search_locations is not None:
            # Programs list the folder of a package: here is one, with nothing in it.
            spec.submodule_search_locations.append(str(FOLDER / NAME))
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        why = names.why_absent(_below(spec.name))
        return AliasModule(spec.name, f"Not part of Wherry: {why}." if why else None)

    def exec_module(self, module: ModuleType) -> None:
        itself = names.ITSELF.get(_below(module.__name__))
        if itself is not None:
            sys.modules[module.__name__] = importlib.import_module(itself)

    def get_code(self, fullname: str) -> CodeType:
        """What `python -m` runs."""
        if why := names.why_absent(_below(fullname)):
            says = _says(fullname.removesuffix(".__main__"), why)
            return compile(f"raise SystemExit({says!r})\n", f"<python -m {fullname}>", "exec")
        program = f"if __name__ == '__main__':\n    from {fullname} import main\n    raise SystemExit(main())\n"
        return compile(program, f"<python -m {fullname}>", "exec")

    def find_distributions(self, context: Any = None) -> Iterable[Distribution]:
        wanted = getattr(context, "name", None)
        if wanted not in (None, NAME):
            return []
        return MetadataPathFinder.find_distributions(DistributionFinder.Context(name=NAME, path=[str(FOLDER)]))


def _below(fullname: str) -> str:
    """The path of a module within the alias: empty for the package itself."""
    return "" if fullname == NAME else fullname.removeprefix(NAME + ".")


def _is_module(path: str) -> bool:
    return path in names.MODULES or bool(names.why_absent(path))


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
    framework = sys.modules.get("transformers.integrations.deepspeed")
    if framework is not None and getattr(framework, "DeepSpeedConfig", None) is object:
        logger.warning(
            "transformers was imported before the alias was installed and has concluded that deepspeed is missing; "
            "call wherry.compat.deepspeed.install() first if its Trainer is to use it"
        )
    _add_finder()


def _add_finder() -> None:
    if not any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, AliasFinder())
        importlib.invalidate_caches()


def become_alias(name: str) -> None:
    """The package in the folder `alias`, whichever way it was found, has its modules found from now on."""
    _add_finder()
    sys.modules[name].__class__ = AliasModule
    # Scripts log with DeepSpeed's logger, whose lines are seen without more ado.
    show_unless_shown()
    if is_rank_zero():
        from wherry import __version__

        # A warning, so that it is seen where nobody has set up logging: one engine stands in for another.
        logger.warning("import deepspeed gives Wherry %s here (it answers to version %s)", __version__, VERSION)


def environment() -> dict[str, str]:
    """What to add to the environment of a new process so that it, and whatever it starts, finds the alias."""
    return {
        variable: os.pathsep.join([str(folder), *filter(None, [os.environ.get(variable)])])
        for variable, folder in (("PYTHONPATH", FOLDER), ("PATH", PROGRAMS))
    }


def _is_alias(module: ModuleType) -> bool:
    origin = getattr(module, "__file__", None)
    return origin is not None and FOLDER in Path(origin).parents
