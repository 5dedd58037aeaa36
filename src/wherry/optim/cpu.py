"""The host optimizers for direct use: torch optimizers for parameters on the CPU, run by the native kernels.

    optimizer = wherry.optim.CPUAdam(model.parameters(), lr=1e-4, weight_decay=0.1)

State has torch's names (`step`, `exp_avg`, `exp_avg_sq`, `sum`), so state dicts of fp32 parameters go to and from
torch.optim. A bf16 parameter also keeps `low`, the 16 low bits of its fp32 master, and a fp16 one keeps `master`.
Parameters may be contiguous, transposed, or of torch.channels_last; state lies in memory as they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from wherry import native
from wherry.errors import WherryError
from wherry.native.formulas import Formula

__all__ = ["CPUAdagrad", "CPUAdam", "CPULion"]

Group = dict[str, Any]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What is kept of a parameter's fp32 master beside it, by its dtype.
_MASTERS = {torch.bfloat16: "low", torch.float16: "master"}


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a piece of memory, in whatever order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _flat(tensor: Tensor) -> Tensor:
    """A dense tensor's elements as they lie in memory."""
    plain = tensor.detach()
    return plain.view(-1) if plain.is_contiguous() else plain.as_strided((plain.numel(),), (1,))


def _room_beside(p: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for a value for each element of a parameter, in its order."""
    return torch.empty_strided(p.shape, p.stride(), dtype=dtype)


class _CPUOptimizer(torch.optim.Optimizer):
    """What the three share: one plan over all parameters that have gradients, rebuilt only when memory moved."""

    native_rule: ClassVar[type[Formula]] = Formula
    # The state tensors that the rule updates, in its order.
    moments: ClassVar[tuple[str, ...]] = ()
    counts_steps: ClassVar[bool] = True
    # Whether moments are of the type of the weights, and not in fp32.
    moments_as_weights = False

    def __init__(self, params: Iterable[Any], pool: native.Pool | None, **defaults: Any) -> None:
        name = type(self).__name__
        for key, value in defaults.items():
            if key == "betas":
                if len(value) != 2 or not all(0 <= beta < 1 for beta in value):
                    raise WherryError(f"{name}: betas={value!r}, expected two numbers from 0 to below 1")
            elif not value >= 0:
                raise WherryError(f"{name}: {key}={value!r}, expected 0 or more")
        self._pool = pool
        self._plan: native.PackedSegments | None = None
        self._places: list[Any] = []
        # fp16 parameters only: the version and address each was left at, to see that someone else wrote to it.
        self._left: dict[Tensor, tuple[int, int]] = {}
        super().__init__(params, defaults)

    def rule(self, group: Group, step: int) -> Formula:
        return self.native_rule.of(group, step)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_pool", None)
        self._plan, self._places, self._left = None, [], {}

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_pool": None}

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        try:
            for p in self.param_groups[-1]["params"]:
                self._check(p)
        except WherryError:
            self.param_groups.pop()
            raise

    def _check(self, p: Tensor) -> None:
        plain = not is_traceable_wrapper_subclass(p)
        if plain and p.device.type == "cpu" and p.dtype in _DTYPES and _is_dense(p):
            return
        kind = "" if plain else f"{type(p).__name__} of "
        raise WherryError(
            f"{self._where(p)}: expected a plain CPU tensor of fp32, bf16 or fp16 whose elements fill its memory, got "
            f"{kind}{p.dtype} of shape {tuple(p.shape)}, strides {tuple(p.stride())}, on {p.device}; make it so "
            "(`p.data = p.data.contiguous()`) or give it to a torch.optim optimizer"
        )

    def _where(self, wanted: Tensor) -> str:
        places = ((g, i, p) for g, group in enumerate(self.param_groups) for i, p in enumerate(group["params"]))
        group, i = next((g, i) for g, i, p in places if p is wanted)
        return f"{type(self).__name__}: group {group}, parameter {i}"

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but that nothing is rounded, and what the dictionary's groups do not name stays as it is.

        Like there, tensors of the dictionary that fit are taken and not copied.
        """
        given: list[dict[str, Any]] = []
        groups = self.param_groups

        def before(_: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
            self._check_saved(saved)
            given.append(saved)

        def after(_: torch.optim.Optimizer) -> None:
            for group, had in zip(self.param_groups, groups, strict=True):
                for name, value in had.items():
                    group.setdefault(name, value)
            self._restore(given[0])

        # Behind all hooks that may change the dictionary, and ahead of all that look at what was loaded.
        handles = [
            self.register_load_state_dict_pre_hook(before),
            self.register_load_state_dict_post_hook(after, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _check_saved(self, saved: dict[str, Any]) -> None:
        needed = {*self.moments, "step"} if self.counts_steps else set(self.moments)
        for i in (i for group in saved["param_groups"] for i in group["params"]):
            state = saved["state"].get(i)
            if state and not needed <= state.keys():
                raise WherryError(
                    f"{type(self).__name__}.load_state_dict: of parameter {i} there is {', '.join(map(str, state))}, "
                    f"expected {', '.join(sorted(needed))}; load it into the optimizer that it was saved from"
                )

    def _restore(self, saved: dict[str, Any]) -> None:
        """Take again, in its own precision, what torch has cast to the parameters' dtype."""
        numbers = (i for group in saved["param_groups"] for i in group["params"])
        ours = (p for group in self.param_groups for p in group["params"])
        for i, p in zip(numbers, ours, strict=True):
            if not (found := saved["state"].get(i)):
                continue
            state, names = self.state[p], self._names(p)
            for name in ("low", "master"):  # the weights may have been of another dtype
                if name not in names:
                    state.pop(name, None)
            for name in names:
                if name in found:
                    dtype = {"low": torch.int16, "master": torch.float32}.get(name) or self._moment_dtype(p)
                    state[name] = found[name].detach().to(p.device, dtype)

    def _names(self, p: Tensor) -> tuple[str, ...]:
        """The tensors of a parameter's state."""
        master = _MASTERS.get(p.dtype)
        return self.moments if master is None else (*self.moments, master)

    def _moment_dtype(self, p: Tensor) -> torch.dtype:
        if self.moments_as_weights and p.dtype is torch.float16:
            raise WherryError(
                f"{self._where(p)}: fp32_optimizer_states=False would keep moments in fp16, which is not offered; make "
                "the weights bf16, or leave it out"
            )
        return p.dtype if self.moments_as_weights else torch.float32

    def _begin_state(self, p: Tensor, group: Group) -> dict[str, Any]:
        state = self.state[p]
        if self.counts_steps and not isinstance(state.get("step"), Tensor):
            state["step"] = torch.tensor(float(state.get("step", 0)))  # saved as a number by older versions of torch
        for name in self.moments:
            if name not in state:
                state[name] = _room_beside(p, self._moment_dtype(p)).fill_(self._first_value(group))
        if p.dtype is torch.bfloat16 and "low" not in state:
            state["low"] = _room_beside(p, torch.int16).zero_()
        if p.dtype is torch.float16 and "master" not in state:
            state["master"] = _room_beside(p, torch.float32).copy_(p)
        return state

    def _lay_state(self, p: Tensor) -> None:
        """State as the parameter lies: one loaded from elsewhere, or a parameter moved since, may lie otherwise."""
        state = self.state[p]
        for name in self._names(p):
            value = state[name]
            if value.shape != p.shape:
                raise WherryError(
                    f"{self._where(p)}: its state {name!r} is of shape {tuple(value.shape)}, expected "
                    f"{tuple(p.shape)}; load or make the state of this parameter"
                )
            if value.stride() != p.stride():
                state[name] = _room_beside(p, value.dtype).copy_(value)

    def _first_value(self, group: Group) -> float:
        return 0.0

    def _gradient(self, p: Tensor) -> Tensor:
        grad = p.grad
        assert grad is not None
        if grad.layout is not torch.strided or grad.dtype not in _DTYPES:
            raise WherryError(
                f"{self._where(p)}, of shape {tuple(p.shape)}, has a gradient of {grad.layout}, {grad.dtype}; expected "
                "a dense one of fp32, bf16 or fp16 (Embedding: sparse=False)"
            )
        if grad.stride() == p.stride() or (grad.is_contiguous() and p.is_contiguous()):
            return _flat(grad)
        return _flat(_room_beside(p, grad.dtype).copy_(grad))

    def _refresh_master(self, p: Tensor, master: Tensor) -> None:
        if self._left.get(p) != (p._version, p.data_ptr()):
            # Weights were loaded from outside: they win, the master only adds bits to those that did not change.
            torch.where(master.to(p.dtype) == p, master, p.float(), out=master)

    def _make_plan(self, params: list[Tensor]) -> native.PackedSegments:
        segments = []
        for p in params:
            held = {name: _flat(self.state[p][name]) for name in self._names(p)}
            segments.append(
                native.Segment(
                    grad=None,
                    working=_flat(p),
                    master=held.get("master"),
                    low=held.get("low"),
                    state=tuple(held[name] for name in self.moments),
                    name=f"parameter of shape {tuple(p.shape)}",
                )
            )
        return native.PackedSegments(segments)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient. A `closure` evaluates the loss again first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params: list[Tensor] = []
        states: list[dict[str, Any]] = []
        grads: list[Tensor] = []
        rules: list[Formula] = []
        for group in self.param_groups:
            known: dict[int, Formula] = {}
            for p in group["params"]:
                if p.grad is None or p.numel() == 0:
                    continue
                grads.append(self._gradient(p))
                params.append(p)
                state = self._begin_state(p, group)
                states.append(state)
                step = int(state["step"]) + 1 if self.counts_steps else 1
                if step not in known:
                    known[step] = self.rule(group, step)
                rules.append(known[step])
        if params:
            self._update(params, states, grads, rules)
        return loss

    def _update(
        self, params: list[Tensor], states: list[dict[str, Any]], grads: list[Tensor], rules: list[Formula]
    ) -> None:
        # What cannot be updated is told before anything has changed.
        plan = self._plan_of(params, states)
        for p, state in zip(params, states, strict=True):
            if p.dtype is torch.float16:
                self._refresh_master(p, state["master"])
        plan.run(rules, pool=self._pool, grads=grads)
        if self.counts_steps:
            torch._foreach_add_([state["step"] for state in states], 1)
        # The kernels write behind autograd's back; this lets it notice saved tensors that have changed.
        torch.autograd.graph.increment_version(params)
        self._left = {p: (p._version, p.data_ptr()) for p in params if p.dtype is torch.float16}

    def _plan_of(self, params: list[Tensor], states: list[dict[str, Any]]) -> native.PackedSegments:
        if self._plan is None or self._places != self._places_of(params, states):
            for p in params:
                self._check(p)
                self._lay_state(p)
            self._plan, self._places = self._make_plan(params), self._places_of(params, states)
        return self._plan

    def _places_of(self, params: list[Tensor], states: list[dict[str, Any]]) -> list[Any]:
        """Where the parameters and their states lie: users move the ones and replace the others."""
        found: list[Any] = []
        for p, state in zip(params, states, strict=True):
            found += p.data_ptr(), p.shape, p.stride()
            found += [state[name].data_ptr() for name in self._names(p)]
        return found


class CPUAdam(_CPUOptimizer):
    """AdamW, or with `adamw_mode=False` Adam with L2 weight decay."""

    native_rule = native.Adam
    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        *,
        bias_correction: bool = True,
        maximize: bool = False,
        pool: native.Pool | None = None,
    ) -> None:
        super().__init__(
            params,
            pool,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=adamw_mode,
            bias_correction=bias_correction,
            maximize=maximize,
        )

    def rule(self, group: Group, step: int) -> Formula:
        if group.get("amsgrad"):
            raise WherryError("CPUAdam: a group has amsgrad=True, which is not offered; use torch.optim.AdamW")
        return super().rule(group, step)


class CPUAdagrad(_CPUOptimizer):
    """Adagrad, as torch.optim.Adagrad."""

    native_rule = native.Adagrad
    moments = ("sum",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        pool: native.Pool | None = None,
    ) -> None:
        super().__init__(
            params,
            pool,
            lr=lr,
            lr_decay=lr_decay,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
            maximize=maximize,
        )

    def _first_value(self, group: Group) -> float:
        return group["initial_accumulator_value"]


class CPULion(_CPUOptimizer):
    """Lion, with decoupled weight decay."""

    native_rule = native.Lion
    moments = ("exp_avg",)
    counts_steps = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        pool: native.Pool | None = None,
    ) -> None:
        super().__init__(params, pool, lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize)
