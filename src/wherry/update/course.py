"""The course of one update: read the record, update, and send home what has changed, as steps between waits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from wherry.tiers.tickets import DONE, OnHost, Ticket
from wherry.update.jobs import READ, READY, UPDATE, WRITE, Steps
from wherry.update.rules import Groups
from wherry.update.state import Absent, Batch


def course(
    batch: Batch,
    read: Callable[[Batch], Ticket | None],
    groups: Groups,
    multiplier: float,
    fence: Ticket,
    absent: Absent | None = None,
    aside: list[torch.Tensor] | None = None,
    fit: Callable[[], bool] | None = None,
) -> Steps:
    """The steps of the update of one batch, whose record comes by `read`; `absent` parameters are left alone.

    With gradients set `aside` it is a late one: new weights are kept until they are published. One that is not `fit`
    once its gradients are there changes nothing.
    """
    flats = [state.flat for state in batch.states]
    homes = [] if batch.apart else [flat.home for flat in flats if flat.home is not None]
    fetched, has_record = 0, False
    uploads: list[Ticket] = []
    try:
        record = read(batch)
        has_record = True
        tickets = [record] if record is not None else []
        for home in homes:
            tickets.append(home.fetch())
            fetched += 1
        # What was begun before and still reads the weights that are about to change.
        tickets += [home.quiet() for home in homes]
        if aside is None:
            tickets += [gradient.landing for gradient in batch.gradients]
        for ticket in tickets:
            if ticket is not DONE:
                yield READ, ticket
        if fit is None or fit():
            yield UPDATE, batch.update(groups, multiplier, absent, aside)
        for gradient in batch.gradients:
            gradient.spent()
        tickets = []
        if aside is not None:
            batch.fresh = [w.clone() if batch.on_disk else w for w in batch.working()]
        elif batch.apart:
            uploads = [OnHost(ticket) for ticket in batch.publish(fence)]
        stored = batch.store()
        tickets += [stored] if stored is not None else []
        tickets += [home.store() for home in homes]
        for ticket in uploads:
            yield WRITE, ticket
        tickets = [ticket for ticket in tickets if ticket is not DONE]
        if tickets:
            yield READY, DONE
        for ticket in tickets:
            yield WRITE, ticket
    finally:
        if has_record:
            batch.leave(uploads[-1] if uploads else DONE)
        for home in homes[:fetched]:
            home.leave()
