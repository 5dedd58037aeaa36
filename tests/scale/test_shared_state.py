"""State shared by micro-batches that run together: random numbers, thread state, running statistics."""

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
from tests.engine.harness import assert_close, assert_equal, assert_near, engine_of, make_model, settings
from tests.models import Checkpointed, Stack, sgd, vectors
from tests.scale.windows import VECTORS, windows
from torch import nn
from torch.nn import functional as F

from wherry.sharding.layer_major import Interleaver
from wherry.sharding.thread_state import RandomStream


class MaskCheck(nn.Module):
    """Record each mask that is drawn."""

    seen: list[torch.Tensor] = []  # noqa: RUF012

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.rand_like(x.detach()[:1])
        self.seen.append(mask.clone())
        return x * (mask > 0.5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_the_same_mask_again(reentrant: bool) -> None:
    model: Any = make_model(lambda: Checkpointed(reentrant=reentrant))
    for block in model.blocks:
        block.linear = nn.Sequential(block.linear, MaskCheck())
    MaskCheck.seen.clear()

    def count(engine: Any, step: int) -> int:
        return len(MaskCheck.seen)

    torch.manual_seed(3)
    windows(model, "layer_major", accumulation=3, steps=2, each_step=count, **VECTORS)
    masks = MaskCheck.seen[len(MaskCheck.seen) // 2 :]
    forward, again = masks[: len(masks) // 2], masks[len(masks) // 2 :]
    assert len(forward) == 3 * 4
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
        runs.append(windows(make_model(Drops), "layer_major", accumulation=3, **VECTORS))
    assert_equal(*runs)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    windows(make_model(), "layer_major", accumulation=3)
    assert torch.equal(torch.get_rng_state(), before)


class WithContexts(Stack):
    """Autocast, no_grad and saved-tensor hooks that are entered before one unit and left after another."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            shift = self.blocks[2](x)
        with torch.autocast("cpu", torch.bfloat16):
            x = self.blocks[0](x)
            with torch.autograd.graph.saved_tensors_hooks(lambda t: (t,), lambda t: t[0]):
                x = self.blocks[1](x)
        return self.out(self.blocks[2](x.float()) + shift)


@pytest.mark.parametrize("stage", [2, 3])
def test_units_keep_the_thread_state_of_their_micro_batch(stage: int) -> None:
    orders = ("step_major", "layer_major")
    one, other = (windows(make_model(WithContexts), order, stage=stage, accumulation=2, **VECTORS) for order in orders)
    assert_equal(other, one)
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_suspended_forward_keeps_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake a GPU: `with torch.cuda.stream(...)` around a unit applies to one micro-batch alone."""
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
        with stream(f"stream of {name}"):
            interleaver.reach(units[1])
            seen.append((name, now["stream"]))
        seen.append((name, now["stream"]))

    forwards = [partial(forward, name) for name in "ab"]
    interleaver.run(forwards, lambda running: None)
    in_turn = [("a", "main"), ("b", "main"), ("a", "stream of a"), ("a", "main"), ("b", "stream of b"), ("b", "main")]
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

    common: dict[str, Any] = {"accumulation": 3, "each_step": statistics, **VECTORS}
    runs = [windows(make_model(Norms), order, **common) for order in ("step_major", "layer_major")]
    assert_close(*runs)
    assert_near(runs[1].extra[-1], runs[0].extra[-1])


def test_masks_after_a_load_are_those_without(tmp_path: Path) -> None:
    model = make_model(Drops)
    config = settings(3, 3, more={"wherry": {"accumulation": "layer_major"}})

    def begin() -> Any:
        return engine_of(copy.deepcopy(model), config, optimizer=sgd)

    def trained(engine: Any, steps: range) -> list[float]:
        return [float(engine.train_batch(iter([vectors(step, micro, 0) for micro in range(3)]))) for step in steps]

    torch.manual_seed(5)
    engine = begin()
    trained(engine, range(2))
    engine.save_checkpoint(tmp_path)
    losses = trained(engine, range(2, 5))
    after = torch.get_rng_state()
    engine.close()
    torch.manual_seed(6)
    engine = begin()
    engine.load_checkpoint(tmp_path)
    assert trained(engine, range(2, 5)) == pytest.approx(losses, rel=1e-6)
    assert torch.equal(torch.get_rng_state(), after)
    engine.close()
