"""States that leave the device between phases of a run, and come back: `engine.offload_states` and `reload_states`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack

import torch

from wherry.errors import WherryError
from wherry.sharding.gradients import Gradients
from wherry.sharding.unit import Flat, Unit
from wherry.sharding.weights import Gatherer
from wherry.tickets import Ticket
from wherry.tiers.streams import Link
from wherry.update.updater import Updater

# What may leave, and the names that scripts have for it.
STATES = ("parameters", "gradients", "optimizer")
SPELLINGS = {
    "lp_params": "parameters",
    "hp_params": "optimizer",
    "optim_states": "optimizer",
    "lp_grads": "gradients",
    "contiguous_grad_buffer": "gradients",
}


class OffloadedStates:
    """Memory of the device that was freed for a while, and where its contents are meanwhile.

    A storage is emptied and later filled again: all tensors on it, views of the user's included, stay what they were.
    Parameters read as NaN meanwhile.
    """

    def __init__(
        self, units: list[Unit], gatherer: Gatherer, gradients: Gradients, updater: Updater | None, link: Link
    ) -> None:
        self._units = units
        self._gatherer = gatherer
        self._gradients = gradients
        self._updater = updater
        self._link = link
        self._away: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    @property
    def nbytes(self) -> dict[str, int]:
        """The states that are away, and their bytes."""
        return {state: sum(host.nbytes for _, host in moved) for state, moved in self._away.items()}

    def offload(self, chosen: Iterable[str]) -> int:
        """Free the device's memory of these states; returns how many bytes that were.

        What is away already stays away. No update may be under way; reductions and copies that are end first.
        """
        if self._updater is not None:
            self._updater.drop_reads()
        self._gatherer.drop_reads()
        self._gatherer.release_all()
        self._gradients.settle()
        if self._link.shared:
            return 0  # the host's memory is where it is to go
        for flat in (flat for unit in self._units for flat in unit.flats):
            flat.quiet()  # a save may still copy from it
        freed = sum(self._offload(state) for state in chosen if state not in self._away)
        self._link.return_unused()
        return freed

    def _offload(self, state: str) -> int:
        moved: list[tuple[torch.Tensor, torch.Tensor]] = []
        with ExitStack() as given_up:
            tickets: list[Ticket] = []
            for memory in self._on_device(state):
                host = self._link.host.take(memory.nbytes)
                given_up.callback(self._link.host.give, host)
                tickets.append(self._link.down(host, memory))
                given_up.callback(tickets[-1].finish)  # before its memory is given back
                moved.append((memory, host))
            for ticket in tickets:
                ticket.wait()
            given_up.pop_all()
        if state == "parameters":
            for flat in self._resident():
                flat.show_blanks()
        for memory, _ in moved:
            memory.untyped_storage().resize_(0)
        self._away[state] = moved
        return sum(host.nbytes for _, host in moved)

    def reload(self) -> None:
        """Everything is on the device again."""
        tickets: list[Ticket] = []
        hosts: list[torch.Tensor] = []
        for moved in self._away.values():
            for memory, host in moved:
                memory.untyped_storage().resize_(host.nbytes)
                with torch.autograd._unsafe_preserve_version_counter(memory):
                    tickets.append(self._link.up(memory, host))
                hosts.append(host)
        if "parameters" in self._away:
            for flat in self._resident():
                flat.show_whole()
        self._away.clear()
        for ticket in tickets:
            ticket.finish()
        for host in hosts:
            self._link.host.give(host)

    def close(self) -> None:
        for moved in self._away.values():
            for _, host in moved:
                self._link.host.give(host)
        self._away.clear()

    def chosen(self, include: Iterable[str] | None, device: str) -> list[str]:
        """The states that a call means; raises where there is none such, or it means another place than the host."""
        if str(device) not in ("host", "cpu"):
            raise WherryError(f'offload_states: expected the device "host" (or "cpu"), got {device!r}')
        names = STATES if include is None else [include] if isinstance(include, str) else include
        chosen = [SPELLINGS.get(str(getattr(name, "value", name)), str(name)) for name in names]
        if strange := sorted(set(chosen) - set(STATES)):
            raise WherryError(
                f"offload_states: {', '.join(strange)} is no state; they are {', '.join(STATES)}, or as "
                f"DeepSpeed has them {', '.join(SPELLINGS)}"
            )
        return list(dict.fromkeys(chosen))

    def _resident(self) -> list[Flat]:
        return [flat for unit in self._units for flat in unit.flats if flat.resident]

    def _on_device(self, state: str) -> Iterator[torch.Tensor]:
        """Whole storages, as bytes, each once."""
        seen: set[int] = set()
        for tensor in self._tensors(state):
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage._cdata not in seen:
                seen.add(storage._cdata)
                yield torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)

    def _tensors(self, state: str) -> Iterator[torch.Tensor]:
        if state == "parameters":
            for flat in (flat for unit in self._units for flat in unit.flats if flat.storage is None):
                yield flat.shard_memory
        elif state == "gradients":
            for gradient in self._gradients.all:
                yield gradient.accumulated
        elif self._updater is not None:
            yield from self._updater.states.device_memory()
