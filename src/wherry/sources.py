"""What MODEL names on the command line and in `estimate`: a preset, a Hugging Face config, a callable of one's own."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import json
import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry.errors import WherryError
from wherry.plan.grid import ALONE, Grid
from wherry.plan.model_source import Inputs, ModelSource, told_by
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
    if Path(model).exists():
        return _of_hugging_face(Path(model))
    close = difflib.get_close_matches(model, SHAPES, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise WherryError(
        f"MODEL: expected a preset ({', '.join(SHAPES)}), a Hugging Face config.json or its folder, or "
        f"module:callable, got {model!r}{hint}"
    )


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


def _of_hugging_face(path: Path) -> ModelSource:
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise WherryError(f"MODEL: {file} cannot be read as a Hugging Face config: {error}") from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise WherryError(f'MODEL: {file} has no "model_type", so it is not the config of a Hugging Face model')
    try:
        release = metadata.version("transformers")
    except metadata.PackageNotFoundError as error:
        raise WherryError(f"MODEL: the model of {file} needs transformers: pip install transformers") from error
    import transformers

    kind = values.pop("model_type")
    try:
        config = transformers.AutoConfig.for_model(kind, **values)
    except ImportError as error:  # transformers imports the code of each kind when it is asked for
        raise WherryError(f"MODEL: transformers {release} cannot import what {file} needs: {error}") from error
    except Exception as error:  # each kind of model checks its config in its own way
        why = str(error).partition(". Should contain one of")[0]  # of hundreds of names
        raise WherryError(f"MODEL: transformers {release} does not take {file}: {why}") from error
    of_text = config.get_text_config() if hasattr(config, "get_text_config") else config

    def make(micro_batch: int, sequence: int) -> tuple[nn.Module, Inputs | None]:
        with told_by(f"MODEL: {file} fails"):
            cls = _class_of(config)
            model = cls.from_config(config) if hasattr(cls, "from_config") else cls(config)
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

    name = f"{file.parent.resolve().name} ({kind})"
    longest = getattr(of_text, "max_position_embeddings", None) or getattr(of_text, "n_positions", None) or 2048
    source = ModelSource(name, make, sequence=min(longest, 2048), part=part)
    return source


def _class_of(config: Any) -> Any:
    import transformers

    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    return transformers.AutoModelForCausalLM


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
