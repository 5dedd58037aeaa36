"""Parameters that are partitioned one by one, before there are units: each rank holds 1/N of each."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from wherry.parallel.comm import Comm
from wherry.parallel.partition import local
from wherry.sharding.fingerprint import alike, claims, fingerprint
from wherry.tiers.disk_errors import DiskError, hint, human
from wherry.tiers.disk_folder import make_folder

PART = "_wherry_part"
# On the memory of a placeholder: whose it is, as long as that lives.
OWNER = "_wherry_placeholder_of"

# Bytes of a parameter that travel at a time on the host. Among more than a few ranks gloo gathers through a copy, in
# threads whose heaps keep what they have freed: of a large embedding that would be another one.
PIECE = 1 << 20
# Bytes of a parameter that travels with others, when several are released at once.
SMALL = 1 << 13


def allocate(numel: int, dtype: torch.dtype, device: torch.device, folder: str | None) -> torch.Tensor:
    """Memory for a shard, of undefined contents: on `device`, or in a file of `folder` that is gone with the tensor."""
    if folder is None:
        return torch.empty(numel, dtype=dtype, device=device)
    make_folder(folder)
    handle, path = tempfile.mkstemp(prefix="wherry-init-", dir=folder)
    nbytes = max(1, numel * dtype.itemsize)
    try:
        # Allocated now: whoever writes to a hole of a mapped file, and the disk is full, is killed without a word.
        os.posix_fallocate(handle, 0, nbytes)
        return torch.from_file(path, shared=True, size=numel, dtype=dtype)
    except OSError as error:
        message = f"Init: there is no room for {human(nbytes)} under {folder}: {error.strerror}; {hint(error.errno)}"
        raise DiskError(message, error.errno, folder, 0, nbytes, "Init") from error
    finally:
        os.close(handle)
        os.unlink(path)


class Lease:
    """What parts hold together."""


class Part:
    """This rank's part of one parameter. The parameter itself is whole, or a placeholder that reads as NaN."""

    def __init__(
        self,
        parameter: nn.Parameter,
        comm: Comm,
        device: torch.device,
        rests_on: torch.device,
        folder: str | None,
        lease: Lease,
    ) -> None:
        self.lease = lease
        self.folder = folder
        self.parameter = parameter
        self.comm = comm
        self.device = device
        self.whole_on = parameter.device
        self.whole = True
        parameter.__dict__["__deepcopy__"] = partial(_copied, parameter)
        self.shape = parameter.shape
        self.dtype = parameter.dtype
        self.rests_on = rests_on
        # There is one as soon as the parameter has been released.
        self.shard = torch.empty(0, dtype=parameter.dtype, device=rests_on)
        self._blank: torch.Tensor | None = None
        # The memory of that, which knows this part.
        self._marked: torch.UntypedStorage | None = None

    def like(self, parameter: nn.Parameter) -> Part:
        """A part of another parameter, held as this one is."""
        part = Part(parameter, self.comm, self.device, self.rests_on, self.folder, self.lease)
        parameter.__dict__[PART] = part
        return part

    def _shard_numel(self, numel: int) -> int:
        return -(-numel // self.comm.size)

    @torch.no_grad()
    def release(self, source: int = 0, *, agreed: bool = False) -> int:
        """Keep this rank's part of `source`'s values, and let go of the rest. Returns the bytes of memory let go of.

        `agreed`: the parameter has these values already.
        """
        if not self.whole:
            return 0
        alone = self.comm.size == 1 and self.folder is None and not self.aliased()
        with torch._C.DisableTorchFunction():
            value = self.parameter.data
            self.shape, self.dtype = value.shape, value.dtype
            self.whole_on = value.device
            flat = (value if agreed else value.to(self.device)).contiguous().view(-1)
            if not agreed:
                self.comm.broadcast(flat, source).wait()
            own = flat.data_ptr() == value.data_ptr() and value.untyped_storage().nbytes() == value.nbytes
            # A rank by itself keeps all of it, where it is.
            kept = alone and own and value.device == self.rests_on
            freed = self.shard.nbytes if kept else value.nbytes
            if kept:
                self.shard = flat
            else:
                self._take_part(flat)
        self._show_placeholder()
        return freed

    def _take_part(self, flat: torch.Tensor) -> None:
        numel = self._shard_numel(flat.numel())
        if (self.shard.numel(), self.shard.dtype) != (numel, flat.dtype):
            self.shard = allocate(numel, flat.dtype, self.rests_on, self.folder)
        start = self.comm.rank * numel
        mine = flat[start : start + numel]
        self.shard[: mine.numel()].copy_(mine)
        self.shard[mine.numel() :].zero_()

    def _show_placeholder(self) -> None:
        with torch._C.DisableTorchFunction():
            blank = self._blank
            if blank is None or (blank.dtype, blank.device) != (self.dtype, self.whole_on):
                self._blank = blank = torch.full((), float("nan"), dtype=self.dtype, device=self.whole_on)
                self._marked = blank.untyped_storage()
                setattr(self._marked, OWNER, weakref.ref(self))
            self.parameter.data = blank.expand(self.shape)
        self.whole = False

    def shown_by(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter's memory is that of the placeholder."""
        return self._marked is not None and self._marked is parameter.untyped_storage()

    @torch.no_grad()
    def copy_to(self, parameter: torch.Tensor) -> None:
        """A parameter that was made of the placeholder gets the values, and a part of its own if this is released."""
        with torch._C.DisableTorchFunction():
            if self.whole:
                parameter.data = self.parameter.data.clone()
                return
            assert isinstance(parameter, nn.Parameter)
            part = self.like(parameter)
            part.shard = allocate(self.shard.numel(), self.dtype, self.rests_on, self.folder).copy_(self.shard)
            part._show_placeholder()

    @torch.no_grad()
    def agree(self, source: int) -> None:
        """A parameter that stays whole gets `source`'s values on every rank."""
        with torch._C.DisableTorchFunction():
            flat = self.parameter.data.to(self.device).contiguous()
            self.comm.broadcast(flat, source).wait()
            self.parameter.data.copy_(flat)

    @torch.no_grad()
    def value(self) -> torch.Tensor:
        """The whole parameter, in memory of its own. Every rank must call it."""
        with torch._C.DisableTorchFunction():
            ranks, numel = self.comm.size, self.shard.numel()
            whole = torch.empty(numel * ranks, dtype=self.dtype, device=self.device)
            size = numel
            if self.device.type == "cpu":
                size = min(numel, max(1, PIECE // (ranks * self.dtype.itemsize)))
            room = whole if size == numel else whole.new_empty(ranks * size)
            for begin in range(0, numel, size or 1):
                piece = self.shard[begin : begin + size].to(self.device)
                gathered = room[: ranks * piece.numel()]
                self.comm.all_gather(gathered, piece).wait()
                if room is not whole:
                    whole.view(ranks, numel)[:, begin : begin + size] = gathered.view(ranks, -1)
            return whole[: self.shape.numel()].view(self.shape)

    def last(self) -> torch.Tensor:
        """The whole parameter, for somebody who copies it and has no more use for the part. Every rank must call it."""
        if self.comm.size == 1 and self.shard.device == self.device:
            return self.shard[: self.shape.numel()].view(self.shape)
        return self.value()

    def gather(self) -> None:
        """Make the parameter whole, where its user built it."""
        if self.whole:
            return
        value = self.value()
        with torch._C.DisableTorchFunction():
            self.parameter.data = value.to(self.whole_on)
        self.whole = True

    def open(self) -> None:
        """Make the parameter whole for somebody who writes all of it and reads nothing: what it holds is not said."""
        if self.whole:
            return
        with torch._C.DisableTorchFunction():
            self.parameter.data = torch.empty(self.shape, dtype=self.dtype, device=self.whole_on)
        self.whole = True

    def leave(self) -> None:
        """Let go of the whole parameter, and of what was done to it since it was gathered. No other rank takes part."""
        if self.whole:
            self._show_placeholder()

    def bytes_of(self) -> torch.Tensor | None:
        """The memory of the whole parameter, if it lies in one piece."""
        with torch._C.DisableTorchFunction():
            value = self.parameter.data
            if not self.whole or not value.is_contiguous():
                return None
            return value.view(-1).view(torch.uint8)

    def aliased(self) -> bool:
        """Whether somebody else holds the parameter's memory, as by `data = parameter.data`."""
        if not self.whole:
            return False
        with torch._C.DisableTorchFunction():
            storage = self.parameter.untyped_storage()
            # One for the parameter, one for the object that asks.
            return torch._C._storage_Use_Count(storage._cdata) > 2


@dataclass(frozen=True)
class Agreement:
    """What the ranks have found out about parts that are about to be released."""

    held: set[Part]
    """Somebody else holds their memory."""
    alike: set[Part]
    """They have rank 0's values on every rank."""
    differ: bool = False
    """Ranks have compared what they have, and it was not the same."""


@torch.no_grad()
def agree_on(parts: Sequence[Part], comm: Comm, device: torch.device, *, compare: bool) -> Agreement:
    """Rank 0 says whose memory somebody else holds; small parameters, of which nobody does, get its values by the way.

    What somebody holds is a question of the program, which is one on all ranks; but a backend may hold what it has just
    gathered for a moment longer, and garbage is collected when it is. Each rank by itself would release others than its
    peers.

    `compare`: of larger ones that nobody holds on any rank, fingerprints say whether all ranks have the same values, as
    they do where they draw from one seed.
    """
    held = [part.aliased() for part in parts]
    if not parts or comm.size == 1:
        return Agreement({part for part, flag in zip(parts, held, strict=True) if flag}, set())
    with torch._C.DisableTorchFunction():
        memories = {part: memory for part in parts if (memory := part.bytes_of()) is not None}
        small = {part: memory for part, memory in memories.items() if memory.nbytes <= SMALL}
        large = {part: memory for part, memory in memories.items() if part not in small} if compare else {}
        flags = torch.tensor(held, dtype=torch.uint8)
        mine = _flagged(parts, flags)
        prints = [0 if part in mine else fingerprint(memory) for part, memory in large.items()]
        said, shown = _exchanged(
            torch.cat([flags, *(memory.to("cpu") for memory in small.values())]),
            torch.cat([flags, claims(prints)]) if large else flags[:0],
            comm,
            device,
        )
        here, anywhere = _flagged(parts, said), _flagged(parts, shown)
        begin = len(parts)
        for part, memory in small.items():
            if part not in here:
                memory.copy_(said[begin : begin + memory.numel()])
            begin += memory.numel()
        same = dict(zip(large, alike(shown[len(parts) :]), strict=True))
    compared = large.keys() - anywhere
    agreed = {part for part in compared if same[part]}
    return Agreement(here, agreed | (small.keys() - here), differ=len(agreed) < len(compared))


def _flagged(parts: Sequence[Part], flags: torch.Tensor) -> set[Part]:
    """Those whose byte is set, of bytes that begin with one for each part, if there are any."""
    return {part for part, flag in zip(parts, flags[: len(parts)].tolist(), strict=False) if flag}


def _exchanged(
    said: torch.Tensor, shown: torch.Tensor, comm: Comm, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """What rank 0 says, and the greatest byte of those that ranks show, if they show any: one collective."""
    if shown.numel():
        # Where the others say nothing, which is the least, the greatest is what rank 0 says.
        said = said if comm.rank == 0 else torch.zeros_like(said)
        message = torch.cat([said, shown]).to(device)
        comm.all_reduce(message, "max", label="Init").wait()
    else:
        message = said.to(device)
        comm.broadcast(message, label="Init").wait()
    message = message.to("cpu")
    return message[: said.numel()], message[said.numel() :]


def _copied(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """A deep copy: of a released parameter it is released as well, and a part of its own."""
    part = part_of(parameter)
    with torch._C.DisableTorchFunction():
        value = parameter.data if part is not None and not part.whole else parameter.data.clone()
        copy = nn.Parameter(value, parameter.requires_grad)
        if part is not None and not part.whole:
            part.copy_to(copy)
    memo[id(parameter)] = copy
    return copy


def part_of(parameter: torch.Tensor) -> Part | None:
    """The part of a parameter that is partitioned by itself; None for any other."""
    part = parameter.__dict__.get(PART) if isinstance(parameter, nn.Parameter) else None
    return part if part is not None and part.parameter is parameter else None


def source_of(parameter: torch.Tensor) -> Part | None:
    """The part of another parameter whose placeholder this one was made of, as by `nn.Parameter(other.weight)`."""
    if type(parameter) is not nn.Parameter or parameter.layout is not torch.strided:
        return None
    with torch._C.DisableTorchFunction():
        owner = getattr(parameter.untyped_storage(), OWNER, None)
        source: Part | None = owner() if owner is not None else None
        if source is None or source.parameter is parameter or not source.shown_by(parameter):
            return None
        return source if source.shape == parameter.shape else None


def own_parts(parameters: Iterable[torch.Tensor]) -> None:
    """Parameters that were made of placeholders hold what those stand for, by parts of their own."""
    for parameter in parameters:
        source = source_of(parameter)
        if source is not None and part_of(parameter) is None:
            source.copy_to(parameter)


def taken(parameter: nn.Parameter) -> Callable[[], torch.Tensor]:
    """What gives the parameter's whole value, once, to somebody who partitions it in another way from now on."""
    part = part_of(parameter)
    if part is None:
        value = local(parameter)
        return lambda: value
    del parameter.__dict__[PART], parameter.__dict__["__deepcopy__"]
    if part.whole:
        part.release()
    return part.last


@contextmanager
def parts_gathered(parts: Sequence[Part], modifier_rank: int | None) -> Iterator[None]:
    """Parameters whole, for reading and editing; those that were not are released at the end.

    After an exception they are what they were before: the other ranks may not have met it, and take part in nothing.
    """
    opened = {part for part in parts if not part.whole}
    try:
        for part in parts:
            part.gather()
        yield
    except BaseException:
        for part in opened:
            part.leave()
        raise
    for part in parts:
        if part in opened:
            part.release(modifier_rank or 0)
        elif modifier_rank is not None and part.whole:
            part.agree(modifier_rank)
