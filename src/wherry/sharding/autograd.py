"""The backward that runs, what there is to ask of autograd, and the tensors that modules are called with and return."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from wherry.sharding.unit import Unit

NO_TASK = -1
backward_task = torch._C._current_graph_task_id  # NO_TASK outside a backward


class Backward:
    """The backward that runs, if one does, or the last that ran: what the engine and every hook ask and tell of it.

    There is one for a model. Only `begin` and `end` move it between running and not.
    """

    def __init__(self) -> None:
        self.running = False
        # autograd's number of it; NO_TASK until the first hook inside it.
        self.task = NO_TASK
        # Whether it is the last one of its accumulation window, and of how many micro-batches it is.
        self.boundary = False
        self.micro_batches = 1
        # Whether its loss carries the loss scale. Known before it begins.
        self.scaled = False
        # Whether it makes gradients of weights, and not of inputs only; None as long as nobody has asked.
        self.reduces: bool | None = None
        # Units that it has reached, and those of them whose gradients it has not brought all.
        self.reached: set[Unit] = set()
        self.open: list[Unit] = []

    def notice_scaled(self, grad: torch.Tensor) -> None:
        """A hook on a loss that carries the scale, which a backward of it calls first."""
        self.scaled = True

    def begin(self, *, boundary: bool, micro_batches: int) -> None:
        """It is about to run, or has just begun to."""
        self.running = True
        self.task = backward_task()
        self.boundary = boundary
        self.micro_batches = micro_batches
        self.reduces = None
        self.reached.clear()
        self.open = []

    def is_task(self, task: int) -> bool:
        """Whether `task`, which a hook has found running, is it, and no backward within it. The first to ask is."""
        if self.task == NO_TASK:
            self.task = task
        return task == self.task

    def reach(self, unit: Unit) -> bool:
        """Operations of the unit are next. True the first time."""
        if unit in self.reached:
            return False
        self.reached.add(unit)
        return True

    def await_gradients(self, unit: Unit) -> None:
        """Gradients of the unit are to come next."""
        self.open.append(unit)

    def take_open(self) -> list[Unit]:
        """The units that are open; those that stay so are awaited again."""
        units, self.open = self.open, []
        return units

    def conclude(self, reduces: bool | None) -> None:
        """It is known whether it makes gradients of weights; None where it has failed before that.

        Of one that has failed no sum is complete, whatever still arrives.
        """
        self.reduces = reduces
        self.boundary = self.boundary and reduces is not None

    def end(self) -> None:
        """Nothing of it is left to run."""
        self.running = False
        self.task = NO_TASK
        self.scaled = False

    def turn_out_last(self) -> None:
        """It was the last one of its window, which was not known when it ran."""
        self.boundary = True


def accumulates(parameter: nn.Parameter) -> bool:
    """Whether the backward that runs makes this parameter's gradient."""
    # A released parameter raises in a graph.
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        node = parameter.view_as(parameter).grad_fn
    accumulate = node.next_functions[0][0] if node is not None else None
    if accumulate is None:
        return False
    try:
        return torch._C._will_engine_execute_node(accumulate)
    except RuntimeError:  # torch's, in a torch.autograd.grad for this very parameter: it accumulates nothing
        return False


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a module's inputs or outputs: nested lists, tuples, mappings and dataclasses are looked into."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name))


def with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with all tensors in it changed: dicts, lists and tuples are made anew, anything else is left as it is."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: with_tensors(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [with_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
