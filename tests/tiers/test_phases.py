"""States leave the device between phases and return bit for bit; every rank reports a disk that fails."""

from __future__ import annotations

import copy
import os
import re
import select
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import engine_of, make_model, settings, token_batch, train_step
from tests.tiers.rows import ROWS, offload, with_stores

import wherry
from wherry.errors import PeerError, WherryError
from wherry.native.disk import Fault
from wherry.offload_states import SPELLINGS
from wherry.parallel.comm import Comm, SoloComm
from wherry.testing import run_ranks
from wherry.testing.late import Chaos, ChaosLink, topology
from wherry.tickets import Ticket
from wherry.tiers.disk_errors import DiskError
from wherry.update.optimizer_states import UpdateBucket


@pytest.mark.parametrize(
    ("stage", "include"), [(0, None), (3, None), (3, "optimizer"), (0, ["lp_params", "contiguous_grad_buffer"])]
)
def test_states_leave_and_come_back(stage: int, include: str | list[str] | None) -> None:
    model = make_model()

    def body(comm: Comm) -> list[float]:
        link = ChaosLink(Chaos(comm.rank))
        losses = []
        mine = copy.deepcopy(model)
        engine = engine_of(
            mine, settings(stage, more={"bf16": {"enabled": True}}), topology(comm, link.chaos, link=link)
        )
        for step in range(6):
            if step == 3 and leaves:
                before = link.bytes_down
                freed = engine.offload_states(include=include)
                assert freed == link.bytes_down - before > 0
                names = [include] if isinstance(include, str) else include or SPELLINGS
                rows = {(row.state, row.tier): row for row in engine.memory()}
                away = {state.removesuffix(" away") for state, _ in rows if state.endswith(" away")}
                assert away == {SPELLINGS.get(name, name) for name in names}
                assert freed == sum(row.bytes_actual for (state, _), row in rows.items() if state.endswith(" away"))
                for state in away:
                    # Counters of steps are no tensors of the device's.
                    assert rows[state, "device"].bytes_actual <= 64 < rows[f"{state} away", "host"].bytes_actual
                with pytest.raises(WherryError, match=r"call reload_states\(\) first"):
                    engine(*token_batch(step, 0, comm.rank))
                engine.reload_states()
                assert link.host.counters.in_use == 0
                assert not any(row.state.endswith(" away") for row in engine.memory())
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


def test_memory_of_states_that_have_left_is_other_programs() -> None:
    """A GPU's allocator would keep it, for this program alone."""

    class Returns(ChaosLink):
        def return_unused(self) -> None:
            left.append(next(row.bytes_actual for row in engine.memory() if row.state == "gradients"))

    left: list[int] = []
    link, model = Returns(Chaos(4)), make_model()
    mesh = topology(SoloComm(), link.chaos, link=link)
    engine = engine_of(model, settings(2), mesh)
    train_step(engine, 0, 0)
    assert not left
    assert engine.offload_states() > 0
    assert left == [0]
    engine.reload_states()
    engine.close()


def test_states_that_there_are_not() -> None:
    engine, *_ = wherry.initialize(model=make_model(), config=settings(1))
    with pytest.raises(WherryError, match=r"offload_states: momenta is no state; they are parameters"):
        engine.offload_states(include=["momenta"])
    with pytest.raises(WherryError, match=r"offload_states: momenta is no state.*optim_states"):
        engine.offload_states(include="momenta")
    with pytest.raises(WherryError, match='expected the device "host"'):
        engine.offload_states(device="nvme")
    # Where the device is the host, nothing has to move.
    assert engine.offload_states() == 0
    engine.reload_states()
    engine(*token_batch(0, 0, 0))
    engine.close()


@pytest.mark.usefixtures("every_flat_alone")
@pytest.mark.parametrize(
    ("row", "what", "policy"),
    [
        ("disk-2", "write", "at_step"),
        ("infinity", "write", "before_use"),
        ("disk-2", "write", "in_backward"),
        ("infinity", "write", "delayed"),
        ("infinity", "read", "before_use"),
        ("disk-2", "read", "at_step"),
    ],
)
def test_a_failing_disk_is_told_to_every_rank_with_the_unit(row: str, what: str, policy: str, tmp_path: Path) -> None:
    model = make_model()
    config = offload(row, tmp_path, policy)
    config["wherry"]["delayed_update_warmup"] = 1

    def body(comm: Comm) -> tuple[str, list[str]]:
        mine = copy.deepcopy(model)
        place, stores = with_stores(topology(comm))
        engine = engine_of(mine, settings(ROWS[row][0], more=config), place)
        try:
            for step in range(5):
                if step == 2 and comm.rank == 1:
                    stores[0].inject(Fault(what, errno=5, skip=1))
                train_step(engine, step, comm.rank)
            return "no error", []
        except (WherryError, PeerError, DiskError) as error:
            return str(error), list(map(str, tmp_path.iterdir()))
        finally:
            engine.close()

    messages = [message for message, _ in run_ranks(2, body, timeout=20)]
    unit = re.search(rf"unit '(root|blocks\.\d)': {what} of", messages[1])
    assert unit is not None, messages
    assert "Input/output error" in messages[1]
    assert "rank 1 has failed" in messages[0]
    assert unit[0] in messages[0]
    assert "Input/output error" in messages[0]
    assert list(tmp_path.iterdir()) == []


def test_weights_read_from_outside_are_those_after_the_step(tmp_path: Path) -> None:
    """Updates that run beside the forward are complete for whoever looks, by a parameter or by a state_dict."""
    model = make_model()
    config = offload("offload-0", tmp_path, "before_use")

    def trained(look: Any) -> torch.Tensor:
        mine = copy.deepcopy(model)
        link = ChaosLink(Chaos(1))
        engine = engine_of(mine, settings(0, more=config), topology(SoloComm(), link.chaos, link=link))
        train_step(engine, 0, 0)
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


def begin(row: str, folder: Path, policy: str, **more: Any) -> tuple[Any, Any, ChaosLink]:
    """An engine of one rank, its model, and the way to its device."""
    model = make_model()
    link = ChaosLink(Chaos(2))
    engine = engine_of(
        model,
        settings(ROWS[row][0], more=offload(row, folder, policy, **more)),
        topology(SoloComm(), link.chaos, link=link),
    )
    return engine, model, link


@pytest.mark.parametrize("stage", [0, 3])
def test_states_leave_one_after_another_within_a_window(stage: int) -> None:
    """Keep states away that are away, and go on in the window with its gradients."""
    model = make_model()

    def body(comm: Comm) -> list[float]:
        link = ChaosLink(Chaos(comm.rank))
        mine = copy.deepcopy(model)
        engine = engine_of(mine, settings(stage, 3, 0.3), topology(comm, link.chaos, link=link))
        told = []
        for step in range(3):
            for micro in range(3):
                if leaves and (step, micro) in ((1, 1), (2, 0), (2, 2)):
                    assert engine.offload_states(["optimizer"]) > 0
                    assert engine.offload_states(["optimizer"]) == 0
                    assert engine.offload_states() > 0
                    assert engine.offload_states() == 0
                    engine.reload_states()
                    assert link.host.counters.in_use == 0
                loss = engine(*token_batch(step, micro, comm.rank))
                engine.backward(loss)
                engine.step()
                told.append(float(loss.detach()))
            told.append(engine.get_global_grad_norm())
        engine.close()
        return told

    leaves = False
    plain = run_ranks(2, body)
    leaves = True
    assert run_ranks(2, body) == plain


@pytest.mark.usefixtures("forks")
def test_a_fork_does_not_wait_for_updates_that_run_elsewhere(tmp_path: Path) -> None:
    engine, model, _ = begin("offload-2", tmp_path, "before_use")
    train_step(engine, 0, 0)
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            told = f"read {float(model.blocks[0].mix.weight.sum())}"
        except WherryError as error:
            told = str(error)
        os.write(into, told.encode())
        os._exit(0)
    ready, _, _ = select.select([out], [], [], 20)
    told = os.read(out, 4096).decode() if ready else "nothing: it hangs"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(out)
    os.close(into)
    assert f"under way in process {os.getpid()}" in told
    assert "engine.settle() before the fork" in told
    assert model.blocks[0].mix.weight.isfinite().all()
    engine.close()


def test_an_engine_may_be_closed_inside_gathered(tmp_path: Path) -> None:
    engine, model, link = begin("offload-3-parameters", tmp_path, "before_use")
    weight = model.blocks[0].mix.weight
    with wherry.gathered(weight):
        assert weight.isfinite().all()
        engine.close()
        assert weight.isnan().all()
    assert link.host.counters.in_use == 0
    again, model, _ = begin("offload-3-parameters", tmp_path, "before_use")
    with wherry.gathered_for_generation(again):
        again.close()
    assert again.closed


def test_what_fails_at_the_end_keeps_nothing_else(tmp_path: Path) -> None:
    engine, model, link = begin("infinity", tmp_path, "before_use")
    engine.backward(engine(*token_batch(0, 0, 0)))

    class Broken:
        def open(self, *_: Any) -> None:
            """Takes whatever comes."""

        log = open

        def close(self) -> None:
            raise RuntimeError("a sink of the user's")

    engine.monitor.add(Broken())
    engine.monitor.log(0, {})
    with pytest.raises(RuntimeError, match="a sink of the user's"):
        engine.close()
    assert engine.closed
    assert link.host.counters.in_use == 0
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert list(tmp_path.iterdir()) == []
    engine.close()


def test_weights_that_cannot_all_be_gathered_are_all_let_go_of(tmp_path: Path) -> None:
    model, (place, stores) = make_model(), with_stores(topology(SoloComm()))
    config = settings(3, more=offload("infinity", tmp_path, "at_step"))
    engine = engine_of(model, config, place)
    flats = [flat for unit in engine.units for flat in unit.flats]
    stores[0].inject(Fault("read", errno=5, skip=1))
    with pytest.raises(DiskError, match="Input/output error"), wherry.gathered(model):
        pass
    assert [flat.pins for flat in flats] == [0] * len(flats)
    assert not any(flat.elastic.nbytes for flat in flats)
    engine.close()


@pytest.mark.usefixtures("every_flat_alone")
@pytest.mark.parametrize("policy", ["at_step", "before_use"])
def test_gathers_that_were_begun_are_waited_for_when_an_update_fails(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = UpdateBucket.update

    def fail(bucket: UpdateBucket, *args: Any) -> Ticket:
        if bucket.name == "blocks.1":
            raise OSError("a bad kernel")
        return update(bucket, *args)

    monkeypatch.setattr(UpdateBucket, "update", fail)

    def body(comm: Comm) -> None:
        class Noted(Ticket):
            def wait(self) -> None:
                waited.append(self)

        waited: list[Ticket] = []
        begun: list[Ticket] = []

        def gather(*_: Any) -> Ticket:
            begun.append(Noted())
            return begun[-1]

        model = make_model()
        engine = engine_of(model, settings(2, more=offload("offload-2", tmp_path, policy)), comm)
        engine.backward(engine(*token_batch(0, 0, comm.rank)))
        comm.all_gather = gather  # type: ignore[method-assign]
        with pytest.raises(WherryError, match="a bad kernel"):
            engine.step()
        assert len(begun) == 2
        assert waited == begun
        engine.close()

    run_ranks(2, body)
