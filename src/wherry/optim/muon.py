"""Muon for the matrices inside a model and AdamW for the rest, as one torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from wherry.errors import WherryError
from wherry.optim.groups import ADD_GROUP, check_options

Group = dict[str, Any]


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon and torch.optim.AdamW in one optimizer: `use_muon` of a group says which of them updates it.

    A group has the options and the state of the one that updates it, by torch's names. `params` are parameters,
    (name, parameter) pairs, or groups. Where a group does not say `use_muon` it is cut in two by the attribute
    `use_muon` of its parameters, and those without one go to Muon if they have two dims. That takes embeddings and the
    output head for matrices, which AdamW updates better: `Muon.for_model` knows them.

    `adamw_lr` and `adamw_weight_decay` are `lr` and `weight_decay` where they are left out.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        adamw_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float | None = None,
    ) -> None:
        both = {"lr": lr, "weight_decay": weight_decay}
        others = {
            "adamw_lr": lr if adamw_lr is None else adamw_lr,
            "betas": betas,
            "adamw_eps": adamw_eps,
            "adamw_weight_decay": weight_decay if adamw_weight_decay is None else adamw_weight_decay,
        }
        muon = {
            **both,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        check_options("Muon", {**muon, **others})
        adamw = {name.removeprefix("adamw_"): value for name, value in others.items()}
        self._options: dict[bool, Group] = {True: muon, False: {**_ADAMW, **adamw}}
        super().__init__(params, {"lr": lr})

    @classmethod
    def for_model(cls, model: nn.Module, parameters: Iterable[Any] | None = None, **options: Any) -> Self:
        """For a model's parameters, or those given, with Muon for its `hidden_matrices`.

        Groups keep their own options; those that do not say `use_muon` are cut in two.
        """
        trained = (p for p in model.parameters() if p.requires_grad)
        given: list[Any] = list(trained if parameters is None else parameters)
        hidden = set(hidden_matrices(model))
        groups = given if given and isinstance(given[0], dict) else [{"params": given}] if given else []
        return cls([half for group in groups for half in _halves(group, hidden.__contains__)], **options)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, or two where it does not say `use_muon`."""
        for half in _halves(param_group, _is_matrix):
            self._add(half, f"Muon: group {len(self.param_groups)}")

    def _add(self, group: Group, where: str) -> None:
        known, others = self._options[group["use_muon"]], self._options[not group["use_muon"]]
        strange = [name for name in group if name in others and name not in known]
        if strange:
            whose = "AdamW" if group["use_muon"] else "Muon"
            raise WherryError(
                f"{where}: use_muon={group['use_muon']}, and {strange[0]} is an option of {whose}'s groups; remove it, "
                f"or set use_muon={not group['use_muon']}"
            )
        check_options(where, group)
        for name, value in group.items():
            if name.startswith("adamw_"):
                raise WherryError(f"{where}: {name} is for all groups; in a group it is {name.removeprefix('adamw_')}")
            if name in _FIXED and value != _FIXED[name]:
                raise WherryError(f"{where}: {name}={value!r} is not offered beside Muon; leave it out")
        if group["use_muon"]:
            for shape in map(whole_shape, map(_parameter, group["params"])):
                if len(shape) != 2:
                    raise WherryError(
                        f"{where}: Muon updates matrices, got a parameter of shape {tuple(shape)}; give it "
                        "to AdamW, in a group with use_muon=False or by `parameter.use_muon = False`"
                    )
        ADD_GROUP(self, {**known, **group})

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_options": self._options}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. A `closure` evaluates the loss again first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for use_muon, cls in ((True, torch.optim.Muon), (False, torch.optim.AdamW)):
            groups = [group for group in self.param_groups if bool(group["use_muon"]) is use_muon]
            # One with these very groups and this very state, made as it is when it is unpickled.
            inner = cls.__new__(cls)
            inner.__setstate__({"defaults": {}, "state": self.state, "param_groups": groups})
            inner.step()
        return loss


# Of AdamW's options those that are no arguments here, as torch has them.
_ADAMW = {
    **dict.fromkeys(("amsgrad", "maximize", "capturable", "differentiable"), False),
    **dict.fromkeys(("foreach", "fused")),
    "decoupled_weight_decay": True,
}
# And those that stay as they are, by whatever kernel AdamW is made.
_FIXED = {
    **dict.fromkeys(("amsgrad", "capturable", "differentiable"), False),
    **dict.fromkeys(("decoupled_weight_decay", "bias_correction"), True),
}


def _parameter(item: Any) -> Tensor:
    """Of a parameter or a (name, parameter) pair."""
    return item[1] if isinstance(item, tuple) else item


def whole_shape(parameter: Tensor) -> torch.Size:
    """Also where DeepSpeed's zero.Init shows it as one without elements."""
    return getattr(parameter, "ds_shape", parameter.shape)


def _is_matrix(parameter: Tensor) -> bool:
    marked = getattr(parameter, "use_muon", None)
    return len(whole_shape(parameter)) == 2 if marked is None else bool(marked)


def _halves(group: Group, by_muon: Callable[[Tensor], bool]) -> Iterator[Group]:
    """A group, or the part of it that Muon updates and the other, each with what of its options is for it."""
    params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    if "use_muon" in group:
        yield {**group, "params": params, "use_muon": bool(group["use_muon"])}
        return
    names = group.get("param_names")
    if names is not None:  # torch has taken pairs apart
        params = list(zip(names, params, strict=True))
    for use_muon in (True, False):
        part = [item for item in params if by_muon(_parameter(item)) is use_muon]
        foreign = _OF_ADAMW_ALONE if use_muon else _OF_MUON_ALONE
        if part:
            options = {name: value for name, value in group.items() if name not in (*foreign, "param_names")}
            yield {**options, "params": part, "use_muon": use_muon}


_OF_MUON_ALONE = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")
_OF_ADAMW_ALONE = ("betas", *_ADAMW)


# --- which weights are Muon's ---


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The matrices inside a model: those that Muon is for.

    Weights of two dims, but for those of embeddings (and what is tied to one) and of the output head: the one that the
    model names by `get_output_embeddings()`, as those of Transformers do, or else the last nn.Linear outside the
    repeated blocks, and such as have an output for each row of an embedding. `use_muon` on a parameter overrules it.
    """
    modules = list(model.modules())
    embeddings = [module for module in modules if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    left_out = {module.weight for module in embeddings} | set(_heads(modules, embeddings))
    return [p for p in model.parameters() if (_is_matrix(p) and p not in left_out) or getattr(p, "use_muon", False)]


def _heads(modules: list[Any], embeddings: list[Any]) -> Iterator[Tensor]:
    asked = [module.get_output_embeddings() for module in modules if hasattr(module, "get_output_embeddings")]
    named: list[Any] = [head.weight for head in asked if isinstance(head, nn.Module)]
    if named:
        yield from named
        return
    inside = {module for block in _blocks(modules) for module in block.modules()}
    outside = [module for module in modules if isinstance(module, nn.Linear) and module not in inside]
    sizes = {embedding.num_embeddings for embedding in embeddings}
    yield from (linear.weight for linear in outside if linear is outside[-1] or linear.out_features in sizes)


def _blocks(modules: list[nn.Module]) -> Iterator[nn.Module]:
    """Modules with others in them, in a list or several of a kind in a sequence. A lone layer is none."""
    for container in modules:
        children = [child for child in container.children() if next(child.children(), None) is not None]
        if isinstance(container, nn.Sequential):
            kinds = [type(child) for child in children]
            yield from (child for child in children if kinds.count(type(child)) > 1)
        elif isinstance(container, nn.ModuleList | nn.ModuleDict):
            yield from children
