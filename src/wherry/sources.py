"""What MODEL names on the command line and in `estimate`: a preset, a Hugging Face config, a callable of one's own."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry.config.problems import did_you_mean, path_meant
from wherry.errors import WherryError, one_line, printable
from wherry.plan.grid import ALONE, Grid
from wherry.plan.model_source import Inputs, ModelSource, told_by
from wherry.regular import read_regular
from wherry.train.presets import GPT2, PRESETS, Shape

if TYPE_CHECKING:
    import torch
    from torch import nn

# Shapes that only a plan can run.
LARGE = {
    "gpt3-175b": Shape(layers=96, hidden=12288, heads=96, sequence=2048, vocabulary=GPT2),
    "gpt-1t": Shape(layers=128, hidden=25600, heads=160, sequence=2048, vocabulary=GPT2),
}
SHAPES = PRESETS | LARGE


# What pages of models on the hub are called, and their names there: an owner's and a model's.
_PAGE = "https://huggingface.co/"
_ON_HUB = re.compile(r"[\w.-]+/[\w.-]+")


def _is_on_hub(model: str) -> bool:
    """Whether this can only be a name on the hub: what begins as a path does is one."""
    owner, _, name = model.partition("/")
    is_name = _ON_HUB.fullmatch(model) is not None and not owner.startswith(".") and not name.endswith(".json")
    return is_name and not os.path.exists(owner)


def located(model: Any, *, online: bool = False) -> Any:
    """The path of the config of a model that is named as on the hub, if its cache here has it or it may be fetched."""
    if not isinstance(model, str) or not _is_on_hub(name := without_page(model)):
        return model
    file = folder_of(name, "config.json", fetch=online, command="MODEL: the config of") / "config.json"
    return str(file) if file.exists() else name


def without_page(model: str) -> str:
    """The name on the hub of a model, a page of which is given; any other as it is."""
    return "/".join(model.removeprefix(_PAGE).split("/")[:2]) if model.startswith(_PAGE) else model


def folder_of(model: str, *patterns: str, fetch: bool, command: str) -> Path:
    """The folder that `model` names: of this machine, or, where it is named as on the hub, in the hub's cache here.

    There it has the files of these names, which are fetched if need be, and if they may be.
    """
    if not _is_on_hub(model):
        return Path(model)
    from wherry.plan.network import files_on_hub

    return files_on_hub(model, *patterns, fetch=fetch, told=f"{command} {model}") or Path(model)


def find(model: str | nn.Module | Callable[..., Any]) -> ModelSource:
    """The source that `model` names.

    >>> find("gpt2-124m").sequence
    1024
    """
    if not isinstance(model, str):
        return _of_object(model)
    if model in SHAPES:
        return of_shape(model, SHAPES[model])
    if ":" in model and not Path(model).exists():
        return _of_callable(model, _imported(model))
    if model and Path(model).exists():
        return _of_hugging_face(Path(model))
    raise WherryError(f"MODEL: {_nowhere(model)}")


def _nowhere(model: str) -> str:
    """Why nothing is found under this name, and what to do."""
    if _is_on_hub(model):
        folder = model.partition("/")[2]
        return (
            f"there is no folder {model}; for the Hugging Face hub's model of this name download its config first, "
            f"`hf download {model} config.json --local-dir {folder}`, then `wherry plan ./{folder}`; or add --online"
        )
    if "/" in model or model.endswith(".json"):
        kind = "file" if model.endswith(".json") else "folder"
        return f"there is no such {kind}: {one_line(model)}{path_meant(Path(model))}"
    # No model has as few as these digits say.
    count = f"{model.replace(',', '.')}B" if re.fullmatch(r"\d{1,3}([.,]\d{1,2})?", model) else model
    number = f"; a number of parameters has its own table: wherry plan --params {count}" if model[:1].isdigit() else ""
    return (
        f"expected a preset ({', '.join(SHAPES)}), a Hugging Face config.json or its folder, a name on the hub with "
        "its owner, like openai-community/gpt2, or module:callable, got "
        f"{one_line(model)!r}{number or did_you_mean(model, SHAPES)}"
    )


def around(model: Any, *, online: bool = False) -> AbstractContextManager[None]:
    """Where a plan of `model` is made: what a file describes is built without a network, unless that is asked for."""
    if online or not isinstance(model, str) or not Path(model).exists() or _release() is None:
        return nullcontext()
    from wherry.plan.network import off_the_network

    return off_the_network(model)


def _of_object(model: nn.Module | Callable[..., Any]) -> ModelSource:
    from torch import nn

    if isinstance(model, nn.Module):
        return ModelSource(type(model).__name__, lambda *_: (model, None), scales=False)
    return _of_callable(getattr(model, "__name__", "model"), model)


def of_shape(name: str, shape: Shape) -> ModelSource:
    """A GPT-2 of this shape."""

    def make(
        micro_batch: int, sequence: int, grid: Grid = ALONE, dtype: torch.dtype | None = None
    ) -> tuple[nn.Module, Inputs]:
        from wherry.train import planned

        model, args = planned.part_of(shape, grid, dtype, micro_batch, sequence)
        return model, Inputs(args)

    def part(grid: Grid, dtype: torch.dtype) -> ModelSource:
        return dataclasses.replace(source, make=partial(make, grid=grid, dtype=dtype), part=None)

    source = ModelSource(name, make, shape.sequence, part=part)
    return source


# Hugging Face.


# Characters of a config's file; those of models with a name for each of thousands of labels have a tenth of it.
_LONGEST = 16 << 20
_DEEPEST = 32
# Whole numbers are sizes, counts, or ids of tokens. Those of these names are counted to, before a model is built.
_LARGEST = 10**12
_COUNTED = re.compile(r"(layers?|blocks|experts|groups|stages|depths?|heads|(labels))$")
_MOST_COUNTED, _MOST_LABELS = 10_000, 100_000
_MOST_MODULES = 200_000
_MOST_PARAMETERS = 10**15
# Kept in some files from the tokenizer's, where it may be any number.
_UNREAD = "model_max_length"


def _release() -> str | None:
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return None


def _read_config(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(read_regular(file, _LONGEST))
    except OSError as error:
        raise WherryError(f"MODEL: {file} cannot be read as a Hugging Face config: {error.strerror}") from None
    except RecursionError:
        raise WherryError(f"MODEL: {file} is nested too deeply to be a Hugging Face config") from None
    except ValueError as error:
        raise WherryError(f"MODEL: {file} cannot be read as a Hugging Face config: {error}") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise WherryError(f'MODEL: {file} has no "model_type", so it is not the config of a Hugging Face model')
    if not isinstance(names := values.get("architectures") or [], list):
        raise WherryError(f"MODEL: {file}: architectures: expected a list of names, got {one_line(str(names), 80)}")
    checked: dict[str, Any] = _checked(values, file, ())
    return checked


def _checked(value: Any, file: Path, path: tuple[str, ...], depth: int = 0) -> Any:
    """A part of a config, with strings that can be printed, and no number that a model cannot be built with."""
    where = f"MODEL: {file}: {one_line('.'.join(path))}"
    if depth > _DEEPEST:
        raise WherryError(f"MODEL: {file} is nested too deeply to be a Hugging Face config")
    if isinstance(value, dict):
        return {printable(name): _checked(part, file, (*path, name), depth + 1) for name, part in value.items()}
    if isinstance(value, list):
        return [_checked(part, file, path, depth + 1) for part in value]
    if isinstance(value, str):
        return printable(value)
    name = path[-1] if path else ""
    if not isinstance(value, int) or isinstance(value, bool) or name == _UNREAD:
        return value
    if abs(value) > _LARGEST:
        raise WherryError(f"{where}: expected a number of at most {_LARGEST:,}, got {one_line(str(value), 80)}")
    if counted := _COUNTED.search(name):
        most = _MOST_LABELS if counted[2] else _MOST_COUNTED
        least = 0 if name.startswith(("n_", "num_")) else -most  # others may be which one is meant, from the end
        if not least <= value <= most:
            raise WherryError(f"{where}: expected a number from {least:,} to {most:,}, got {value:,}")
    return value


def _of_hugging_face(path: Path) -> ModelSource:
    file = path / "config.json" if path.is_dir() else path
    values = _read_config(file)
    release = _release()
    if release is None:
        raise WherryError(f"MODEL: the model of {file} needs transformers: pip install transformers")
    import transformers

    kind = values.pop("model_type")
    try:
        config = transformers.AutoConfig.for_model(kind, **values)
    except ImportError as error:  # transformers imports the code of each kind when it is asked for
        raise WherryError(f"MODEL: transformers {release} cannot import what {file} needs: {error}") from error
    except Exception as error:  # each kind of model checks its config in its own way
        why = " ".join(str(error).partition(". Should contain one of")[0].split())  # of hundreds of names
        raise WherryError(f"MODEL: transformers {release} does not take {file}: {why}") from error
    of_text = config.get_text_config() if hasattr(config, "get_text_config") else config

    def make(micro_batch: int, sequence: int) -> tuple[nn.Module, Inputs | None]:
        with told_by(f"MODEL: {file} fails"), _few_modules(file):
            model = _class_of(config)(config)
        if (count := sum(parameter.numel() for parameter in model.parameters())) > _MOST_PARAMETERS:
            raise WherryError(f"MODEL: {file} describes a model of {count:,} parameters; none is as large")
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = False
        model.train()
        return model, _text_batch(model, micro_batch, sequence)

    def part(grid: Grid, _: torch.dtype) -> ModelSource:
        if grid.pipe > 1:
            raise WherryError("--pipeline-parallel: only the presets are known by their stages; use --tensor-parallel")

        def make_part(micro_batch: int, sequence: int) -> tuple[nn.Module, Inputs | None]:
            model, batch = make(micro_batch, sequence)
            styles = getattr(of_text, "base_model_tp_plan", None)
            if not styles:
                raise WherryError(f"--tensor-parallel: transformers has no plan of how ranks share a {kind}")
            from wherry.plan.parts import cut

            cut(model, {f"*{pattern}": style for pattern, style in styles.items()}, grid.tensor)
            return model, batch

        return dataclasses.replace(source, make=make_part, part=None)

    folder = file.parent.resolve()
    # In a hub's cache folders are called after commits.
    cached = folder.parent.name == "snapshots"
    called = folder.parents[1].name.removeprefix("models--").replace("--", "/") if cached else folder.name
    name = one_line(f"{called} ({kind})")
    longest = getattr(of_text, "max_position_embeddings", None) or getattr(of_text, "n_positions", None) or 2048
    if not isinstance(longest, int) or longest < 1:
        raise WherryError(f"MODEL: {file}: max_position_embeddings: expected 1 or more, got {longest}")
    source = ModelSource(name, make, sequence=min(longest, 2048), part=part)
    return source


def _class_of(config: Any) -> Callable[[Any], Any]:
    """The first model among what a config names."""
    import transformers

    for name in config.architectures or ():
        found = getattr(transformers, str(name), None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    return partial(transformers.AutoModelForCausalLM.from_config, trust_remote_code=False)


@contextmanager
def _few_modules(file: Path) -> Iterator[None]:
    """A model that is built here has no more modules than a machine can step through."""
    from torch.nn.modules.module import register_module_module_registration_hook

    thread, count = threading.get_ident(), 0

    def counted(*_: Any) -> None:
        nonlocal count
        count += threading.get_ident() == thread
        if count > _MOST_MODULES:
            raise WherryError(f"MODEL: {file} describes a model of more than {_MOST_MODULES:,} modules")

    hook = register_module_module_registration_hook(counted)
    try:
        yield
    finally:
        hook.remove()


def _text_batch(model: nn.Module, micro_batch: int, sequence: int) -> Inputs | None:
    """Token ids, and labels where the forward takes them; None for a model of something else than text."""
    accepted = inspect.signature(model.forward).parameters
    if "input_ids" not in accepted:
        return None
    import torch

    ids = torch.zeros(micro_batch, sequence, dtype=torch.int64)
    is_language_model = any(word in type(model).__name__ for word in ("CausalLM", "LMHead", "ConditionalGeneration"))
    return Inputs((), {"input_ids": ids} | ({"labels": ids} if "labels" in accepted and is_language_model else {}))


# A callable of the user's own.


def _imported(text: str) -> Callable[..., Any]:
    module_name, _, path = text.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        with told_by(f"MODEL: {text} cannot be imported"):
            value: Any = importlib.import_module(module_name)
            for part in path.split("."):
                value = getattr(value, part)
    except WherryError:
        raise
    except (ImportError, AttributeError, ValueError, SyntaxError) as error:
        raise WherryError(f"MODEL: {text} cannot be imported: {error}") from error
    if not callable(value):
        raise WherryError(f"MODEL: {text} is a {type(value).__name__}; expected a callable that returns a model")
    return value


def _of_callable(name: str, call: Callable[..., Any]) -> ModelSource:
    from torch import nn

    accepted = _accepted(name, call)

    def make(micro_batch: int, sequence: int) -> tuple[nn.Module, Inputs | None]:
        wanted = {"micro_batch": micro_batch, "sequence": sequence}
        with told_by(f"MODEL: {name} fails"):
            made = call(**{key: value for key, value in wanted.items() if key in accepted})
        model, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(model, nn.Module):
            raise WherryError(
                f"MODEL: {name} returned {type(made).__name__}; expected a model, or a model and the inputs of one "
                "micro-batch (a tensor, a tuple or a dict)"
            )
        return model, None if batch is None else Inputs.of(batch)

    return ModelSource(name, make, scales="micro_batch" in accepted)


ASKED = ("micro_batch", "sequence")


def _accepted(name: str, call: Callable[..., Any]) -> set[str]:
    """The names of what a callable takes. What it cannot do without, a plan must be able to give."""
    try:
        parameters = inspect.signature(call).parameters
    except ValueError:  # some that are not written in Python do not tell
        return set()
    fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        each for each, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in fixed
    ]  # fmt: skip
    if beyond := [each for each in needed if each not in ASKED]:
        raise WherryError(
            f"MODEL: {name} needs {', '.join(beyond)}, and a plan gives {' and '.join(ASKED)} only: write a function "
            "that needs nothing else and returns the model, or the model and its inputs"
        )
    return set(parameters)
