"""What makes an unmodified model gather, release and reduce: hooks on its modules, outputs and parameters."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from wherry.errors import WherryError
from wherry.sharding.autograd import NO_TASK, accumulates, backward_task, tensors_in
from wherry.sharding.flat_gradient import FlatGradient
from wherry.sharding.gradients import Gradients
from wherry.sharding.layer_major import Interleaver
from wherry.sharding.saved import FrozenCalls, SavedWeights
from wherry.sharding.turns import Turns
from wherry.sharding.unit import Flat, Unit
from wherry.sharding.watched_params import Hook, WatchedParameters
from wherry.sharding.weights import Gatherer, Pass

T = TypeVar("T")


class Phases(Protocol):
    """What the hooks tell the engine."""

    def forward_begins(self) -> None: ...

    def backward_begins(self) -> None: ...

    def backward_ends(self) -> None: ...


class Hooks:
    """Installs the hooks of all units on a model, and takes them off again."""

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        gatherer: Gatherer,
        gradients: Gradients,
        phases: Phases,
        *,
        updates_beside: bool = False,
        layer_major: bool = False,
        saves_by_hooks: bool = False,
    ) -> None:
        """`saves_by_hooks`: activations are recomputed or offloaded, by hooks on what autograd saves."""
        self.model = model
        # Whether a unit may be used while its update is still under way.
        self.updates_beside = updates_beside
        self.units = units
        self.root = units[0]
        self.gatherer = gatherer
        self.gradients = gradients
        self.schedule = gatherer.schedule
        self.phases = phases
        # The forwards that run together, if any do.
        self.interleaver: Interleaver | None = None
        self.backward = gradients.backward
        # How many forwards of each unit's modules are running, nested ones and recursion included.
        self.running = [0] * len(units)
        self.saved = SavedWeights(units, gatherer)
        self._frozen = FrozenCalls(gatherer)
        self._handles: list[RemovableHandle] = []
        # The units of parameters whose reads are watched.
        self._unit_of: dict[nn.Parameter, Unit] = {}
        self._home: dict[Flat, Unit] = {}
        # The gradients of each unit, by their places among all.
        self._places: dict[Unit, list[int]] = {}
        self._note_places()
        # The units that each forward has run whose backward may still come, the oldest first.
        self._awaited: list[set[Unit]] = []
        self.turns = Turns(model, gatherer.link.device)
        # Threads whose forward was refused: torch tells the hooks behind it nevertheless.
        self._refused: set[int] = set()
        # How many other methods of the model are running that were called through the engine.
        self._calling = 0
        # How often the weights have been updated. A backward needs them as they were in its forward.
        self._version = 0
        # Whether any weights do not stay whole.
        self.travels = any(unit.travelling for unit in units)
        # Whether this rank may pass over units whose collectives the others run.
        self._passes_over = gradients.comm.size > 1 and any(unit.travelling and not unit.root for unit in units)
        self._saves_by_hooks = saves_by_hooks
        self._install(layer_major=layer_major)

    def _note_places(self) -> None:
        self._home = {flat: unit for unit in self.units for flat in unit.flats}
        self._places = {}
        for place, gradient in enumerate(self.gradients.all):
            self._places.setdefault(self._home[gradient.flat], []).append(place)

    def take_stock(self) -> None:
        """Note the flats that units have now, and their gradients."""
        self._note_places()
        self.saved.take_stock()

    # Installation.

    def _install(self, *, layer_major: bool) -> None:
        # Root hooks come first in the forward and last after it, whatever else is on the module.
        self._keep(self.model.register_forward_pre_hook(Hook(self._root_pre_forward, compiles=True), prepend=True))
        for unit in self.units:
            if unit.travelling or self.updates_beside:
                self._install_unit(unit)
            elif layer_major and not unit.root:
                # Forwards that run together stop at every unit, at those that never move as well.
                for module in unit.modules:
                    turn = Hook(partial(self._pre_forward_of_resident, unit))
                    self._keep(module.register_forward_pre_hook(turn, prepend=True))
        self._keep(self.model.register_forward_hook(Hook(self._root_post_forward, compiles=True), always_call=True))
        self.gradients.watch(weakref.ref(self))
        if self.travels or self.updates_beside:
            self._watch_parameters()

    def _install_unit(self, unit: Unit) -> None:
        wants_inputs = any(not flat.trainable for flat in unit.travelling)
        for module in unit.modules:
            if module is self.model:
                continue
            self._keep(module.register_forward_pre_hook(Hook(partial(self._pre_forward, unit)), prepend=True))
            if wants_inputs:
                post = Hook(partial(self._post_forward_with_inputs, unit))
                self._keep(module.register_forward_hook(post, always_call=True, with_kwargs=True))
            else:
                post = Hook(partial(self._post_forward, unit))
                self._keep(module.register_forward_hook(post, always_call=True))

    def _watch_parameters(self) -> None:
        flats_of = {unit: unit.flats if self.updates_beside else unit.travelling for unit in self.units}
        self._unit_of = {p: unit for unit, flats in flats_of.items() for flat in flats for p in flat.parameters}
        for module in self.model.modules():
            if any(parameter in self._unit_of for parameter in module._parameters.values()):
                module._parameters = WatchedParameters(module._parameters, self)

    def _keep(self, handle: RemovableHandle) -> None:
        self._handles.append(handle)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._unit_of.clear()
        for module in self.model.modules():
            if isinstance(module._parameters, WatchedParameters):
                module._parameters = dict(module._parameters)

    def is_whole(self, parameter: nn.Parameter) -> bool:
        unit = self._unit_of.get(parameter)
        return unit is None or unit.whole

    @property
    def busy(self) -> bool:
        """Whether a forward or a backward of the model is running."""
        return bool(self.running[self.root.index]) or self.backward.running

    @property
    def awaits_backward(self) -> bool:
        """Tell whether a forward of this window has had no backward yet."""
        return bool(self._awaited)

    # Forward.

    def _root_pre_forward(self, module: nn.Module, args: Any) -> None:
        root = self.root
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self._refused.add(get_ident())
            self.check_transforms()
            self._refused.remove(get_ident())
        if self.interleaver is None and backward_task() == NO_TASK:
            turns, me = self.turns, get_ident()
            inside = self.running[root.index] and turns.forward != me
            if inside or self.backward.running or turns.holder not in (0, me):
                self._check_turn()
            if self.running[root.index] == 0:
                self._begin_forward()
                self.running = [0] * len(self.units)
                turns.forward = me
        self.running[root.index] += 1
        if root.travelling or self.updates_beside:
            self.gatherer.gather(root)

    def check_transforms(self) -> None:
        """Refuse the transforms of torch.func that gathers, or saved-tensor hooks, cannot run in; vmap is none."""
        kinds = {interpreter.key().name for interpreter in torch._C._functorch.get_interpreter_stack() or ()}
        if self.travels and kinds & {"Grad", "Jvp"}:
            why, cure = "gathers partitioned weights in place", 'set "zero_optimization": {"stage": 2} or less'
        elif self._saves_by_hooks and "Grad" in kinds:
            why, cure = "keeps activations by saved-tensor hooks", 'leave out "activation_checkpointing"'
        else:
            return
        raise WherryError(
            f"forward: torch.func.{{grad, vjp, jvp, jacrev, jacfwd, hessian}} do not support an engine that {why}; "
            f"{cure}, or use torch.autograd.grad or torch.autograd.functional, which do, as torch.vmap and "
            "torch.func.functional_call do"
        )

    def _check_turn(self) -> None:
        """A forward begins where another has not ended, or a backward: a thread is inside, or they have failed."""
        try:
            self.turns.check("forward", forward=self.running[self.root.index] > 0, backward=self.backward.running)
        except WherryError:
            self._refused.add(get_ident())
            raise
        if self.turns.forward != get_ident():
            self.break_off()

    def _root_post_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        root = self.root
        if self._refused and get_ident() in self._refused:
            self._refused.remove(get_ident())  # it has not begun
            return
        self.running[root.index] = max(0, self.running[root.index] - 1)
        if self.running[root.index] or backward_task() != NO_TASK:
            return
        begins = partial(self._root_pre_backward, self._version)
        awaits_backward = self._hook_outputs(output, begins)
        if self.interleaver is not None:
            return
        if output is None and sys.exc_info()[0] is not None:
            self.schedule.drop()
        self._end_forward()
        if not awaits_backward:
            for unit in self.units:
                if unit.shared:
                    self.gatherer.release(unit)

    def break_off(self) -> None:
        """A forward has ended by what torch tells no hook of, as it does of an Exception: Ctrl-C is none."""
        if self.interleaver is not None or backward_task() != NO_TASK or not any(self.running):
            return
        self.running = [0] * len(self.units)
        self.schedule.drop()
        self.gatherer.release_all()

    def _pre_forward_of_resident(self, unit: Unit, module: nn.Module, args: Any) -> None:
        self._reach(unit)

    def _reach(self, unit: Unit) -> bool:
        """A forward comes to a unit that it is not inside of. True for the first of those that run together."""
        if unit.root or backward_task() != NO_TASK:
            return False
        if self.interleaver is None:
            return True
        first = self.interleaver.reach(unit)
        if not torch.is_grad_enabled():
            self._frozen.ran_without_graph(unit)
        return first

    def _pre_forward(self, unit: Unit, module: nn.Module, args: Any) -> None:
        first = not self.running[unit.index] and self._reach(unit)
        self.running[unit.index] += 1
        if self.running[unit.index] > 1:
            return
        if first:
            if self._awaited and self.schedule.running is Pass.FORWARD:
                self._awaited[-1].add(unit)
            self._need(unit)
        elif unit.root or backward_task() == NO_TASK:
            self.gatherer.gather(unit)
        else:  # a recomputation
            self._need_in_backward(unit)

    def _need(self, unit: Unit) -> None:
        """`unit` is needed now; the ones that were expected before it are not."""
        for skipped in self.schedule.reach(unit):
            self._stand_in(skipped)
        self.gatherer.gather(unit)
        self.gatherer.prefetch()

    def _begin_forward(self) -> None:
        self.phases.forward_begins()
        self.schedule.begin(Pass.FORWARD if torch.is_grad_enabled() else Pass.LOOK)
        if torch.is_grad_enabled():
            self._awaited.append(set())

    def _end_forward(self) -> None:
        for skipped in self.schedule.end():
            self._stand_in(skipped)

    def _stand_in(self, unit: Unit) -> None:
        """Take part in the collectives of a unit that the model has passed over: other ranks may use it."""
        backward = self.backward.running
        # Gradients of a unit that has run may still come, in another order than was expected.
        may_come = backward and unit in self._places and any(unit in run for run in self._awaited)
        if self.running[unit.index] or unit.shared or may_come:
            return
        self.gatherer.start(unit)
        self.gatherer.prefetch()
        self.gatherer.release(unit)
        if self.updates_beside and not backward:
            self.gatherer.prefetch(settle=True)  # as after the forward of this unit, elsewhere
        if backward and self._makes_gradients():
            self._complete_missing(unit)

    def _complete_missing(self, unit: Unit) -> None:
        for place in self._places.get(unit, ()):
            if not self.gradients.all[place].collected:
                self.gradients.collect(self.gradients.all[place])

    def _makes_gradients(self) -> bool:
        """Whether the backward that runs is one for weights, and not for inputs only, as of torch.autograd.grad."""
        if self.backward.reduces is None:
            self.backward.conclude(self.gradients.have_arrived or self.reaches_weights())
        return self.backward.reduces is True

    def reaches_weights(self) -> bool:
        """Inside a backward, a nested one included: whether it makes gradients of weights."""
        return any(accumulates(p) for gradient in self.gradients.all for p in gradient.flat.parameters)

    def _post_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        self.running[unit.index] = max(0, self.running[unit.index] - 1)
        # A recomputation inside a backward: the weights are needed again at once.
        if self.running[unit.index] or backward_task() != NO_TASK:
            return
        awaits_backward = self._hook_outputs(output, partial(self._pre_backward, unit), unit)
        if self.interleaver is not None and self.interleaver.needed(unit):
            return
        if not unit.shared or not (awaits_backward or self.running[self.root.index]):
            self.gatherer.release(unit)
            if unit.travelling:
                torch.clear_autocast_cache()  # else it holds what was cast of every unit's weights
        if self.updates_beside and not unit.root and sys.exc_info()[0] is None:
            # The device is at work on this unit: time to wait for the update of the next. After an exception in the
            # forward this hook is called as well, and another collective would only confuse the other ranks.
            self.gatherer.prefetch(settle=True)

    def _post_forward_with_inputs(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """As `_post_forward`, for a unit with frozen weights: its inputs' gradients tell when they are done with."""
        if torch.is_grad_enabled() and self.running[unit.index] == 1:
            self._frozen.watch(unit, args, kwargs, output, together=self.interleaver is not None)
        self._post_forward(unit, module, args, output)

    def _hook_outputs(
        self, output: Any, hook: Callable[[torch.Tensor], torch.Tensor | None], unit: Unit | None = None
    ) -> bool:
        """Hook what a backward can come from; tell whether it can. A `unit` that returns a weight stays gathered."""
        can_run_backward = False
        for tensor in tensors_in(output):
            # Others may compute what they are when they are asked for more, as lazy logits do.
            plain = type(tensor) is torch.Tensor or issubclass(type(tensor), nn.Parameter)
            if plain and (tensor.is_leaf or tensor._is_view()) and unit is not None and self.saved.is_weight(tensor):
                unit.share()
            if tensor.requires_grad and torch.is_grad_enabled():
                if not (plain and tensor.is_leaf):  # which would keep the hook
                    tensor.register_hook(hook)
                can_run_backward = True
        return can_run_backward

    def settle(self) -> None:
        """Complete updates that are under way, for whoever goes through all parameters."""
        if self.updates_beside and not self.busy:
            self.gatherer.settle([flat for unit in self.units for flat in unit.flats if flat.pending])

    def read(self, parameter: nn.Parameter) -> None:
        """A parameter is read from its module: inside a forward its unit is gathered first."""
        unit = self._unit_of.get(parameter)
        if unit is None or self.running[unit.index]:
            return
        if self.updates_beside and unit.pending:
            self.gatherer.settle(unit.flats)
        if unit.whole or not (self.running[self.root.index] or self.backward.running or self._calling):
            return
        if self.backward.running and any(flat.is_whole_of(parameter) for flat in unit.travelling):
            return  # saved for this backward, and unpacked
        # Used by a unit that is not its own: from now on it stays gathered through the step.
        unit.share()
        self.gatherer.gather(unit)

    # Other methods.

    def call(self, method: Callable[..., T], args: Any, kwargs: Any) -> T:
        """A method of the model other than its forward: weights that it reads by itself are gathered for it."""
        self.check_transforms()
        self._calling += 1
        try:
            with self.saved.around():
                output = method(*args, **kwargs)
        except BaseException:
            if self._calling == 1:
                self.break_off()
            raise
        finally:
            self._calling -= 1
            outermost = not (self._calling or self.running[self.root.index] or backward_task() != NO_TASK)
            if outermost:
                for unit in self.units:
                    if unit.shared:
                        self.gatherer.release(unit)
        if outermost and torch.is_grad_enabled():
            self._hook_outputs(output, partial(self._root_pre_backward, self._version))
        return output

    # Forwards that run together.

    def run_layer_major(self, forwards: Sequence[Callable[[], T]]) -> list[T]:
        """The results of several forwards of the model, each unit gathered once for all of them.

        Each draws its random numbers from a stream of its own, and the first of these becomes the thread's.
        """
        self._begin_forward()
        self._frozen.forget()
        self.interleaver = Interleaver(len(self.units), self.gatherer.link.device)
        try:
            results = self.interleaver.run(forwards, self._enter)
        except BaseException as error:
            if isinstance(error, Exception):
                error.add_note(
                    "This was raised while micro-batches ran together, a unit at a time; "
                    '"wherry": {"accumulation": "step_major"} runs them one after another.'
                )
            self.end_backward()
            raise
        finally:
            self.interleaver = None
            self.running = [0] * len(self.units)
        self._end_forward()
        self.gradients.expect(len(forwards))
        self._frozen.await_recomputations()
        return results

    def _enter(self, running: list[int]) -> None:
        self.running = running

    # Backward.

    def weights_changed(self) -> None:
        """No forward before this has a backward any more."""
        self._version += 1

    def begin_backward(self, *, boundary: bool, micro_batches: int) -> None:
        """Prepare the units for a backward that is about to run, or has just begun to."""
        self.turns.backward = get_ident()
        self.gradients.begin()
        self.backward.begin(boundary=boundary, micro_batches=micro_batches)
        self.schedule.begin(Pass.BACKWARD)
        for unit in self.units:
            if unit.shared and unit.travelling:
                self.gatherer.gather(unit)

    def end_backward(self, *, reduces: bool | None = None) -> None:
        """Nothing of the backward is left to run: no unit stays gathered.

        `reduces` says whether it has made gradients of weights, and is None for a backward that has failed.
        """
        if reduces is None:
            self.schedule.drop()
            self.gatherer.end_hold()
        self.backward.conclude(reduces)
        for skipped in self.schedule.end():
            self._stand_in(skipped)
        del self._awaited[:1]
        self.backward.end()
        self._frozen.forget()
        self.gatherer.release_all()

    def inside_backward(self) -> bool:
        """Called from every hook that a backward runs. False inside a backward that runs within another."""
        if not self.backward.running:  # the user's own `loss.backward()`
            self._start_backward()
        if torch.is_grad_enabled():  # create_graph: a second backward will need the weights of this one
            self.gatherer.hold()
        return self.backward.is_task(backward_task())

    def _start_backward(self) -> None:
        self.phases.backward_begins()
        torch.autograd.Variable._execution_engine.queue_callback(self.phases.backward_ends)

    def _root_pre_backward(self, version: int, grad: torch.Tensor) -> None:
        if version != self._version:
            raise WherryError(
                f"backward: the weights have been updated {self._version - version} times since the forward of this "
                "loss, and its gradients would mix the old with the new; run every backward before step(), or the "
                "forward again after it"
            )
        if self.backward.running and self.backward.task not in (NO_TASK, backward_task()):
            # The model's outputs belong to no nested backward: the one before this has failed without a word.
            self._start_backward()
        self.inside_backward()

    def end_window(self) -> None:
        self._awaited.clear()

    def _pre_backward(self, unit: Unit, grad: torch.Tensor) -> None:
        if self.inside_backward() and unit.travelling and unit not in self.backward.reached:
            if self.backward.open:
                self._complete_open()
            self.backward.await_gradients(unit)
        self._need_in_backward(unit)

    def _complete_open(self) -> None:
        """The backward comes to another unit: what it has not brought of those before, and will not bring, is missing.

        A rank that misses nothing of them has reduced them, and goes on to gather; this one does so in the same order.
        """
        for unit in self.backward.take_open():
            missing = [self.gradients.all[place] for place in self._places.get(unit, ())]
            missing = [gradient for gradient in missing if not gradient.collected]
            if any(gradient.comes() for gradient in missing):
                self.backward.await_gradients(unit)
            elif missing and self._makes_gradients():
                self._complete_missing(unit)

    def _need_in_backward(self, unit: Unit) -> None:
        if self.backward.reach(unit):
            self._need(unit)
        else:
            self.gatherer.gather(unit)

    def arrived_nested(self) -> None:
        self.gradients.arrived_nested()

    def all_arrived(self, gradient: FlatGradient) -> None:
        """All gradients of a flat have come."""
        unit = self._home[gradient.flat]
        if unit.root and self._passes_over:
            return  # it is reduced when the backward has ended, behind the units that this rank has passed over
        self.gradients.collect(gradient)
        # Every operation that used these weights has run: each needed them to make a gradient that has arrived.
        if not unit.shared:
            self.gatherer.release_flat(gradient.flat)
