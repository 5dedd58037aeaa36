"""Recomputation in backward, on torch's non-reentrant checkpoint, and what must be so while it runs."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts, noop_context_fn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from wherry.errors import WherryError

if TYPE_CHECKING:
    from wherry.activations.manager import Activations

T = TypeVar("T")

# The engine whose forward runs, so that `checkpoint` in the model's code finds it. A context variable follows threads
# and greenlets alike.
running: ContextVar[Activations | None] = ContextVar("wherry_activations", default=None)
# True inside a checkpoint, and while one is recomputed: checkpoints in there would only be computed once more.
inside: ContextVar[bool] = ContextVar("wherry_inside_checkpoint", default=False)

# Names of operations that people know, and what they come to beneath autograd.
FAMILIES = {
    "matmul": ("mm", "addmm", "bmm", "baddbmm"),
    "attention": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    ),
}

ContextPair = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def checkpoint(fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call `fn`, and let the backward compute again what it would have saved, from its arguments alone.

    Inside an engine's forward the arguments are kept as `activation_checkpointing` says: shared out among
    tensor-parallel ranks, on the host, on disk. Random numbers are the same again. A checkpoint inside another one is
    an ordinary call.

        for block in self.blocks:
            x = wherry.checkpoint(block, x)
    """
    if inside.get() or not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    activations = running.get()
    if activations is not None:
        return activations.checkpointed(getattr(fn, "__qualname__", type(fn).__name__), fn, args, kwargs)
    return recomputed(fn, args, kwargs)


def recomputed(
    fn: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    contexts: Callable[[], ContextPair] = noop_context_fn,
    saving: AbstractContextManager[Any] | None = None,
) -> T:
    """`fn` under torch's checkpoint. `saving` is entered where it saves the arguments, `contexts` around `fn`."""
    # torch saves what is given by position. Tensors in containers, and those by keyword, are to be saved as well.
    leaves, spec = tree_flatten((args, kwargs))

    def call(*given: Any) -> T:
        there, named = tree_unflatten(list(given), spec)
        token = inside.set(True)
        try:
            return fn(*there, **named)
        finally:
            inside.reset(token)

    with saving or nullcontext():
        return torch_checkpoint(call, *leaves, use_reentrant=False, context_fn=contexts)


class Anew:
    """A context that may be entered again and again: a graph that is retained is recomputed in each backward."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


def operations(names: Sequence[str]) -> frozenset[Any]:
    """The operations that a config names: `matmul`, `attention`, or as torch calls them, like `aten.mm`."""
    found: set[Any] = set()
    for name in names:
        members = FAMILIES.get(name)
        if members is not None:
            # Which of them there are depends on torch's release.
            found |= {getattr(torch.ops.aten, member) for member in members if hasattr(torch.ops.aten, member)}
            continue
        namespace, _, rest = name.partition(".")
        packet, _, overload = (rest or namespace).partition(".")
        library = getattr(torch.ops, namespace) if rest else torch.ops.aten
        operation = getattr(library, packet, None)
        if operation is not None and overload:
            operation = getattr(operation, overload, None)
        if operation is None:
            near = difflib.get_close_matches(name, [*FAMILIES, *dir(torch.ops.aten)], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise WherryError(
                f"activation_checkpointing.save_operations: torch has no operation {name!r}{hint}; give "
                f"{', '.join(FAMILIES)}, or a name like aten.mm"
            )
        found.add(operation)
    return frozenset(found)


def selective(saved: frozenset[Any]) -> ContextPair:
    """Contexts of a checkpoint in which the results of these operations are kept."""
    if not saved:
        return nullcontext(), nullcontext()

    def decide(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        known = operation in saved or getattr(operation, "overloadpacket", None) in saved
        return CheckpointPolicy.MUST_SAVE if known else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)
