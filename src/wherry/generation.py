"""Weights whole through many forwards, as when a model generates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from wherry.errors import WherryError

if TYPE_CHECKING:
    from wherry.engine import Engine


@contextmanager
def gathered_for_generation(engine: Engine) -> Iterator[None]:
    """Gather every unit once, for as many forwards as run inside, and release them at the end.

    Every rank must enter. The forwards communicate nothing, so ranks may make different numbers of them. Weights are
    for reading here: edits are lost, and there are no backwards or steps inside. It takes the memory of a whole model
    in the working type.

        with wherry.gathered_for_generation(engine):
            tokens = engine.module.generate(prompt, max_new_tokens=200)
    """
    engine._check_open()
    if engine._hooks.backward_running:
        raise WherryError("gathered_for_generation: a backward is running; enter it between steps")
    engine._access.meet("gathered_for_generation()", [flat for unit in engine.units for flat in unit.travelling])
    engine.settle()
    before, engine._generating = engine._generating, True
    flats = [flat for unit in engine.units for flat in unit.travelling]
    pinned = []
    try:
        for flat in flats:
            engine._gatherer.gather_for_readers(flat)
            flat.pins += 1
            pinned.append(flat)
        yield
    finally:
        engine._generating = before
        for flat in pinned:
            flat.pins -= 1
            engine._gatherer.release_flat(flat)
