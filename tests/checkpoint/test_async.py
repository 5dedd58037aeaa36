"""`async_save`: a checkpoint holds the states at the call, and training goes on while it is written."""

from __future__ import annotations

import copy
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.harness import (
    BF16,
    Gate,
    Shape,
    assert_same,
    async_engine,
    load_into,
    on,
    save_from,
    state_of,
    train,
)
from tests.engine.harness import adamw, make_model, settings, token_batch

import wherry
from wherry.checkpoint import folder as folders
from wherry.checkpoint import staging
from wherry.checkpoint.format import RankFiles
from wherry.checkpoint.staging import Staging
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks
from wherry.tiers.host import Room

ROOT = Path(__file__).parents[2]
HOST = {"offload_optimizer": {"device": "cpu"}}
DISK = {"offload_optimizer": {"device": "nvme"}}
WEIGHTS = {"offload_param": {"device": "cpu"}}
IN_BACKWARD = {"wherry": {"update_policy": "in_backward"}}
DELAYED = {"wherry": {"update_policy": "delayed", "delayed_update_warmup": 1}}
# Stage and config; states rest on the device, sharded or not, in its dtypes.
ON_DEVICE: dict[str, tuple[int, dict[str, Any]]] = {
    "1, bf16": (1, BF16),
    "2, in backward": (2, IN_BACKWARD),
    "3, weights on the host": (3, {"zero_optimization": {"stage": 3, **WEIGHTS}}),
}
# States that need no copy from a device.
ON_HOST: dict[str, tuple[int, dict[str, Any]]] = {
    "3, in backward": (3, {"zero_optimization": {"stage": 3, **HOST, **WEIGHTS}, **BF16, **IN_BACKWARD}),
    "3, states on disk": (3, {"zero_optimization": {"stage": 3, **DISK, **WEIGHTS}, **BF16}),
    "3, delayed": (3, {"zero_optimization": {"stage": 3, **HOST}, **DELAYED}),
    "1, no device": (1, {}),
}


@pytest.mark.parametrize("name", [*ON_DEVICE, *ON_HOST])
def test_the_states_saved_are_those_at_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """States on disk are written before the call returns, which is logged; all others behind training."""
    stage, more = copy.deepcopy({**ON_DEVICE, **ON_HOST}[name])
    plain = {key: value for key, value in more.items() if key == "bf16"}
    if "disk" in name:
        (tmp_path / "states").mkdir()
        more["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(tmp_path / "states")
    late = "no device" not in name
    gate = Gate(monkeypatch)
    trained = threading.Barrier(2)

    def saving(comm: Comm) -> Any:
        engine, link = async_engine(comm, stage, more, late)
        train(engine, comm, 2)
        states = state_of(engine, everywhere=False)
        before = link.bytes_down
        engine.save_checkpoint(tmp_path / "saved")
        assert (tmp_path / "saved" / "latest").exists() is ("disk" in name)
        copied = link.bytes_down - before
        losses = train(engine, comm, 2, first=2)
        trained.wait(60)  # with the gate open, one rank's writer thread would run the other's late copies
        gate.open.set()
        engine.wait_for_checkpoint()
        in_use = link.aside_pool.counters.in_use
        engine.save_checkpoint(tmp_path / "saved")
        engine.wait_for_checkpoint()
        assert link.aside_pool.counters.in_use == in_use == 0, "buffers are given back"
        after = state_of(engine, everywhere=False)
        engine.close()
        return states, losses, after, copied

    def undisturbed(comm: Comm) -> Any:
        engine, _ = async_engine(comm, stage, more, late)
        train(engine, comm, 2)
        engine.settle()  # as reading the states does: apply a delayed update
        losses = train(engine, comm, 2, first=2)
        found = losses, state_of(engine, everywhere=False)
        engine.close()
        return found

    states, losses, after, copied = run_ranks(2, saving)[0]
    expected = run_ranks(2, undisturbed)[0]
    assert losses == expected[0]
    assert_same(after, expected[1])
    assert (copied > 0) is (name in ON_DEVICE)
    reasons = [text for text in caplog.messages if "as states on disk are read as they are written" in text]
    assert len(reasons) == (2 if "disk" in name else 0)
    for tag, wanted in (("global_step2", states), ("global_step4", after)):
        loaded = load_into(Shape(1, 0, more=plain), tmp_path / "saved", tag=tag)
        for key, value in wanted.items():  # a working weight may be rounded otherwise
            assert (plain and key.endswith(":working")) or torch.equal(loaded[key], value), (tag, key)


def test_weights_are_copied_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are copied before moments, so that a forward that waits for them does not wait for all."""
    gate = Gate(monkeypatch)

    def body(comm: Comm) -> None:
        engine, link = async_engine(comm, 0, {})
        train(engine, comm, 1)
        engine.save_checkpoint(tmp_path)
        weights = sum(4 * p.numel() for p in engine.module.parameters())
        assert link.bytes_aside == weights and len(link.queue) > 0
        engine(*token_batch(1, 0, comm.rank))
        assert link.bytes_aside == weights, "a forward waits for no moments"
        gate.open.set()
        engine.close()

    run_ranks(1, body)


@pytest.mark.parametrize("late", [True, False])
def test_weights_that_the_program_overwrites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """Writes to the model's parameters right after the call do not reach the checkpoint."""
    gate = Gate(monkeypatch)

    def body(comm: Comm) -> None:
        engine, _ = async_engine(comm, 0, {}, late=late)
        train(engine, comm, 1)
        states = state_of(engine)
        engine.save_checkpoint(tmp_path)
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.zero_()
        train(engine, comm, 1, first=5)
        gate.open.set()
        engine.load_checkpoint(tmp_path)  # it waits for the save
        assert_same(state_of(engine), states)
        engine.close()

    run_ranks(1, body)


def test_a_save_that_fails_leaves_nothing_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)

    def full(files: Any, name: str, tensor: torch.Tensor) -> str:
        raise OSError(28, "No space left on device", str(files.partial))

    def body(comm: Comm) -> None:
        engine, link = async_engine(comm, 1, {})
        train(engine, comm, 1)
        in_use = link.aside_pool.counters.in_use
        monkeypatch.setattr(RankFiles, "put", full)
        engine.save_checkpoint(tmp_path)
        assert link.aside_pool.counters.in_use > in_use
        gate.open.set()
        with pytest.raises(wherry.WherryError, match="No space left on device"):
            engine.wait_for_checkpoint()
        assert link.aside_pool.counters.in_use == in_use
        train(engine, comm, 1, first=1)
        engine.close()

    run_ranks(1, body)


def save_and_end(folder: str) -> None:
    """Return while the save waits for this thread to end; executors take no more tasks by then."""
    pieces = Staging.pieces

    def late(staged: Any) -> Any:
        threading.main_thread().join()
        yield from pieces(staged)

    Staging.pieces = late  # type: ignore[method-assign]
    model = make_model()
    config = settings(0, more={"wherry": {"checkpoint": {"async_save": True}}})
    engine, *_ = wherry.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
    engine.save_checkpoint(folder)
    print(Path(folder, "latest").exists())


def test_a_program_that_ends_waits_for_its_last_save(tmp_path: Path, launched: Any) -> None:
    code = "import sys; from tests.checkpoint.test_async import save_and_end; save_and_end(sys.argv[1])"
    done = launched.subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
    assert folders.newest_whole(tmp_path) == "global_step0"


def test_a_checkpoint_that_is_deleted_while_the_folder_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another process keeps the last ones only."""
    for tag in ("first", "second"):
        save_from(Shape(), tmp_path, steps=0, tag=tag)
    listed = folders.newest_first(tmp_path)
    (tmp_path / "second" / "manifest.json").unlink()
    monkeypatch.setattr(folders, "newest_first", lambda folder: listed)
    assert folders.newest_whole(tmp_path) == "first"
    assert "second is passed over" in caplog.text


@pytest.mark.parametrize("free", [0, 1 << 40])
def test_without_the_memory_for_copies_training_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, free: int
) -> None:
    """All ranks write before the call returns, log the reason once, and the checkpoint is the same."""
    monkeypatch.setattr(staging, "rooms", lambda: [Room("a machine", "on a machine", free)])
    gate = Gate(monkeypatch)

    def body(engine: Any, comm: Comm) -> Any:
        train(engine, comm, 1)
        states = state_of(engine)
        engine.save_checkpoint(tmp_path)
        comm.barrier()
        assert (tmp_path / "latest").exists() is (free == 0)
        gate.open.set()
        engine.wait_for_checkpoint()
        return states

    states = on(Shape(2, 3, more={"wherry": {"checkpoint": {"async_save": True}}}), body)[0]
    reasons = [text for text in caplog.messages if "training stands still meanwhile" in text]
    assert len(reasons) == (free == 0)
    if reasons:
        assert "copies of the states take" in reasons[0] and "and 0 B are free there" in reasons[0]
    assert_same(load_into(Shape(1, 0), tmp_path), states)


def test_ranks_share_the_memory_of_their_machine_and_of_their_container() -> None:
    """Containers of one name may share a machine, or be on two; the identity of each tells them apart."""

    def short(wanted: int, rooms: list[list[Room]]) -> str | None:
        return staging._shortage([(wanted, each) for each in rooms])

    here = [[Room("a", "on host", 100), Room(f"a {group}", "in the container host", 90)] for group in range(2)]
    there = [[Room("b", "on host", 100), Room("b 0", "in the container host", 90)]]
    assert short(40, here) is None
    assert "take 120 B of host memory on host, and 100 B are free there" in str(short(60, here))
    assert short(60, here[:1] + there) is None
    assert "take 85 B of host memory in the container host, and 90 B" in str(short(85, here[:1] + there))


def test_memory_that_is_pinned_already_is_not_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next save takes the memory that an earlier one has pinned."""
    needed: list[int] = []

    def noted(needs: list[Any]) -> None:
        needed.extend(nbytes for nbytes, _ in needs)

    monkeypatch.setattr(staging, "_shortage", noted)

    def body(comm: Comm) -> None:
        engine, link = async_engine(comm, 1, {})
        for _ in range(2):
            train(engine, comm, 1)
            engine.save_checkpoint(tmp_path)
            engine.wait_for_checkpoint()
        assert needed[0] > 0 >= needed[1] == needed[0] - link.aside_pool.counters.allocated
        engine.close()

    run_ranks(1, body)
