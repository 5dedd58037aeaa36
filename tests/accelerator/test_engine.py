"""The engine on a device apart from the host, whose copies and kernels are late: the bits are those of a calm one.

Each factor of a training meets each other one in some case. A case trains, saves, generates, trains on, loads, and
trains the same steps again, under its update policy and late; the reference is the same training, at once and at_step.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.accelerator import emulated
from tests.activations.model import Model
from tests.engine.harness import Run, adamw, assert_close, assert_equal, make_model, settings, token_batch, train_plain
from tests.tiers.rows import ROWS
from tests.tiers.test_placements import offload

import wherry
from wherry.parallel.comm import Comm, SoloComm
from wherry.parallel.topology import default_device
from wherry.testing import run_ranks

DEVICE_ROWS = {f"device-{stage}": stage for stage in range(4)}
FACTORS: dict[str, tuple[Any, ...]] = {
    "row": (*DEVICE_ROWS, *ROWS),
    "policy": ("at_step", "before_use", "in_backward", "delayed"),
    "window": ("one", "three", "layer-major"),
    "activations": ("keep", "recompute", "host", "disk"),
    "ranks": (1, 2),
    "precision": ("bf16", "fp32"),
    "sums": ("device", "host"),
    "clip": (0.5, 0.0),
    "save": ("at once", "beside"),
    # Where state is updated that does not rest on the device.
    "updates": ("host", 0.3, 1.0),
}
Case = dict[str, Any]
BASE: Case = {
    "row": "offload-3-parameters",
    "policy": "before_use",
    "window": "one",
    "activations": "keep",
    "ranks": 1,
    "precision": "fp32",
    "sums": "device",
    "clip": 0.0,
    "save": "at once",
    "updates": "host",
}


def allowed(case: Case) -> bool:
    """What the engine refuses, or what is another case under another name."""
    if case.get("policy") == "in_backward" and case.get("clip", 0.0):
        return False
    return not (case.get("policy") == "delayed" and case.get("row") in (*DEVICE_ROWS, "parameters-only"))


def cases() -> list[Case]:
    """So many that each two values of two factors meet in one of them."""
    draw = random.Random(0)
    pairs = itertools.combinations(FACTORS, 2)
    left = {((a, x), (b, y)) for a, b in pairs for x in FACTORS[a] for y in FACTORS[b] if allowed({a: x, b: y})}
    found = []
    while left:
        tried = []
        for _ in range(60):
            (a, x), (b, y) = draw.choice(sorted(left, key=str))
            case = {name: draw.choice(values) for name, values in FACTORS.items()} | {a: x, b: y}
            if allowed(case):
                tried.append(case)
        best = max(tried, key=lambda case: sum(pair <= case.items() for pair in map(set, left)))
        left = {pair for pair in left if not set(pair) <= best.items()}
        found.append({name: best[name] for name in FACTORS})
    return found


def config_of(case: Case, folder: Path) -> dict[str, Any]:
    policy, row = case["policy"], case["row"]
    if row in DEVICE_ROWS:
        config: dict[str, Any] = {"wherry": {"update_policy": policy}}
        if case["precision"] == "bf16":
            config["bf16"] = {"enabled": True}
    else:
        config = offload(row, folder, policy, case["precision"])
    if case.get("updates", "host") != "host":
        config["wherry"]["update_on"] = case["updates"]
    if policy == "delayed":
        config["wherry"]["delayed_update_warmup"] = 1
    if case["window"] == "layer-major":
        config["wherry"]["accumulation"] = "layer_major"
    block = {
        "keep": {},
        "recompute": {"policy": "recompute"},
        "host": {"policy": "offload", "cpu_checkpointing": True, "offload_min_bytes": 1},
        "disk": {"policy": "offload", "nvme_path": str(folder), "offload_min_bytes": 1},
    }[case["activations"]]
    if block:
        config["activation_checkpointing"] = block
    config["wherry"]["checkpoint"] = {"async_save": case.get("save") == "beside"}
    stage = DEVICE_ROWS.get(row, ROWS.get(row, (0,))[0])
    return settings(stage, 1 if case["window"] == "one" else 3, case["clip"], config)


def batch(step: int, micro: int, rank: int) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.to(default_device()) for tensor in token_batch(step, micro, rank))


def one_step(engine: Any, step: int, rank: int) -> torch.Tensor:
    """The mean loss, which nobody has waited for."""
    count = engine.gradient_accumulation_steps()
    if count > 1 and engine.config["wherry"]["accumulation"] == "layer_major":
        return engine.train_batch(iter([batch(step, micro, rank) for micro in range(count)]))
    losses = []
    for micro in range(count):
        loss = engine(*batch(step, micro, rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach() / count)
    return torch.stack(losses).sum()


def life(case: Case, folder: Path, rank: int | None = None) -> Run:
    """Train, save, generate, train on; load, and train on again.

    Ranks are threads, or with `rank` this process is one of several.
    """
    model = make_model(functools.partial(Model, 3))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout) and case["ranks"] > 1:
            module.p = 0.0  # ranks are threads, and have one generator
    config = config_of(case, folder)

    def body(comm: Comm | None) -> Run:
        here = rank if comm is None else comm.rank
        assert here is not None
        torch.manual_seed(here)  # dropout's
        mine, run = copy.deepcopy(model), Run()
        engine, *_ = wherry.initialize(
            model=mine, optimizer=adamw(mine.parameters()), mesh=comm, config=copy.deepcopy(config)
        )

        def train(*steps: int) -> list[torch.Tensor]:
            losses = [one_step(engine, step, here) for step in steps]
            run.norms.append(engine.get_global_grad_norm() or -1.0)
            return losses

        losses = train(0, 1)
        engine.save_checkpoint(str(folder / "saved"))
        with torch.no_grad(), engine.gathered_for_generation():
            mine.eval()
            losses.append(mine(*batch(9, 0, here)))
            mine.train()
        first = train(2, 3)
        engine.wait_for_checkpoint()
        engine.load_checkpoint(str(folder / "saved"))
        again = train(2, 3)
        assert [float(loss) for loss in again] == [float(loss) for loss in first], "as after the save"
        further = train(*range(4, 4 + case.get("further", 0)))
        run.losses += [float(loss) for loss in (*losses, *first, *further)]
        engine.settle()
        with wherry.gathered(mine):
            run.weights = {name: p.detach().cpu().clone() for name, p in mine.named_parameters()}
        engine.close()
        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wherry.offload.ROOM_FOR_SUMS", 0.25 if case["sums"] == "device" else 0.0)
        patch.setattr("wherry.update.optimizer_states.STREAMED_NUMEL", 512)
        if rank is not None:
            return body(None)
        return body(SoloComm()) if case["ranks"] == 1 else run_ranks(case["ranks"], body)[0]


def told(case: Case) -> str:
    return "-".join(str(value) for value in case.values())


def held() -> int:
    torch.accelerator.synchronize()
    for _ in range(2):  # the first may free graphs, whose hooks hold what the second frees
        gc.collect()
    return torch.accelerator.memory_allocated()


@pytest.mark.parametrize("case", cases(), ids=told)
def test_a_life_on_a_late_device_has_the_bits_of_a_calm_one(case: Case, tmp_path: Path) -> None:
    before = held()
    emulated.lateness(0.0)
    plain = {"updates": "host"} if case["policy"] == "delayed" else {"policy": "at_step", "updates": "host"}
    calm = life(case | plain, tmp_path / "calm")
    emulated.seed(len(told(case)))
    emulated.lateness(0.9)
    assert_equal(life(case, tmp_path / "late"), calm)
    assert held() <= before, "a closed engine gives all of the device back"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("row", [*DEVICE_ROWS, "offload-2", "infinity"])
def test_the_numbers_are_plain_pytorchs(row: str, ranks: int, tmp_path: Path) -> None:
    case = {"row": row, "policy": "before_use", "window": "three", "activations": "keep"}
    config = config_of(case | {"precision": "fp32", "clip": 0.5}, tmp_path)
    model = make_model()

    def body(comm: Comm) -> Run:
        mine, run = copy.deepcopy(model), Run()
        engine, *_ = wherry.initialize(model=mine, optimizer=adamw(mine.parameters()), mesh=comm, config=config)
        for step in range(6):
            run.losses.append(sum(comm.gather_objects(float(one_step(engine, step, comm.rank)))) / comm.size)
            run.norms.append(engine.get_global_grad_norm())
        engine.settle()
        with wherry.gathered(mine):
            run.weights = {name: p.detach().cpu().clone() for name, p in mine.named_parameters()}
        engine.close()
        return run

    plain = train_plain(model, ranks=ranks, accumulation=3, steps=6, clip=0.5)
    assert_close(body(SoloComm()) if ranks == 1 else run_ranks(ranks, body)[0], plain, 1e-5)
