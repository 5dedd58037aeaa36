"""What is asked of an engine and done with it between steps: nothing here is part of the life of a step."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from functools import partial, update_wrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from wherry import accounts
from wherry.accounts import MemoryRow
from wherry.accumulation import Accumulation
from wherry.checkpoint.session import Checkpoints, Counts
from wherry.errors import WherryError
from wherry.observe.monitor import Monitor
from wherry.observe.reporter import Reporter
from wherry.offstage import Offstage
from wherry.parallel.comm import Comm
from wherry.parallel.topology import Topology
from wherry.parallel.world import world_of
from wherry.placement import Placement
from wherry.sharding.compiling import compile_units
from wherry.sharding.gradients import Gradients
from wherry.sharding.hooks import Hooks
from wherry.sharding.unit import Unit
from wherry.sharding.weights import Gatherer
from wherry.tiering import Tiering
from wherry.update.loss_scale import LossScaler
from wherry.update.optimizer import ShardedOptimizer
from wherry.update.pipeline import Updater
from wherry.update.reach import ParameterStates

if TYPE_CHECKING:
    from wherry.config import BatchSizes, Config

_PLAIN = frozenset((bool, int, float, type(None)))


class Surface(nn.Module):
    """Questions, checkpoints, and the names that scripts know. `Engine` is this and the step."""

    placement: Placement
    topology: Topology
    comm: Comm
    units: list[Unit]
    optimizer: ShardedOptimizer | None
    global_steps: int
    _config: Config
    _batch: BatchSizes
    _gatherer: Gatherer
    _gradients: Gradients
    _updater: Updater | None
    _tiering: Tiering
    _offstage: Offstage
    _scaler: LossScaler
    _reporter: Reporter
    _hooks: Hooks
    _accumulation: Accumulation
    _checkpoints: Checkpoints
    _states: ParameterStates | None
    _norm: float | None
    _window_scale: float
    _backwards_in_window: int
    _steps_in_window: int
    _applied: bool
    _compiled: int

    def settle(self) -> None:
        raise AssertionError("the engine settles")

    def _rest(self) -> None:
        raise AssertionError("the engine has updates under way")

    def _check_open(self) -> None:
        raise AssertionError("the engine is open or closed")

    def _abandon_window(self) -> None:
        raise AssertionError("the engine has the window")

    def _come_to_rest(self) -> None:
        raise AssertionError("the engine has everything under way")

    def _go_on_from(self, counts: Counts) -> None:
        raise AssertionError("the engine counts")

    # Between phases.

    def offload_states(
        self,
        include: Iterable[str] | None = None,
        device: str = "host",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> int:
        """Free the device's memory of "parameters", "gradients" and "optimizer", or of those in `include`.

        They wait in host memory until `reload_states()`; the engine cannot be used meanwhile, but for sending more of
        them away. Returns the bytes freed, which are none where the device is the host. An accumulation window goes on
        afterwards where it was. For generation with another program between two phases of training.
        """
        if str(device) not in ("host", "cpu"):
            raise WherryError(f'offload_states: expected the device "host" (or "cpu"), got {device!r}')
        self._come_to_rest()
        return self._offstage.leave(include)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring what `offload_states` has sent away back to the device."""
        self._offstage.come_back()

    # The size of a batch.

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Train on with more or fewer micro-batches in a window, as a schedule of growing batches does.

        Every rank makes the call, between windows. The micro-batch stays, so the loader does as well.
        """
        share = self._batch.micro * self.comm.size
        if train_batch_size < share or train_batch_size % share:
            raise WherryError(
                f"set_train_batch_size: expected a multiple of {share} (micro-batch {self._batch.micro} x "
                f"{self.comm.size} ranks), got {train_batch_size}"
            )
        self._set_batch(self._batch.micro, train_batch_size // share, "set_train_batch_size()")

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Say that micro-batches are of another size from here on, with as many of them in a window.

        Every rank makes the call, between windows. A loader that has been made keeps its size.
        """
        if micro_batch_size < 1:
            raise WherryError(f"set_train_micro_batch_size: expected 1 or more, got {micro_batch_size}")
        self._set_batch(micro_batch_size, self._batch.accumulation, "set_train_micro_batch_size()")

    def _set_batch(self, micro: int, accumulation: int, call: str) -> None:
        if self._backwards_in_window or self._steps_in_window:
            raise WherryError(
                f"the batch size cannot change within an accumulation window, of which {self._backwards_in_window} of "
                f"{self._batch.accumulation} micro-batches have run; change it after the update"
            )
        if (micro, accumulation) == (self._batch.micro, self._batch.accumulation):
            return
        world_of(self.topology).meet(call)
        if micro != self._batch.micro:
            self._accumulation.resized()
        self._batch = type(self._batch)(micro * accumulation * self.comm.size, micro, accumulation)
        if (accumulation > 1) is not self._gradients.policy.accumulates:
            self._sum_gradients_for(accumulation)

    def _sum_gradients_for(self, accumulation: int) -> None:
        """Windows have one micro-batch, or more than one, from here on: sums have another type and another place."""
        flats = [gradient.flat for gradient in self._gradients.all]
        policy = self._tiering.gradient_policy(flats, accumulation)
        if self._updater is not None:
            self._updater.detach()
        self._gradients.choose(policy, partial(self._tiering.way_of, policy))
        self._hooks.watch_arrivals()
        if self._updater is not None:
            self._updater.attach(self._gradients.all)
        self._states = None

    # Checkpoints.

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write everything that training goes on from to `save_dir/tag`; every rank calls it.

        `tag` is `global_step<N>` unless given. `client_state` is kept beside it: numbers, strings, tensors, and lists
        and dicts of these. Whatever happens on the way, the checkpoint before stays whole.
        """
        self._meet("save_checkpoint()")
        self.settle()
        self._checkpoints.save(save_dir, tag, client_state, save_latest, not exclude_frozen_parameters)
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from `load_dir/tag`, or from the latest; returns its path and its client state.

        It may have been written by any number of ranks, at any stage and tier. (None, None) where there is none.
        Without its optimizer's states counts are the checkpoint's all the same, and masters are its weights;
        `load_module_only` leaves the counts as they are.
        """
        from wherry.checkpoint.load import LoadOptions

        self._meet("load_checkpoint()")
        self.settle()
        states = load_optimizer_states and not load_module_only
        schedule = load_lr_scheduler_states and not load_module_only
        options = LoadOptions(load_module_strict, states, schedule, counts=not load_module_only)
        if self._hooks.backward_running or (states and (self._backwards_in_window or self._steps_in_window)):
            self._abandon_window()
        loaded = self._checkpoints.load(load_dir, tag, options)
        self._gatherer.forget_near()
        if loaded is None:
            return None, None
        if loaded.counts is not None:
            self._go_on_from(loaded.counts)
        return str(loaded.path), loaded.client_state

    def _meet(self, call: str) -> None:
        self._check_open()
        world_of(self.topology).meet(call)

    def wait_for_checkpoint(self) -> None:
        """Return when no checkpoint is being written behind training any more; every rank calls it."""
        if self._checkpoints.behind:
            world_of(self.topology).meet("wait_for_checkpoint()")
        self._checkpoints.wait()

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the working weights alone, as transformers loads them; every rank calls it.

        Files are of 5 GB at most, with an index; a unit at a time is in memory. For a name that ends in .bin or .pt
        it is one file of torch.save's, for which rank 0 holds the whole model.
        """
        self._meet("save_16bit_model()")
        self._rest()
        self._checkpoints.save_model(Path(save_dir), save_filename, exclude_frozen=exclude_frozen_parameters)
        return True

    def consolidated_state_dict(
        self, dtype: torch.dtype | None = None, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """The whole model on rank 0's host, None on the other ranks; every rank calls it.

        Weights are the working ones, or in `dtype`; torch.float32 gives the masters.
        """
        self._meet("consolidated_state_dict()")
        self._rest()
        return self._checkpoints.consolidated(dtype, exclude_frozen=exclude_frozen_parameters)

    # What people ask.

    @property
    def monitor(self) -> Monitor:
        """Where the numbers of each update go; add a sink to it, or log numbers of your own."""
        return self._reporter.monitor

    @property
    def flops(self) -> int | None:
        """Operations of the step that the config's `flops_profiler` names, on this rank; None before it."""
        return self._reporter.flops

    @property
    def states(self) -> ParameterStates:
        """Masters, moments and gradients of single parameters. What is under way is completed first."""
        self._rest()
        if self._states is None:
            self._states = ParameterStates(
                self.units,
                self._updater,
                self._groups(),
                self._gradients,
                self._gatherer.comm,
                self.comm,
                lambda: self._window_scale,
            )
        return self._states

    def has_gradients(self) -> bool:
        """Whether the boundary's backward has run and its gradients are still there."""
        return self._gradients.boundary and self._backwards_in_window > 0

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last window's gradients, before clipping; None before the first update."""
        return self._norm

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> None:
        """Always an error, that names the config's key: clipping is part of the update.

        `torch.nn.utils.clip_grad_norm_` finds no `.grad` on an engine's parameters, and does nothing.
        """
        raise WherryError(
            f'clip_grad_norm_: step() clips, to the "gradient_clipping" of the config, which is '
            f"{self._config.gradient_clipping}; set that to {max_norm} and leave the call out. "
            "engine.get_global_grad_norm() is the norm before it"
        )

    def was_step_applied(self) -> bool:
        return self._applied

    def gradients(self, name: str) -> torch.Tensor:
        """The whole mean gradient of a parameter, in fp32, from the boundary's backward until the next window begins.

        Every rank must call it.
        """
        return self._gradients.named.whole(name).float() * self._window_scale

    def gradient_norms(self) -> dict[str, float]:
        """The norm of the last window's gradients by unit, before clipping. Every rank must call it."""
        squares = self._gradients.norm.by_flat(self._gradients.all)
        unit_of = {flat: unit.name for unit in self.units for flat in unit.flats}
        by_unit: dict[str, float] = {}
        for flat, value in squares.items():
            by_unit[unit_of[flat]] = by_unit.get(unit_of[flat], 0.0) + value
        return {name: math.sqrt(value) * self._window_scale for name, value in by_unit.items()}

    def memory(self) -> list[MemoryRow]:
        """Bytes by state and tier on this rank: what the placement comes to, and what is held now."""
        return accounts.rows(
            self.units, self._gatherer, self._gradients, self._updater, self._tiering, self._offstage.away
        )

    def get_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self._groups()]

    def get_mom(self) -> list[Any]:
        return [group.get("betas", group.get("momentum")) for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups if self.optimizer is not None else []

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config, as JSON holds it."""
        return self._config.to_dict()

    @property
    def global_rank(self) -> int:
        return self.topology.global_rank

    @property
    def local_rank(self) -> int:
        return self.topology.local_rank

    @property
    def world_size(self) -> int:
        return self.topology.world_size

    @property
    def dp_world_size(self) -> int:
        return self.comm.size

    @property
    def loss_scale(self) -> float:
        return self._scaler.scale

    def train_batch_size(self) -> int:
        return self._batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._batch.micro

    def gradient_accumulation_steps(self) -> int:
        return self._batch.accumulation

    def gradient_clipping(self) -> float:
        return self._config.gradient_clipping

    def zero_optimization(self) -> bool:
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        return self._config.zero_optimization.stage

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        return self._config.zero_optimization.stage3_gather_16bit_weights_on_model_save

    @property
    def working_dtype(self) -> torch.dtype | None:
        """The dtype that the config gives the working weights; None where it leaves the model as it is."""
        return self._config.working_dtype()

    def fp16_enabled(self) -> bool:
        return self._config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        return self._config.bf16.enabled

    def steps_per_print(self) -> float | None:
        return self._config.steps_per_print

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise WherryError(
            "an engine cannot be copied or pickled, as it holds what its process has open. Copy its model: with "
            "wherry.gathered(engine.module): copy = copy.deepcopy(engine.module), on every rank; or save with "
            "engine.save_checkpoint(folder)"
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Surface:
        self._modules["module"]._apply(fn, recurse)  # type: ignore[union-attr]
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        # What the engine counts and remembers changes many times in a step, and torch's way looks at each for modules.
        if type(value) in _PLAIN:
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__.get("_modules", {})
        if name == "module" and name in modules:
            updater = self.__dict__.get("_updater")
            if updater is not None and not self._hooks.busy:
                updater.rest()  # whoever takes the model may read its weights
            return modules[name]
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "module" not in modules:
                raise
            value = getattr(modules["module"], name)
            if getattr(value, "__self__", None) is modules["module"] and self._hooks.travels:
                return update_wrapper(partial(self._call, value), value)
            return value

    def _call(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """A method of the model, called through the engine, as in `engine.encode(x)`."""
        self._check_open()
        try:
            return self._hooks.call(method, args, kwargs)
        except BaseException as error:
            self.comm.tell(error)
            raise

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        **options: Any,
    ) -> None:
        """torch.compile for each block by itself: gathers, releases and reductions stay between the graphs.

        `options` are those of torch.compile. A model compiled as a whole is refused.

            engine.compile(mode="reduce-overhead")
        """
        self._check_open()
        if schedule is not None:
            raise WherryError("compile: a schedule of passes is not offered; blocks are compiled as they are")
        self._compiled = compile_units(self.units, {"backend": backend, **(compile_kwargs or {}), **options})

    @property
    def is_compiled(self) -> bool:
        return self._compiled > 0
