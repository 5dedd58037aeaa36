"""`optimizer`: which rule updates the weights, and its parameters."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema

from wherry.config.fields import ConfigBlock, Constructed, Flag, Integer, Number, Text, key, lowered
from wherry.config.problems import did_you_mean, named, shown


def _numbers(value: Any, count: int, example: str) -> list[float]:
    is_list = isinstance(value, list | tuple) and len(value) == count
    if not is_list or any(isinstance(each, bool) or not isinstance(each, int | float) for each in value):
        raise ValueError(f"expected {example}, got {shown(value)}")
    return [float(each) for each in value]


def _pair(value: Any) -> list[float]:
    found = _numbers(value, 2, "two numbers like [0.9, 0.999]")
    if not all(0 <= beta < 1 for beta in found):
        raise ValueError(f"expected two numbers from 0 to below 1, got {list(value)}")
    return found


def _coefficients(value: Any) -> list[float]:
    return _numbers(value, 3, "three numbers like [3.4445, -4.7750, 2.0315]")


def _eps_of_adafactor(value: Any) -> list[float | None]:
    """The first may be left to the type's precision."""
    is_unset = isinstance(value, list | tuple) and len(value) == 2 and value[0] is None
    found = _numbers([0, value[1]] if is_unset else value, 2, "two numbers like [null, 1e-3]")
    if any(each < 0 for each in found):
        raise ValueError(f"expected two numbers of at least 0, got {found}")
    return [None if is_unset else found[0], found[1]]


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
    amsgrad: Flag = key(
        False,
        "The AMSGrad variant, by torch's own update: its three moments are in fp32 and in memory.",
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


class MuonParams(ConfigBlock):
    lr: Number = key(
        1e-3, "Learning rate, of Muon's weights and of AdamW's where the next two do not say another.", ge=0
    )
    muon_lr: Number | None = key(None, "Learning rate of Muon's weights. Unset: lr.", ge=0)
    adam_lr: Number | None = key(None, "Learning rate of the weights that AdamW updates. Unset: lr.", ge=0)
    weight_decay: Number = key(0.1, "Weight decay, of both.", ge=0)
    momentum: Number = key(0.95, "Momentum of Muon.", ge=0)
    nesterov: Flag = key(True, "Nesterov momentum of Muon.")
    ns_steps: Integer = key(5, "Newton-Schulz iterations, by which Muon makes an update orthogonal.", ge=1, le=99)
    ns_coefficients: Annotated[
        list[float],
        BeforeValidator(_coefficients),
        WithJsonSchema({"type": "array", "items": {"type": "number"}, "minItems": 3, "maxItems": 3}),
    ] = key([3.4445, -4.7750, 2.0315], "Coefficients of an iteration.")
    ns_eps: Number = key(1e-7, "The least norm that an update is divided by before its iterations.", ge=0)
    adjust_lr_fn: Annotated[Literal["original", "match_rms_adamw"], BeforeValidator(lowered)] = key(
        "original",
        "How Muon's learning rate follows the shape of a matrix of A rows and B columns: original, times "
        "sqrt(max(1, A / B)); match_rms_adamw, times 0.2 sqrt(max(A, B)), which suits learning rates of AdamW.",
    )
    betas: Betas = key([0.9, 0.999], "Decay rates of AdamW's two moments.")
    eps: Number = key(1e-8, "Added to AdamW's denominator.", ge=0)
    adam_w_mode: Annotated[Flag, _only(True, "the weights that are not Muon's are updated by AdamW")] = key(
        True, "Decoupled weight decay of those that AdamW updates."
    )

    def arguments(self) -> dict[str, Any]:
        """As `wherry.optim.Muon` takes them."""
        given = self.model_dump(exclude={"muon_lr", "adam_lr", "ns_eps", "adam_w_mode"})
        muon_lr, adam_lr = (self.lr if lr is None else lr for lr in (self.muon_lr, self.adam_lr))
        return {**given, "lr": muon_lr, "adamw_lr": adam_lr, "eps": self.ns_eps, "adamw_eps": self.eps}


class AdafactorParams(_Params):
    lr: Number = key(1e-2, "Learning rate, as a share of a weight's size; from step 1 / lr^2 on, 1 / sqrt(step).", ge=0)
    beta2_decay: Number = key(-0.8, "The second moment's decay rate at step t is 1 - t to this power.", le=0)
    eps: Annotated[
        list[float | None],
        BeforeValidator(_eps_of_adafactor),
        WithJsonSchema(
            {"type": "array", "items": {"anyOf": [{"type": "number"}, {"type": "null"}]}, "minItems": 2, "maxItems": 2}
        ),
    ] = key(
        [None, 1e-3],
        "Added to the squared gradient, which null leaves to the type's precision; and the least size of a weight "
        "that a step is in proportion to.",
    )
    d: Number = key(1.0, "An update whose root mean square is above this is made as small.", ge=1)


class LambParams(ConfigBlock):
    lr: Number = key(1e-3, "Learning rate.", ge=0)
    weight_decay: Number = key(0.0, "Weight decay.", ge=0)
    betas: Betas = key([0.9, 0.999], "Decay rates of the two moments.")
    eps: Number = key(1e-8, "Added to the denominator.", ge=0)
    eps_inside_sqrt: Flag = key(False, "Add eps to the second moment, and not to its root.")
    bias_correction: Flag = key(True, "Correct the moments for their start at zero.")
    max_coeff: Number = key(10.0, "The most that a step is stretched by the trust ratio.", ge=0)
    min_coeff: Number = key(0.01, "The least of it.", ge=0)


# What the native kernels update, and what is updated by whole parameters.
NATIVE: dict[str, type[ConfigBlock]] = {
    "Adam": AdamParams,
    "AdamW": AdamParams,
    "Adagrad": AdagradParams,
    "Lion": LionParams,
    "SGD": SGDParams,
}
WHOLE: dict[str, type[ConfigBlock]] = {"Muon": MuonParams, "Adafactor": AdafactorParams, "Lamb": LambParams}
OPTIMIZERS = {**NATIVE, **WHOLE}
TORCH_ELEMENTWISE = ("Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
_COMPRESSED = "compressed communication is not offered; use Adam or AdamW"
_WIDTHS = "width-dependent learning rates are not offered; give parameter groups their own lr to an AdamW"
REFUSED = {
    "OneBitAdam": _COMPRESSED,
    "OneBitLamb": _COMPRESSED,
    "ZeroOneAdam": _COMPRESSED,
    "MuAdam": _WIDTHS,
    "MuAdamW": _WIDTHS,
    "MuSGD": _WIDTHS,
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
    """An optimizer's name as it is spelled, or an error that says which one may be meant."""
    if not isinstance(value, str):
        raise ValueError(f"expected the name of an optimizer, got {shown(value)}")
    name = named(value, (*OPTIMIZERS, *TORCH_ELEMENTWISE, *REFUSED)) or value
    if name in REFUSED:
        raise ValueError(f"{name} is not part of Wherry: {REFUSED[name]}")
    if instead := _small(value):
        raise ValueError(f'no optimizer is called "{value}" here: use {instead}')
    # torch is asked last and only about a name not known above, so that a config loads without importing torch.
    if name not in OPTIMIZERS and name not in TORCH_ELEMENTWISE and not _known_to_torch(name):
        hint = did_you_mean(value, [*OPTIMIZERS, *TORCH_ELEMENTWISE])
        known = f"; expected {', '.join(OPTIMIZERS)}, or one of torch.optim: {', '.join(TORCH_ELEMENTWISE)}"
        raise ValueError(f'unknown optimizer "{value}"{hint or known}')
    return name


class Optimizer(Constructed):
    models: ClassVar = OPTIMIZERS

    type: Annotated[
        str,
        BeforeValidator(optimizer_name),
        WithJsonSchema({"type": "string", "examples": [*OPTIMIZERS, *TORCH_ELEMENTWISE]}),
    ] = key(
        ...,
        "Adam (decoupled weight decay by default), AdamW, Adagrad, Lion, SGD; Muon (with AdamW for embeddings, the "
        "output head, norms and biases), Adafactor, Lamb; or another optimizer of torch.optim. auto: AdamW.",
    )
    params: dict[Text, Any] = key({}, "What the optimizer is constructed with.")

    def build_args(self) -> tuple[str, dict[str, Any]]:
        """The name of the rule and its keyword arguments, as torch.optim or wherry.optim takes them.

        >>> Optimizer(type="Adam", params={"lr": 0.1, "adam_w_mode": False}).build_args()
        ('Adam', {'lr': 0.1})
        """
        params = MuonParams(**self.params).arguments() if self.type == "Muon" else {**self.params}
        params.pop("adam_w_mode", None)
        return self.type, {name: tuple(value) if isinstance(value, list) else value for name, value in params.items()}

    @classmethod
    def resolve(cls, type_name: str, params: ConfigBlock) -> tuple[str, dict[str, Any]]:
        resolved = params.model_dump(exclude={"fp32_optimizer_states"})
        if not isinstance(params, AdamParams):
            return type_name, resolved
        if not params.amsgrad:
            del resolved["amsgrad"]
        if params.bias_correction:
            del resolved["bias_correction"]
        if params.adam_w_mode:
            del resolved["adam_w_mode"]
        return "AdamW" if params.adam_w_mode else "Adam", resolved
