"""`optimizer`: which rule updates the weights, and its parameters."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema

from wherry.config.fields import ConfigBlock, Constructed, Flag, Number, Text, key
from wherry.config.problems import did_you_mean, named, shown


def _pair(value: Any) -> list[float]:
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    if not is_pair or any(isinstance(beta, bool) or not isinstance(beta, int | float) for beta in value):
        raise ValueError(f"expected two numbers like [0.9, 0.999], got {shown(value)}")
    if not all(0 <= beta < 1 for beta in value):
        raise ValueError(f"expected two numbers from 0 to below 1, got {list(value)}")
    return [float(beta) for beta in value]


Betas = Annotated[
    list[float],
    BeforeValidator(_pair),
    WithJsonSchema({"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}),
]


def _only(wanted: bool, why: str) -> AfterValidator:
    def check(value: bool) -> bool:
        if value is not wanted:
            raise ValueError(f"expected {shown(wanted)}, got {shown(value)}: {why}")
        return value

    return AfterValidator(check)


class _Params(ConfigBlock):
    lr: Number = key(1e-3, "Learning rate.", ge=0)
    weight_decay: Number = key(0.0, "Weight decay.", ge=0)
    maximize: Flag = key(False, "Maximize the objective instead of minimizing it.")


class AdamParams(_Params):
    betas: Betas = key([0.9, 0.999], "Decay rates of the two moments.")
    eps: Number = key(1e-8, "Added to the denominator.", ge=0)
    bias_correction: Flag = key(True, "Correct the moments for their start at zero.")
    adam_w_mode: Flag = key(
        True, "Decoupled weight decay (AdamW), also when the type says Adam; false for decay inside the gradient (L2)."
    )
    amsgrad: Annotated[Flag, _only(False, "AMSGrad needs a third state; use another optimizer")] = key(
        False, "The AMSGrad variant."
    )
    fp32_optimizer_states: Annotated[
        Flag, _only(True, 'it would keep moments in half precision, which "wherry": {"state_dtype": "bf16"} does here')
    ] = key(True, "Moments in fp32. false is refused: wherry.state_dtype has them smaller.")


class AdagradParams(_Params):
    lr: Number = key(1e-2, "Learning rate.", ge=0)
    lr_decay: Number = key(0.0, "Learning rate decay.", ge=0)
    initial_accumulator_value: Number = key(0.0, "Where the accumulator starts.", ge=0)
    eps: Number = key(1e-10, "Added to the denominator.", ge=0)


class LionParams(_Params):
    betas: Betas = key([0.9, 0.99], "Decay rates for the update and for the moment.")


class SGDParams(_Params):
    momentum: Number = key(0.0, "Momentum.", ge=0)
    dampening: Number = key(0.0, "Dampening of the momentum.")
    nesterov: Flag = key(False, "Nesterov momentum.")


NATIVE: dict[str, type[ConfigBlock]] = {
    "Adam": AdamParams,
    "AdamW": AdamParams,
    "Adagrad": AdagradParams,
    "Lion": LionParams,
    "SGD": SGDParams,
}
TORCH_ELEMENTWISE = ("Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
_COMPRESSED = "compressed communication is not offered; use Adam or AdamW"
_WIDTHS = "width-dependent learning rates are not offered; give parameter groups their own lr to an AdamW"
_WHOLE = "it needs whole matrices, and a shard is a part of one; use AdamW"
REFUSED = {
    "OneBitAdam": _COMPRESSED,
    "OneBitLamb": _COMPRESSED,
    "ZeroOneAdam": _COMPRESSED,
    "MuAdam": _WIDTHS,
    "MuAdamW": _WIDTHS,
    "MuSGD": _WIDTHS,
    "Lamb": "it needs the norm of each whole parameter, and a shard is a part of one; use AdamW",
    "Muon": _WHOLE,
    "Adafactor": _WHOLE,
    "LBFGS": "it evaluates the model several times in one step; use AdamW",
    "SparseAdam": "gradients are dense here; use Adam",
}


# As bitsandbytes and Transformers name what keeps moments in 8 bits, or pages state out of a GPU's memory.
_SMALL = re.compile(r"(paged_?)?(adamw?|lion|adagrad|sgd)(_?bnb)?_?(8|32)?_?(bit)?")


def _small(name: str) -> str:
    """Which keys do what an optimizer of another library does by its name; nothing of any other name."""
    match = _SMALL.fullmatch(name.lower())
    if match is None or not (match[1] or match[4]):
        return ""
    keys = ['"wherry": {"state_dtype": "int8"}'] if match[4] == "8" else []
    keys += ['"zero_optimization": {"offload_optimizer": {"device": "cpu"}}'] if match[1] else []
    return f"{named(match[2], NATIVE)} with {' and '.join(keys)}" if keys else ""


def _known_to_torch(name: str) -> bool:
    import torch.optim

    found = getattr(torch.optim, name, None)
    return isinstance(found, type) and issubclass(found, torch.optim.Optimizer)


def optimizer_name(value: Any) -> str:
    """An optimizer's name as it is spelt, or an error that says which one may be meant."""
    if not isinstance(value, str):
        raise ValueError(f"expected the name of an optimizer, got {shown(value)}")
    name = named(value, (*NATIVE, *TORCH_ELEMENTWISE, *REFUSED)) or value
    if name in REFUSED:
        raise ValueError(f"{name} is not part of Wherry: {REFUSED[name]}")
    if instead := _small(value):
        raise ValueError(f'no optimizer is called "{value}" here: use {instead}')
    # torch is asked last and only about a name not known above, so that a config loads without importing torch.
    if name not in NATIVE and name not in TORCH_ELEMENTWISE and not _known_to_torch(name):
        hint = did_you_mean(value, [*NATIVE, *TORCH_ELEMENTWISE])
        known = f"; expected {', '.join(NATIVE)}, or one of torch.optim: {', '.join(TORCH_ELEMENTWISE)}"
        raise ValueError(f'unknown optimizer "{value}"{hint or known}')
    return name


class Optimizer(Constructed):
    models: ClassVar = NATIVE

    type: Annotated[
        str,
        BeforeValidator(optimizer_name),
        WithJsonSchema({"type": "string", "examples": [*NATIVE, *TORCH_ELEMENTWISE]}),
    ] = key(
        ...,
        "Adam (decoupled weight decay by default), AdamW, Adagrad, Lion, SGD, or an optimizer of torch.optim. "
        "auto: AdamW.",
    )
    params: dict[Text, Any] = key({}, "What the optimizer is constructed with.")

    def build_args(self) -> tuple[str, dict[str, Any]]:
        """The name of the rule and its keyword arguments, as torch.optim takes them.

        >>> Optimizer(type="Adam", params={"lr": 0.1, "adam_w_mode": False}).build_args()
        ('Adam', {'lr': 0.1})
        """
        params = {name: tuple(value) if name == "betas" else value for name, value in self.params.items()}
        params.pop("adam_w_mode", None)
        return self.type, params

    @classmethod
    def resolve(cls, type_name: str, params: ConfigBlock) -> tuple[str, dict[str, Any]]:
        resolved = params.model_dump(exclude={"amsgrad", "fp32_optimizer_states"})
        if not isinstance(params, AdamParams):
            return type_name, resolved
        if params.bias_correction:
            del resolved["bias_correction"]
        if params.adam_w_mode:
            del resolved["adam_w_mode"]
        return "AdamW" if params.adam_w_mode else "Adam", resolved
