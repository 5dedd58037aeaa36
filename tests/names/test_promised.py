"""Every name that people could write before stays: in Python, on the command line, in a config and under the alias.

`tests.names.collect` wrote `promised.json`. Names may be added; one that is removed is named in GONE.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.names import collect

PROMISED = json.loads((Path(__file__).parent / "promised.json").read_text())

GONE = {
    "wherry bench disk --peers": "python benchmarks/disk.py measures fio and DeepSpeed's aio beside the disk tier",
    ".wherry.Engine(parts)": "wherry.initialize, which alone makes engines, gives the parts one by one",
}
"""A name, as `missing` gives it, and what to use instead."""

# What modules under the alias had imported for themselves from elsewhere: DeepSpeed's have no such names.
_IMPORTED = {
    "accelerator": "AbstractContextManager default_device host_memory nullcontext",
    "accelerator.real_accelerator": "AbstractContextManager default_device host_memory nullcontext",
    "constants": "timedelta",
    "runtime.lr_schedules": "SCHEDULES",
    "utils.tensor_fragment": "Callable Engine Sequence WherryError",
}
GONE |= {
    f"deepspeed.{module}.{name}": "import it from where it lives"
    for module, names in _IMPORTED.items()
    for name in names.split()
}


def arguments(where: str, promised: list[str], now: list[str]) -> Iterator[str]:
    """What can no longer be given by the same name, or in the same place."""
    yield from (f"{where}({name})" for name in promised if name not in now)
    kept = [name for name in now if name in promised]
    if kept != [name for name in promised if name in now]:
        yield f"{where}: the order of {', '.join(promised)}"


def members(where: str, promised: dict[str, list[str]], now: dict[str, list[str]]) -> Iterator[str]:
    for name, parameters in promised.items():
        if name in now:
            yield from arguments(f"{where}.{name}", parameters, now[name])
        else:
            yield f"{where}.{name}"


def unexpected(missing: Iterator[str]) -> list[str]:
    return [name for name in missing if name not in GONE]


def test_names_of_the_package_and_their_arguments():
    now = collect.python_names()
    assert not unexpected(members("", PROMISED["python"], now))


def lost_members(path: str) -> list[str]:
    now = collect.members(collect.resolve(path), collect.resolve(collect.CLASSES[path]))
    return unexpected(members(path, PROMISED["members"][path], now))


def test_members_of_what_people_hold():
    assert not lost_members("wherry.Engine")
    assert not lost_members("wherry.update.optimizer.ShardedOptimizer")


@pytest.mark.long  # importing these libraries takes seconds
@pytest.mark.parametrize("door", ["lightning.WherryStrategy", "transformers.WherryTrainer"])
def test_members_of_the_classes_of_other_libraries(door):
    assert not lost_members(f"wherry.integrations.{door}")


@pytest.mark.parametrize("command", collect.COMMANDS)
def test_flags_of_the_command_line(command):
    now = collect.flags(command)
    assert now, f"the help of `wherry {command}` names no flag"
    assert not unexpected(f"wherry {command} {flag}" for flag in PROMISED["flags"][command] if flag not in now)


def test_keys_of_a_config():
    now = set(collect.config_keys())
    assert not unexpected(f"config: {key}" for key in PROMISED["keys"] if key not in now)


def test_names_under_the_alias(forks):
    promised = PROMISED["alias"]
    now = collect.alias(list(promised["modules"]), forks.run)
    gone = (
        f"{module}.{name}"
        for module, names in promised["modules"].items()
        for name in names
        if name not in now["modules"][module]
    )
    assert not unexpected(gone)
    assert not unexpected(arguments("deepspeed.initialize", promised["initialize"], now["initialize"]))
    assert not unexpected(members("DeepSpeedEngine", promised["engine"], now["engine"]))


def test_nothing_is_gone_that_is_there():
    told = {name.partition("(")[0].rpartition(".")[2] for name in GONE if not name.startswith(("wherry ", "config: "))}
    here = set(collect.members(collect.resolve("wherry.Engine"), torch.nn.Module))
    assert not told & here
