"""The optimizer that a user holds: true torch parameter groups outside, sharded rules inside."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from wherry import native, optim
from wherry.errors import WherryError
from wherry.observe.log import warn
from wherry.optim.groups import ADD_GROUP
from wherry.parallel.agreement import plain
from wherry.update.rules import NATIVE_FAMILIES, NativeFamily, NativeRule, TorchRule, UpdateRule
from wherry.update.whole_rules import is_known, rule_of, whole_groups

if TYPE_CHECKING:
    from wherry.config import Config
    from wherry.update.parameter_states import ParameterStates

OptimizerLike = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]

# Optimizers that treat every element by itself, so that a shard may be updated without the rest of its parameter.
ELEMENT_WISE = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "Adamax",
    "AdamW",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
WHY_NOT = {
    "LBFGS": "it needs the whole gradient's inner products, and several evaluations a step",
    "SparseAdam": "it works on sparse gradients, and flats are dense",
}


class UntestedOptimizerError(WherryError, AssertionError):
    """An optimizer that nobody has vouched for. Scripts written for DeepSpeed catch it as an assertion."""


@dataclass(frozen=True)
class OptimizerSpec:
    """What the user's optimizer comes to: its groups, and how a flat's segments are to be updated."""

    instance: torch.optim.Optimizer
    native_family: NativeFamily | None
    # How moments are stored: fp32, or the lossy bf16 and int8.
    state_dtype: str = "fp32"
    # The groups whose parameters are updated as a whole.
    whole: frozenset[int] = frozenset()

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.instance.param_groups

    @property
    def recorded(self) -> bool:
        """Whether its state lies in records, by names that are known."""
        return self.native_family is not None or is_known(self.instance)

    def make_rule(
        self, *, on_host: bool, on_disk: bool = False, pool: native.Pool | None = None, masters: bool = True
    ) -> UpdateRule:
        """The rule for state that the host's kernels can reach, or not; with state on disk there is no other.

        Without `masters` torch's moments are of the type of the weights.
        """
        if self.native_family is not None and on_host:
            return NativeRule(self.native_family, self.state_dtype, pool)
        instance = self.instance
        known_as = _known_as(instance)
        if self.state_dtype == ("fp32" if masters else "bf16"):
            rule = rule_of(instance, self.state_dtype, on_host=on_host, pool=pool)
            if rule is not None:
                return rule
        needs = "optimizer state on disk" if on_disk else f"wherry.state_dtype: {self.state_dtype}"
        if on_disk or self.state_dtype != ("fp32" if masters else "bf16"):
            where = "" if on_host else " on the host"
            if not (masters or on_disk):
                needs = f"no masters with moments in {self.state_dtype}"
            more = ", Muon, Adafactor or Lamb" if on_disk and self.state_dtype == "fp32" else ""
            got, beyond = known_as, " and ".join(_beyond_kernels(instance))
            if beyond and known_as in NATIVE_FAMILIES:
                got += (
                    f" with {beyond}, which its kernels do not have; leave {beyond} out, or keep fp32 state in memory"
                )
            raise WherryError(f"{needs} needs Adam, AdamW, Adagrad, Lion or SGD{where}{more}, got {got}")
        optimizer_class = {"CPUAdam": torch.optim.AdamW, "CPUAdagrad": torch.optim.Adagrad, "CPULion": Lion}.get(
            known_as, type(instance)
        )
        return TorchRule(instance, optimizer_class, whole=bool(self.whole))


def described(spec: OptimizerSpec | None) -> Iterator[tuple[str, str]]:
    """What of an optimizer every rank of a stage must have alike: what it is, and the options of its groups."""
    if spec is None:
        yield "optimizer", "missing"
        return
    kind = type(spec.instance)
    yield "optimizer", f"{kind.__module__}.{kind.__qualname__}"
    yield from options_described(spec.groups)


def options_described(groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """The numbers of groups: words in them may be a program's own labels."""
    yield "the number of param_groups", str(len(groups))
    for number, group in enumerate(groups):
        for name, value in group.items():
            if name not in ("params", "param_names") and not isinstance(value, str):
                text = plain(value)
                if text is not None:
                    yield f"param_groups[{number}].{name}", text


def groups_described(spec: OptimizerSpec | None, model: nn.Module) -> Iterator[tuple[str, str]]:
    """And the group of each parameter, which every rank that holds the same ones must have alike."""
    groups = spec.groups if spec is not None else []
    group_of = {parameter: str(number) for number, group in enumerate(groups) for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        yield f"the param_group of {name}", group_of.get(parameter, "none")


def resolve_optimizer(
    model: nn.Module,
    config: Config,
    optimizer: OptimizerLike | None,
    model_parameters: Iterable[Any] | None,
    make: Callable[[Config, list[Any]], torch.optim.Optimizer] | None = None,
) -> OptimizerSpec | None:
    """The optimizer that `initialize` was given, or that the config names; None for an engine that only evaluates.

    `make` makes another than torch's own from what the config says.
    """
    given = _listed(model_parameters)
    parameters = given or [p for p in model.parameters() if p.requires_grad]
    if not parameters and not isinstance(optimizer, torch.optim.Optimizer) and (optimizer or config.optimizer):
        raise WherryError(
            "optimizer: no parameter of the model requires a gradient, so there is nothing to train; call "
            "requires_grad_() on what is to be trained, or leave the optimizer out for an engine that only evaluates"
        )
    if optimizer is not None and config.optimizer is not None:
        warn("optimizer: the config's %s is not used, as initialize was given one", config.optimizer.type)
    if optimizer is None:
        if config.optimizer is None:
            return None
        instance = (
            make(config, parameters) if make else from_config(*config.optimizer.build_args(), parameters, model=model)
        )
    elif isinstance(optimizer, torch.optim.Optimizer):
        instance = optimizer
        _tell_of_left_out(given, instance)
    else:
        cls, options = optimizer, {}
        if isinstance(optimizer, partial) and not optimizer.args:
            cls, options = optimizer.func, optimizer.keywords
        if cls in (torch.optim.Muon, optim.Muon):  # for some of a model's weights alone
            optimizer = partial(optim.Muon.for_model, model, **options)
        instance = optimizer(parameters) if callable(optimizer) else optimizer
    spec = describe(instance, allow_untested=config.zero_allow_untested_optimizer, state_dtype=config.state_dtype())
    _check_groups(model, spec)
    return spec


def _tell_of_left_out(given: list[Any], optimizer: torch.optim.Optimizer) -> None:
    """A ready optimizer has its parameters: those of `model_parameters` that it does not have are not trained."""
    known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    left_out = [p for p in _parameters_in(given) if p.requires_grad and p not in known]
    if left_out:
        warn(
            "model_parameters: %d that require a gradient are not in the %s that initialize was given, which decides, "
            "and are not trained; the first has shape %s",
            len(left_out), type(optimizer).__name__, tuple(left_out[0].shape),
        )  # fmt: skip


def _parameters_in(given: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The parameters among parameters, (name, parameter) pairs and groups of either."""
    for item in given:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, dict):
            params = item.get("params", ())
            yield from _parameters_in([params] if isinstance(params, torch.Tensor) else params)
        elif isinstance(item, list | tuple):
            yield from _parameters_in(item[1:])


def _listed(given: Iterable[Any] | None) -> list[Any]:
    """`model_parameters`, as torch's optimizers take them."""
    if isinstance(given, torch.Tensor | dict | str):
        raise WherryError(
            f"model_parameters: expected parameters, (name, parameter) pairs, or groups as dicts, in a list or another "
            f"iterable, got one {type(given).__name__}"
        )
    return list(given) if given is not None else []


def _check_groups(model: nn.Module, spec: OptimizerSpec) -> None:
    inside = set(model.parameters())
    strangers = [p for group in spec.groups for p in group["params"] if p not in inside]
    if strangers:
        shapes = ", ".join(str(tuple(p.shape)) for p in strangers[:5])
        raise WherryError(
            f"optimizer: {len(strangers)} of its parameters are not the model's (shapes {shapes}); was the model "
            "copied, moved or wrapped after the optimizer was made?"
        )


def describe(
    instance: torch.optim.Optimizer, *, allow_untested: bool = False, state_dtype: str = "fp32"
) -> OptimizerSpec:
    """Check that `instance` can be sharded, and say how."""
    if not isinstance(instance, torch.optim.Optimizer):
        raise WherryError(f"optimizer: expected a torch.optim.Optimizer or a callable that makes one, got {instance!r}")
    if any(float(state.get("step", 1)) > 0 for state in instance.state.values()):
        raise WherryError(
            f"optimizer: {type(instance).__name__} already has state, from steps or a loaded checkpoint; pass it fresh "
            "to wherry.initialize and load its state through the engine"
        )
    name, module = _known_as(instance), type(instance).__module__
    ours = module.startswith("wherry.")
    known = (module.startswith("torch.optim") and name in ELEMENT_WISE) or (ours and name in NATIVE_FAMILIES)
    if not (known or is_known(instance)) and not allow_untested:
        reason = WHY_NOT.get(name, "Wherry does not know whether it treats every parameter by itself")
        raise UntestedOptimizerError(
            f"optimizer: {module}.{name} cannot be sharded: {reason}. Those of torch.optim work "
            f"({', '.join(ELEMENT_WISE)}; Adafactor and Muon), and Lion and Lamb; if yours treats every parameter by "
            "itself, set zero_allow_untested_optimizer to true"
        )
    family = NATIVE_FAMILIES.get(name) if known else None
    if _beyond_kernels(instance):
        family = None
    # Of what nobody knows whether it treats every element by itself, a parameter is not cut.
    return OptimizerSpec(instance, family, state_dtype, frozenset() if known else whole_groups(instance))


def _known_as(instance: torch.optim.Optimizer) -> str:
    """The class's name; for one of ours under another name, the name that its rule goes by."""
    if type(instance).__module__.startswith("wherry."):
        for cls in type(instance).__mro__:
            if cls.__name__ in NATIVE_FAMILIES:
                return cls.__name__
    return type(instance).__name__


def _beyond_kernels(instance: torch.optim.Optimizer) -> list[str]:
    """List options in use that the native kernels do not have."""
    options = ("amsgrad", "differentiable", "capturable")
    return [name for name in options if any(group.get(name) for group in instance.param_groups)]


def from_config(
    name: str, options: dict[str, Any], parameters: Iterable[Any], cls: Any = None, *, model: nn.Module | None = None
) -> torch.optim.Optimizer:
    """The optimizer that a config's `optimizer` block names, with its arguments as torch.optim has them.

    Muon asks the `model` which of the parameters are its. `cls` is another class that takes the same. `bias_correction`
    is no argument of torch's Adam, but an option of its groups that is followed here.
    """
    own = cls or name not in ("Adam", "AdamW")
    beside = {} if own else {key: options[key] for key in ("bias_correction",) if key in options}
    options = {key: value for key, value in options.items() if key not in beside}
    if cls is None and name == "Muon" and model is not None:
        return _made(name, partial(optim.Muon.for_model, model), parameters, options)
    cls = cls or {"Lion": Lion, "Lamb": optim.Lamb}.get(name) or getattr(torch.optim, name)
    instance = cls.__new__(cls)
    if cls.add_param_group is torch.optim.Optimizer.add_param_group:
        instance.add_param_group = partial(ADD_GROUP, instance)
    _made(name, instance.__init__, parameters, options)
    vars(instance).pop("add_param_group", None)
    instance.defaults.update(beside)
    for group in instance.param_groups:
        group.update({**beside, **group})
    return instance


def _made(name: str, make: Callable[..., Any], parameters: Iterable[Any], options: dict[str, Any]) -> Any:
    try:
        return make(parameters, **options)
    except (TypeError, ValueError) as error:
        raise WherryError(f"optimizer.params: {name} does not take these: {error}") from error


class Lion(torch.optim.Optimizer):
    """Sign of an interpolation of momentum and gradient, with decoupled weight decay, in plain torch."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        if lr < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"Lion: expected lr >= 0, weight_decay >= 0 and betas in [0, 1), got lr={lr}, "
                f"weight_decay={weight_decay}, betas={betas}"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, (beta1, beta2) = float(group["lr"]), group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                momentum, grad = state["exp_avg"], parameter.grad
                if group["maximize"]:
                    grad = -grad
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(momentum.mul(beta1).add_(grad, alpha=1 - beta1).sign_(), alpha=-lr)
                momentum.mul_(beta2).add_(grad, alpha=1 - beta2)
        return loss


class ShardedOptimizer(torch.optim.Optimizer):
    """What `wherry.initialize` returns. Its `param_groups` are the user's; `step()` updates the shards.

    `state` stays empty: moments are kept by flat, and reached through the engine.
    """

    def __init__(
        self,
        instance: torch.optim.Optimizer,
        update: Callable[[], bool],
        drop: Callable[[], None],
        states: Callable[[], ParameterStates],
    ) -> None:
        super().__init__([nn.Parameter(torch.empty(0))], dict(instance.defaults))
        # The very groups of the user's optimizer: a scheduler built on either moves both.
        self.param_groups = instance.param_groups
        self.instance = instance
        # Its parameters have no gradients of their own: a step of it would do nothing, in silence.
        self._guard = weakref.finalize(self, instance.register_step_pre_hook(_refuse_step).remove)
        self._guard.atexit = False
        self._update = update
        self._drop = drop
        self._states = states
        # True when the last step was skipped for non-finite gradients.
        self.overflow = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.overflow = not self._update()
        self.instance._opt_called = True  # type: ignore[attr-defined]
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of a complete window that no step has used; within a window they are kept."""
        self._drop()

    def _names(self, states: ParameterStates) -> list[str]:
        return [states.name_of(parameter) for group in self.param_groups for parameter in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, in torch's form; parameters of which it has all keep their shapes.

        It is for as many ranks, at the same stage: `engine.save_checkpoint` writes what any number of ranks loads.
        """
        states = self._states()
        count = itertools.count()
        groups = [{**group, "params": [next(count) for _ in group["params"]]} for group in self.param_groups]
        state = {number: part for number, part in enumerate(states.parts(self._names(states))) if part}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over hyper-parameters, and what `state_dict()` gave of the state; every rank calls it with its own.

        The groups stay the same objects, for the schedules that hold them.
        """
        given = state_dict.get("param_groups", ())
        if len(given) != len(self.param_groups):
            raise WherryError(f"optimizer: {len(given)} parameter groups were given, expected {len(self.param_groups)}")
        if "state" in state_dict:
            states = self._states()
            numbers = dict(enumerate(self._names(states)))
            strange = [number for number in state_dict["state"] if number not in numbers]
            if strange:
                raise WherryError(
                    f"optimizer.load_state_dict: it has state for parameter {strange[0]}, and the groups have "
                    f"{len(numbers)} parameters; give the state_dict() of an optimizer of the same parameters"
                )
            states.load_parts({name: state_dict["state"].get(number, {}) for number, name in numbers.items()})
        for group, values in zip(self.param_groups, given, strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})

    def close(self) -> None:
        """The engine has ended: the user's optimizer may be used by itself again."""
        self._guard()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "instance"):
            raise WherryError(
                "optimizer: a group cannot be added after wherry.initialize, as flats are laid out by group; "
                "give every parameter to the optimizer first"
            )
        ADD_GROUP(self, param_group)


def _refuse_step(optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> None:
    name = type(optimizer).__name__
    raise WherryError(
        f"{name}.step: this {name} was given to wherry.initialize, and the engine has the gradients and the state: by "
        "itself it would update nothing; call engine.step(), or step() of the optimizer that wherry.initialize returned"
    )
