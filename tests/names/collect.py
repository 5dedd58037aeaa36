"""Collect names that scripts write: Python names, flags of commands, keys of a config, names under the alias.

`python -m tests.names.collect > tests/names/promised.json` made the list.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import re
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

COMMANDS = (
    "", "run", "train", "plan", "generate", "bench", "bench adam", "bench disk", "export", "inspect",
    "import-deepspeed", "config check", "config explain", "config deepspeed", "config schema", "doctor", "version",
)  # fmt: skip
# Classes that scripts use, and bases whose members are not theirs.
CLASSES = {
    "wherry.Engine": "torch.nn.Module",
    "wherry.update.optimizer.ShardedOptimizer": "torch.optim.Optimizer",
    "wherry.integrations.lightning.WherryStrategy": "lightning.pytorch.strategies.DDPStrategy",
    "wherry.integrations.transformers.WherryTrainer": "transformers.Trainer",
}
FUNCTIONS = (
    "wherry.nn.chunked_cross_entropy", "wherry.optim.CPUAdam", "wherry.optim.CPUAdagrad", "wherry.optim.CPULion",
    "wherry.optim.Lamb", "wherry.optim.Muon", "wherry.optim.hidden_matrices",
)  # fmt: skip
# Public to Wherry's own rooms alone.
_INNER = {
    "backward_begins", "backward_ends", "begin_backward", "check_open", "check_turn", "drop_gradients", "drop_window",
    "flat_gradients", "forward_begins", "keep", "last_norm", "make_autocast", "meet", "misses_loss_scale",
    "param_groups", "plain_tensors", "saves_behind", "scaler", "settings", "take_gradients", "update",
    "update_on_zeros", "unwrap", "weights_version", "window", "zero_grad_of_loop",
}  # fmt: skip


def parameters(function: Any) -> list[str]:
    """List the names under which arguments can be given, in order."""
    try:
        return [name for name in inspect.signature(function).parameters if name != "self"]
    except (TypeError, ValueError):
        return []


def python_names() -> dict[str, list[str]]:
    import wherry

    names = {f"wherry.{name}": parameters(getattr(wherry, name)) for name in wherry.__all__}
    return names | {path: parameters(resolve(path)) for path in FUNCTIONS}


def members(owner: type, base: type) -> dict[str, list[str]]:
    """List public methods and properties that `owner` has beyond `base`."""
    names = {name for name in dir(owner) if not name.startswith("_") and not hasattr(base, name)} - _INNER
    return {name: parameters(getattr(owner, name)) for name in sorted(names)}


def flags(command: str) -> list[str]:
    """List the flags in a command's help."""
    from wherry.cli import main

    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
    return sorted(set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", text.getvalue())))


def public(module: ModuleType) -> list[str]:
    """List what a script can import of a module, but for modules and what it has imported from Python itself."""
    return sorted(
        name
        for name in dir(module)
        if not name.startswith("_")
        and not isinstance(value := getattr(module, name), ModuleType)
        and str(getattr(value, "__module__", "")) not in ("typing", "__future__")
    )


def alias(modules: Sequence[str]) -> dict[str, Any]:
    """Turn the alias on in this process, and collect the names under `import deepspeed`."""
    import torch

    from wherry.compat import deepspeed as compat

    compat.install()
    deepspeed = importlib.import_module("deepspeed")
    return {
        "modules": {name: public(importlib.import_module(name)) for name in modules},
        "initialize": parameters(deepspeed.initialize),
        "engine": members(deepspeed.DeepSpeedEngine, torch.nn.Module),
    }


def config_keys() -> list[str]:
    from wherry.config.reference import catalog

    return sorted({info.path for info in catalog()})


def resolve(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


if __name__ == "__main__":
    found = {
        "python": python_names(),
        "members": {path: members(resolve(path), resolve(base)) for path, base in CLASSES.items()},
        "flags": {command: flags(command) for command in COMMANDS},
        "keys": config_keys(),
        "alias": alias(sys.argv[1:]),
    }
    print(json.dumps(found, indent=1, sort_keys=True))
