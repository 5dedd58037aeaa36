"""Experts and branches that steps leave out at random: what has no gradient stays as it is, as in plain PyTorch.

    python -m tests.engine.absent --cases 500 --seed 0

Every case trains one model by plain PyTorch and by the engine under every exact update policy, on a placement, ranks,
an optimizer, an accumulation and clipping that the case's number draws; some go on from a checkpoint, on others.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.engine.harness import make_model, settings
from tests.tiers.rows import ROWS
from torch import nn

import wherry
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks
from wherry.testing.late import Chaos, ChaosLink, topology
from wherry.update.optimizer import Lion

WIDTH, STEPS = 12, 7
EXPERTS, BLOCKS = 3, 4
TOLERANCE = 1e-6
# Damped, so that no rounding of a gradient near zero becomes a whole step.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=3e-3, eps=1e-2, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, eps=1e-2, weight_decay=0.1),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=3e-3, eps=1e-2, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=3e-3, lr_decay=0.1, eps=1e-2, initial_accumulator_value=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02, weight_decay=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "lion": lambda p: Lion(p, lr=1e-3, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-2, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=2e-3, eps=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=2e-3, eps=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2, t0=2),
}
# State on disk, and 8-bit and bf16 moments, are updated by the native kernels.
NATIVE = ("adam", "adamw", "adagrad", "sgd", "sgd momentum", "lion")


class Block(nn.Module):
    """Experts beside a layer that always runs, and a branch: parameters of one unit, some with gradients, some not."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH + number + i) for i in range(EXPERTS))
        self.back = nn.ParameterList(nn.Parameter(torch.randn(WIDTH + number + i, WIDTH) / 4) for i in range(EXPERTS))
        self.branch = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH))

    def forward(self, x: torch.Tensor, experts: Sequence[int], branch: bool) -> torch.Tensor:
        x = x + torch.tanh(self.always(x))
        for i in experts:
            x = x + torch.tanh(self.experts[i](x)) @ self.back[i]
        return x + self.branch(x) if branch else x


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(i) for i in range(BLOCKS))
        self.never = nn.Linear(WIDTH, 3)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor, paths: Sequence[tuple[Sequence[int], bool]]) -> torch.Tensor:
        x = x.to(self.head.weight.dtype)
        for block, path in zip(self.blocks, paths, strict=True):
            x = block(x, *path)
        return self.head(x).float().square().mean()


@dataclass(frozen=True)
class Case:
    number: int
    optimizer: str
    row: str
    ranks: int
    accumulation: int
    clip: float
    groups: bool
    precision: dict[str, Any]
    # Go on after so many steps from a checkpoint, on other ranks and another placement.
    resume: tuple[int, int, str] | None
    # Whether the device is apart from the host, and copies between them, the disk and other ranks are late.
    late: bool
    # Of stage 3 on four ranks: two copies of the shards, or weights shared out a second time among two ranks.
    nodes: str | None
    # Of parameters that stage 3 gathers ahead, and the classes of units: branches may be units inside of others.
    prefetch: int
    units: tuple[str, ...]

    @classmethod
    def draw(cls, number: int) -> Case:
        draw = random.Random(number)
        rows = {**{f"stage-{s}": (s, "none", "none") for s in range(4)}, **ROWS}
        optimizer = draw.choice(list(OPTIMIZERS))
        fitting = [row for row, (_, state, _) in rows.items() if optimizer in NATIVE or state != "nvme"]
        # Two summands have one sum, whatever their order; the sign that Lion takes knows no tolerance.
        small = optimizer == "lion"
        ranks = draw.choice([1, 1, 2] if small else [1, 1, 2, 3])
        accumulation = draw.choice([1, 2 // ranks] if small else [1, 1, 2])
        low = {"bf16": {"enabled": True}}
        lossy = low | {"wherry": {"state_dtype": draw.choice(["bf16", "int8"])}}
        row = draw.choice(fitting)
        kinds = [{}, {}, {}, low, lossy if optimizer in NATIVE and rows[row][1] != "none" else low]
        resume = None
        if draw.random() < 0.3:
            resume = draw.randrange(1, STEPS), draw.choice([1, 2] if small else [1, 2, 3]), draw.choice(fitting)
        precision = draw.choice(kinds)
        if resume is not None and "wherry" in precision and rows[resume[2]][1] == "none":
            resume = None  # such state is for the host
        nodes = None
        if row == "stage-3" and not small and draw.random() < 0.5:
            nodes, ranks, resume = draw.choice(["mics_shard_size", "zero_hpz_partition_size"]), 4, None
        units = draw.choice([("Block",), ("Block", "Sequential")])
        return cls(
            number, optimizer, row, ranks, accumulation, draw.choice([0.0, 0.0, 0.5]) if not small else 0.0,
            draw.random() < 0.5, precision, resume,
            draw.random() < 0.3, nodes, draw.choice([0, 600, 10**6]), units,
        )  # fmt: skip

    def batch(self, step: int, micro: int, rank: int) -> tuple[torch.Tensor, list[tuple[list[int], bool]]]:
        draw = random.Random(f"{self.number} {step} {micro} {rank}")
        paths = [([i for i in range(EXPERTS) if draw.random() < 0.3], draw.random() < 0.3) for _ in range(BLOCKS)]
        generator = torch.Generator().manual_seed(draw.randrange(2**31))
        return torch.randn(2, WIDTH, generator=generator), paths

    def parameters(self, model: nn.Module) -> Any:
        if not self.groups:
            return model.parameters()
        first = [p for name, p in model.named_parameters() if "experts" in name or "always.bias" in name]
        rest = [p for p in model.parameters() if not any(p is other for other in first)]
        return [{"params": first}, {"params": rest, "lr": 2e-3}]

    def policies(self) -> list[str]:
        return ["at_step", "before_use", *(["in_backward"] if not self.clip else [])]

    def config(self, row: str, ranks: int, policy: str, folder: Path, clip: float | None = None) -> dict[str, Any]:
        stage, state, weights = ROWS.get(row) or (int(row[-1]), "none", "none")
        zero: dict[str, Any] = {"stage3_prefetch_bucket_size": self.prefetch}
        zero |= {self.nodes: 2} if self.nodes else {}
        disk = {"cpu": {}, "nvme": {"nvme_path": str(folder)}}
        if state != "none":
            zero["offload_optimizer"] = {"device": state} | disk[state]
        if weights != "none":
            zero["offload_param"] = {"device": weights} | disk[weights]
        own = {"update_policy": policy, "unit_classes": list(self.units)}
        own |= {"delayed_update_warmup": 1} if policy == "delayed" else {}
        own |= self.precision.get("wherry", {})
        accumulation = self.ranks * self.accumulation // ranks
        return settings(
            stage, accumulation, self.clip if clip is None else clip,
            {**self.precision, "zero_optimization": zero, "wherry": own},
        )  # fmt: skip


def plain(case: Case, model: nn.Module, *, late: bool = False) -> dict[str, torch.Tensor]:
    """The oracle; `late` gradients are those of the weights of one update before."""
    model = copy.deepcopy(model)
    behind = copy.deepcopy(model)
    optimizer = OPTIMIZERS[case.optimizer](case.parameters(model))
    count = case.ranks * case.accumulation
    for step in range(STEPS):
        source = behind if late else model
        source.zero_grad()
        for rank, micro in itertools.product(range(case.ranks), range(case.accumulation)):
            (source(*case.batch(step, micro, rank)) / count).backward()
        for p, q in zip(model.parameters(), source.parameters(), strict=True):
            p.grad = q.grad
        if late:
            behind.load_state_dict(model.state_dict())
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def trained(case: Case, model: nn.Module, policy: str, folder: Path) -> dict[str, torch.Tensor]:
    """The weights after training through the engine, the fp32 masters of them."""
    saved = folder / f"{policy}-saved"

    def part(row: str, ranks: int, first: int, last: int, resumed: bool) -> dict[str, torch.Tensor]:
        def body(comm: Comm) -> dict[str, torch.Tensor]:
            mine = copy.deepcopy(model)
            chaos = Chaos(4 * case.number + comm.rank) if case.late else None
            engine, *_ = wherry.initialize(
                model=mine,
                optimizer=OPTIMIZERS[case.optimizer](case.parameters(mine)),
                config=case.config(row, ranks, policy, folder),
                mesh=topology(comm, chaos, link=None if chaos is None else ChaosLink(chaos)),
            )
            if resumed:
                engine.load_checkpoint(saved)
            per_rank = case.ranks * case.accumulation // ranks
            for step in range(first, last):
                for index in range(comm.rank * per_rank, (comm.rank + 1) * per_rank):
                    rank, micro = divmod(index, case.accumulation)
                    engine.backward(engine(*case.batch(step, micro, rank)))
                    engine.step()
            if last < STEPS:
                engine.save_checkpoint(saved)
            found = {name: engine.states.full(name, "master") for name, _ in mine.named_parameters()}
            engine.close()
            return found

        return run_ranks(ranks, body)[0]

    if case.resume is None:
        return part(case.row, case.ranks, 0, STEPS, False)
    at, ranks, row = case.resume
    part(case.row, case.ranks, 0, at, False)
    if (case.ranks * case.accumulation) % ranks:
        ranks = case.ranks
    return part(row, ranks, at, STEPS, True)


def check(number: int) -> Case:
    """Raises what is wrong with a case."""
    case = Case.draw(number)
    model = make_model(Branching, seed=number)
    exact = not case.precision
    with tempfile.TemporaryDirectory() as folder:
        runs = {policy: trained(case, model, policy, Path(folder)) for policy in case.policies()}
        first = runs["at_step"]
        for policy, run in runs.items():
            for name, value in run.items():
                assert torch.equal(value, first[name]), f"{case}: {name} differs between at_step and {policy}"
        if exact:
            _close(case, "at_step", first, plain(case, model))
        if exact and case.resume is None and ROWS.get(case.row, (0, "none"))[1] != "none":
            _close(case, "delayed", trained(case, model, "delayed", Path(folder)), plain(case, model, late=True))
    before = dict(model.named_parameters())
    if exact:
        for name in ("never.weight", "never.bias"):
            assert torch.equal(first[name], before[name]), f"{case}: {name} was never used, and has changed"
    return case


def _close(case: Case, policy: str, ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    for name, value in theirs.items():
        off = float((ours[name] - value).abs().max())
        assert off <= TOLERANCE, f"{case}: {name} is {off:.2e} off plain PyTorch's, with {policy}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    options = parser.parse_args()
    begin = time.perf_counter()
    wrong = 0
    for number in range(options.seed, options.seed + options.cases):
        try:
            check(number)
        except Exception as error:
            wrong += 1
            print(f"{number}: {type(error).__name__}: {error}", flush=True)
    print(f"{options.cases} cases from {options.seed}: {wrong} wrong, {time.perf_counter() - begin:.0f} s")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
