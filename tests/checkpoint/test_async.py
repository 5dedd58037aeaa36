"""`async_save`: a checkpoint holds the states at the call, and training goes on while it is written."""

from __future__ import annotations

import copy
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.harness import BF16, MODEL, Shape, assert_same, load_into, on, state_of, train
from tests.engine.harness import adamw, engine_of, make_model, settings
from tests.engine.test_whole_optimizers import VOUCHED

import wherry
from wherry.checkpoint import folder as folders
from wherry.checkpoint import staging
from wherry.checkpoint.format import RankFiles
from wherry.checkpoint.staging import Staging
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks
from wherry.testing.late import Chaos, ChaosLink, topology
from wherry.tickets import Ticket
from wherry.tiers.host import Room

ROOT = Path(__file__).parents[2]


class Gate:
    """Hold back the threads that write checkpoints until `open` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        pieces = Staging.pieces

        def late(staged: Any) -> Any:
            assert self.open.wait(60)
            yield from pieces(staged)

        monkeypatch.setattr(Staging, "pieces", late)


class LatestLink(ChaosLink):
    """A link whose background copies run when one is waited for, and never earlier."""

    def aside(self, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        late = self.down(target, source)
        self.chaos.pending.remove(late)  # type: ignore[arg-type]
        return late


def async_engine(
    comm: Comm, stage: int, more: dict[str, Any], late: bool = True, optimizer: Any = adamw
) -> tuple[Any, LatestLink]:
    """An engine with `async_save`; if `late`, on a device apart from the host, whose copies complete late."""
    chaos = Chaos(7 * stage + comm.rank)
    link = LatestLink(chaos)
    config = settings(stage, more=copy.deepcopy(more))
    config["wherry"] = {**more.get("wherry", {}), "checkpoint": {"async_save": True}}
    mesh = topology(comm, chaos, link=link) if late else topology(comm)
    return engine_of(copy.deepcopy(MODEL), config, mesh, optimizer), link


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=1e-2)


IN_BACKWARD = {"wherry": {"update_policy": "in_backward"}}
ON_HOST = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
ON_DISK = {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "cpu"}}
# Stage and config; a device apart, on which states rest, needs copies from it.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "device": (2, IN_BACKWARD),
    "device, whole parameters": (0, VOUCHED),
    "host": (3, {"zero_optimization": {"stage": 3, **ON_HOST}, **BF16, **IN_BACKWARD}),
    "disk": (3, {"zero_optimization": {"stage": 3, **ON_DISK}, **BF16}),
    "no device": (1, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_states_saved_are_those_at_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """States on disk are written before the call returns, which is logged; all others behind training."""
    stage, more = copy.deepcopy(CASES[name])
    on_disk, plain = name == "disk", {key: value for key, value in more.items() if key in (*BF16, *VOUCHED)}
    optimizer = adafactor if "whole" in name else adamw
    if on_disk:
        (tmp_path / "states").mkdir()
        more["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(tmp_path / "states")
    gate = Gate(monkeypatch)
    trained = threading.Barrier(2)

    def saving(comm: Comm) -> Any:
        engine, link = async_engine(comm, stage, more, "no" not in name, optimizer)
        train(engine, comm, 2)
        states = state_of(engine, everywhere=False)
        before = link.bytes_down
        engine.save_checkpoint(tmp_path / "saved")
        assert (tmp_path / "saved" / "latest").exists() is on_disk
        assert (link.bytes_down > before) is name.startswith("device")
        with torch.no_grad():
            for parameter in engine.module.parameters() if stage < 3 else ():
                parameter.zero_()  # by the program
        train(engine, comm, 2, first=2)
        trained.wait(60)  # with the gate open, one rank's writer thread would run the other's late copies
        gate.open.set()
        engine.wait_for_checkpoint()
        assert link.aside_pool.counters.in_use == 0, "every buffer is back in the pool"
        engine.close()
        return states

    states = run_ranks(2, saving)[0]
    reasons = [text for text in caplog.messages if "as states on disk are read as they are written" in text]
    assert len(reasons) == on_disk
    loaded = load_into(Shape(1, 0, more=plain), tmp_path / "saved", optimizer=optimizer)
    for key, value in states.items():  # a working weight may be rounded otherwise
        assert ("bf16" in plain and key.endswith(":working")) or torch.equal(loaded[key], value), key


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
    engine = engine_of(make_model(), settings(0, more={"wherry": {"checkpoint": {"async_save": True}}}))
    engine.save_checkpoint(folder)
    print(Path(folder, "latest").exists())


def test_a_program_that_ends_waits_for_its_last_save(tmp_path: Path, launched: Any) -> None:
    code = "import sys; from tests.checkpoint.test_async import save_and_end; save_and_end(sys.argv[1])"
    done = launched.subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
    assert folders.newest_whole(tmp_path) == "global_step0"


@pytest.mark.parametrize("free", [0, 1 << 40])
def test_without_the_memory_for_copies_training_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, free: int
) -> None:
    """All ranks write before the call returns, log the reason once, and the checkpoint is the same."""
    monkeypatch.setattr(staging, "rooms", lambda *_: [Room("a machine", "on a machine", free)])
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


def test_a_save_behind_updates_writes_the_bytes_of_a_calm_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments of 8 bits have scales beside their codes, which updates change too."""

    def body(comm: Comm) -> None:
        engine, _ = async_engine(comm, 1, {"wherry": {"state_dtype": "int8"}}, late=False)
        train(engine, comm, 2)
        engine.save_checkpoint(tmp_path / "calm")
        engine.wait_for_checkpoint()
        gate = Gate(monkeypatch)
        engine.save_checkpoint(tmp_path / "behind")
        train(engine, comm, 2, first=2)
        gate.open.set()
        engine.wait_for_checkpoint()
        engine.close()

    run_ranks(1, body)
    calm = sorted((tmp_path / "calm").rglob("*.safetensors"))
    assert calm
    for path in calm:
        assert path.read_bytes() == (tmp_path / "behind" / path.relative_to(tmp_path / "calm")).read_bytes(), path.name
