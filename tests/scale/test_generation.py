"""Generation: one gather for many forwards, and weights that are held do not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.harness import engine_of, gathered, make_model, on_ranks, settings, token_batch, train, train_plain

import wherry
from wherry.errors import WherryError


def test_many_forwards_gather_once_and_their_number_may_differ_between_ranks() -> None:
    reference = make_model()

    def use(engine: Any) -> list[float]:
        comm, losses = engine.comm, []
        for step in range(3):
            if step in (0, 2):
                comm.traffic.clear()
                with wherry.gathered_for_generation(engine):
                    once = comm.traffic.calls["all_gather"]
                    with torch.no_grad():
                        for turn in range(3 + comm.rank):
                            seen = float(engine(*token_batch(9, turn, 0)))
                            if step == 0:
                                assert seen == pytest.approx(float(reference(*token_batch(9, turn, 0))), rel=1e-6)
                    assert comm.traffic.calls["all_gather"] == once == len(engine.units)
                    with pytest.raises(WherryError, match="held by gathered_for_generation"):
                        engine.backward(engine(*token_batch(0, 0, 0)))
                assert gathered(engine) == 0
            losses += train(engine, step + 1, step)
        with pytest.raises(KeyError), wherry.gathered_for_generation(engine), wherry.gathered_for_generation(engine):
            raise KeyError("stop")
        assert gathered(engine) == 0, "an exception releases the weights"
        return losses

    losses = [sum(step) / 2 for step in zip(*on_ranks(use), strict=True)]
    assert losses == pytest.approx(train_plain(make_model(), ranks=2, steps=3).losses, rel=1e-5)


def test_held_weights_do_not_change() -> None:
    engine = engine_of(make_model(), settings(2))
    engine.backward(engine(*token_batch(0, 0, 0)))
    with wherry.gathered_for_generation(engine):
        for call in (engine.step, engine.offload_states):
            with pytest.raises(WherryError, match=f"{call.__name__}: weights are held by gathered_for_generation"):
                call()
    engine.step()
    assert engine.global_steps == 1
    with wherry.gathered_for_generation(engine):
        engine.close()
    assert engine.closed
