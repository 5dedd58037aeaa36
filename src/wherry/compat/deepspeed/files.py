"""Read the files of a DeepSpeed checkpoint: run nothing in them, and validate their form.

They are pickles. torch reads them with `weights_only`, and inert classes replace the few of DeepSpeed's that stand in
them.
"""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from wherry.checkpoint.errors import CheckpointError
from wherry.checkpoint.files import DTYPES, Count
from wherry.checkpoint.format import Shape
from wherry.errors import one_line
from wherry.regular import open_regular

# Keys that Megatron-DeepSpeed imports for what it adds to a client state, with DeepSpeed's values.
UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"
UNIVERSAL_CHECKPOINT_VERSION_KEY, UNIVERSAL_CHECKPOINT_VERSION_VALUE = "universal_checkpoint_version", 0.4
# Megatron's models name their weights under these keys, which are saved with the client state.
VOCABULARY_PARAMETER_PATTERNS = "vocabulary_parameter_patterns"
PIPELINE_REPLICATED_PARAMETER_PATTERNS = "pipeline_replicated_parameter_patterns"
TP_REPLICATED_PARAMETER_PATTERNS = "tp_replicated_parameter_patterns"
PARAMETER_WITH_ROW_PARALLELISM_PATTERNS = "parameter_with_row_parallelism_patterns"
PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 = "parameter_with_2_sub_params_cat_dim_0"
ORIGINAL_VOCAB_SIZE, PADDED_VOCAB_SIZE = "original_vocab_size", "padded_vocab_size"

# Limits of values beside tensors, far above those of any run.
_MOST_VALUES, _DEEPEST = 1_000_000, 64
# Tied weights stand in a file once, under several names.
_MOST_NAMES_OF_A_BYTE = 8


class _Inert:
    """A class that takes what a pickle gives it, and does nothing."""

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state


# Classes that DeepSpeed pickles beside tensors.
_STAND_INS: list[Any] = [
    (_Inert, name)
    for name in (
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
    )
]


def _load(path: Path) -> Any:
    """Load a file without running anything in it."""
    try:
        _check_archive(path)
        with torch.serialization.safe_globals(_STAND_INS):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        if foreign := re.search(r"GLOBAL (\S+)", str(error)):
            why = f"it holds an object of {foreign[1]}, which is not loaded: nothing in a checkpoint is run"
        raise CheckpointError(f"{path} cannot be read: {one_line(why)}") from None


def _check_archive(path: Path) -> None:
    """Refuse records that are compressed or longer than the file, since torch allocates the length they declare."""
    with os.fdopen(open_regular(path), "rb") as file:
        length = os.fstat(file.fileno()).st_size
        for record in zipfile.ZipFile(file).infolist():
            if record.compress_type != zipfile.ZIP_STORED or record.file_size > length:
                raise ValueError(f"its record {record.filename} is not as torch stores one")


# Validators.


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    is_known = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.dtype in DTYPES
    is_dense = tensor.layout is torch.strided and tensor.device.type == "cpu"
    if not is_known or not is_dense or tensor.is_conj() or tensor.is_neg():
        kind = f"{type(tensor).__name__} of {tensor.dtype}, {tensor.layout} on {tensor.device}"
        raise ValueError(f"expected a plain tensor, got a {kind}")
    stored = tensor.untyped_storage().nbytes()
    if tensor.nbytes > stored:
        raise ValueError(f"expected {tensor.nbytes:,} bytes in the file, got {stored:,}")
    return tensor.detach()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() != 1 or not tensor.is_floating_point():
        raise ValueError(f"expected floating-point numbers in one dim, got {tensor.dtype} of {list(tensor.shape)}")
    return tensor


def _state(value: Any) -> Any:
    """Check a state of a flat: a tensor has one element for each of the weight's."""
    return _flat(_plain(value)) if isinstance(value, torch.Tensor) and value.dim() else value


def _whole_state(value: Any) -> Any:
    value = _plain(value) if isinstance(value, torch.Tensor) else value
    if isinstance(value, torch.Tensor) and value.dim() and not value.is_floating_point():
        raise ValueError(f"expected floating-point numbers, got {value.dtype}")
    return value


def _number(value: Any) -> Any:
    """Convert a count that was saved as a float or as a tensor with one element."""
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        value = _plain(value).item()
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _small(value: Any) -> Any:
    """Refuse values without end: too many, or too deep in each other."""
    waiting, seen = [(value, 0)], 0
    while waiting:
        inner, depth = waiting.pop()
        seen += 1
        if seen > _MOST_VALUES or depth > _DEEPEST:
            raise ValueError(f"expected at most {_MOST_VALUES:,} values, at most {_DEEPEST} deep")
        if isinstance(inner, dict):
            waiting += ((part, depth + 1) for pair in inner.items() for part in pair)
        elif isinstance(inner, list | tuple | set | frozenset):
            waiting += ((part, depth + 1) for part in inner)
        elif isinstance(inner, torch.Tensor):
            _plain(inner)
    return value


def _listed(value: Any) -> Any:
    """Refuse a tensor in place of a list: its rows can be iterated, and one element of a file can have 10^9 of them."""
    if isinstance(value, torch.Tensor):
        raise ValueError("expected a list, got a tensor")
    return value


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("expected a name that can be printed")
    return text


Item = TypeVar("Item")
Name = Annotated[str, Field(strict=True, min_length=1, max_length=1000), AfterValidator(_printable)]
StateName = Annotated[str, Field(strict=True, pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")]
Plain = Annotated[torch.Tensor, AfterValidator(_plain)]
Flat = Annotated[Plain, AfterValidator(_flat)]
Small = Annotated[Any, AfterValidator(_small)]
Listed = Annotated[list[Item], BeforeValidator(_listed)]
# Some versions leave out what others save as None.
_NoneIsEmpty = BeforeValidator(lambda value: () if value is None else value)
Named = Annotated[dict[Name, Item], BeforeValidator(lambda value: {} if value is None else value)]


# Forms of the files.


class _Form(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True, extra="allow")


class ModelFile(_Form):
    """`*_model_states.pt`; other entries are the client state, or not needed."""

    __pydantic_extra__: dict[str, Small] = Field(init=False)

    module: dict[Name, Plain]
    buffer_names: Annotated[Listed[Name], _NoneIsEmpty] = Field(default_factory=list)
    # One item for each group of trained parameters.
    param_shapes: Annotated[Listed[dict[Name, Shape]], _NoneIsEmpty] = Field(default_factory=list)
    frozen_param_shapes: Named[Shape] = Field(default_factory=dict)
    frozen_param_fragments: Named[Plain] = Field(default_factory=dict)
    shared_params: Named[Name] = Field(default_factory=dict)
    lr_scheduler: Small = None
    # The optimizer of stage 0, which `whole_optimizer` reads.
    optimizer: dict[Any, Any] | None = None
    global_steps: Count = 0
    skipped_steps: Count = 0
    global_samples: Count = 0
    dp_world_size: Annotated[Count, Field(ge=1)] = 1
    ds_version: Annotated[str | None, Field(max_length=100)] = None


class WholeStates(_Form):
    """The states of one parameter, in its shape: a count of updates, numbers, and tensors."""

    __pydantic_extra__: dict[StateName, Annotated[Any, AfterValidator(_whole_state)]] = Field(init=False)

    step: Annotated[Count, BeforeValidator(_number)] = 0

    def tensors(self) -> dict[str, torch.Tensor]:
        kept = self.model_extra or {}
        return {name: value for name, value in kept.items() if isinstance(value, torch.Tensor) and value.dim()}


class States(WholeStates):
    """The states of one flat."""

    __pydantic_extra__: dict[StateName, Annotated[Any, AfterValidator(_state)]] = Field(init=False)


class BaseState(BaseModel):
    """An optimizer's state in torch's form."""

    state: dict[int, States]
    param_groups: Listed[dict[str, Small]] = Field(default_factory=list)


class OptimizerStates(_Form):
    """One rank's part in `*_optim_states.pt`; stage 3 has other names than stages 1 and 2."""

    fp32_flat_groups: Listed[Flat] | None = None
    single_partition_of_fp32_groups: Listed[Flat] | None = None
    optimizer_state_dict: BaseState | Listed[States] | None = None
    base_optimizer_state: BaseState | Listed[States] | None = None
    loss_scaler: Any = None


class OptimizerFile(_Form):
    optimizer_state_dict: OptimizerStates


class WholeState(_Form):
    """The optimizer of stage 0 with states of each parameter."""

    state: dict[int, WholeStates]
    param_groups: Listed[dict[str, Small]]


class WholeOptimizer(_Form):
    """The optimizer of stage 0 in 16 bits, DeepSpeed's `FP16_Optimizer`, with flats of each group."""

    fp32_groups_flat: Listed[Flat]
    optimizer_state_dict: BaseState


class _UniversalState(_Form):
    param: Plain


class UniversalOptimizer(_Form):
    """`zero/optimizer_state.pt` of a universal checkpoint."""

    param_groups: Listed[dict[str, Small]]
    optimizer_state_dict: BaseState | None = None
    loss_scaler: Any = None


Form = TypeVar("Form", bound=BaseModel)


def read_model(path: Path) -> ModelFile:
    model = read_valid(ModelFile, path)
    if sum(tensor.nbytes for tensor in model.module.values()) > _MOST_NAMES_OF_A_BYTE * path.stat().st_size:
        raise CheckpointError(f"{path}: module: many of its tensors are the same bytes of the file")
    return model


def whole_optimizer(model: ModelFile, path: Path) -> WholeOptimizer | WholeState | None:
    """Validate the optimizer of stage 0; None without one of a known form."""
    saved = model.optimizer or {}
    if "fp32_groups_flat" in saved:
        return _validate(WholeOptimizer, saved, path)
    return _validate(WholeState, saved, path) if "state" in saved else None


def read_universal_state(path: Path) -> torch.Tensor:
    """Read a state of one parameter: in its shape, or the bare flat tensor that stage 3 leaves."""
    value = _load(path)
    return _validate(_UniversalState, {"param": value} if isinstance(value, torch.Tensor) else value, path).param


def read_universal_step(path: Path) -> int:
    return _validate(States, {"step": _load(path)}, path).step


def read_valid(form: type[Form], path: Path) -> Form:
    return _validate(form, _load(path), path)


def _validate(form: type[Form], value: Any, path: Path) -> Form:
    try:
        return form.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = "".join(f"{one_line(str(part))}: " for part in first["loc"] if part != "[key]")
        why = first["msg"].removeprefix("Value error, ")
        raise CheckpointError(f"{path}: {where}{why[:1].lower()}{why[1:]}") from None
