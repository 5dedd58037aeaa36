"""What micro-batches that run together share: random numbers, thread state, statistics, and what a model keeps."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.engine.harness import assert_close, assert_equal, make_model, settings, train_plain
from tests.engine.test_models import Stack, sgd, vectors
from tests.scale.test_accumulation import Checkpointed, Reentrant, Untied
from tests.scale.windows import train_windows
from torch import nn
from torch.nn import functional as F

import wherry
from wherry.sharding.interleave import Interleaver
from wherry.sharding.thread_state import RandomStream


class MaskCheck(nn.Module):
    """Notes each mask that is drawn, in a list of the test's own."""

    seen: list[torch.Tensor] = []  # noqa: RUF012

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.rand_like(x.detach()[:1])
        self.seen.append(mask.clone())
        return x * (mask > 0.5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_the_same_mask_again(reentrant: bool) -> None:
    model = make_model(Reentrant if reentrant else Checkpointed)
    for block in model.blocks:
        block.mix = nn.Sequential(block.mix, MaskCheck())
    MaskCheck.seen.clear()

    def count(engine: Any, step: int) -> int:
        return len(MaskCheck.seen)

    torch.manual_seed(3)
    train_windows(model, stage=3, order="layer_major", accumulation=4, steps=2, each_step=count)
    masks = MaskCheck.seen[len(MaskCheck.seen) // 2 :]
    forward, again = masks[: len(masks) // 2], masks[len(masks) // 2 :]
    assert len(forward) == 4 * 3
    for mask in again:
        assert sum(torch.equal(mask, other) for other in forward) == 1
    # Each micro-batch has a stream of its own.
    assert len({tuple(mask.flatten().tolist()) for mask in forward}) == 12


class Drops(Stack):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = F.dropout(block(x), 0.3)
        return self.out(x)


def test_random_numbers_repeat_and_models_without_them_leave_the_generator_alone() -> None:
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        runs.append(
            train_windows(make_model(Drops), stage=3, order="layer_major", accumulation=4, batch=vectors, optimizer=sgd)
        )
    assert_equal(*runs)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    train_windows(make_model(), stage=3, order="layer_major", accumulation=4)
    assert torch.equal(torch.get_rng_state(), before)


class WithBlocks(Untied):
    """Autocast, no_grad and saved-tensor hooks that are entered before one unit and left after another."""

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        with torch.no_grad():
            shift = self.blocks[2](x)
        with torch.autocast("cpu", torch.bfloat16):
            x = self.blocks[0](x)
            with torch.autograd.graph.saved_tensors_hooks(lambda t: (t,), lambda t: t[0]):
                x = self.blocks[1](x)
        x = self.blocks[2](x.float()) + shift
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


@pytest.mark.parametrize("stage", [2, 3])
def test_blocks_of_the_model_keep_their_own_thread_state(stage: int) -> None:
    model = make_model(WithBlocks)
    one = train_windows(model, stage=stage, order="step_major", accumulation=2)
    other = train_windows(model, stage=stage, order="layer_major", accumulation=2)
    assert_equal(other, one)
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_forward_that_waits_takes_its_stream_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: a `with torch.cuda.stream(...)` around a unit is that of one micro-batch, and not of those after it."""
    gpu, now = torch.device("cuda", 0), {"stream": "main"}
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: now["stream"])
    monkeypatch.setattr(torch.accelerator, "set_stream", lambda stream: now.update(stream=stream))
    monkeypatch.setattr(RandomStream, "now", classmethod(lambda *_: RandomStream(gpu, torch.get_rng_state(), None)))
    units: Any = [SimpleNamespace(index=0), SimpleNamespace(index=1)]
    interleaver = Interleaver(len(units), gpu)
    seen: list[tuple[str, str]] = []

    @contextmanager
    def stream(name: str) -> Iterator[None]:
        before, now["stream"] = now["stream"], name
        yield
        now["stream"] = before

    def forward(name: str) -> None:
        interleaver.reach(units[0])
        seen.append((name, now["stream"]))
        with stream(f"beside {name}"):
            interleaver.reach(units[1])
            seen.append((name, now["stream"]))
        seen.append((name, now["stream"]))

    forwards = [partial(forward, name) for name in "ab"]
    interleaver.run(forwards, lambda running: None, [RandomStream.now(gpu) for _ in forwards])
    in_turn = [("a", "main"), ("b", "main"), ("a", "beside a"), ("a", "main"), ("b", "beside b"), ("b", "main")]
    assert seen == in_turn and now["stream"] == "main"


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.BatchNorm1d(12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12)) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return F.mse_loss(x, y)


def test_running_statistics_are_those_of_step_major() -> None:
    def statistics(engine: Any, step: int) -> dict[str, torch.Tensor]:
        return {name: buffer.clone() for name, buffer in engine.module.named_buffers()}

    runs = [
        train_windows(
            make_model(Norms), stage=3, order=order, accumulation=3, batch=vectors, optimizer=sgd, each_step=statistics
        )
        for order in ("step_major", "layer_major")
    ]
    assert_close(*runs)
    for name, buffer in runs[0].extra[-1].items():
        torch.testing.assert_close(runs[1].extra[-1][name], buffer)


class Remembers(Stack):
    """What the end of one forward leaves, the beginning of the next one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: torch.Tensor | None = None

    def run(self, x: torch.Tensor) -> torch.Tensor:
        if self.memory is not None:
            x = x + self.memory
        x = super().run(x)
        self.memory = x.detach().mean(0)
        return x


class SideLoss(Stack):
    """Blocks leave a part of the loss on themselves, and the model collects it at the end."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(12, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.linear(x))
            self.extra = x.square().mean()
            return x

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x, y) + sum(block.extra for block in self.blocks)


class Counts(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return super().run(x) * (1 + 1 / self.seen)


class SetsAndUnsets(Stack):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        self.factor = x.mean().detach()
        x = super().run(x) * self.factor
        del self.factor
        return x


@pytest.mark.parametrize(
    ("model_class", "what"),
    [(Remembers, "memory"), (SideLoss, "blocks.0.extra"), (Counts, "seen"), (SetsAndUnsets, "factor")],
)
@pytest.mark.parametrize("order", ["auto", "layer_major"])
def test_a_model_that_keeps_state_runs_step_major(
    model_class: type[nn.Module], what: str, order: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "wherry")
    model = make_model(model_class)
    plain = train_plain(model, ranks=2, accumulation=3, steps=3, batch=vectors, optimizer=sgd) if model_class in (
        SideLoss, SetsAndUnsets) else None  # fmt: skip
    one = train_windows(model, stage=3, order="step_major", accumulation=3, ranks=2, batch=vectors, optimizer=sgd)
    run = train_windows(model, stage=3, order=order, accumulation=3, ranks=2, batch=vectors, optimizer=sgd)
    assert_equal(run, one)
    if plain is not None:
        assert run.losses[:3] == pytest.approx(plain.losses, rel=1e-5)
    lines = [record.getMessage() for record in caplog.records if "step_major" in record.getMessage()]
    assert lines and all(repr(what) in line for line in lines)


@pytest.mark.parametrize("how", ["closure", "partial", "object", "module"])
def test_a_model_that_reads_what_its_hooks_have_kept_runs_step_major(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As models do that take features from inside of another."""
    caplog.set_level(logging.INFO, "wherry")
    found: dict[str, torch.Tensor] = {}

    class Keeper:
        def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
            self.kept = found["x"] = output

    def closure(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        found["x"] = output

    class Outside(nn.Module):
        def keep(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
            self.kept = found["x"] = output

    class Features(Stack):
        def run(self, x: torch.Tensor) -> torch.Tensor:
            return super().run(x) + found["x"]

    model = make_model(Features)
    hook = {
        "closure": closure, "partial": partial(closure), "object": Keeper(), "module": Outside().keep
    }[how]  # fmt: skip
    model.blocks[0].register_forward_hook(hook)
    one, run = (
        train_windows(model, stage=3, order=order, accumulation=3, batch=vectors, optimizer=sgd)
        for order in ("step_major", "layer_major")
    )
    assert_equal(run, one)
    lines = [record.getMessage() for record in caplog.records if "step_major" in record.getMessage()]
    assert len(lines) == 1 and "the forward changes 'blocks.0.forward hook " in lines[0]


class CountsCalls(Drops):
    """Its forward changes what micro-batches that run together would share."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def run(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().run(x)


@pytest.mark.parametrize("kind", [Drops, CountsCalls])
def test_masks_after_a_load_are_those_without(kind: type[Drops], tmp_path: Path) -> None:
    """A first window runs one micro-batch after another, and each draws what it draws where they run together."""
    model = make_model(kind)
    config = settings(3, 3, more={"wherry": {"accumulation": "layer_major"}})

    def begin() -> Any:
        mine = copy.deepcopy(model)
        return wherry.initialize(model=mine, optimizer=sgd(mine.parameters()), config=config)[0]

    def windows(engine: Any, steps: range) -> list[float]:
        return [float(engine.train_batch(iter([vectors(step, micro, 0) for micro in range(3)]))) for step in steps]

    torch.manual_seed(5)
    engine = begin()
    windows(engine, range(2))
    engine.save_checkpoint(tmp_path)
    losses = windows(engine, range(2, 5))
    after = torch.get_rng_state()
    engine.close()
    torch.manual_seed(6)
    engine = begin()
    engine.load_checkpoint(tmp_path)
    assert windows(engine, range(2, 5)) == pytest.approx(losses, rel=1e-6)
    assert torch.equal(torch.get_rng_state(), after)
    engine.close()
