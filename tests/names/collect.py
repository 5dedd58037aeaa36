"""What people write when they use Wherry: Python names, flags of commands, keys of a config, names under the alias.

`python -m tests.names.collect > tests/names/promised.json` is how the list was made.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
COMMANDS = (
    "",
    "run",
    "train",
    "plan",
    "generate",
    "bench",
    "bench adam",
    "bench disk",
    "export",
    "inspect",
    "import-deepspeed",
    "config check",
    "config explain",
    "config deepspeed",
    "config schema",
    "doctor",
    "version",
)
# Classes that people hold, and bases whose members are not theirs.
CLASSES = {
    "wherry.Engine": "torch.nn.Module",
    "wherry.update.optimizer.ShardedOptimizer": "torch.optim.Optimizer",
    "wherry.integrations.lightning.WherryStrategy": "lightning.pytorch.strategies.DDPStrategy",
    "wherry.integrations.transformers.WherryTrainer": "transformers.Trainer",
}
FUNCTIONS = (
    "wherry.nn.chunked_cross_entropy",
    "wherry.optim.CPUAdam",
    "wherry.optim.CPUAdagrad",
    "wherry.optim.CPULion",
    "wherry.optim.Lamb",
    "wherry.optim.Muon",
    "wherry.optim.hidden_matrices",
)
# Public to Wherry's own rooms alone.
_INNER = {
    "backward_begins", "backward_ends", "forward_begins", "keep", "meet", "update", "unwrap", "weights_version",
    "zero_grad_of_loop",
}  # fmt: skip

_ALIAS = """
import importlib, json, sys, torch
from wherry.compat import deepspeed as alias
alias.install()
import deepspeed
from tests.names.collect import members, parameters, public
found = {}
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    found[name] = public(module)
print(json.dumps({
    "modules": found,
    "initialize": parameters(deepspeed.initialize),
    "engine": members(deepspeed.DeepSpeedEngine, torch.nn.Module),
}))
"""


def parameters(function: Any) -> list[str]:
    """The names under which arguments can be given, in order."""
    try:
        return [name for name in inspect.signature(function).parameters if name != "self"]
    except (TypeError, ValueError):
        return []


def python_names() -> dict[str, list[str]]:
    import wherry

    names = {f"wherry.{name}": parameters(getattr(wherry, name)) for name in wherry.__all__}
    return names | {path: parameters(resolve(path)) for path in FUNCTIONS}


def members(owner: type, base: type) -> dict[str, list[str]]:
    """Public methods and properties that `owner` has beyond `base`."""
    names = {name for name in dir(owner) if not name.startswith("_") and not hasattr(base, name)} - _INNER
    return {name: parameters(getattr(owner, name)) for name in sorted(names)}


def flags(command: str) -> list[str]:
    """The flags that a command's help tells of."""
    from wherry.cli import main

    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
    return sorted(set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", text.getvalue())))


def public(module: ModuleType) -> list[str]:
    """What a script can import of it, but for modules and what it has imported from Python itself."""
    return sorted(
        name
        for name in dir(module)
        if not name.startswith("_")
        and not isinstance(value := getattr(module, name), ModuleType)
        and str(getattr(value, "__module__", "")) not in ("typing", "__future__")
    )


def alias(modules: Sequence[str], run: Callable[..., Any] | None = None) -> dict[str, Any]:
    """The names under `import deepspeed`, in a process of its own; `run` starts one with an interpreter's words."""
    words = ["-c", _ALIAS, *modules]
    if run is None:
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, cwd=ROOT)
    else:
        done = run(*words, folder=ROOT, launched=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def config_keys() -> list[str]:
    from wherry.config.reference import catalog

    return sorted({info.path for info in catalog()})


def resolve(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def collect(modules: Sequence[str]) -> dict[str, Any]:
    return {
        "python": python_names(),
        "members": {path: members(resolve(path), resolve(base)) for path, base in CLASSES.items()},
        "flags": {command: flags(command) for command in COMMANDS},
        "keys": config_keys(),
        "alias": alias(modules),
    }


if __name__ == "__main__":
    print(json.dumps(collect(sys.argv[1:]), indent=1, sort_keys=True))
