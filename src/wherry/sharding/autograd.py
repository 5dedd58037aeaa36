"""What there is to ask of autograd while it runs, and the tensors in what modules are called with and return."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

NO_TASK = -1
backward_task = torch._C._current_graph_task_id  # NO_TASK outside a backward


def accumulates(parameter: nn.Parameter) -> bool:
    """Whether the backward that runs makes this parameter's gradient."""
    with torch.enable_grad():
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
