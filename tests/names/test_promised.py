"""Every name that scripts could use before stays: in Python, on the command line, in a config and under the alias.

`tests.names.collect` wrote `promised.json`. Names may be added; one that is removed is named in GONE.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.names import collect

PROMISED = json.loads((Path(__file__).parent / "promised.json").read_text())

GONE = {
    "wherry bench disk --peers": "python benchmarks/disk.py measures fio and DeepSpeed's aio beside the disk tier",
    ".wherry.Engine(parts)": "wherry.initialize, which alone makes engines, gives the parts one by one",
}
"""A name, as `missing` gives it, and what to use instead."""


def members(where: str, promised: dict[str, list[str]], now: dict[str, list[str]]) -> Iterator[str]:
    """Find names that are missing, and arguments that can no longer be given by the same name or in the same place."""
    for name, parameters in promised.items():
        path = f"{where}.{name}"
        if name not in now:
            yield path
            continue
        yield from (f"{path}({parameter})" for parameter in parameters if parameter not in now[name])
        kept = [parameter for parameter in now[name] if parameter in parameters]
        if kept != [parameter for parameter in parameters if parameter in now[name]]:
            yield f"{path}: the order of {', '.join(parameters)}"


def unexpected(missing: Iterator[str]) -> list[str]:
    return [name for name in missing if name not in GONE]


def lost_members(path: str) -> list[str]:
    now = collect.members(collect.resolve(path), collect.resolve(collect.CLASSES[path]))
    return unexpected(members(path, PROMISED["members"][path], now))


def test_names_of_the_package_their_members_and_arguments():
    assert not unexpected(members("", PROMISED["python"], collect.python_names()))
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
    code = "import json, sys; from tests.names import collect; print(json.dumps(collect.alias(sys.argv[1:])))"
    done = forks.run("-c", code, *promised["modules"], folder=Path(__file__).parents[2], launched=False)
    assert done.returncode == 0, done.stderr
    now = json.loads(done.stdout)
    for module, names in promised["modules"].items():
        assert not unexpected(f"{module}.{name}" for name in names if name not in now["modules"][module])
    initialize = {"initialize": promised["initialize"]}
    assert not unexpected(members("deepspeed", initialize, {"initialize": now["initialize"]}))
    assert not unexpected(members("DeepSpeedEngine", promised["engine"], now["engine"]))
