"""A sequence shared out over ranks: each has a part of it, and in attention, which sees all of it, a part of the heads.

Heads and sequence change places by an all-to-all on each side of attention (as published for DeepSpeed-Ulysses).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wherry.errors import WherryError
from wherry.fake import faking
from wherry.parallel.comm import Comm
from wherry.sharding.watched_params import Hook

IGNORED = -100
HEADS, SEQUENCE = 1, 2
# Implementations of attention that need not know the ranks.
INNER = ("sdpa", "eager")
_PREFIX = "wherry_context_"


class _SharedForward:
    """One forward over this rank's part of a sequence."""

    def __init__(self, comm: Comm, length: int, mask: Tensor | None) -> None:
        self.comm, self.length, self.mask = comm, length, mask
        self.attended = False


_running: ContextVar[_SharedForward | None] = ContextVar("wherry_context", default=None)


@dataclass(frozen=True, eq=False)
class _WholeMask:
    """What attention over a whole sequence is masked with, which goes the way of a mask through the model."""

    share: _SharedForward
    mask: Any


class ContextParallel:
    """Shares the sequences of a model's forwards with labels out over `comm`; `handles` undo it.

    All ranks of it call the model with the same samples. The loss is that of whole sequences on each of them, and the
    mean of their gradients is its gradient. Without labels, as in generation, each rank runs all of a sequence.
    """

    def __init__(self, model: nn.Module, comm: Comm) -> None:
        found = _language_model(model)
        if isinstance(found, str):
            raise WherryError(f"context parallelism: {found}")
        self.comm = comm
        self._names = list(inspect.signature(found.forward).parameters)
        self._checked = faking()
        self.handles: list[Any] = [
            _OwnAttention(found, comm),
            found.register_forward_pre_hook(Hook(self._begin), with_kwargs=True),
            found.register_forward_hook(Hook(self._end), with_kwargs=True, always_call=True),
        ]

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        labels = given.get("labels")
        _running.set(None)
        if labels is None or given.get("past_key_values") is not None:
            return None
        self._check(labels)
        share, mine = self._part(given, labels)
        _running.set(share)
        return (), mine

    def _end(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        share = _running.get()
        _running.set(None)
        if share is None or output is None:
            return None
        if not share.attended:
            raise WherryError(
                f"context parallelism: {type(module).__name__} has run no attention by Transformers' interface, so "
                "ranks would have seen their own parts of the sequence alone; leave wherry.context_parallel at 1"
            )
        if isinstance(getattr(output, "loss", None), Tensor):
            output.loss = whole_loss(output.loss, self.comm)
        return output

    def _check(self, labels: Tensor) -> None:
        """Of the first batch, that all have the same."""
        if self._checked:
            return
        self._checked = True
        told = self.comm.gather_objects((tuple(labels.shape), labels.double().sum().item()))
        if len(set(told)) > 1:
            raise WherryError(
                f"context parallelism: the {self.comm.size} ranks that share a sequence were given different samples "
                f"(labels of {' and of '.join(str(shape) for shape, _ in told)}); give each of them the same batch, "
                "as a loader does whose sampler counts the ranks along dp alone"
            )

    def _part(self, given: dict[str, Any], labels: Tensor) -> tuple[_SharedForward, dict[str, Any]]:
        """This rank's part of what the model is called with."""
        ranks, shape = self.comm.size, labels.shape
        width = -(-shape[1] // ranks)
        start, short = width * self.comm.rank, width * ranks - shape[1]

        def part(value: Tensor, fill: int = 0) -> Tensor:
            if short:
                value = F.pad(value, (*(0, 0) * (value.dim() - 2), 0, short), value=fill)
            return value.narrow(1, start, width).contiguous()

        mine = {
            name: part(value) if isinstance(value, Tensor) and value.shape[:2] == shape else value
            for name, value in given.items()
            if name not in ("labels", "position_ids")
        }
        mask, positions = given.get("attention_mask"), given.get("position_ids")
        if mask is not None:  # the way to attention is another; of experts' losses a part may be all padding
            mine["attention_mask"] = labels.new_ones(shape[0], width)
        if positions is None:
            positions = torch.arange(shape[1], device=labels.device).expand(shape)
        elif positions.dim() != 2 or positions.shape[1] != shape[1]:
            raise WherryError(
                f"context parallelism: position_ids: expected one for each of {tuple(shape)} tokens, got "
                f"{tuple(positions.shape)}"
            )
        elif not faking() and bool((positions.diff(dim=-1) < (mask is None)).any()):
            raise WherryError(
                "context parallelism: position_ids begin anew within a row, as of several packed into one, whose "
                "borders attention over parts of it does not know; give unpacked rows (packing_strategy "
                '"wrapped" packs without borders)'
            )
        positions = positions.expand(shape)
        beyond = torch.arange(1, short + 1, device=labels.device)
        positions = torch.cat([positions, positions[:, -1:] + beyond], 1) if short else positions
        mine["position_ids"] = positions.narrow(1, start, width)
        following = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        mine["labels"] = part(labels, IGNORED)
        mine["shift_labels"] = part(following, IGNORED)
        if given.get("num_items_in_batch") is None:
            mine["num_items_in_batch"] = (following != IGNORED).sum() / ranks
        return _SharedForward(self.comm, width * ranks, _mask_of(mask, short)), mine


def _mask_of(mask: Any, short: int) -> Tensor | None:
    """The mask of whole rows. What is masked at their ends alone, no token before it sees anyway."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise WherryError(
            f"context parallelism: attention_mask: expected one number for each token, got {type(mask).__name__} of "
            f"{tuple(getattr(mask, 'shape', ()))}"
        )
    if faking() or bool((mask[:, 1:] <= mask[:, :-1]).all()):
        return None
    return F.pad(mask.bool(), (0, short))


def whole_loss(share: Tensor, comm: Comm) -> Tensor:
    """The mean of ranks' shares of a loss, on each of them; each has its own share's gradient."""
    return _Mean.apply(share, comm)


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, comm: Comm) -> Tensor:
        total = share.detach().clone()
        comm.all_reduce(total, label="loss").wait()
        return total / comm.size

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Exchange(torch.autograd.Function):
    """Along `cut` a rank gives each rank a part, and what comes of all is laid end to end along `joined`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, cut: int, joined: int) -> Tensor:
        ctx.way = comm, cut, joined
        sent = torch.stack(x.chunk(comm.size, cut))
        received = torch.empty_like(sent)
        comm.all_to_all(received, sent, label="attention").wait()
        return torch.cat(received.unbind(), joined)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        comm, cut, joined = ctx.way
        return _Exchange.apply(grad, comm, joined, cut), None, None, None


class _OwnAttention:
    """The implementation of attention that a model's configs name, for as long as this is there."""

    def __init__(self, model: nn.Module, comm: Comm) -> None:
        configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
        self._before = [(each, each._attn_implementation) for each in configs.values() if _has_attention(each)]
        for config, name in self._before:
            heads = getattr(config, "num_attention_heads", None)
            if isinstance(heads, int) and heads % comm.size:
                raise WherryError(
                    f"context parallelism: the {heads} heads of attention cannot be shared out over {comm.size} "
                    "ranks; give a divisor of their number"
                )
            if name not in INNER:
                raise WherryError(
                    f'context parallelism: attention is {name}; load the model with attn_implementation="sdpa" or '
                    '"eager"'
                )
        for config, name in self._before:
            config._attn_implementation = _registered(name)

    def remove(self) -> None:
        for config, name in self._before:
            config._attn_implementation = name


def _has_attention(config: Any) -> bool:
    return getattr(config, "_attn_implementation", None) is not None


def _registered(name: str) -> str:
    """The implementation called `name` over whole sequences, as Transformers knows it."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    called = _PREFIX + name
    if called not in ALL_ATTENTION_FUNCTIONS:
        mask_of = ALL_MASK_ATTENTION_FUNCTIONS[name]

        def mask(**asked: Any) -> Any:
            if (share := _running.get()) is None:
                return mask_of(**asked)
            whole = {"q_length": share.length, "kv_length": share.length, "attention_mask": share.mask}
            return _WholeMask(share, mask_of(**asked | whole))

        def attend(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor | None]:
            inner = ALL_ATTENTION_FUNCTIONS.get(name) or sys.modules[type(module).__module__].eager_attention_forward
            if isinstance(mask, _WholeMask):
                return _attend(inner, module, (query, key, value), mask, *args, **kwargs)
            if _running.get() is not None:
                raise WherryError(
                    f"context parallelism: {type(module).__name__} is not causal, or masks in a way of its own, and "
                    "would see a part of the sequence alone; leave wherry.context_parallel at 1"
                )
            return inner(module, query, key, value, mask, *args, **kwargs)

        AttentionInterface.register(called, attend)
        AttentionMaskInterface.register(called, mask)
    return called


def _attend(
    inner: Callable[..., Any], module: nn.Module, states: tuple[Tensor, Tensor, Tensor], whole: _WholeMask,
    *args: Any, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    comm = whole.share.comm
    whole.share.attended = True
    query, key, value = states
    of_module: Any = module
    if (repeats := query.shape[HEADS] // key.shape[HEADS]) > 1 and key.shape[HEADS] % comm.size:
        key, value = (state.repeat_interleave(repeats, HEADS) for state in (key, value))
        of_module = _WithAllHeads(module)
    query, key, value = (_Exchange.apply(state, comm, HEADS, SEQUENCE) for state in (query, key, value))
    output, _ = inner(of_module, query, key, value, whole.mask, *args, **kwargs)
    return _Exchange.apply(output, comm, 1, 2), None  # heads come after the sequence there


class _WithAllHeads:
    """A module of attention whose keys have as many heads as its queries."""

    num_key_value_groups = 1

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _language_model(model: nn.Module) -> nn.Module | str:
    """The causal language model within; or why there is none whose sequence can be shared out."""
    base = getattr(sys.modules.get("transformers"), "PreTrainedModel", ())
    wanted = {"input_ids", "labels", "position_ids"}
    causal_lm = next((each for each in model.modules() if isinstance(each, base) and wanted <= _taken(each)), None)
    if causal_lm is None or causal_lm.config.is_encoder_decoder:
        return (
            "expected a causal language model of Transformers, whose forward takes input_ids, labels and "
            f"position_ids, got {type(causal_lm or model).__name__}"
        )
    text = causal_lm.config.get_text_config()
    strange = {kind for kind in getattr(text, "layer_types", None) or () if "attention" not in kind or "linear" in kind}
    if strange or any(isinstance(module, nn.Conv1d) for module in causal_lm.modules()):
        return (
            f"{type(causal_lm).__name__} has layers ({', '.join(strange) or 'convolutions'}) that go along the sequence"
        )
    if "loss_function" not in inspect.unwrap(type(causal_lm).forward).__code__.co_names:
        return f"{type(causal_lm).__name__} computes its loss in a way of its own, from labels in a row"
    if not any(
        hasattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS") for module in causal_lm.modules()
    ):
        return f"{type(causal_lm).__name__} computes attention in a way of its own, not by Transformers' interface"
    if by_length := _knows_its_place(causal_lm, text):
        return f"{type(causal_lm).__name__} has {by_length}, which parts of a sequence cannot have"
    return causal_lm


def _knows_its_place(model: nn.Module, config: Any) -> str | None:
    """What in a model asks how long a sequence is, or where in it a token is, otherwise than by position_ids."""
    kinds: set[Any] = set()
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        kinds |= set(kind.values()) if isinstance(kind, dict) else {kind}
        if isinstance(getattr(module, "sinks", None), nn.Parameter):
            return "sinks of each head in its attention"
    if found := kinds & {"longrope", "dynamic"}:
        return f"{found.pop()} position embeddings"
    return "attn_temperature_tuning" if getattr(config, "attn_temperature_tuning", False) else None


def _taken(module: nn.Module) -> set[str]:
    return set(inspect.signature(module.forward).parameters)
