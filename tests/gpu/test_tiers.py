"""On a GPU: states on host and disk, under every policy, and with copies that real streams make late."""

from __future__ import annotations

import copy
import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import Run, adamw, assert_equal, make_model, settings, token_batch
from tests.gpu.warm import DEVICE, warm_up
from tests.tiers.test_placements import EXACT, ROWS, offload

import wherry
from wherry.parallel.comm import Comm, SoloComm
from wherry.parallel.topology import Topology, default_device
from wherry.testing import run_ranks
from wherry.tickets import Ticket
from wherry.tiers.streams import DeviceLink
from wherry.train.model import GPT, GPTConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE is None, reason="needs an accelerator: run `pytest tests/gpu` where there is one"),
]
STEPS = 4
# Cycles that a late copy waits at most: about a millisecond, longer than a tiny model's whole forward.
LATE = 2_000_000


class LateLink(DeviceLink):
    """Copies begin late, by a random time, so that a stream which did not wait for one reads what was there before."""

    def __init__(self, seed: int) -> None:
        super().__init__(default_device())
        self._random = random.Random(seed)

    def _copy(self, stream: torch.Stream, *arguments: Any, **options: Any) -> Ticket:
        sleep = getattr(torch.get_device_module(self.device), "_sleep", None)
        if sleep is not None:  # else it is a device whose copies are late by themselves
            with stream:
                sleep(self._random.randrange(LATE))
        return super()._copy(stream, *arguments, **options)


def train(
    config: dict[str, Any], stage: int, *, ranks: int = 1, clip: float = 0.0, accumulation: int = 1, late: int = -1
) -> Run:
    """One rank is the program's own thread, two are threads that share the device; with `late`, a seed, copies wait."""
    model = make_model()

    def body(comm: Comm) -> Run:
        mine = copy.deepcopy(model)
        mesh: Any = comm
        if late >= 0:
            device, link = default_device(), LateLink(1000 * late + comm.rank)
            mesh = Topology(comm, device, comm.rank, comm.rank, comm.size, link=lambda pin: link)
        engine, *_ = wherry.initialize(
            model=mine,
            optimizer=adamw(mine.parameters()),
            config=settings(stage, accumulation, clip, copy.deepcopy(config)),
            mesh=mesh,
        )
        run = Run()
        for step in range(STEPS):
            for micro in range(accumulation):
                loss = engine(*(t.to(DEVICE) for t in token_batch(step, micro, comm.rank)))
                engine.backward(loss)
                engine.step()
                run.losses.append(sum(comm.gather_objects(float(loss.detach()))) / comm.size)
            norm = engine.get_global_grad_norm()
            run.norms.append(-1.0 if norm is None else norm)
        with wherry.gathered(mine):
            run.weights = {name: p.detach().cpu().clone() for name, p in mine.named_parameters()}
        engine.close()
        return run

    return body(SoloComm()) if ranks == 1 else run_ranks(ranks, body)[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("row", ROWS)
def test_every_policy_gives_the_same_bits(row: str, ranks: int, precision: str, tmp_path: Path) -> None:
    """Of the same host kernel: without offload the GPU's own kernel rounds in another order."""
    stage = ROWS[row][0]
    runs = [train(offload(row, tmp_path, policy, precision), stage, ranks=ranks) for policy in EXACT]
    for run in runs[1:]:
        assert_equal(run, runs[0])


@pytest.mark.parametrize(
    ("policy", "clip", "accumulation"),
    [
        ("at_step", 0.5, 2),
        ("before_use", 0.0, 2),
        ("before_use", 0.5, 1),
        ("in_backward", 0.0, 1),
        ("in_backward", 0.0, 2),
    ],
)
@pytest.mark.parametrize("row", ["offload-2", "offload-3-parameters", "infinity"])
def test_late_copies_change_nothing(row: str, policy: str, clip: float, accumulation: int, tmp_path: Path) -> None:
    stage, config = ROWS[row][0], offload(row, tmp_path, policy, "bf16")
    calm = train(config, stage, clip=clip, accumulation=accumulation)
    for seed in range(5):
        assert_equal(train(config, stage, clip=clip, accumulation=accumulation, late=seed), calm)


# 25 million parameters, and 6 million on a device that a CPU computes for.
_HIDDEN = 256 if DEVICE is not None and DEVICE.type == "emulated" else 512
SHAPE = GPTConfig(layers=8, hidden=_HIDDEN, heads=8, sequence=64, vocabulary=256)


def _peak(config: dict[str, Any], stage: int) -> tuple[int, int]:
    """Device bytes at the peak of a step of a model of some millions of parameters, and those at rest, above before."""
    for _ in range(2):  # of the engine before: graphs, and what their hooks hold
        gc.collect()
    warm_up()
    torch.accelerator.empty_cache()
    torch.manual_seed(0)
    before = torch.accelerator.memory_allocated()
    model = GPT(SHAPE)
    engine, *_ = wherry.initialize(
        model=model, optimizer=adamw(model.parameters()), config=settings(stage, 1, 0.5, copy.deepcopy(config))
    )
    ids = torch.zeros(1, 64, dtype=torch.int64, device=DEVICE)
    for step in range(3):
        if step == 2:
            engine.settle()
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
        engine.backward(engine(ids, ids))
        engine.step()
    engine.settle()
    torch.accelerator.synchronize()
    found = torch.accelerator.max_memory_allocated() - before, torch.accelerator.memory_allocated() - before
    engine.close()
    return found


def test_states_on_the_host_take_no_device_memory(tmp_path: Path) -> None:
    parameters = sum(p.numel() for p in GPT(SHAPE).parameters())
    bf16 = {"bf16": {"enabled": True}}
    resident, _ = _peak(bf16, 2)
    offloaded, _ = _peak(offload("offload-2", tmp_path, "before_use", "bf16"), 2)
    # Master and moments, twelve bytes of a parameter, have left the device.
    assert resident - offloaded >= 11 * parameters
    config = offload("offload-3-parameters", tmp_path, "before_use", "bf16")
    unit = parameters // 8
    config["zero_optimization"] |= {"stage3_max_live_parameters": 2 * unit, "stage3_prefetch_bucket_size": unit}
    everything, at_rest = _peak(config, 3)
    # Two units' weights of eight, in two bytes.
    assert everything <= offloaded - 5 * 2 * unit
    # Buffers of three units' gradients, of which two may be on their way down, and little else.
    assert at_rest <= 3.3 * 2 * unit
