"""The engine: forward, backward, step. It reads like the life of a step."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from wherry import ending
from wherry.accounts import explain_shortage
from wherry.accumulation import Accumulation
from wherry.activations.manager import Activations
from wherry.checkpoint.session import Checkpoints, Counts, Session
from wherry.errors import DivergenceError, WherryError
from wherry.fake import host_value
from wherry.observe.log import get_logger
from wherry.observe.reporter import Reporter, Update
from wherry.offstage import Offstage
from wherry.parallel.topology import Topology
from wherry.parallel.world import world_of
from wherry.placement import Placement
from wherry.sharding.access import Access
from wherry.sharding.autograd import tensors_in, with_tensors
from wherry.sharding.compiling import refuse_engine, refuse_whole
from wherry.sharding.gradients import Gradients
from wherry.sharding.hooks import Hooks
from wherry.sharding.roster import Roster
from wherry.sharding.schedule import Schedule
from wherry.sharding.unit import Unit
from wherry.sharding.weights import Gatherer
from wherry.surface import Surface
from wherry.tiering import Tiering
from wherry.update.clipping import norm_and_multiplier
from wherry.update.loss_scale import LossScaler
from wherry.update.nonfinite import NonFinite
from wherry.update.optimizer import ShardedOptimizer
from wherry.update.pipeline import Updater
from wherry.update.reach import ParameterStates

if TYPE_CHECKING:
    from wherry.config import BatchSizes, Config


@dataclass
class Parts:
    """What `initialize` has built for an engine."""

    config: Config
    topology: Topology
    placement: Placement
    batch: BatchSizes
    units: list[Unit]
    gatherer: Gatherer
    schedule: Schedule
    gradients: Gradients
    tiering: Tiering
    hooks: Callable[[Engine], Hooks]
    activations: Callable[[Hooks], Activations]
    updater: Updater | None
    optimizer: Callable[[Engine], ShardedOptimizer | None]
    scaler: LossScaler
    autocast: Callable[[], AbstractContextManager[Any]]
    autocast_inputs: torch.dtype | None


class Engine(Surface):
    """A model, its optimizer and their placement. It is called like the model.

        loss = engine(inputs, targets)
        engine.backward(loss)
        engine.step()

    Attributes that the engine does not have are the model's.
    """

    def __init__(self, module: nn.Module, parts: Parts) -> None:
        super().__init__()
        self.module = module
        self.placement = parts.placement
        self.topology = parts.topology
        self.comm = parts.topology.data
        self.device = parts.topology.device
        self.units = parts.units
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        self.global_steps = 0
        self.global_samples = 0
        self.micro_steps = 0
        self.skipped_steps = 0
        self._config = parts.config
        self._batch = parts.batch
        self._gatherer = parts.gatherer
        self._schedule = parts.schedule
        self._gradients = parts.gradients
        self._updater = parts.updater
        self._tiering = parts.tiering
        self._offstage = Offstage(parts.units, parts.gradients, parts.updater, parts.tiering.link)
        self._scaler = parts.scaler
        self._autocast = parts.autocast
        self._input_dtype = parts.autocast_inputs
        self._log = get_logger(parts.topology.global_rank)
        reference = weakref.ref(self)
        self._reporter = Reporter(
            parts.config,
            lambda: reference().module,  # type: ignore[union-attr]
            parts.topology.traffic,
            self._log,
            _synchronise(self.device),
        )
        self._spans = self._reporter.spans
        self._nonfinite = NonFinite(
            parts.config.nonfinite(), parts.topology, parts.units, parts.gradients, parts.scaler, self._log
        )
        self._norm: float | None = None
        # What the window's sums are multiplied by, clipping aside.
        self._window_scale = 1.0
        self._applied = False
        self._closed = False
        # Threads, connections and files are of this process, and of none that is forked from it.
        self._process = os.getpid()
        # Inside gathered_for_generation: weights are whole, and do not change.
        self._generating = False
        self._states: ParameterStates | None = None
        # Modules that `compile` has compiled.
        self._compiled = 0
        self._forced_boundary: bool | None = None
        self._backwards_in_window = 0
        # How many micro-batches the backward that runs is of.
        self._micro_batches = 1
        self._steps_in_window = 0
        # Whether gradients of this window are to be divided by the number of its micro-batches; None before the first.
        self._averaged: bool | None = None
        # Whether the losses of this window carry the loss scale; None before its first backward.
        self._scaled: bool | None = None
        # True from the moment a backward is known to be of a loss that carries the scale.
        self._loss_is_scaled = False
        # True while the backward that ends is one of `backward()`.
        self._in_backward = False
        self._hooks = parts.hooks(self)
        self._roster = Roster(module, parts.units)
        self._accumulation = Accumulation(self, parts.config.wherry.accumulation)
        self._activations = parts.activations(self._hooks)
        self.optimizer = parts.optimizer(self)
        self._checkpoints = Checkpoints(self._session, parts.config)
        state_of = parts.updater.holdings.state_of if parts.updater is not None else {}
        self._access = Access(module, parts.units, parts.gatherer, self.comm, state_of.get, self._rest, self.settle)

    # Forward.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._check_open()
        module = self._modules["module"]  # as an attribute it would settle updates that may still run
        assert module is not None
        if torch.compiler.is_compiling():
            refuse_engine()
        if module._compiled_call_impl is not None:
            refuse_whole(module)
        if self._hooks.travels and os.getpid() != self._process:
            self._refuse_fork("forward")
        if self._hooks.running[0]:
            self._hooks.break_off()  # by Ctrl-C, in a call of the model itself
        if self._input_dtype is not None:
            args, kwargs = with_tensors((args, kwargs), partial(_cast, self._input_dtype))
        try:
            # Of forwards that run together no single one has a time.
            together = self._hooks.interleaver.active
            phase = nullcontext() if together else self._reporter.phase("forward", self.global_steps + 1)
            with phase, self._autocast(), self._hooks.saved.around(), self._activations.forward():
                return module(*args, **kwargs)
        except BaseException as error:
            explain_shortage(self, error, "forward")
            self._hooks.break_off()
            if not self._hooks.interleaver.stopping:  # else it is stopped because of another's error
                self.comm.tell(error)
            raise

    def forward_begins(self) -> None:
        """Called by the model's hook. What an exception left behind is cleared here, so that this step is healthy."""
        if self._hooks.backward_running:
            self._abandon_window()
        if torch.is_grad_enabled():
            self._gradients.let_go()
        self._activations.begin()

    # Backward.

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Run the backward of `loss`. At the boundary every gradient is reduced when this returns.

        Gradients are averaged over the micro-batches of the window, unless `scale_wrt_gas` is False because the loss
        was divided already. A plain `loss.backward()` does the same as this with the defaults.
        """
        self._check_open()
        _checked(loss)
        self._backward([loss], retain_graph=retain_graph, averaged=scale_wrt_gas)
        return loss

    def _backward(self, losses: Sequence[torch.Tensor], *, retain_graph: bool = False, averaged: bool = True) -> None:
        """One backward of the sum of so many micro-batches' losses."""
        self._loss_is_scaled = True
        self._begin_backward(averaged=averaged, micro_batches=len(losses))
        scaled = losses
        if self._scaler.scale != 1.0:
            scaled = [loss * self._scaler.scale for loss in losses]
        try:
            with self._reporter.phase("backward", self.global_steps + 1):
                torch.autograd.backward(scaled, retain_graph=retain_graph)
            self._in_backward = True
            self.backward_ends()
        except BaseException as error:
            explain_shortage(self, error, "backward")
            self.comm.tell(error)
            self._abandon_window()
            raise
        finally:
            self._loss_is_scaled = False
        for loss in losses:
            self._reporter.loss(loss)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, for a backward of one's own: `engine.scale(loss).backward()`."""
        scaled = loss * self._scaler.scale
        scaled.register_hook(self._notice_scaled)
        return scaled

    def _notice_scaled(self, grad: torch.Tensor) -> None:
        self._loss_is_scaled = True

    def backward_begins(self) -> None:
        """Called by a hook: the user's own `loss.backward()` has begun."""
        self._begin_backward(averaged=True)

    def backward_ends(self) -> None:
        """The last gradient has been computed: finish the reductions, release the weights."""
        if not self._hooks.backward_running:
            return
        explicit, self._in_backward = self._in_backward, False
        self._loss_is_scaled = False
        makes_gradients = explicit or self._gradients.arrivals > 0
        self._hooks.end_backward(reduces=makes_gradients)
        if not makes_gradients:
            if self._updater is not None:
                self._updater.early.retract()
            return  # gradients of inputs only, as of torch.autograd.grad: no micro-batch of the window
        self._gradients.finish()
        self._backwards_in_window += self._micro_batches
        self._window_scale = self._gradient_scale()

    def _begin_backward(self, *, averaged: bool, micro_batches: int = 1) -> None:
        if os.getpid() != self._process:
            self._refuse_fork("backward")
        if self._generating:
            raise WherryError("backward: weights are held by gathered_for_generation; leave that context first")
        if self._hooks.backward_running:
            self._abandon_window()
        if self._averaged is not None and averaged != self._averaged:
            self._abandon_window()
            raise WherryError(
                "backward: scale_wrt_gas changed within an accumulation window; use one value for all its micro-batches"
            )
        if self._scaled is not None and self._scaled != self._loss_is_scaled and self._scaler.scale != 1.0:
            self._abandon_window()
            raise WherryError(
                "backward: some losses of this accumulation window carry the loss scale and some do not; use "
                "engine.backward(loss), or engine.scale(loss).backward(), for all of them"
            )
        self._scaled = self._loss_is_scaled
        self._averaged = averaged
        self._micro_batches = micro_batches
        micro_batch = max(self._backwards_in_window, self._steps_in_window) + micro_batches
        boundary = self._is_boundary(micro_batch)
        self._updates_begin_with(boundary)
        self._gradients.begin(boundary=boundary, micro_batches=micro_batches)
        self._hooks.begin_backward()

    def _updates_begin_with(self, boundary: bool) -> None:
        """No update is under way while gradients come, but those that a policy makes of these very gradients."""
        if self._updater is None or not self._updater.policy.beside:
            return
        if self._updater.policy.when != "delayed":
            self._updater.settle()
        if boundary and self._updater.policy.when == "in_backward":
            self._updater.early.expect(self._groups(), self._gradient_scale())

    # Step.

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At the boundary update the weights, and move the learning rate schedule on; within a window only count.

        `lr_kwargs` go to the schedule's `step`. One that waits for a metric moves only when it is given here.
        """
        self._check_open()
        self.micro_steps += 1
        self._steps_in_window += 1
        if not self._is_boundary(max(self._steps_in_window, self._backwards_in_window)):
            self._applied = False
            return
        if self.optimizer is None:
            raise WherryError(
                "step: this engine has no optimizer; give wherry.initialize an optimizer, or the config a block "
                '"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}'
            )
        try:
            with self._spans("wherry::step"):
                self.optimizer.step()
        except BaseException as error:
            self.comm.tell(error)
            raise
        needs_metric = isinstance(self.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if self._applied and self.lr_scheduler is not None and (lr_kwargs or not needs_metric):
            self.lr_scheduler.step(**(lr_kwargs or {}))

    def update(self) -> bool:
        """One update of all weights from the window's gradients. False if it was skipped for non-finite gradients."""
        assert self._updater is not None and self.optimizer is not None
        if not self._backwards_in_window:
            self._applied = False
            self._log.warning("step %d: no backward came before it, so nothing is updated", self.global_steps + 1)
            self._end_window()
            return True
        if os.getpid() != self._process:
            self._refuse_fork("step")
        self._roster.check()
        self._gradients.complete_window()
        norm = self._gradients.norm
        try:
            squares = host_value(norm.total(self._gradients.all, self._gatherer.journal, self._schedule.digest))
        except DivergenceError:
            self._schedule.distrust()
            self._abandon_window()
            raise
        self._schedule.settle(norm.one_path, self.comm.gather_objects)
        if self._gatherer.look_ahead.searching:
            self._gatherer.look_ahead.settle(self.comm.gather_objects)
        self._norm, multiplier = norm_and_multiplier(squares, self._window_scale, self._config.gradient_clipping)
        groups, found = self.optimizer.param_groups, None
        if not math.isfinite(self._norm):
            found = self._nonfinite.look(self._updater, groups, multiplier, self._reporter.last_loss)
        self._applied = found is None or self._nonfinite.ignores
        if self._applied:
            self._updater.step(groups, multiplier, norm.absent(self._gradients.all))
            self._hooks.version += 1
        else:
            self.skipped_steps += 1
            self._hooks.version += any(finding.made for finding in found or ())
        self.global_steps += 1
        self.global_samples += self._batch.train
        self._end_window()
        if found is None:
            self._nonfinite.end()
        else:
            self._nonfinite.conclude(found, self.global_steps, self._norm, self.get_lr())
        if self._reporter.tells_of(self.global_steps):
            scale = self._scaler.scale if self._scaler.dynamic else None
            self._reporter.updated(Update(self.global_steps, self.global_samples, self.get_lr(), self._norm, scale))
        return self._applied

    def _gradient_scale(self) -> float:
        """What turns sums over ranks and micro-batches, of a scaled loss, into the mean gradient of the loss."""
        micro_batches = self._batch.accumulation if self._averaged is not False else 1
        loss_scale = self._scaler.scale if self._scaled else 1.0
        return self._gradients.policy.predivide / (loss_scale * self.comm.size * micro_batches)

    # The accumulation window.

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch at hand ends the window, so that `step()` will update."""
        return self._is_boundary(max(self._steps_in_window + 1, self._backwards_in_window))

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Decide by hand whether the next backward ends the window; None goes back to counting micro-batches."""
        self._forced_boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate only; the window ends with a backward outside."""
        before, self._forced_boundary = self._forced_boundary, False
        try:
            yield
        finally:
            self._forced_boundary = before

    def _is_boundary(self, micro_batch: int) -> bool:
        if self._forced_boundary is not None:
            return self._forced_boundary
        return micro_batch >= self._batch.accumulation

    def _end_window(self) -> None:
        self._backwards_in_window = self._steps_in_window = 0
        self._averaged = self._scaled = None
        self._reporter.last_loss = None
        self._gatherer.hold = False
        self._gatherer.journal = 0
        self._gatherer.stop_reading()
        self._gradients.end_window()
        self._hooks.end_window()
        self._gatherer.forget_near()
        # Weights gathered by a forward whose backward never came are out of date now.
        self._gatherer.release_all()

    def _drop_window(self) -> list[str]:
        """Forget the window's gradients. What has been updated from them already, by name."""
        self._gatherer.hold = False
        self._hooks.end_backward()
        changed = self._updater.abandon() if self._updater is not None else []
        self._gradients.drop()
        self._end_window()
        self._in_backward = False
        self._loss_is_scaled = False
        return changed

    def _abandon_window(self) -> None:
        """As `_drop_window`, after an exception, or at the end."""
        changed = self._drop_window()
        if changed and self._updater is not None:
            self._log.warning(
                "gradients are dropped that no step has ended, and the update policy in_backward has updated %d of %d "
                "parts of the model from them already: %s ...; to lose nothing go back to a checkpoint",
                len(changed), len(self._updater.batches), changed[0],
            )  # fmt: skip

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the window so far; its micro-batches are counted from the start again."""
        if not (self._backwards_in_window or self._hooks.backward_running):
            return
        changed = self._drop_window()
        if changed:
            raise WherryError(
                f"zero_grad: the update policy in_backward has updated {len(changed)} parts of the model from these "
                f"gradients already ({changed[0]} first), which is not taken back; set "
                '"wherry": {"update_policy": "before_use"}, or let no gradient come that is not wanted: '
                "engine.requires_grad_(False) around a loss that is for another model"
            )

    def zero_grad_of_loop(self) -> None:
        """A training loop's `optimizer.zero_grad()`. Loops call it for every micro-batch: within a window it waits."""
        if self._backwards_in_window >= self._batch.accumulation:
            self.zero_grad()

    # Training by iterator.

    def train_batch(self, data: Iterator[Any]) -> torch.Tensor:
        """One whole accumulation window from an iterator of micro-batches; returns the mean loss, detached."""
        if not hasattr(data, "__next__"):
            raise WherryError(
                f"train_batch: expected an iterator, got {type(data).__name__}; make one before the loop, as with "
                "data = iter(loader), so that each call goes on where the last one ended"
            )
        self._check_open()
        return self._accumulation.window(data)

    def _loss_of(self, batch: Any) -> torch.Tensor:
        if isinstance(batch, dict):
            output = self(**batch)
        else:
            output = self(*batch) if isinstance(batch, list | tuple) else self(batch)
        return _checked(output if isinstance(output, torch.Tensor) else next(tensors_in(output), None))

    def _window_begun(self) -> bool:
        """Whether micro-batches of this window have run already, or its end is decided by hand."""
        return bool(self._backwards_in_window or self._steps_in_window) or self._forced_boundary is not None

    def _to_device(self, batch: Any) -> Any:
        return with_tensors(batch, lambda tensor: tensor.to(self.device, non_blocking=True))

    def _come_to_rest(self) -> None:
        """Nothing is under way, and nothing is in memory that is not needed until the engine is used again."""
        if self._closed:
            self._check_open()
        if self._hooks.backward_running:
            self._abandon_window()
        if self._updater is not None:
            self._updater.rest()
            self._updater.stop_reading()
        self._gatherer.stop_reading()
        self._gatherer.release_all()
        self._gatherer.trim()
        self._gradients.rest()

    def _rest(self) -> None:
        self._check_open()
        if self._updater is not None:
            self._updater.rest()

    def settle(self) -> None:
        """Complete updates that are still under way, so that weights and state are those after the last step.

        Whoever reads weights or state need not call it. With delayed updates it is how training ends: the weights
        take the last update, which they otherwise do in the next step.
        """
        self._check_open()
        if self._updater is not None:
            if self._updater.policy.when == "delayed" and self._updater.publishes:
                self._updater.comm.meet("settle()")
            self._updater.complete()

    # What a checkpoint holds of the step.

    def _session(self) -> Session:
        module = self._modules["module"]  # as an attribute it would settle updates, a delayed one too early
        assert module is not None
        return Session(
            module=module,
            units=self.units,
            comm=world_of(self.topology),
            data=self.comm,
            tensor=self.topology.tensor,
            device=self.device,
            link=self._tiering.link,
            gatherer=self._gatherer,
            updater=self._updater,
            optimizer=self.optimizer,
            scaler=self._scaler,
            lr_scheduler=self.lr_scheduler,
            dataloader=self.training_dataloader,
            config=self.config,
            placement=[list(row) for row in self.placement.rows()],
            counts=Counts(
                self.global_steps,
                self.micro_steps - self._steps_in_window,
                self.skipped_steps,
                self.global_samples,
                self._norm,
                self._applied,
            ),
            left_out=self._left_out(),
            complete=self._gradients.boundary,
        )

    def _left_out(self) -> str | None:
        """What a checkpoint that is written now lacks, in words; None where there is nothing."""
        if not self._backwards_in_window:
            return None
        return (
            f"{self._backwards_in_window} of the {self._batch.accumulation} micro-batches of this accumulation window "
            "have run, and are not in it: it is of the last update, and the window begins anew where it is loaded"
        )

    def _go_on_from(self, counts: Counts) -> None:
        self.global_steps, self.micro_steps = counts.global_steps, counts.micro_steps
        self.global_samples = counts.samples
        self.skipped_steps, self._norm, self._applied = counts.skipped_steps, counts.norm, counts.applied
        if self._updater is not None:
            self._updater.steps_made = self.global_steps - self.skipped_steps

    # The end.

    def close(self) -> None:
        """Give everything back: hooks, gradients, optimizer state, gathered weights.

        Weights that are whole on every rank stay with the model, which is an ordinary module again. Partitioned ones
        are gone: save or gather them before. In a fork there is nothing to give back: it is all of the first process.
        """
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._process:
            return
        self._states = None
        ending.close(self)

    def unwrap(self) -> nn.Module:
        """Close, and give the model back whole: partitioned weights are gathered on every rank's host."""
        return ending.unwrap(self)

    @property
    def closed(self) -> bool:
        return self._closed

    def destroy(self) -> None:
        self.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise WherryError("this engine has been closed; call wherry.initialize again for a new one")
        if not self._offstage.empty:
            raise WherryError("this engine's states were sent away by offload_states(); call reload_states() first")

    def _refuse_fork(self, call: str) -> NoReturn:
        raise WherryError(
            f"{call}: this engine is of process {self._process}, and process {os.getpid()} is its fork, which has "
            "none of its threads, files and connections; train in the first process, or call wherry.initialize here"
        )


def _checked(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise WherryError(f"backward: expected a loss of one element, got {shape}; reduce it, as with loss.mean()")
    if not loss.requires_grad:
        raise WherryError(
            "backward: the loss has no gradient; was it computed under no_grad, or from detached outputs?"
        )
    return loss


def _synchronise(device: torch.device) -> Callable[[], object] | None:
    return None if device.type == "cpu" else lambda: torch.accelerator.synchronize(device)


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
