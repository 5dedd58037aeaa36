"""Parameters that are shared out one by one, before there are units: each rank holds 1/N of each."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from wherry.parallel.comm import Comm
from wherry.parallel.partition import local
from wherry.sharding.quantized import is_wide, placeholder
from wherry.tiers.disk_errors import DiskError, hint, human
from wherry.tiers.disk_folder import make_folder

# On a parameter, and on the storage of its placeholder: the shard, there as long as that lives.
SHARD, OWNER = "_wherry_shard", "_wherry_shard_of"


@dataclass(eq=False)
class Sharing:
    """Among which ranks parameters are shared out, and where their shards rest: in memory, or in files of `folder`."""

    comm: Comm
    device: torch.device
    rests_on: torch.device
    folder: str | None
    # What floating-point parameters are cast to; None leaves them as they are built.
    dtype: torch.dtype | None = None
    shards: weakref.WeakSet[ParamShard] = field(default_factory=weakref.WeakSet)

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for a shard, of undefined contents; a file is gone with the tensor."""
        if self.folder is None:
            return torch.empty(numel, dtype=dtype, device=self.rests_on)
        make_folder(self.folder)
        handle, path = tempfile.mkstemp(prefix="wherry-init-", dir=self.folder)
        nbytes = max(1, numel * dtype.itemsize)
        try:
            # Allocated now: whoever writes to a hole of a mapped file, and the disk is full, is killed without a word.
            os.posix_fallocate(handle, 0, nbytes)
            return torch.from_file(path, shared=True, size=numel, dtype=dtype)
        except OSError as error:
            message = f"Init: there is no room for {human(nbytes)} under {self.folder}: {error.strerror}; " + hint(
                error.errno
            )
            raise DiskError(message, error.errno, self.folder, 0, nbytes, "Init") from error
        finally:
            os.close(handle)
            os.unlink(path)


class ParamShard:
    """This rank's part of one parameter. The parameter itself is whole, or a placeholder that reads as NaN."""

    def __init__(self, parameter: nn.Parameter, sharing: Sharing) -> None:
        self.parameter = parameter
        self.sharing = sharing
        self.comm = sharing.comm
        self.whole = True
        # Whether it is seen without elements while it is released, instead of as NaN of its shape.
        self.empty = False
        self.shape, self.dtype, self.whole_on = parameter.shape, parameter.dtype, parameter.device
        # There is one as soon as the parameter has been released.
        self.shard = torch.empty(0, dtype=self.dtype, device=sharing.rests_on)
        self._blank: torch.Tensor | None = None
        # What is set on a storage lives as long as Python's object of it.
        self._blank_storage: torch.UntypedStorage | None = None
        # A parameter that it shared memory with until both were released.
        self.shared_with: weakref.ref[nn.Parameter] | None = None
        parameter.__dict__[SHARD] = self
        parameter.__dict__["__deepcopy__"] = partial(_copied, parameter)
        sharing.shards.add(self)

    @torch.no_grad()
    def release(self, source: int = 0) -> int:
        """Keep this rank's part of `source`'s values, and let go of the rest. Returns the bytes that were let go of."""
        if not self.whole:
            return 0
        alone = self.comm.size == 1 and self.sharing.folder is None and not self.aliased()
        with torch._C.DisableTorchFunction():
            if self.sharing.dtype is not None and is_wide(self.parameter.dtype):
                self.parameter.data = self.parameter.data.to(self.sharing.dtype)
            value = self.parameter.data
            self.shape, self.dtype, self.whole_on = value.shape, value.dtype, value.device
            own = value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
            if alone and own and value.device == self.sharing.rests_on:
                freed, self.shard = self.shard.nbytes, value.view(-1)
            else:
                freed = value.nbytes
                self._keep_part(self._values_of(source))
            self._show_placeholder()
        return freed

    def _values_of(self, source: int) -> torch.Tensor:
        """A rank's values of a parameter that is whole, flattened, on the device."""
        flat = self.parameter.data.to(self.sharing.device).contiguous().view(-1)
        self.comm.broadcast(flat, source, label="Init").wait()
        return flat

    def _keep_part(self, flat: torch.Tensor) -> None:
        numel = -(-flat.numel() // self.comm.size)
        if (self.shard.numel(), self.shard.dtype) != (numel, flat.dtype):
            self.shard = self.sharing.allocate(numel, flat.dtype)
        mine = flat[self.comm.rank * numel : (self.comm.rank + 1) * numel]
        self.shard[: mine.numel()].copy_(mine)
        self.shard[mine.numel() :].zero_()

    def _show_placeholder(self) -> None:
        with torch._C.DisableTorchFunction():
            blank = self._blank
            if blank is None or (blank.dtype, blank.device) != (self.dtype, self.whole_on):
                self._blank = blank = placeholder(self.dtype, self.whole_on)
                self._blank_storage = blank.untyped_storage()
                setattr(self._blank_storage, OWNER, weakref.ref(self))
            self.parameter.data = blank.expand(self.seen)
        self.whole = False

    @property
    def seen(self) -> torch.Size:
        """The shape of the placeholder."""
        return torch.Size([0]) if self.empty else self.shape

    def show(self, *, empty: bool) -> None:
        """While it is released, the parameter is seen without elements, or as NaN of its shape."""
        self.empty = empty
        if not self.whole:
            self._show_placeholder()

    @torch.no_grad()
    def copy_to(self, parameter: nn.Parameter) -> None:
        """A parameter that was made of the placeholder gets the values, and a shard of its own if this is released."""
        with torch._C.DisableTorchFunction():
            if self.whole:
                parameter.data = self.parameter.data.clone()
                return
            other = ParamShard(parameter, self.sharing)
            other.shape = self.shape
            other.shard = self.sharing.allocate(self.shard.numel(), self.dtype).copy_(self.shard)
            other._show_placeholder()

    @torch.no_grad()
    def agree(self, source: int) -> None:
        """A parameter that stays whole gets `source`'s values on every rank."""
        with torch._C.DisableTorchFunction():
            self.parameter.data.copy_(self._values_of(source).view(self.parameter.shape))

    @torch.no_grad()
    def value(self) -> torch.Tensor:
        """The whole parameter, on the device; a rank by itself has it in its shard. Every rank must call it."""
        with torch._C.DisableTorchFunction():
            flat = self.shard.to(self.sharing.device)
            if self.comm.size > 1:
                whole = flat.new_empty(flat.numel() * self.comm.size)
                self.comm.all_gather(whole, flat).wait()
                flat = whole
            return flat[: self.shape.numel()].view(self.shape)

    def gather(self) -> None:
        """Make the parameter whole, where its user built it."""
        if self.whole:
            return
        value = self.value()
        with torch._C.DisableTorchFunction():
            self.parameter.data = value.to(self.whole_on, copy=self.comm.size == 1)
        self.whole = True

    def leave(self) -> None:
        """Let go of the whole parameter, and of what was done to it since it was gathered. No other rank takes part."""
        if self.whole:
            self._show_placeholder()

    def aliased(self) -> bool:
        """Whether somebody else holds the parameter's memory, as by `data = parameter.data`."""
        with torch._C.DisableTorchFunction():
            storage = self.parameter.untyped_storage()
            # One for the parameter, one for the object that asks.
            return self.whole and torch._C._storage_Use_Count(storage._cdata) > 2


def _copied(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """A deep copy: of a released parameter it is released as well, with a shard of its own."""
    shard = shard_of(parameter)
    with torch._C.DisableTorchFunction():
        if shard is not None and not shard.whole:
            copy = nn.Parameter(parameter.data, parameter.requires_grad)
            shard.copy_to(copy)
        else:
            copy = nn.Parameter(parameter.data.clone(), parameter.requires_grad)
    memo[id(parameter)] = copy
    return copy


def is_plain(parameter: torch.Tensor) -> bool:
    """Whether it is torch's own kind of parameter; a class that adds nothing but names to that says so."""
    return type(parameter) is nn.Parameter or getattr(type(parameter), "plain_parameter", False)


def shard_of(parameter: torch.Tensor) -> ParamShard | None:
    """The shard of a parameter that is shared out by itself; None for any other."""
    shard = parameter.__dict__.get(SHARD) if isinstance(parameter, nn.Parameter) else None
    return shard if shard is not None and shard.parameter is parameter else None


def made_of(parameter: torch.Tensor) -> ParamShard | None:
    """The shard of another parameter whose placeholder this one was made of, as by `nn.Parameter(other.weight)`."""
    if not is_plain(parameter) or parameter.layout is not torch.strided:
        return None
    with torch._C.DisableTorchFunction():
        owner = getattr(parameter.untyped_storage(), OWNER, None)
        source: ParamShard | None = owner() if owner is not None else None
        if source is None or source.parameter is parameter or source.seen != parameter.shape:
            return None
        return source


def shared_with(parameter: nn.Parameter) -> nn.Parameter | None:
    """A parameter that this one shared memory with inside `wherry.Init`, if there was one."""
    shard, source = shard_of(parameter), made_of(parameter)
    if shard is None:
        return source.parameter if source is not None else None
    return shard.shared_with() if shard.shared_with is not None else None


def own_values(parameters: Iterable[torch.Tensor]) -> None:
    """Parameters that were made of placeholders get what those stand for, in shards of their own."""
    for parameter in parameters:
        source = made_of(parameter)
        if source is not None and shard_of(parameter) is None:
            assert isinstance(parameter, nn.Parameter)
            source.copy_to(parameter)


def take(parameter: nn.Parameter) -> torch.Tensor:
    """The parameter's whole value, for somebody who shares it out in another way from now on: its shard goes."""
    shard = shard_of(parameter)
    if shard is None:
        return local(parameter)
    del parameter.__dict__[SHARD], parameter.__dict__["__deepcopy__"]
    if shard.whole:
        shard.release()
    return shard.value()


@contextmanager
def shards_gathered(shards: Sequence[ParamShard], modifier_rank: int | None) -> Iterator[None]:
    """Parameters whole, for reading and editing; those that were not are released at the end.

    After an exception they are what they were before: the other ranks may not have met it, and take part in nothing.
    """
    opened = {shard for shard in shards if not shard.whole}
    try:
        for shard in shards:
            shard.gather()
        yield
    except BaseException:
        for shard in opened:
            shard.leave()
        raise
    for shard in shards:
        if shard in opened:
            shard.release(modifier_rank or 0)
        elif modifier_rank is not None and shard.whole:
            shard.agree(modifier_rank)
