"""Updates overlap forwards and backwards: each use waits for its own update, reads, writes and gathers alone."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.engine.harness import engine_of, make_model, on_ranks, settings, token_batch, train_step
from tests.tiers.rows import ROWS, offload

from wherry.errors import WherryError
from wherry.tickets import Ticket
from wherry.tiers import streams
from wherry.update.optimizer_states import UpdateBucket

NAMES = ["root", "blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.usefixtures("every_flat_alone")
@pytest.mark.parametrize(("row", "policy"), [("offload-1", "before_use"), ("disk-2", "in_backward")])
def test_a_step_waits_for_no_update_and_each_unit_for_its_own(
    row: str, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates wait for a gate. Parameters that are kept are NaN while an update is under way, not half updated."""
    model = make_model()
    kept = list(model.parameters())
    engine = engine_of(model, settings(ROWS[row][0], more=offload(row, tmp_path, policy)))
    gate, update = threading.Event(), UpdateBucket.update

    def behind(bucket: UpdateBucket, *args: Any) -> Ticket:
        assert gate.wait(50), "nobody opens the gate"
        return update(bucket, *args)

    monkeypatch.setattr(UpdateBucket, "update", behind)

    def pending() -> list[str]:
        return [unit.name for unit in engine.units if unit.pending]

    train_step(engine, 0, 0)
    assert pending() == NAMES
    assert all(parameter.isnan().all() for parameter in kept)
    gate.set()
    reached: list[list[str]] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: reached.append(pending()))
    loss = engine(*token_batch(1, 0, 0))
    assert reached == [NAMES[2:], NAMES[3:], []]
    assert not any(parameter.isnan().any() for parameter in kept)
    engine.backward(loss)
    engine.step()
    assert pending() == NAMES
    engine.close()  # the last update is made, and shown
    assert not any(parameter.isnan().any() for parameter in kept)


@pytest.mark.usefixtures("every_flat_alone")
def test_gathers_begin_in_the_step(tmp_path: Path) -> None:
    """Each unit waits for its own, and a rank that runs its model alone begins none."""

    def use(engine: Any) -> dict[str, torch.Tensor]:
        comm = engine.comm
        kept = list(engine.module.parameters())
        engine.backward(engine(*token_batch(0, 0, comm.rank)))
        comm.traffic.clear()
        engine.step()
        assert comm.traffic.calls["all_gather"] == 4
        assert all(unit.pending for unit in engine.units)
        assert all(parameter.isnan().all() for parameter in kept)
        if comm.rank == 1:
            with torch.no_grad():
                engine(*token_batch(3, 0, 0))
            assert comm.traffic.calls["all_gather"] == 4
            assert not any(parameter.isnan().any() for parameter in kept)
        comm.barrier()
        return {name: weight.clone() for name, weight in engine.module.state_dict().items()}

    first, second = on_ranks(use, stage=2, config=offload("offload-2", tmp_path, "before_use"))
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())


@pytest.mark.usefixtures("every_flat_alone")
def test_that_weights_have_changed_already_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By the error where gradients are dropped on purpose, and else beside the error that ended the backward."""

    def stumble(*_: Any) -> None:
        raise OSError("the disk is gone")

    engine = engine_of(make_model(), settings(2, more=offload("offload-2", tmp_path, "in_backward")))
    engine.backward(engine(*token_batch(0, 0, 0)))
    with pytest.raises(WherryError, match=r"zero_grad: .* updated 4 parts .* already"):
        engine.zero_grad()
    engine.accept_partial_update()
    engine.zero_grad()
    assert not caplog.records
    engine.module.blocks[0].register_forward_pre_hook(lambda module, args: args[0].register_hook(stumble) and None)
    with pytest.raises(OSError, match="the disk is gone"):
        engine.backward(engine(*token_batch(1, 0, 0)))
    engine.accept_partial_update()
    engine.zero_grad()
    (warning,) = caplog.records
    assert "of 4 parts of the model from them already" in warning.getMessage()
    engine.close()


@pytest.mark.usefixtures("every_flat_alone")
def test_gathers_under_way_are_waited_for_when_an_update_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update = UpdateBucket.update

    def fail(bucket: UpdateBucket, *args: Any) -> Ticket:
        if bucket.name == "blocks.1":
            raise OSError("a bad kernel")
        return update(bucket, *args)

    def use(engine: Any) -> None:
        waited: list[Ticket] = []
        begun: list[Ticket] = []

        class Noted(Ticket):
            def wait(self) -> None:
                waited.append(self)

        engine.backward(engine(*token_batch(0, 0, engine.comm.rank)))
        engine.comm.all_gather = lambda *_: begun.append(Noted()) or begun[-1]
        with pytest.raises(WherryError, match="a bad kernel"):
            engine.step()
        assert len(begun) == 2 and waited == begun

    monkeypatch.setattr(UpdateBucket, "update", fail)
    on_ranks(use, stage=2, config=offload("offload-2", tmp_path, "at_step"))


def test_a_copy_orders_the_stream_of_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    second, event = torch.device("xpu", 1), Mock()
    monkeypatch.setattr(streams, "new_stream", Mock())
    monkeypatch.setattr(streams, "new_event", lambda device: event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: ("the stream of", device))
    streams.DeviceLink(second, pin=False).fence().wait()
    event.wait.assert_called_once_with(("the stream of", second))
