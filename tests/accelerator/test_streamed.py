"""Updates on the device of state that rests elsewhere: what they hold there, in what order things move, whose bits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.accelerator.machine import MACHINE
from tests.accelerator.test_order import traced_late, training
from tests.engine.harness import TinyLM, make_model, token_batch
from tests.life import at, batch
from tests.tiers.rows import offload

import wherry
from wherry.update.streamed import StreamedUpdates

MUON = {"type": "Muon", "params": {"lr": 1e-2, "adam_lr": 3e-3}}
PIECE = 1024
# Of the torch form, for 256 elements at a time.
TEMPORARIES = 16 * 1024
ADAM = {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}}


def engine_of(folder: Path, optimizer: dict[str, Any], row: str = "offload-3-parameters", **more: Any) -> Any:
    config = offload(row, folder, "at_step", "bf16")
    config["wherry"] |= more
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0} | config["zero_optimization"]
    config |= {"zero_optimization": zero, "optimizer": optimizer, "train_micro_batch_size_per_gpu": 2}
    return wherry.initialize(model=make_model(), config=config)[0]


def one_step(engine: Any, step: int) -> None:
    engine.backward(engine(*(tensor.to(engine.device) for tensor in token_batch(step, 0, 0))))
    engine.step()


def trained(folder: Path, optimizer: dict[str, Any], steps: int = 4, **more: Any) -> dict[str, torch.Tensor]:
    engine = engine_of(folder, optimizer, **more)
    for step in range(steps):
        one_step(engine, step)
    names = [name for name, _ in engine.module.named_parameters()]
    found = {name: engine.states.full(name, "master").cpu() for name in names}
    engine.close()
    return found


@pytest.mark.parametrize(
    ("row", "optimizer"),
    [("offload-2", MUON), ("offload-3-parameters", {"type": "Lamb"}), ("infinity", {"type": "Adafactor"})],
)
def test_whole_parameters_are_updated_on_the_device_unless_told(
    row: str, optimizer: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wherry.update.optimizer_states.STREAMED_NUMEL", 512)
    moved: list[int] = []
    update = StreamedUpdates.update
    monkeypatch.setattr(StreamedUpdates, "update", lambda self, *terms: (moved.append(1), update(self, *terms))[1])
    on_host = trained(tmp_path / "host", optimizer, row=row, update_on="host")
    assert not moved
    on_device = trained(tmp_path / "device", optimizer, row=row)
    assert moved
    begun = make_model().state_dict()
    for name, expected in on_host.items():  # products in bf16 are not the same on both
        assert (on_device[name] - expected).norm() <= 0.1 * (expected - begun[name].float()).norm(), name


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_share_of_the_units_is_updated_there(share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wherry.update.optimizer_states.BUCKET_NUMEL", 1)
    moved: list[int] = []
    update = StreamedUpdates.update

    def counted(self: Any, rule: Any, segments: Any, *terms: Any) -> Any:
        moved.append(sum(segment.numel for segment in segments))
        return update(self, rule, segments, *terms)

    monkeypatch.setattr(StreamedUpdates, "update", counted)
    model = make_model(partial(TinyLM, 10))
    block, total = sum(p.numel() for p in model.blocks[0].parameters()), sum(p.numel() for p in model.parameters())
    config = offload("offload-2", tmp_path, "at_step")
    config["wherry"]["update_on"] = share
    config |= {"optimizer": ADAM, "train_micro_batch_size_per_gpu": 2}
    config["zero_optimization"]["stage"] = 2
    engine = wherry.initialize(model=model, config=config)[0]
    one_step(engine, 0)
    assert abs(sum(moved) - share * total) <= block * (0 < share < 1)
    engine.close()


def test_three_pieces_are_on_the_device_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the model, whose peak is that of steps that the host updates."""
    monkeypatch.setattr("wherry.update.optimizer_states.STREAMED_NUMEL", PIECE)
    monkeypatch.setattr("wherry.native.fallback.DEVICE_CHUNK", 256)
    peaks = []
    for share in (0.0, 1.0):
        base = MACHINE.held()
        torch.accelerator.reset_peak_memory_stats()
        engine = engine_of(tmp_path / str(share), ADAM, update_on=share)
        for step in range(3):
            one_step(engine, step)
        engine.settle()
        torch.accelerator.synchronize()
        peaks.append(torch.accelerator.max_memory_allocated() - base)
        rows = {row.state: row for row in engine.memory()}
        engine.close()
    # Weights and gradients in bf16, the low halves of the masters, and two moments in fp32.
    piece = PIECE * (2 + 2 + 2 + 4 + 4)
    assert peaks[0] + 2 * piece < peaks[1] <= peaks[0] + 3 * piece + TEMPORARIES
    assert 2 * piece < rows["optimizer streamed"].bytes_actual <= rows["optimizer streamed"].bytes_expected


def test_one_goes_up_while_another_comes_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wherry.update.optimizer_states.STREAMED_NUMEL", 512)
    case = at("offload-3-parameters") | {"policy": "at_step"}
    with training(case, tmp_path, wherry={"update_on": "device"}) as engine:
        engine.backward(engine(*batch(2, 0)))
        with traced_late() as traced:
            engine.step()
    ups, downs = traced.of("up"), traced.of("down")
    assert {up.stream for up in ups}.isdisjoint(down.stream for down in downs)
    waiting = [down for down in downs if down.queued < ups[-1].queued and not 0 < down.begun < ups[-1].queued]
    assert waiting, "the last piece goes up while another has yet to come down"


def test_an_embedding_of_adamws_is_cut_beside_muon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what Muon updates a whole parameter is there, and of all else a piece."""
    monkeypatch.setattr("wherry.update.optimizer_states.STREAMED_NUMEL", 256)
    largest: list[int] = []
    update = StreamedUpdates.update

    def looked(self: Any, rule: Any, segments: Any, *terms: Any) -> Any:
        largest.extend(segment.numel for segment in segments if len(segment.state) == 2)
        return update(self, rule, segments, *terms)

    monkeypatch.setattr(StreamedUpdates, "update", looked)
    trained(tmp_path, {"type": "Muon", "params": {"lr": 1e-2}}, steps=1)
    assert max(largest) <= 512


def test_auto_is_the_share_at_which_both_end_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By rates measured as the engine is built: the bits are those of any other share."""
    caplog.set_level("INFO", "wherry")
    expected = trained(tmp_path / "host", ADAM, update_on="host")
    found = trained(tmp_path / "auto", ADAM, update_on="auto")
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    [line] = [record.getMessage() for record in caplog.records if "update_on" in record.getMessage()]
    assert 0 < int(line.partition("%")[0].rpartition(" ")[2]) < 100, line


def test_what_keeps_its_state_itself_is_not_updated_elsewhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "wherry")
    engine_of(tmp_path, {"type": "RMSprop"}, update_on="auto").close()
    assert "wherry.update_on: auto is the host, as the form of the state of RMSprop is not known" in caplog.text
    with pytest.raises(wherry.WherryError, match=r"wherry.update_on: 1.0 .* got RMSprop; leave it out"):
        engine_of(tmp_path, {"type": "RMSprop"}, update_on=1.0)
