"""States leave the device between phases and return bit for bit; every rank reports a disk that fails."""

from __future__ import annotations

import copy
import os
import re
import select
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

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
from wherry.tiers.disk_errors import DiskError


class NotingLink(ChaosLink):
    """A link whose device's free memory is returned to the system so many times."""

    returned = 0

    def return_unused(self) -> None:
        self.returned += 1
        super().return_unused()


def leave_and_return(engine: Any, link: NotingLink, include: Any) -> None:
    """Offload states twice, look at the table of memory, and reload them."""
    before, returned = link.bytes_down, link.returned
    freed = engine.offload_states(include=include)
    assert freed == link.bytes_down - before > 0
    assert link.returned > returned, "a GPU's allocator would keep it, for this program alone"
    assert engine.offload_states(include=include) == 0
    names = [include] if isinstance(include, str) else include or SPELLINGS
    rows = {(row.state, row.tier): row for row in engine.memory()}
    away = {state.removesuffix(" away") for state, _ in rows if state.endswith(" away")}
    assert away == {SPELLINGS.get(name, name) for name in names}
    assert freed == sum(row.bytes_actual for (state, _), row in rows.items() if state.endswith(" away"))
    for state in away:
        # Counters of steps are no tensors of the device's.
        assert rows[state, "device"].bytes_actual <= 64 < rows[f"{state} away", "host"].bytes_actual
    with pytest.raises(WherryError, match=r"call reload_states\(\) first"):
        engine(*token_batch(0, 0, 0))
    engine.offload_states()  # the others too
    engine.reload_states()
    assert link.host.counters.in_use == 0
    assert not any(row.state.endswith(" away") for row in engine.memory())


@pytest.mark.parametrize(
    ("stage", "include"), [(3, None), (3, "optimizer"), (0, ["lp_params", "contiguous_grad_buffer"])]
)
def test_states_leave_and_come_back(stage: int, include: str | list[str] | None) -> None:
    """At the beginning, in the middle and at the end of a window."""
    model = make_model()
    config = settings(stage, 3, 0.3, {"bf16": {"enabled": True}})

    def body(comm: Comm) -> list[float]:
        link = NotingLink(Chaos(comm.rank))
        engine = engine_of(copy.deepcopy(model), config, topology(comm, link.chaos, link=link))
        values = []
        for step in range(3):
            for micro in range(3):
                if leaves and (step, micro) in ((1, 1), (2, 0), (2, 2)):
                    leave_and_return(engine, link, include)
                loss = engine(*token_batch(step, micro, comm.rank))
                engine.backward(loss)
                engine.step()
                values.append(float(loss.detach()))
            values.append(engine.get_global_grad_norm())
        engine.close()
        return values

    leaves = False
    plain = run_ranks(2, body)
    leaves = True
    assert run_ranks(2, body) == plain


def test_states_that_there_are_not() -> None:
    engine = engine_of(make_model(), settings(1))
    with pytest.raises(WherryError, match=r"offload_states: momenta is no state; they are parameters.*optim_states"):
        engine.offload_states(include=["momenta"])
    with pytest.raises(WherryError, match='expected the device "host"'):
        engine.offload_states(device="nvme")
    # Where the device is the host, nothing has to move.
    assert engine.offload_states() == 0
    engine.close()


@pytest.mark.usefixtures("every_flat_alone")
@pytest.mark.parametrize(
    ("row", "direction", "policy"),
    [
        ("disk-2", "write", "in_backward"),
        ("infinity", "write", "delayed"),
        ("infinity", "read", "before_use"),
        ("disk-2", "read", "at_step"),
    ],
)
def test_a_failing_disk_is_told_to_every_rank_with_the_unit(
    row: str, direction: str, policy: str, tmp_path: Path
) -> None:
    model = make_model()
    config = offload(row, tmp_path, policy)
    config["wherry"]["delayed_update_warmup"] = 1

    def body(comm: Comm) -> str:
        place, stores = with_stores(topology(comm))
        engine = engine_of(copy.deepcopy(model), settings(ROWS[row][0], more=config), place)
        try:
            for step in range(5):
                if step == 2 and comm.rank == 1:
                    stores[0].inject(Fault(direction, errno=5, skip=1))
                train_step(engine, step, comm.rank)
            return "no error"
        except (WherryError, PeerError, DiskError) as error:
            return str(error)
        finally:
            engine.close()

    messages = run_ranks(2, body, timeout=20)
    unit = re.search(rf"unit '(root|blocks\.\d)': {direction} of", messages[1])
    assert unit is not None, messages
    assert "rank 1 has failed" in messages[0] and unit[0] in messages[0]
    assert all("Input/output error" in message for message in messages)
    assert list(tmp_path.iterdir()) == []


def begin(row: str, folder: Path, policy: str) -> tuple[Any, Any, ChaosLink]:
    """Build an engine of one rank; return it, its model, and the link to its device."""
    model, link = make_model(), ChaosLink(Chaos(2))
    config = settings(ROWS[row][0], more=offload(row, folder, policy))
    return engine_of(model, config, topology(SoloComm(), link.chaos, link=link)), model, link


def test_weights_read_from_outside_are_those_after_the_step(tmp_path: Path) -> None:
    """Updates that run beside the forward are complete for whoever looks, by a parameter or by a state_dict."""
    looks = [
        lambda engine, model: engine.module.blocks[0].mix.weight,
        lambda engine, model: model.blocks[0].mix.weight,
        lambda engine, model: model.state_dict()["blocks.0.mix.weight"],
        lambda engine, model: model.blocks[0].state_dict()["mix.weight"],
    ]
    seen = []
    for look in looks:
        engine, model, _ = begin("offload-0", tmp_path, "before_use")
        train_step(engine, 0, 0)
        seen.append(look(engine, model).detach().clone())
        engine.close()
    assert not torch.equal(seen[0], make_model().state_dict()["blocks.0.mix.weight"])
    assert all(torch.equal(other, seen[0]) for other in seen)


@pytest.mark.usefixtures("forks")
def test_a_fork_does_not_wait_for_updates_that_run_elsewhere(tmp_path: Path) -> None:
    engine, model, _ = begin("offload-2", tmp_path, "before_use")
    train_step(engine, 0, 0)
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            outcome = f"read {float(model.blocks[0].mix.weight.sum())}"
        except WherryError as error:
            outcome = str(error)
        os.write(into, outcome.encode())
        os._exit(0)
    ready, _, _ = select.select([out], [], [], 20)
    outcome = os.read(out, 4096).decode() if ready else "nothing: it hangs"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(out)
    os.close(into)
    assert f"under way in process {os.getpid()}" in outcome and "engine.settle() before the fork" in outcome
    assert model.blocks[0].mix.weight.isfinite().all()
    engine.close()


def test_an_engine_may_be_closed_inside_gathered(tmp_path: Path) -> None:
    engine, model, link = begin("offload-3-parameters", tmp_path, "before_use")
    weight = model.blocks[0].mix.weight
    with wherry.gathered(weight), wherry.gathered_for_generation(engine):
        assert weight.isfinite().all()
        engine.close()
        assert weight.isnan().all()
    assert engine.closed and link.host.counters.in_use == 0


def test_what_fails_at_the_end_keeps_nothing_else(tmp_path: Path) -> None:
    engine, model, link = begin("infinity", tmp_path, "before_use")
    engine.backward(engine(*token_batch(0, 0, 0)))
    sink = Mock()
    sink.close.side_effect = RuntimeError("a sink of the user's")
    engine.monitor.add(sink)
    engine.monitor.log(0, {})
    with pytest.raises(RuntimeError, match="a sink of the user's"):
        engine.close()
    assert engine.closed and link.host.counters.in_use == 0
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert list(tmp_path.iterdir()) == []
    engine.close()


def test_weights_that_cannot_all_be_gathered_are_all_let_go_of(tmp_path: Path) -> None:
    model, (place, stores) = make_model(), with_stores(topology(SoloComm()))
    engine = engine_of(model, settings(3, more=offload("infinity", tmp_path, "at_step")), place)
    flats = [flat for unit in engine.units for flat in unit.flats]
    stores[0].inject(Fault("read", errno=5, skip=1))
    with pytest.raises(DiskError, match="Input/output error"), wherry.gathered(model):
        pass
    assert not any(flat.pins or flat.elastic.nbytes for flat in flats)
    engine.close()
