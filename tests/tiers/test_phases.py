"""Between phases states leave the device and come back, to the bit; and a disk that fails is told to every rank."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import adamw, make_model, settings, token_batch
from tests.tiers.chaos import Chaos, ChaosLink, topology
from tests.tiers.test_placements import ROWS, offload

import wherry
from wherry.errors import PeerError, WherryError
from wherry.native.disk import Fault
from wherry.parallel.comm import Comm, SoloComm
from wherry.parallel.threads import run_ranks


@pytest.mark.parametrize("include", [None, ["optimizer"], ["lp_params", "contiguous_grad_buffer"]])
@pytest.mark.parametrize("stage", [0, 3])
def test_states_leave_and_come_back(stage: int, include: list[str] | None) -> None:
    model = make_model()

    def body(comm: Comm) -> list[float]:
        link = ChaosLink(Chaos(comm.rank))
        losses = []
        mine = copy.deepcopy(model)
        engine, *_ = wherry.initialize(
            model=mine,
            optimizer=adamw(mine.parameters()),
            config=settings(stage, more={"bf16": {"enabled": True}}),
            mesh=topology(comm, link.chaos, link=link),
        )
        for step in range(6):
            if step == 3 and leaves:
                before = link.bytes_down
                freed = engine.offload_states(include=include)
                assert freed == link.bytes_down - before > 0
                with pytest.raises(WherryError, match=r"call reload_states\(\) first"):
                    engine(*token_batch(step, 0, comm.rank))
                engine.reload_states()
                assert link.host.counters.in_use == 0
            loss = engine(*token_batch(step, 0, comm.rank))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        engine.close()
        return losses

    leaves = False
    plain = run_ranks(2, body)
    leaves = True
    assert run_ranks(2, body) == plain


def test_states_that_there_are_not() -> None:
    engine, *_ = wherry.initialize(model=make_model(), config=settings(1))
    with pytest.raises(WherryError, match=r"offload_states: momenta is no state; they are parameters"):
        engine.offload_states(include=["momenta"])
    with pytest.raises(WherryError, match='expected the device "host"'):
        engine.offload_states(device="nvme")
    # Where the device is the host, nothing has to move.
    assert engine.offload_states() == 0
    engine.reload_states()
    engine(*token_batch(0, 0, 0))
    engine.close()


@pytest.mark.parametrize("policy", ["at_step", "before_use", "in_backward"])
@pytest.mark.parametrize("row", ["disk-2", "infinity"])
def test_a_failing_disk_is_told_to_every_rank_with_the_unit(row: str, policy: str, tmp_path: Path) -> None:
    model = make_model()

    def body(comm: Comm) -> tuple[str, list[str]]:
        mine = copy.deepcopy(model)
        engine, *_ = wherry.initialize(
            model=mine,
            optimizer=adamw(mine.parameters()),
            config=settings(ROWS[row][0], more=offload(row, tmp_path, policy)),
            mesh=topology(comm),
        )
        try:
            for step in range(5):
                if step == 2 and comm.rank == 1:
                    engine._tiering._stores[0].inject(Fault("write", errno=5, skip=1))
                engine.backward(engine(*token_batch(step, 0, comm.rank)))
                engine.step()
            return "no error", []
        except (WherryError, PeerError) as error:
            return str(error), list(map(str, tmp_path.iterdir()))
        finally:
            engine.close()

    messages = [message for message, _ in run_ranks(2, body, timeout=20)]
    assert "blocks." in messages[1] or "root" in messages[1]
    assert "Input/output error" in messages[1]
    assert "rank 1 has failed" in messages[0]
    assert "Input/output error" in messages[0]
    assert list(tmp_path.iterdir()) == []


def test_weights_read_from_outside_are_those_after_the_step(tmp_path: Path) -> None:
    """Updates that run beside the forward are complete for whoever looks, by a parameter or by a state_dict."""
    model = make_model()
    config = offload("offload-0", tmp_path, "before_use")

    def trained(look: Any) -> torch.Tensor:
        mine = copy.deepcopy(model)
        link = ChaosLink(Chaos(1))
        engine, *_ = wherry.initialize(
            model=mine,
            optimizer=adamw(mine.parameters()),
            config=settings(0, more=config),
            mesh=topology(SoloComm(), link.chaos, link=link),
        )
        engine.backward(engine(*token_batch(0, 0, 0)))
        engine.step()
        seen = look(engine, mine).detach().clone()
        engine.close()
        return seen

    looks = [
        lambda engine, mine: engine.module.blocks[0].mix.weight,
        lambda engine, mine: mine.blocks[0].mix.weight,
        lambda engine, mine: mine.state_dict()["blocks.0.mix.weight"],
        lambda engine, mine: mine.blocks[0].state_dict()["mix.weight"],
    ]
    first, *others = [trained(look) for look in looks]
    assert not torch.equal(first, model.state_dict()["blocks.0.mix.weight"])
    for other in others:
        assert torch.equal(first, other)
