"""Updates on the device of state that rests elsewhere: the memory there, the order of copies, and the bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.accelerator import emulated
from tests.accelerator.machine import MACHINE
from tests.accelerator.test_order import BLOCKS, traced_late, training
from tests.engine.harness import make_model, token_batch
from tests.life import at, batch
from tests.native.cases import RULES, assert_updates_as_the_host, moved, segment
from tests.tiers.rows import offload

import wherry
from wherry.native.on_device import update_on_device

PIECE = 1024
# Of the torch form, for 256 elements at a time.
TEMPORARIES = 16 * 1024
ADAM = {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}}


def test_an_update_in_torch_has_the_bits_of_the_host_and_the_host_does_not_wait(
    small_sizes: Any,
) -> None:
    emulated.lateness(1)
    rule = RULES["adamw"](1)
    for state in ("fp32", "bf16", "8bit"):
        made = moved(segment(rule, torch.ones(3000), torch.ones(3000), mode="split", state=state), "emulated")
        torch.accelerator.synchronize()
        with emulated.trace() as trace:
            update_on_device([made], [rule], 1.0)
        assert trace.items and not any(item.begun for item in trace.items)
    small_sizes(device_chunk=512)
    assert_updates_as_the_host(update_on_device, "emulated")


@pytest.fixture
def small_pieces(small_sizes: Any) -> None:
    small_sizes(streamed=PIECE)
    small_sizes(device_chunk=256)


def engine_of(folder: Path, optimizer: dict[str, Any], row: str = "offload-3-parameters", **more: Any) -> Any:
    config = offload(row, folder, "at_step", "bf16")
    config["wherry"] |= more
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0} | config["zero_optimization"]
    config |= {"zero_optimization": zero, "optimizer": optimizer, "train_micro_batch_size_per_gpu": 2}
    return wherry.initialize(model=make_model(), config=config)[0]


def train(engine: Any, steps: int = 4) -> tuple[dict[str, torch.Tensor], int]:
    """Train and close; return the masters, and the bytes that updates have had on the device."""
    for step in range(steps):
        engine.backward(engine(*(tensor.to(engine.device) for tensor in token_batch(step, 0, 0))))
        engine.step()
    masters = {name: engine.states.full(name, "master").cpu() for name, _ in engine.module.named_parameters()}
    rows = {row.state: row for row in engine.memory()}
    engine.close()
    if "optimizer streamed" not in rows:
        return masters, 0
    assert rows["optimizer streamed"].bytes_actual <= rows["optimizer streamed"].bytes_expected
    return masters, rows["optimizer streamed"].bytes_actual


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    ("row", "optimizer"),
    [
        ("offload-2", {"type": "Muon", "params": {"lr": 1e-2, "adam_lr": 3e-3}}),
        ("offload-3-parameters", {"type": "Lamb"}),
        ("infinity", {"type": "Adafactor"}),
    ],
)
def test_whole_parameters_are_updated_on_the_device_unless_told(
    row: str, optimizer: dict[str, Any], tmp_path: Path
) -> None:
    on_host, none = train(engine_of(tmp_path / "host", optimizer, row, update_on="host"))
    on_device, nbytes = train(engine_of(tmp_path / "device", optimizer, row))
    assert nbytes > none == 0
    begun = make_model().state_dict()
    for name, expected in on_host.items():  # products in bf16 are not the same on both
        assert (on_device[name] - expected).norm() <= 0.1 * (expected - begun[name].float()).norm(), name


@pytest.mark.usefixtures("small_pieces")
def test_three_pieces_are_on_the_device_at_most(tmp_path: Path) -> None:
    """Beside the model, whose peak is that of steps that the host updates."""
    peaks = []
    for share in (0.0, 1.0):
        base = MACHINE.held()
        torch.accelerator.reset_peak_memory_stats()
        _, nbytes = train(engine_of(tmp_path / str(share), ADAM, update_on=share), steps=3)
        torch.accelerator.synchronize()
        peaks.append(torch.accelerator.max_memory_allocated() - base)
    # Weights and gradients in bf16, the low halves of the masters, and two moments in fp32.
    piece = PIECE * (2 + 2 + 2 + 4 + 4)
    assert peaks[0] + 2 * piece < peaks[1] <= peaks[0] + 3 * piece + TEMPORARIES
    assert 2 * piece < nbytes <= 3 * piece + TEMPORARIES


def test_a_share_of_the_units_is_updated_there(tmp_path: Path) -> None:
    sent = []
    for share in (0.0, 0.3, 1.0):
        with training(at("offload-2") | {"policy": "at_step"}, tmp_path / str(share), update_on=share) as engine:
            engine.backward(engine(*batch(2, 0)))
            with traced_late() as traced:
                engine.step()
                engine.settle()
        sent.append(sum(down.nbytes for down in traced.of("down") if down.stream != 0))
    assert sent[0] == 0 and abs(sent[1] / sent[2] - 0.3) <= 1 / BLOCKS


def test_one_goes_up_while_another_comes_down(tmp_path: Path) -> None:
    case = at("offload-3-parameters") | {"policy": "at_step"}
    with training(case, tmp_path, update_on="device") as engine:
        engine.backward(engine(*batch(2, 0)))
        with traced_late() as traced:
            engine.step()
    ups, downs = ([copy for copy in traced.of(kind) if copy.stream != 0] for kind in ("up", "down"))
    assert {up.stream for up in ups}.isdisjoint(down.stream for down in downs)
    waiting = [down for down in downs if down.queued < ups[-1].queued and not 0 < down.begun < ups[-1].queued]
    assert waiting, "the last piece goes up while another has yet to come down"


def test_auto_is_the_share_at_which_both_end_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By rates measured as the engine is built: the bits are those of any other share."""
    caplog.set_level("INFO", "wherry")
    expected, _ = train(engine_of(tmp_path / "host", ADAM, update_on="host"))
    masters, _ = train(engine_of(tmp_path / "auto", ADAM, update_on="auto"))
    assert all(torch.equal(masters[name], value) for name, value in expected.items())
    [line] = [record.getMessage() for record in caplog.records if "update_on" in record.getMessage()]
    assert 0 < int(line.partition("%")[0].rpartition(" ")[2]) < 100, line
    engine_of(tmp_path, {"type": "RMSprop"}, update_on="auto").close()
    assert "wherry.update_on: auto is the host, as the form of the state of RMSprop is not known" in caplog.text
    with pytest.raises(wherry.WherryError, match=r"wherry.update_on: 1.0 .* got RMSprop; leave it out"):
        engine_of(tmp_path, {"type": "RMSprop"}, update_on=1.0)
