"""What micro-batches that run together share: random numbers, thread state, statistics, and what a model keeps."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.engine.harness import assert_close, assert_equal, make_model, settings
from tests.engine.test_models import Stack, sgd, vectors
from tests.scale.test_accumulation import Checkpointed, Reentrant, Untied
from tests.scale.windows import train_windows
from torch import nn
from torch.nn import functional as F

import wherry
from wherry.sharding.layer_major import Interleaver
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
    interleaver.run(forwards, lambda running: None)
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


def test_masks_after_a_load_are_those_without(tmp_path: Path) -> None:
    model = make_model(Drops)
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
