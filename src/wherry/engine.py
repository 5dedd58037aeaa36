"""The engine: forward, backward, step. It reads like the life of a step."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial, update_wrapper
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from wherry import memory_report
from wherry.activations import build as activations
from wherry.checkpoint.session import Checkpoints, Session, StepCounts, plain_tensors
from wherry.errors import DivergenceError, WherryError
from wherry.fake import faking
from wherry.life import Life, Lifetime
from wherry.memory_report import MemoryRow
from wherry.observe.log import get_logger
from wherry.observe.metrics import Monitor
from wherry.observe.reporter import Reporter, Update
from wherry.offload_states import OffloadedStates
from wherry.parallel.agreement import agree
from wherry.parallel.topology import world_of
from wherry.sharding.access import Access
from wherry.sharding.autograd import NO_TASK, backward_task, tensors_in, with_tensors
from wherry.sharding.hooks import Hooks
from wherry.sharding.layer_major import sums_in_fp32
from wherry.sharding.model_checks import (
    compile_for_training_only,
    refuse_cuda_graphs,
    refuse_engine,
    refuse_whole,
    uses_cuda_graphs,
)
from wherry.sharding.replicas import compare_replicas
from wherry.sharding.roster import Roster
from wherry.update import schedules
from wherry.update.loss_scale import LossScaler, norm_and_multiplier
from wherry.update.nonfinite import NonFinite
from wherry.update.optimizer import OptimizerSpec, ShardedOptimizer, options_described, resolve_optimizer
from wherry.update.parameter_states import ParameterStates
from wherry.window import Window

if TYPE_CHECKING:
    from wherry.config import BatchSizes, Config
    from wherry.offload import Offload
    from wherry.sharding.construct import Builder
    from wherry.sharding.gradients import Gradients
    from wherry.sharding.unit import Flat
    from wherry.sharding.weights import Gatherer
    from wherry.update.updater import Updater


class Engine(nn.Module):
    """A model, its optimizer and their placement. It is called like the model.

        loss = engine(inputs, targets)
        engine.backward(loss)
        engine.step()

    Attributes that the engine does not have are the model's.
    """

    CLOSED = "this engine has been closed; call wherry.initialize again for a new one"
    # What finds the optimizer of `initialize`, makes the schedule that a config names, and the loss scale.
    resolve_optimizer: Callable[..., OptimizerSpec | None] = staticmethod(resolve_optimizer)
    build_schedule: Callable[..., Any] = staticmethod(schedules.build)
    make_scaler: Callable[..., LossScaler] = staticmethod(lambda config: _scaler(config))

    def __init__(
        self,
        module: nn.Module,
        offload: Offload,
        builder: Builder,
        gatherer: Gatherer,
        gradients: Gradients,
        updater: Updater | None,
    ) -> None:
        super().__init__()
        config, topology, units = offload.config, offload.topology, gatherer.units
        self._modules["module"] = module
        self.placement = offload.placement
        self.topology = topology
        self.comm = topology.data
        self.device = topology.device
        self.units = units
        self.optimizer: ShardedOptimizer | None = None
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        self.global_steps = 0
        self.global_samples = 0
        self.micro_steps = 0
        self.skipped_steps = 0
        self.last_norm: float | None = None
        # Whether the last call of `step` has updated the weights.
        self._applied = False
        self._life = Lifetime(self.CLOSED)
        self._compare_every = config.wherry.compare_replicas
        self.settings = config
        self._builder = builder
        self._gatherer = gatherer
        self.flat_gradients = gradients
        self._updater = updater
        self._offload = offload
        self._offloaded = OffloadedStates(units, gatherer, gradients, updater, offload.link)
        self.scaler = self.make_scaler(config)
        major = config.wherry.accumulation == "layer_major"
        self.window = Window(
            config.batch(self.comm.size),
            self.comm.size,
            together=topology.context.size,
            layer_major=major,
            managed=config.managed_gradient_accumulation,
            summed=config.gradient_allreduce_op == "sum",
        )
        # The context of each forward, and whether its inputs become fp16.
        self._autocast = self.make_autocast()
        self._halves_inputs = config.fp16.enabled and config.fp16.auto_cast
        self._log = get_logger(topology.global_rank)
        synchronize = None if self.device.type == "cpu" else partial(torch.accelerator.synchronize, self.device)
        self._reporter = Reporter(config, topology.traffic, self._log, synchronize)
        self._nonfinite = NonFinite(config.nonfinite(), topology, units, gradients, self.scaler, self._log)
        beside = offload.policy.beside
        self._hooks = Hooks(
            module, units, gatherer, gradients, self, updates_beside=beside, layer_major=major,
            saves_by_hooks=config.activation_checkpointing.resolved_policy() != "none",
        )  # fmt: skip
        self._activations = activations.build(config, module, units, self._hooks.saved, topology, gatherer.gather)
        if offload.spec is not None:
            self.optimizer = self.make_optimizer(offload.spec.instance)
        self._checkpoints = Checkpoints(self._session, config)
        self._state_of = updater.states.state_of if updater is not None else {}
        self.access = Access(module, units, gatherer, self.comm, self._state_of, self.settle)
        self._take_stock()
        asked = config.wherry.profile
        if asked.recorded is not None and not faking():
            self.record_profile(asked.folder_in(config.wherry.run_dir), asked.traced, asked.recorded)

    def _take_stock(self) -> None:
        """Note the flats that units have now."""
        groups = self.param_groups()
        self._states = ParameterStates(self.access, self._state_of, groups, self.flat_gradients, self.topology)
        self._roster = Roster(self._model, self.units, {p for group in groups for p in group["params"]})

    def make_optimizer(self, instance: torch.optim.Optimizer) -> ShardedOptimizer:
        """What a training loop is given for the user's optimizer."""
        return ShardedOptimizer(instance, self.update, self.zero_grad_of_loop, lambda: self.states)

    def make_autocast(self) -> Callable[[], AbstractContextManager[Any]]:
        """Choose the context of each forward."""
        dtype = self.settings.autocast_dtype()
        return nullcontext if dtype is None else partial(torch.autocast, self.device.type, dtype)

    # Forward.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._life.free:
            self.check_open()
            if self._hooks.travels:
                self._life.check_process("forward")
        model = self._model
        if torch.compiler.is_compiling():
            refuse_engine()
        if model._compiled_call_impl is not None:
            refuse_whole(model)
        hooks = self._hooks
        if torch._C._functorch.peek_interpreter_stack() is not None:
            hooks.check_transforms()
        with hooks.turns.taken("forward"):
            if hooks.running[0] or hooks.backward.running:
                self.check_turn("forward")
            if self._halves_inputs:
                args, kwargs = with_tensors((args, kwargs), lambda t: t.half() if t.is_floating_point() else t)
            try:
                # Of forwards that run together no single one has a time.
                together = hooks.interleaver is not None
                phase = nullcontext() if together else self._reporter.phase("forward", self.global_steps + 1)
                with phase, self._autocast(), hooks.saved.around(), self._activations.forward():
                    return model(*args, **kwargs)
            except BaseException as error:
                self._explain_shortage(error, "forward")
                hooks.break_off()
                interleaver = hooks.interleaver
                if interleaver is None or not interleaver.stopping:  # else it is stopped because of another's error
                    self.comm.tell(error)
                raise

    def check_turn(self, call: str) -> None:
        """A call comes to what has not ended: another thread is inside of it, or it has failed without a word.

        What an exception has left behind is cleared here, and what is left of it for good is told.
        """
        hooks = self._hooks
        hooks.turns.check(call, forward=hooks.running[0] > 0, backward=hooks.backward.running)
        if hooks.running[0] and not hooks.turns.is_nested():
            hooks.break_off()  # by Ctrl-C, in a call of the model itself
        if hooks.backward.running and (call == "backward" or backward_task() == NO_TASK):
            self.drop_window()
        if self._updater is not None:
            self._updater.check_whole()

    def forward_begins(self) -> None:
        """Called by the model's hook. What an exception left behind is cleared here, so that this step is healthy."""
        if self._hooks.backward.running:
            self.drop_window()
        if self._updater is not None and self._updater.broken is not None:
            self._updater.check_whole()
        if torch.is_grad_enabled():
            if self._hooks.travels:
                self._roster.check_released()
            if self._roster.waiting:
                self._train_unfrozen()
        self._activations.begin()

    def _train_unfrozen(self) -> None:
        """Train parameters that the optimizer was given frozen and that require a gradient now.

        Lay out their flats anew, a unit at a time; trained flats stay as they are. Leave flats in use for a later call:
        within a window, inside `gathered`, and between a forward and its backward.
        """
        names = self._roster.unfrozen
        if not names or self.window.so_far or self._life.now is not Life.OPEN or self._in_use(self._unfrozen_flats()):
            return
        call, unfrozen = f"step {self.global_steps + 1}", self._unfrozen_flats()
        agree(self.topology, call, stage=[("the list of parameters that are no longer frozen", ", ".join(names))])
        self._flush()
        self._gatherer.drop_reads()
        for unit in self.units:
            flats: list[Flat] = []
            for flat in unit.flats:
                if flat in unfrozen:
                    self._gatherer.take_apart(flat)
                    flats += self._builder.split(unit, flat)
                else:
                    flats.append(flat)
            unit.hold(flats)
        self._gatherer.take_stock()
        self._choose_gradients([flat for unit in self.units for flat in unit.flats])
        self._hooks.take_stock()
        self.access.take_stock()
        self._take_stock()
        more = ", ..." if len(names) > 3 else ""
        self._log.info(
            "%s: %d frozen parameters are trained from here on: %s%s", call, len(names), ", ".join(names[:3]), more
        )

    def _unfrozen_flats(self) -> set[Flat]:
        frozen = (flat for unit in self.units for flat in unit.flats if not flat.trainable)
        return {flat for flat in frozen if any(parameter.requires_grad for parameter in flat.parameters)}

    def _in_use(self, flats: Iterable[Flat]) -> bool:
        """Tell whether somebody keeps any of them whole, or a backward to come has saved views of them."""
        awaited = self._hooks.awaits_backward
        return any(flat.pins or (awaited and not flat.resident) for flat in flats)

    def _choose_gradients(self, flats: Sequence[Flat]) -> None:
        policy = self._offload.gradient_policy(flats, self.window.batch.accumulation)
        self.flat_gradients.choose(policy, partial(self._offload.way_of, policy), flats)

    # Backward.

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Run the backward of `loss`. At the boundary every gradient is reduced when this returns.

        Gradients are averaged over the micro-batches of the window, unless `scale_wrt_gas` is False because the loss
        was divided already. A plain `loss.backward()` does the same as this with the defaults.
        """
        if not self._life.free:
            self.check_open()
        _checked(loss)
        self._backward([loss], retain_graph=retain_graph, averaged=scale_wrt_gas)
        return loss

    def _backward(self, losses: Sequence[torch.Tensor], *, retain_graph: bool = False, averaged: bool = True) -> None:
        """One backward of the sum of so many micro-batches' losses."""
        with self._hooks.turns.taken("backward"):
            self.begin_backward(micro_batches=len(losses), averaged=averaged)
            scaled = losses
            if self.scaler.scale != 1.0:
                scaled = [loss * self.scaler.scale for loss in losses]
            try:
                with self._reporter.phase("backward", self.global_steps + 1):
                    torch.autograd.backward(scaled, retain_graph=retain_graph)
                self._end_backward(makes_gradients=True)
            except BaseException as error:
                self._explain_shortage(error, "backward")
                self.comm.tell(error)
                self.drop_window()
                raise
        for loss in losses:
            self._reporter.loss(loss)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, for a backward of one's own: `engine.scale(loss).backward()`."""
        scaled = loss * self.scaler.scale
        scaled.register_hook(self._hooks.backward.notice_scaled)
        return scaled

    def backward_begins(self) -> None:
        """Called by a hook: the user's own `loss.backward()` has begun."""
        self.begin_backward(scaled=self._hooks.backward.scaled, makes_gradients=self._hooks.reaches_weights)

    def backward_ends(self) -> None:
        """Called by autograd, when the last gradient of the user's own backward has been computed."""
        if not self._hooks.backward.running:
            return
        try:
            self._end_backward(makes_gradients=self.flat_gradients.have_arrived)
        except WherryError:
            self.drop_window()
            raise

    def begin_backward(
        self,
        makes_gradients: Callable[[], bool] = lambda: True,
        *,
        micro_batches: int = 1,
        averaged: bool = True,
        scaled: bool = True,
    ) -> None:
        if not self._life.free:
            self._life.check_process("backward")
            self._life.check_not_generating("backward")
        hooks = self._hooks
        if hooks.running[0] or hooks.backward.running or hooks.turns.holder not in (0, get_ident()):
            self.check_turn("backward")
        try:
            boundary = self.window.begin_backward(
                micro_batches, averaged=averaged, scaled=scaled, loss_scale=self.scaler.scale, counts=makes_gradients
            )
        except WherryError:
            self.drop_window()
            raise
        if self._updater is not None:
            self._updater.begin_backward(self.param_groups(), self._gradient_scale(), boundary=boundary)
        hooks.begin_backward(boundary=boundary, micro_batches=micro_batches)

    def _end_backward(self, *, makes_gradients: bool) -> None:
        """Finish the reductions, release the weights. One for inputs only is no micro-batch of the window."""
        self._hooks.end_backward(reduces=makes_gradients)
        if not makes_gradients:
            if self._updater is not None:
                self._updater.cancel_backward()
            return
        self.flat_gradients.finish(self._gradient_scale(), self.window.own_scale_of(self.scaler.scale))
        self.window.end_backward()

    def _gradient_scale(self) -> float:
        return self.window.scale_of(self.scaler.scale, self.flat_gradients.policy.predivide)

    def misses_loss_scale(self) -> bool:
        """Tell whether the backward that begins is of a loss that lacks the dynamic scale."""
        hooks = self._hooks
        return self.scaler.dynamic and not hooks.backward.scaled and hooks.reaches_weights()

    def take_gradients(self, gradients: dict[torch.Tensor, torch.Tensor]) -> None:
        """Make these the gradients of a whole window, as a backward would that no hook sees."""
        self.begin_backward(averaged=False, micro_batches=self.gradient_accumulation_steps())
        for gradient in self.flat_gradients.all:
            gradient.put(gradients)
        self._end_backward(makes_gradients=True)

    def update_on_zeros(self) -> None:
        """Make the optimizer's states by an update on zero gradients, which counts as none."""
        updater, groups = self._updater, self.param_groups()
        assert updater is not None
        before = self.window.force(True)
        weights = [weight for group in groups for weight in group["params"] if weight.requires_grad]
        self.take_gradients({weight: torch.zeros_like(weight) for weight in weights})
        updater.step(groups, self._gradient_scale())
        updater.flush()
        updater.go_on_from(0)
        self._end_window()
        self.window.force(before)

    # Step.

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At the boundary update the weights, and move the learning rate schedule on; within a window only count.

        `lr_kwargs` go to the schedule's `step`. One that waits for a metric moves only when it is given here.
        """
        if not self._life.free:
            self.check_open()
        hooks = self._hooks
        with hooks.turns.taken("step"):
            updater = self._updater
            if hooks.running[0] or hooks.backward.running or (updater is not None and updater.broken is not None):
                self.check_turn("step")
            self.micro_steps += 1
            if not self.window.begin_step():
                self._applied = False
                return
            if self.optimizer is None:
                raise WherryError(
                    "step: this engine has no optimizer; give wherry.initialize an optimizer, or the config a block "
                    '"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}'
                )
            try:
                with self._reporter.phase("step", self.global_steps + 1):
                    self.optimizer.step()
            except BaseException as error:
                self.comm.tell(error)
                raise
            needs_metric = isinstance(self.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            if self._applied and self.lr_scheduler is not None and (lr_kwargs or not needs_metric):
                self.lr_scheduler.step(**(lr_kwargs or {}))

    def update(self) -> bool:
        """One update of all weights from the window's gradients. False if it was skipped for non-finite gradients."""
        updater, optimizer, window, turns = self._updater, self.optimizer, self.window, self._hooks.turns
        assert updater is not None and optimizer is not None
        if turns.holder != get_ident():  # this is `optimizer.step()`
            with turns.taken("step"), self._reporter.phase("step", self.global_steps + 1):
                self.check_turn("step")
                return self.update()
        if not window.backwards:
            self._applied = False
            self._log.warning("step %d: no backward came before it, so nothing is updated", self.global_steps + 1)
            self._end_window()
            return True
        if not self._life.free:
            self._life.check_process("step")
            self._life.check_not_generating("step")
        self._roster.check()
        if not updater.in_backward:  # else weights are compared before their first update, in the backward
            updater.take_edits()
        compares = self._compare_every and (self.global_steps + 1) % self._compare_every == 0 and not faking()
        if compares and not updater.in_backward:  # else updates are under way until the step
            if updater.policy.when != "delayed":  # whose weights stay as they are until then
                updater.flush()
            self._compare_ranks(f"step {self.global_steps + 1}")
        self.flat_gradients.complete_window()
        # One all-reduce gives the norm. Scale, clipping and overflow become one multiplier.
        norm, schedule = self.flat_gradients.norm, self._gatherer.schedule
        try:
            squares = norm.total(self.flat_gradients.all, self._gatherer.gather_digest, schedule.digest)
        except DivergenceError:
            schedule.differ()
            self.drop_window()
            raise
        schedule.settle(one_path=norm.one_path)
        self.last_norm, multiplier = norm_and_multiplier(
            squares, self.flat_gradients.scale, self.settings.gradient_clipping
        )
        groups, found = optimizer.param_groups, None
        if not math.isfinite(self.last_norm):
            found = self._nonfinite.look(updater, groups, multiplier, self._reporter.last_loss)
        self._applied = found is None or self._nonfinite.ignores
        try:
            if self._applied:
                updater.step(groups, multiplier, norm.absent(self.flat_gradients.all))
            else:
                self.skipped_steps += 1
            if self._applied or any(finding.made for finding in found or ()):
                self._hooks.weights_changed()
            self.global_steps += 1
            self.global_samples += window.samples
            self._end_window()
        except BaseException as error:
            if not isinstance(error, Exception):
                updater.interrupted(error)
            raise
        if found is None:
            self._nonfinite.end()
        else:
            self._nonfinite.conclude(found, self.global_steps, self.get_lr())
        if self._reporter.tells_of(self.global_steps):
            scale = self.scaler.scale if self.scaler.dynamic else None
            self._reporter.updated(Update(self.global_steps, self.global_samples, self.get_lr(), self.last_norm, scale))
        if compares and updater.in_backward:
            updater.flush()
            self._compare_ranks(f"step {self.global_steps}")
        return self._applied

    def keep(self, handles: Iterable[RemovableHandle]) -> None:
        """Undo these with the engine's own hooks."""
        self._hooks._handles += handles

    def weights_version(self) -> Hashable:
        """Changes with the weights; None once there are none."""
        if self.closed:
            return None
        updated = self._updater is not None and self._updater.in_backward and self.window.backwards > 0
        return self._hooks._version, updated and self.window.complete

    # The accumulation window.

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch at hand ends the window, so that `step()` will update."""
        return self.window.ends_next()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Decide by hand whether the next backward ends the window; None goes back to counting micro-batches."""
        self.window.force(is_boundary)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate only; the window ends with a backward outside."""
        before = self.window.force(False)
        try:
            yield
        finally:
            self.window.force(before)

    def _end_window(self) -> None:
        self._reporter.end_window()
        self.flat_gradients.end_window()
        self._hooks.end_window()
        self._gatherer.end_window()
        self.window.reset()  # last: who is interrupted before has a window to drop

    def drop_gradients(self) -> list[str]:
        """Drop the window's gradients. What has been updated from them already, by name."""
        self._hooks.end_backward()
        changed = self._updater.drop() if self._updater is not None else []
        self.flat_gradients.drop()
        self._end_window()
        return changed

    def drop_window(self) -> None:
        """As `_drop_gradients`, after an exception, or at the end."""
        if self.drop_gradients() and self._updater is not None:
            self._log.warning("%s", self._updater.broken)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the window so far; its micro-batches are counted from the start again."""
        self.check_turn("zero_grad")
        if not self.window.so_far:
            return
        changed = self.drop_gradients()
        if changed:
            raise WherryError(
                f"zero_grad: the update policy in_backward has updated {len(changed)} parts of the model from these "
                f"gradients already ({changed[0]} first), which is not taken back; set "
                '"wherry": {"update_policy": "before_use"}, or let no gradient come that is not wanted: '
                "engine.requires_grad_(False) around a loss that is for another model. To train on with the weights as "
                "they are now, call engine.accept_partial_update()"
            )

    def accept_partial_update(self) -> list[str]:
        """Train on with the weights as they are, though a step that did not end has updated parts of the model.

        Only the update policy in_backward leaves such; until this call, or `load_checkpoint`, nothing goes on. Every
        rank makes it. Returns the names of the parts.
        """
        self.check_open()
        with self._hooks.turns.taken("accept_partial_update()"):
            if self._hooks.backward.running:
                self.drop_window()
            world = world_of(self.topology)
            world.meet("accept_partial_update()")
            updater = self._updater
            left = world.gather_objects(updater.left() if updater is not None else ([], [], None))
            for _, _, failed in left:
                if failed is not None:
                    raise WherryError(failed)
            if updater is not None:
                updater.publish_left({name for _, pending, _ in left for name in pending})
                # Where each rank updates a copy by itself, one may have come further than another.
                compare_replicas(self.units, self.topology, "accept_partial_update()")
                updater.made_whole()
            self._hooks.weights_changed()
            return list(dict.fromkeys(name for changed, _, _ in left for name in changed))

    def zero_grad_of_loop(self) -> None:
        """A training loop's `optimizer.zero_grad()`. Loops call it for every micro-batch: within a window it waits."""
        if self.window.complete or self._hooks.backward.running:
            self.zero_grad()
        elif self._updater is not None:
            self._updater.check_whole()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Train on with more or fewer micro-batches in a window, as a schedule of growing batches does.

        Every rank makes the call, between windows. The micro-batch stays, so the loader does as well.
        """
        self._resize(self.window.of_train_batch(train_batch_size), "set_train_batch_size()")

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Say that micro-batches are of another size from here on, with as many of them in a window.

        Every rank makes the call, between windows. A loader that has been made keeps its size.
        """
        self._resize(self.window.of_micro_batch(micro_batch_size), "set_train_micro_batch_size()")

    def _resize(self, batch: BatchSizes, call: str) -> None:
        self.window.check_between()
        if batch == self.window.batch:
            return
        world_of(self.topology).meet(call)
        self.window.resize(batch)
        if (batch.accumulation > 1) is self.flat_gradients.policy.accumulates:
            return
        # Windows of one micro-batch, and of more, have sums of another type and in another place.
        self._choose_gradients([gradient.flat for gradient in self.flat_gradients.all])

    # Training by iterator.

    def train_batch(self, data: Iterator[Any]) -> torch.Tensor:
        """One whole accumulation window from an iterator of micro-batches; returns the mean loss, detached."""
        self.check_open()
        with self._hooks.turns.taken("train_batch"):
            batches = self.window.take(data)
            if self.window.layer_major:
                found = self.backward_together([partial(self._loss_of, self._to_device(batch)) for batch in batches])
                self.step()
                losses = [loss.detach() for loss in found]
            else:
                losses = []
                for batch in batches:
                    loss = self._loss_of(self._to_device(batch))
                    self.backward(loss)
                    self.step()
                    losses.append(loss.detach())
        return sum(losses[1:], losses[0]) / len(losses)

    @property
    def layer_major(self) -> bool:
        """Whether the micro-batches of a window run together, by `train_batch` or `backward_together`."""
        return self.window.layer_major

    def backward_together(
        self, forwards: Sequence[Callable[[], torch.Tensor]], scale_wrt_gas: bool = True
    ) -> list[torch.Tensor]:
        """The losses that `forwards` of the model return, which all go through a unit before the next, after one
        backward of them all. It is for layer-major windows; `step()` comes next.
        """
        self.check_open()
        with self._hooks.turns.taken("backward_together"):
            with self._reporter.phase("forward", self.global_steps + 1):
                losses = self._hooks.run_layer_major(forwards)
            with sums_in_fp32(self.units):
                self._backward(losses, averaged=scale_wrt_gas)
            self.micro_steps += len(losses) - 1
        return losses

    def _loss_of(self, batch: Any) -> torch.Tensor:
        if isinstance(batch, dict):
            output = self(**batch)
        else:
            output = self(*batch) if isinstance(batch, list | tuple) else self(batch)
        return _checked(output if isinstance(output, torch.Tensor) else next(tensors_in(output), None))

    def _to_device(self, batch: Any) -> Any:
        return with_tensors(batch, lambda tensor: tensor.to(self.device, non_blocking=True))

    # Between steps.

    def settle(self) -> None:
        """Complete updates that are still under way, so that weights and state are those after the last step.

        Calls that read weights or state do so by themselves. With delayed updates it is how training ends: the weights
        take the last update, which they otherwise do in the next step.
        """
        self._check_whole("settle()")
        self._flush()

    def _flush(self) -> None:
        if self._updater is not None:
            if self._updater.policy.when == "delayed" and self._updater.pending:
                self._hooks.weights_changed()
            self._updater.flush()

    @contextmanager
    def gathered_for_generation(self) -> Iterator[None]:
        """As `wherry.gathered_for_generation(engine)`."""
        self.check_open()
        if self._hooks.travels:
            self._life.check_process("gathered_for_generation")
        if self._hooks.backward.running:
            raise WherryError("gathered_for_generation: a backward is running; enter it between steps")
        before = self._life.now
        with self.access.held_whole("gathered_for_generation()"):
            self._life.become(Life.GENERATING)
            try:
                yield
            finally:
                if not self.closed:
                    self._life.become(before)

    def is_generating(self) -> bool:
        """Whether weights are held whole, by `gathered_for_generation`."""
        return self._life.now is Life.GENERATING

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
        if self._life.now is not Life.OFFLOADED:
            self.check_open()
            self._life.check_not_generating("offload_states")
        chosen = self._offloaded.chosen(include, device)
        self.check_turn("offload_states()")
        self._flush()
        try:
            return self._offloaded.offload(chosen)
        finally:
            if self._offloaded.nbytes:
                self._life.become(Life.OFFLOADED)

    def offloaded_states(self) -> list[str]:
        """The states that `offload_states` has sent away, and that are not back."""
        return list(self._offloaded.nbytes)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring what `offload_states` has sent away back to the device."""
        if self._life.now is Life.OFFLOADED:
            self._offloaded.reload()
            self._life.become(Life.OPEN)

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
        call, frozen = "save_checkpoint()", exclude_frozen_parameters
        with self._hooks.turns.taken(call):
            self.meet(call)
            self._roster.check()
            self._compare_ranks(call)
            self._checkpoints.save(save_dir, tag, client_state, latest=save_latest, exclude_frozen=frozen)
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
        Without its optimizer's states counts are the checkpoint's all the same, and masters are its weights, rounded
        if `wherry.round_masters` is set; `load_module_only` leaves the counts as they are.
        """
        from wherry.checkpoint.load import LoadOptions

        states = load_optimizer_states and not load_module_only
        schedule = load_lr_scheduler_states and not load_module_only
        # The masters of a universal checkpoint are loaded as they are, as DeepSpeed does.
        rounded = self.settings.wherry.round_masters and not (states or self.settings.checkpoint.load_universal)
        options = LoadOptions(load_module_strict, states, schedule, not load_module_only, rounded)
        self.check_open()
        with self._hooks.turns.taken("load_checkpoint()"):
            world_of(self.topology).meet("load_checkpoint()")
            if self._hooks.backward.running:
                self.drop_window()  # of updates that it has made, the next line is to know
            self._end_updates_for_load()
            if states and self.window.so_far:
                self.drop_window()  # whose gradients no update reads any more
            self._train_unfrozen()  # whose state the checkpoint may have
            try:
                loaded = self._checkpoints.load(load_dir, tag, options)
                self._gatherer.forget_near()
                if loaded is None:
                    return None, None
                if (counts := loaded.counts) is not None:
                    self.global_steps, self.micro_steps = counts.global_steps, counts.micro_steps
                    self.global_samples, self.skipped_steps = counts.samples, counts.skipped_steps
                    self.last_norm, self._applied = counts.norm, counts.applied
                    if self._updater is not None:
                        self._updater.go_on_from(self.global_steps - self.skipped_steps)
            except BaseException as error:
                if self._updater is not None and not isinstance(error, Exception):
                    self._updater.interrupted(error)  # it may have changed some of all that it changes
                raise
        if self._updater is not None and states and load_module_strict:
            self._updater.made_whole()
        return str(loaded.path), loaded.client_state

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
        dtype: torch.dtype | None = None,
    ) -> bool:
        """Write the working weights alone, or these in `dtype`, as transformers loads them; every rank calls it.

        Files are of 5 GB at most, with an index; a unit at a time is in memory. For a name that ends in .bin or .pt
        it is one file of torch.save's, for which rank 0 holds the whole model.
        """
        self.meet("save_16bit_model()")
        self._roster.check()
        compare_replicas(self.units, self.topology, "save_16bit_model()")
        self._checkpoints.save_model(Path(save_dir), save_filename, dtype, exclude_frozen=exclude_frozen_parameters)
        return True

    def consolidated_state_dict(
        self, dtype: torch.dtype | None = None, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """The whole model on rank 0's host, None on the other ranks; every rank calls it.

        Weights are the working ones, or in `dtype`; torch.float32 gives the masters.
        """
        self.meet("consolidated_state_dict()")
        return self._checkpoints.consolidated(dtype, exclude_frozen=exclude_frozen_parameters)

    def _end_updates_for_load(self) -> None:
        """Updates are completed; but where one has failed on any rank, a load is what makes weights and state whole."""
        if self._updater is None:
            return
        if any(world_of(self.topology).gather_objects(self._updater.broken is not None)):
            self._updater.give_up_for_load()
        else:
            self._flush()

    def _compare_ranks(self, call: str) -> None:
        """Raise where ranks hold other weights than they should, or have come to other options of their updates."""
        compare_replicas(self.units, self.topology, call)
        agree(self.topology, call, stage=options_described(self.param_groups()))

    def _check_whole(self, call: str) -> None:
        """What is read or written is of one step."""
        self.check_open()
        self.check_turn(call)

    def meet(self, call: str) -> None:
        """What all ranks call together begins here: where all can, and have come to the same call."""
        try:
            self._check_whole(call)
        except WherryError as error:
            self.comm.tell(error)  # the others wait there
            raise
        world_of(self.topology).meet(call)
        self._flush()
        self._train_unfrozen()

    def _session(self) -> Session:
        window = self.window
        return Session(
            module=self._model,
            units=self.units,
            comm=world_of(self.topology),
            data=self.comm,
            tensor=self.topology.tensor,
            device=self.device,
            link=self._offload.link,
            gatherer=self._gatherer,
            updater=self._updater,
            optimizer=self.optimizer,
            scaler=self.scaler,
            lr_scheduler=self.lr_scheduler,
            dataloader=self.training_dataloader,
            config=self.config,
            placement=[list(row) for row in self.placement.rows()],
            counts=StepCounts(
                self.global_steps,
                self.micro_steps - window.steps,
                self.skipped_steps,
                self.global_samples,
                self.last_norm,
                self._applied,
            ),
            micro_batches=window.so_far,
            accumulation=window.batch.accumulation,
            complete=self.has_gradients(),
        )

    @property
    def saves_behind(self) -> bool:
        """Tell whether checkpoints are saved in the background."""
        return self._checkpoints.behind

    def plain_tensors(self) -> dict[str, torch.Tensor]:
        """Return what the module's state holds beside trained and frozen weights."""
        return plain_tensors(self._session())

    # What people ask.

    @property
    def module(self) -> nn.Module:
        """The model. Whoever takes it may read its weights, so updates that are changing them end first."""
        # A delayed one has not begun to.
        updater = self._updater
        if updater is not None and updater.policy.when != "delayed" and not (self._hooks.busy or updater.broken):
            updater.flush()
        return self._model

    @property
    def closed(self) -> bool:
        return self._life.now is Life.CLOSED

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
        self.settle()
        return self._states

    def has_gradients(self) -> bool:
        """Whether the boundary's backward has run and its gradients are still there."""
        return self.flat_gradients.complete and self.window.backwards > 0

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last window's gradients, before clipping; None before the first update."""
        return self.last_norm

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> None:
        """Raise an error that names the config's key: clipping is part of the update.

        `torch.nn.utils.clip_grad_norm_` finds no `.grad` on an engine's parameters, and does nothing.
        """
        self._refuse_clipping("clip_grad_norm_", f"set that to {max_norm}")

    def clip_grad_value_(self, clip_value: float, foreach: bool | None = None) -> None:
        """Raise an error, as `clip_grad_norm_` does: the update clips by the norm, and not each value."""
        self._refuse_clipping("clip_grad_value_", "use that, as single values are not clipped,")

    def _refuse_clipping(self, call: str, advice: str) -> NoReturn:
        raise WherryError(
            f'{call}: step() clips the norm, to the "gradient_clipping" of the config, which is '
            f"{self.settings.gradient_clipping}; {advice} and leave the call out. "
            "engine.get_global_grad_norm() is the norm before it"
        )

    def was_step_applied(self) -> bool:
        return self._applied

    def gradients(self, name: str) -> torch.Tensor:
        """The whole mean gradient of a parameter, in fp32, from the boundary's backward until the next window begins.

        Every rank must call it.
        """
        return self._states.gradient(name)

    def gradient_norms(self) -> dict[str, float]:
        """The norm of the last window's gradients by unit, before clipping. Every rank must call it."""
        return self.flat_gradients.norms(self.units)

    def memory(self) -> list[MemoryRow]:
        """Bytes by state and tier on this rank: what the placement comes to, and what is held now."""
        return memory_report.rows(self.units, self.flat_gradients, self._updater, self._offload, self._offloaded.nbytes)

    def record_profile(
        self,
        folder: str | os.PathLike[str],
        steps: range = range(0),
        memory_step: int | None = None,
        *,
        told: bool = True,
    ) -> None:
        """Write to a folder where time and memory go in steps to come: a Chrome trace of `steps`, and memory over one.

        As the config's `wherry.profile`, whose place it takes. `told`: a line of the log says where the files are, and
        on a GPU torch's snapshot is one of them.
        """
        from wherry.observe.profile import Profile
        from wherry.observe.timeline import Account

        parts = self.units, self.flat_gradients, self._updater
        account = Account(
            self._model,
            self.device,
            self.units,
            partial(memory_report.in_buffers_too, *parts, self._offload),
            partial(memory_report.tensors_of, *parts),
            self.memory,
        )
        self._reporter.profile = Profile(account, Path(folder), steps, memory_step, self._log, told=told)

    def get_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self.param_groups()]

    def get_mom(self) -> list[Any]:
        return [group.get("betas", group.get("momentum")) for group in self.param_groups()]

    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups if self.optimizer is not None else []

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config, as JSON holds it."""
        return self.settings.to_dict()

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
        return self.scaler.scale

    def train_batch_size(self) -> int:
        return self.window.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.window.batch.micro

    def gradient_accumulation_steps(self) -> int:
        return self.window.batch.accumulation

    def gradient_clipping(self) -> float:
        return self.settings.gradient_clipping

    def zero_optimization(self) -> bool:
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        return self.settings.zero_optimization.stage

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        return self.settings.zero_optimization.stage3_gather_16bit_weights_on_model_save

    @property
    def working_dtype(self) -> torch.dtype | None:
        """The dtype that the config gives the working weights; None where it leaves the model as it is."""
        return self.settings.working_dtype()

    def fp16_enabled(self) -> bool:
        return self.settings.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        return self.settings.bf16.enabled

    def steps_per_print(self) -> float | None:
        return self.settings.steps_per_print

    # torch.compile.

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        **options: Any,
    ) -> None:
        """torch.compile for each block by itself: gathers, releases and reductions stay between the graphs.

        `options` are those of torch.compile. A model compiled as a whole is refused. Modes "default" and
        "max-autotune-no-cudagraphs" go with every placement; CUDA graphs ("reduce-overhead", "max-autotune") only with
        weights and activations that stay on the device, at stages 0 to 2, and blocks run uncompiled under no_grad then.

            engine.compile(mode="max-autotune-no-cudagraphs")
        """
        self.check_open()
        if schedule is not None:
            raise WherryError("compile: a schedule of passes is not offered; blocks are compiled as they are")
        modules = self._blocks()
        if not modules:
            raise WherryError(
                "compile: this model has no blocks to compile one by one; name their classes in the config, as in "
                '"wherry": {"unit_classes": ["Block"]}'
            )
        arguments = {"backend": backend, **(compile_kwargs or {}), **options}
        graphs = uses_cuda_graphs(**arguments)
        if graphs:
            refuse_cuda_graphs(arguments, self.settings, self.topology, modules)
        for module in modules:
            module.compile(**arguments)
            if graphs:
                compile_for_training_only(module)

    @property
    def is_compiled(self) -> bool:
        return any(module._compiled_call_impl is not None for module in self._blocks())

    def _blocks(self) -> list[nn.Module]:
        """What is compiled: the modules of all units but the root."""
        return list(dict.fromkeys(module for unit in self.units if not unit.root for module in unit.modules))

    # The model behind the engine.

    @property
    def _model(self) -> nn.Module:
        """The model as it is: updates of its weights may be under way."""
        model = self._modules["module"]
        assert model is not None
        return model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules", {})
            if "module" not in modules or name == "module":
                raise
            value = getattr(modules["module"], name)
            if getattr(value, "__self__", None) is modules["module"] and self._hooks.travels:
                return update_wrapper(partial(self._call, value), value)
            return value

    def _call(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """A method of the model, called through the engine, as in `engine.encode(x)`."""
        self.check_open()
        with self._hooks.turns.taken(method.__name__):
            try:
                return self._hooks.call(method, args, kwargs)
            except BaseException as error:
                self.comm.tell(error)
                raise

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Engine:
        self._model._apply(fn, recurse)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise WherryError(
            "an engine cannot be copied or pickled, as it holds what its process has open. Copy its model: with "
            "wherry.gathered(engine.module): copy = copy.deepcopy(engine.module), on every rank; or save with "
            "engine.save_checkpoint(folder)"
        )

    # Its end.

    def check_open(self) -> None:
        self._life.check_open()

    def _explain_shortage(self, error: BaseException, phase: str) -> None:
        policy = self.settings.activation_checkpointing.resolved_policy()
        memory_report.explain_shortage(error, phase, self.device, self.memory, policy, self.window.batch.micro)

    def close(self) -> None:
        """Give everything back: hooks, gradients, optimizer state, gathered weights.

        Weights that are whole on every rank stay with the model, which is an ordinary module again. Partitioned ones
        are gone: save or gather them before. In a fork there is nothing to give back: it is all of the first process.
        """
        if self.closed:
            return
        self._life.become(Life.CLOSED)
        if self._life.forked:
            return
        # In this order, whatever of it fails; then the last error is raised, with the others.
        parts = [
            self._settle_last,
            self._checkpoints.close,
            self._gatherer.give_up,
            self.drop_window,
            self._reporter.close,
            self._hooks.remove,
            self._roster.close,
            self._activations.close,
            self.access.close,
            self._offloaded.close,
            *([self._updater.close] if self._updater is not None else []),
            *([self.optimizer.close] if self.optimizer is not None else []),
            self.flat_gradients.close,
            *(flat.close for unit in self.units for flat in unit.travelling),
            self.units.clear,
            self._offload.close,
            self.topology.close,
        ]
        with ExitStack() as end:
            for part in reversed(parts):
                end.callback(part)

    def _settle_last(self) -> None:
        if self._updater is not None and self.comm.size == 1:
            with suppress(WherryError):  # an update that failed was told of before, or is lost with the rest
                self._updater.settle()

    def unwrap(self) -> nn.Module:
        """Close, and give the model back whole: partitioned weights are gathered on every rank's host."""
        self.settle()
        model = self.module
        whole = self.access.on_host("unwrap()")
        self.close()
        for give in whole:
            give()
        return model

    def destroy(self) -> None:
        self.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _scaler(config: Config) -> LossScaler:
    if config.scales_loss() and not config.fp16.enabled:  # autocast's: as torch.amp.GradScaler
        return LossScaler(2.0**16, dynamic=True, window=2000, hysteresis=1, min_scale=config.fp16.min_loss_scale)
    return LossScaler.from_config(config.fp16)


def _checked(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise WherryError(f"backward: expected a loss of one element, got {shape}; reduce it, as with loss.mean()")
    if not loss.requires_grad:
        raise WherryError(
            "backward: the loss has no gradient; was it computed under no_grad, or from detached outputs?"
        )
    return loss
