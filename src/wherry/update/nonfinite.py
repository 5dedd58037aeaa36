"""Steps whose gradients are inf or NaN: what is found out about them, what is said, and when they are an error."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from wherry.errors import NonFiniteError
from wherry.observe.log import RankLogger
from wherry.parallel.topology import Topology, world_of
from wherry.sharding.gradients import Gradients
from wherry.sharding.unit import Unit
from wherry.update.loss_scale import LossScaler
from wherry.update.rules import Groups
from wherry.update.updater import Updater

# Steps that may be skipped one after another where no loss scale falls meanwhile.
IN_A_ROW = 10


@dataclass(frozen=True)
class NonfiniteStep:
    """What one rank knows of such a step."""

    # The place of its first gradient that is not finite, and the unit of that; where none is, it is the last.
    place: tuple[int, int]
    unit: str
    rank: int
    # Of its last micro-batch, if it was given to the engine.
    loss: float | None
    # Parts of the model that it updates, those of them that were updated in the backward from finite gradients, and
    # the names of others that were.
    parts: int
    made: int
    spoilt: tuple[str, ...]


class NonFinite:
    """One engine's such steps. Nothing is done, or asked of the device, before there is one."""

    def __init__(
        self, how: str, topology: Topology, units: list[Unit], gradients: Gradients, scaler: LossScaler, log: RankLogger
    ) -> None:
        self.ignores = how == "ignore"
        self._limit = math.inf if scaler.dynamic else 1 if how == "raise" else IN_A_ROW
        self._topology = topology
        self._units = units
        self._gradients = gradients
        self._scaler = scaler
        self._log = log
        # How many there have been since the last step that was not one.
        self._in_a_row = 0
        # Whether one that was ignored has been told.
        self._told = False

    def end(self) -> None:
        """A step whose gradients are finite."""
        self._in_a_row = 0
        self._scaler.update(overflow=False)

    def look(
        self, updater: Updater, groups: Groups, multiplier: float, loss: torch.Tensor | None
    ) -> list[NonfiniteStep]:
        """What all ranks find, together; while there are the gradients. The step is skipped unless it is ignored."""
        if self._told:
            return []
        order = self._gradients.in_order()
        unfit = [g for g in order if not math.isfinite(float(g.squares()))]
        made, spoilt = ([], []) if self.ignores else updater.skip(groups, multiplier, unfit)
        # Ranks that share a model each see a part of the gradients: what not all of them have updated has parted.
        names = self._topology.tensor.gather_objects([bucket.name for bucket in made])
        parted = {name for mine in names for name in mine if any(name not in theirs for theirs in names)}
        unit_of = {flat: unit.name for unit in self._units for flat in unit.flats}
        mine = NonfiniteStep(
            # The backward comes to the last stage of a pipeline first.
            (-self._topology.pipe.rank, order.index(unfit[0])) if unfit else (1, 0),
            unit_of[unfit[0].flat] if unfit else "",
            self._topology.global_rank,
            None if loss is None else float(loss),
            len(updater.buckets),
            len(made),
            (*(bucket.name for bucket in spoilt), *sorted(parted)),
        )
        return world_of(self._topology).gather_objects(mine)

    def conclude(self, found: list[NonfiniteStep], step: int, rates: list[float]) -> None:
        """Say what became of the step, or raise it."""
        if self.ignores:
            if found:
                self._told = True
                self._warn(
                    f"step {step}: {_what(found)}{_loss(found)}; the update is made all the same, as the config "
                    "has it (wherry.nonfinite, bf16.check_grad_overflow), so that weights are not numbers from here "
                    "on. Of such steps only this one is told"
                )
            return
        before = self._scaler.scale
        try:
            self._scaler.update(overflow=True)
        finally:
            scaled = self._scaler.dynamic or before != 1.0
            scale = f"loss scale {before:g} -> {self._scaler.scale:g}" if scaled else "no loss scale"
            said = f"step {step} skipped: {_what(found)}; {scale}{_loss(found)}{_made(found)}"
            self._in_a_row += 1
            last = self._in_a_row >= self._limit
            spoilt = [name for finding in found for name in finding.spoilt]
            if not (last or spoilt):
                self._warn(said)
        if spoilt:
            raise NonFiniteError(
                f"{said}. But the update policy in_backward has updated {spoilt[0]} in that backward, on the device or "
                "on some of the ranks that share the model, and that is not taken back: go back to a checkpoint, and "
                'set "wherry": {"update_policy": "before_use"}'
            )
        if last:
            first = step - self._in_a_row + 1
            often = f" The {self._in_a_row} steps since step {first} were skipped alike." if self._in_a_row > 1 else ""
            raise NonFiniteError(
                f"{said}.{often} Skipping changes nothing but the data: look for inf or NaN in the batches since step "
                f"{first}, at the loss, and at the unit named (torch.autograd.set_detect_anomaly(True) names the "
                f"operation). If it is the weights, go back to a checkpoint from before, with a learning rate below "
                f"{', '.join(f'{rate:g}' for rate in rates)} or gradient_clipping"
            )

    def _warn(self, text: str) -> None:
        if self._log.rank == 0:
            self._log.warning("%s", text)


def _what(found: list[NonfiniteStep]) -> str:
    first = min(found, key=lambda finding: finding.place)
    where = f", first in {first.unit}" if first.unit else ""
    return f"its gradients are not finite{where}"


def _loss(found: list[NonfiniteStep]) -> str:
    """The loss of the first rank whose own is not finite, or of the first rank."""
    known = [finding for finding in found if finding.loss is not None]
    if not known:
        return ""
    shown = next((finding for finding in known if not math.isfinite(finding.loss or 0.0)), known[0])
    return f"; last loss {shown.loss:g}" + (f" on rank {shown.rank}" if len(found) > 1 else "")


def _made(found: list[NonfiniteStep]) -> str:
    made, parts = sum(finding.made for finding in found), sum(finding.parts for finding in found)
    if not made:
        return ""
    ranks = f" on {len(found)} ranks" if len(found) > 1 else ""
    return (
        f"; in the backward, before that was known, {made} of {parts} parts of the model{ranks} were updated from "
        'finite gradients and stay so ("wherry": {"update_policy": "before_use"} updates after)'
    )
