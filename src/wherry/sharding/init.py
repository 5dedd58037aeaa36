"""`wherry.Init`: models that are partitioned while they are built."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter
from torch.utils.hooks import RemovableHandle

from wherry import config as configs
from wherry.observe.log import say
from wherry.parallel import topology as topologies
from wherry.parallel.comm import Comm
from wherry.placement import Tier
from wherry.sharding.param_shard import ParamShard, Sharing, is_plain, made_of, shard_of
from wherry.sharding.quantized import is_wide
from wherry.sharding.shared_memory import overlapping
from wherry.tiers.elastic import Heap

if TYPE_CHECKING:
    from wherry.config import Config

# What may be asked of a placeholder: it has the parameter's shape and type.
_METADATA = frozenset(
    getter
    for name in ("shape", "dtype", "device", "requires_grad", "is_leaf", "grad", "grad_fn", "layout", "ndim", "names",
                 "is_meta", "is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_nested", "output_nr", "itemsize")
    for prop in (getattr(torch.Tensor, name, None),)
    for getter in (getattr(prop, "__get__", None), getattr(prop, "__set__", None))
    if getter is not None
) | frozenset(
    getattr(torch.Tensor, name)
    for name in ("size", "dim", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "__hash__",
                 "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "__len__", "ndimension")
    if hasattr(torch.Tensor, name)
)  # fmt: skip

# Methods that fill a tensor with random numbers.
_DRAWS = frozenset(
    getattr(torch.Tensor, name)
    for name in ("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_")
)


class _Active(threading.local):
    """List the contexts that a thread is inside of, the innermost at the end."""

    def __init__(self) -> None:
        self.stack: list[Init] = []


_active = _Active()
_lock = threading.Lock()
_users = 0
_handles: list[RemovableHandle] = []


class Init:
    """Within it, models of any class are built partitioned: a submodule's parameters go to their shards when the next
    one is built, so that memory holds one submodule above the shards.

    Initialization code runs unchanged: a parameter that it touches is made whole, and released again. Every rank must
    build the same model; rank 0's values are used. `wherry.initialize` takes such models as any other.

        with wherry.Init(config="config.json"):
            model = MyModel()
        engine, *_ = wherry.initialize(model=model, config="config.json")

    With `dtype`, floating-point parameters are of that from the moment when a module gets them.

    Where the config keeps whole parameters on every rank (stages 0 to 2), or with `enabled=False`, nothing changes.

    With `meta=True` models have no values before `wherry.initialize`, at any stage: it lets modules draw their own, a
    unit at a time, as for a model built under `torch.device("meta")`. Nothing is drawn here, which that device does
    with code of torch's that takes a second to load.
    """

    def __init__(
        self,
        config: Config | str | Path | dict[str, Any] | None = None,
        *,
        mesh: Any = None,
        enabled: bool = True,
        meta: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.enabled = enabled and not meta
        self._shapes = _Shapes() if enabled and meta else None
        self._config: Config | None = None
        if self.enabled and config is not None:
            self._config = config if isinstance(config, configs.Config) else configs.load(config)
            if not self._config.placement().parameters.partitioned:
                self.enabled = False
                stage = self._config.zero_optimization.stage
                say("Init: at stage %d every rank keeps whole parameters, so models are built as usual", stage)
        self._mesh = mesh
        self._dtype = dtype
        self._touch = _Touch(self)
        # Whole parameters, in the order in which they became so.
        self._whole: dict[nn.Parameter, None] = {}
        # Whose parameters were registered or touched last.
        self._module: nn.Module | None = None
        # To which whole parameters go back.
        self._heap = Heap()

    def __enter__(self) -> Init:
        if self._shapes is not None:
            self._shapes.__enter__()
        if not self.enabled:
            return self
        config = self._config or configs.load(None)
        topology = topologies.find(self._mesh, timeout=config.wherry.timeout_s)
        self.comm = topology.data
        tier, folder = config.placement().parameters.tier, None
        if tier is Tier.DISK and (folders := config.zero_optimization.offload_param.nvme_path):
            folder = str(folders[0] if isinstance(folders, list | tuple) else folders)
        rests_on = topology.device if tier is Tier.DEVICE else torch.device("cpu")
        self._sharing = Sharing(topology.data, topology.device, rests_on, folder, self._dtype)
        # The process group is needed as long as there are shards.
        if not isinstance(self._mesh, Comm | topologies.Topology):
            weakref.finalize(self._sharing, self.comm.close)
        _enter(self)
        self._touch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shapes is not None:
            self._shapes.__exit__(kind, error, trace)
        if not self.enabled:
            return
        self._touch.__exit__(kind, error, trace)
        _leave(self)
        if kind is None:
            self.finish()
        elif error is not None:
            self.comm.tell(error)
        self._whole.clear()
        self._module = None

    # What the hooks tell.

    def registered(self, module: nn.Module, parameter: nn.Parameter) -> None:
        """`module` gets a parameter: whichever module was being built before it is done, for now."""
        if not _is_shared_out(parameter):
            return
        if module is not self._module:
            self._release_all()
            self._module = module
        self.fill(parameter)
        if shard_of(parameter) is None:
            if self._dtype is not None and is_wide(parameter.dtype):
                with torch._C.DisableTorchFunction():
                    parameter.data = parameter.data.to(self._dtype)
            self._whole[parameter] = None

    def attached(self, module: nn.Module) -> None:
        """A finished module is made part of another."""
        for parameter in module.parameters():
            if _is_shared_out(parameter):
                self.fill(parameter)
                shard = shard_of(parameter)
                if shard is None or shard.whole:
                    self._whole[parameter] = None
        self._release_all()
        self._module = None

    def fill(self, parameter: nn.Parameter) -> None:
        """A parameter that was made of a released one, as `nn.Parameter(other)`, shares the memory of that."""
        source = made_of(parameter) if shard_of(parameter) is None else None
        if source is not None:
            self.touch([source])
            with torch._C.DisableTorchFunction():
                parameter.data = source.parameter.data

    def finish(self) -> None:
        """Whatever is whole is shared out now, for somebody who is about to gather it by name."""
        self._release_all(aliased=True)

    def touch(self, shards: list[ParamShard]) -> None:
        """Parameters are about to be read or written: they are made whole, and earlier ones released."""
        released = [shard for shard in shards if not shard.whole]
        if released:
            self._release_all(but={shard.parameter for shard in shards})
        for shard in released:
            shard.gather()
            self._whole[shard.parameter] = None

    def _release_all(
        self, but: set[nn.Parameter] | frozenset[nn.Parameter] = frozenset(), *, aliased: bool = False
    ) -> None:
        """Release what is whole; what somebody else holds the memory of waits, unless `aliased`."""
        shards = {p: shard_of(p) or ParamShard(p, self._sharing) for p in self._whole if p not in but}
        held = set() if aliased else self._held(list(shards.values()))
        if aliased:
            whole = [shard.parameter for shard in shards.values() if shard.whole]
            for one, other in overlapping(whole):
                shards[whole[other]].shared_with = weakref.ref(whole[one])
        self._heap.freed(sum(shard.release() for shard in shards.values() if shard not in held))
        self._whole = {p: None for p in self._whole if p in but or shards[p] in held}

    def _held(self, shards: list[ParamShard]) -> set[ParamShard]:
        """Whose memory somebody else holds, as rank 0 says.

        That is a question of the program, which is one on all ranks; but a backend may hold what it has just gathered
        for a moment longer, and garbage is collected when it is: each rank by itself would release others than its
        peers.
        """
        flags = torch.tensor([shard.aliased() for shard in shards], dtype=torch.uint8)
        if shards and self.comm.size > 1:
            flags = flags.to(self._sharing.device)
            self.comm.broadcast(flags, label="Init").wait()
        return {shard for shard, flag in zip(shards, flags.tolist(), strict=True) if flag}


def _is_shared_out(parameter: nn.Parameter) -> bool:
    return is_plain(parameter) and not parameter.is_meta


class _Touch(TorchFunctionMode):
    """Sees every use of a tensor inside the context."""

    def __init__(self, init: Init) -> None:
        super().__init__()
        self.init = init

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            return func(*args, **kwargs)
        parameters = [value for value in tree_iter((args, kwargs)) if isinstance(value, nn.Parameter)]
        for parameter in parameters:
            self.init.fill(parameter)
        shards = [shard for parameter in parameters if (shard := shard_of(parameter)) is not None]
        if shards:
            self.init.touch(shards)
        return func(*args, **kwargs)


def _is_initializer(func: Any) -> bool:
    return getattr(func, "__module__", None) == nn.init.__name__ and func.__name__.endswith("_")


class _Shapes(TorchFunctionMode):
    """The meta device, on which nothing is drawn."""

    def __enter__(self) -> _Shapes:
        self._device = torch.device("meta")
        self._device.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *ended: Any) -> None:
        super().__exit__(*ended)
        self._device.__exit__(*ended)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWS or _is_initializer(func):
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


# torch has hooks for what is registered on modules; they are of the process, and are there while somebody is inside.


def _enter(init: Init) -> None:
    global _users
    _active.stack.append(init)
    with _lock:
        _users += 1
        if _users == 1:
            _handles.append(torch_module.register_module_parameter_registration_hook(_parameter_registered))
            _handles.append(torch_module.register_module_module_registration_hook(_module_registered))


def _leave(init: Init) -> None:
    global _users
    if init in _active.stack:
        _active.stack.remove(init)
    with _lock:
        _users -= 1
        if _users == 0:
            while _handles:
                _handles.pop().remove()


def entered() -> list[Init]:
    """The contexts that this thread is inside of, the outermost first."""
    return list(_active.stack)


def _parameter_registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    inside = entered()
    if inside and parameter is not None:
        inside[-1].registered(module, parameter)


def _module_registered(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    inside = entered()
    if inside and submodule is not None:
        inside[-1].attached(submodule)
