"""What MODEL names on the command line and in `estimate`: a preset, a Hugging Face config, a callable of one's own."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import inspect
import json
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry.errors import WherryError
from wherry.plan.grid import Grid
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


@dataclasses.dataclass(frozen=True)
class Batch:
    """What one forward is called with."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Source:
    """A model that can be built, on whatever device is the default, and the inputs of its forward.

    `make(micro_batch, sequence)` returns the model and one micro-batch, or None for the batch if nobody knows what the
    model is called with.
    """

    name: str
    make: Callable[[int, int], tuple[nn.Module, Batch | None]]
    # Tokens of a sample, where nothing else is asked for.
    sequence: int = 1
    # Whether `make` follows the micro-batch.
    scales: bool = True
    # Another micro-batch for a model that was made already, of (model, micro_batch, sequence), where that can be had.
    inputs: Callable[[nn.Module, int, int], Batch | None] | None = None
    # Whether its forward is known to treat blocks by what they are, and not by counting them.
    known: bool = False
    # The source of the part that one rank of a grid has, with activations of the given dtype, where that is known.
    part: Callable[[Grid, torch.dtype], Source] | None = None
    # How many parameters there are with so many tokens a sample, where that is known without the model.
    parameters: Callable[[int], int] | None = None
    # What tells this model from every other, where text can: its profiles may be kept. Code of one's own may change.
    key: str | None = None

    def share(self, grid: Grid, dtype: torch.dtype | None) -> Source:
        """One rank's part, where ranks share the model."""
        if grid.size == 1:
            return self
        if self.part is None:
            raise WherryError(
                f"{self.name}: how ranks would share it is not known; let module:callable return one rank's part of "
                "the model, and give --ranks as the number of data-parallel ranks"
            )
        if dtype is None:
            import torch

            dtype = torch.float32
        return self.part(grid, dtype)


def find(model: str | nn.Module | Callable[..., Any]) -> Source:
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


def _of_object(model: nn.Module | Callable[..., Any]) -> Source:
    from torch import nn

    if isinstance(model, nn.Module):
        return Source(type(model).__name__, lambda *_: (model, None), scales=False)
    return _of_callable(getattr(model, "__name__", "model"), model)


def of_shape(name: str, shape: Shape) -> Source:
    """A GPT-2 of this shape."""

    def make(micro_batch: int, sequence: int) -> tuple[nn.Module, Batch]:
        from wherry.train import planned

        return planned.model_of(shape, sequence), Batch(planned.inputs_of(micro_batch, sequence))

    def inputs(_: nn.Module, micro_batch: int, sequence: int) -> Batch:
        from wherry.train import planned

        return Batch(planned.inputs_of(micro_batch, sequence))

    def part(grid: Grid, dtype: torch.dtype) -> Source:
        def make_part(micro_batch: int, sequence: int) -> tuple[nn.Module, Batch]:
            from wherry.train import planned

            model, args = planned.part_of(shape, grid, dtype, micro_batch, sequence)
            return model, Batch(args)

        return dataclasses.replace(source, make=make_part, inputs=None, part=None)

    def parameters(sequence: int) -> int:
        return dataclasses.replace(shape, sequence=max(shape.sequence, sequence)).parameters

    source = Source(
        name, make, shape.sequence, inputs=inputs, known=True, part=part, parameters=parameters, key=repr(shape)
    )
    return source


# Hugging Face.


def _of_hugging_face(path: Path) -> Source:
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
    key = f"{json.dumps(values, sort_keys=True)} of transformers {release}"
    kind = values.pop("model_type")

    # Nothing below asks for transformers, or for torch, before it makes the model: where its profile is kept, never.

    @functools.cache
    def config() -> Any:
        import transformers

        try:
            return transformers.AutoConfig.for_model(kind, **values)
        except ImportError as error:  # transformers imports the code of each kind when it is asked for
            raise WherryError(f"MODEL: transformers {release} cannot import what {file} needs: {error}") from error
        except Exception as error:  # each kind of model checks its config in its own way
            why = str(error).partition(". Should contain one of")[0]  # of hundreds of names
            raise WherryError(f"MODEL: transformers {release} does not take {file}: {why}") from error

    def text() -> Any:
        return config().get_text_config() if hasattr(config(), "get_text_config") else config()

    def make(micro_batch: int, sequence: int) -> tuple[nn.Module, Batch | None]:
        with told_by(f"MODEL: {file} fails"):
            cls = _class_of(config())
            model = cls.from_config(config()) if hasattr(cls, "from_config") else cls(config())
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = False
        model.train()
        return model, _text_batch(model, micro_batch, sequence)

    def part(grid: Grid, _: torch.dtype) -> Source:
        if grid.pipe > 1:
            raise WherryError("--pipeline-parallel: only the presets are known by their stages; use --tensor-parallel")

        def make_part(micro_batch: int, sequence: int) -> tuple[nn.Module, Batch | None]:
            model, batch = make(micro_batch, sequence)
            styles = getattr(text(), "base_model_tp_plan", None)
            if not styles:
                raise WherryError(f"--tensor-parallel: transformers has no plan of how ranks share a {kind}")
            from wherry.plan.cut import cut

            cut(model, {f"*{pattern}": style for pattern, style in styles.items()}, grid.tensor)
            return model, batch

        return dataclasses.replace(source, make=make_part, part=None)

    name = f"{file.parent.resolve().name} ({kind})"
    longest = _longest(values) or _longest_of(text())
    source = Source(name, make, sequence=min(longest, 2048), inputs=_text_batch, part=part, key=key)
    return source


def _longest(values: Mapping[str, Any]) -> int | None:
    """The most tokens that a config says its model takes, if it says so itself."""
    inside = values.get("text_config")
    told = inside if isinstance(inside, dict) else values
    found = told.get("max_position_embeddings") or told.get("n_positions")
    return found if isinstance(found, int) and found > 0 else None


def _longest_of(config: Any) -> int:
    """The same of what transformers makes of it, which knows other names and defaults."""
    return int(getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 2048)


def _class_of(config: Any) -> Any:
    import transformers

    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    return transformers.AutoModelForCausalLM


def _text_batch(model: nn.Module, micro_batch: int, sequence: int) -> Batch | None:
    """Token ids, and labels where the forward takes them; None for a model of something else than text."""
    accepted = inspect.signature(model.forward).parameters
    if "input_ids" not in accepted:
        return None
    import torch

    ids = torch.zeros(micro_batch, sequence, dtype=torch.int64)
    is_language_model = any(word in type(model).__name__ for word in ("CausalLM", "LMHead", "ConditionalGeneration"))
    return Batch((), {"input_ids": ids} | ({"labels": ids} if "labels" in accepted and is_language_model else {}))


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


def _of_callable(name: str, call: Callable[..., Any]) -> Source:
    from torch import nn

    accepted = _accepted(name, call)

    def make(micro_batch: int, sequence: int) -> tuple[nn.Module, Batch | None]:
        wanted = {"micro_batch": micro_batch, "sequence": sequence}
        with told_by(f"MODEL: {name} fails"):
            made = call(**{key: value for key, value in wanted.items() if key in accepted})
        model, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(model, nn.Module):
            raise WherryError(
                f"MODEL: {name} returned {type(made).__name__}; expected a model, or a model and the inputs of one "
                "micro-batch (a tensor, a tuple or a dict)"
            )
        if batch is None:
            return model, None
        if isinstance(batch, Mapping):
            return model, Batch((), dict(batch))
        return model, Batch(tuple(batch) if isinstance(batch, list | tuple) else (batch,))

    return Source(name, make, scales="micro_batch" in accepted)


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


@contextmanager
def told_by(what: str) -> Iterator[None]:
    """What a model's own code raises is told as that, with its line. Any other error stays what it is."""
    try:
        yield
    except WherryError:
        raise
    except Exception as error:
        if (line := _line_of(error)) is None:
            raise
        raise WherryError(f"{what}: {type(error).__name__}: {error} ({line})") from error


def _line_of(error: Exception) -> str | None:
    """The innermost line on the way to an error that is neither Wherry's nor torch's nor Python's own."""
    import torch

    others = tuple(f"{Path(module).parent}{os.sep}" for module in (__file__, torch.__file__))
    library = sysconfig.get_path("stdlib")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        of_python = frame.filename.startswith((library, "<")) and "site-packages" not in frame.filename
        if not of_python and not frame.filename.startswith(others):
            return f"{frame.filename}:{frame.lineno}"
    return None
