"""Layer-major accumulation: the results of step-major, with the communication of one micro-batch."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import (
    PeakGathered,
    Run,
    TinyLM,
    assert_close,
    assert_equal,
    assert_near,
    engine_of,
    gathered,
    make_model,
    on_ranks,
    settings,
    token_batch,
    train_engine,
    train_plain,
)
from tests.models import MODELS, Checkpointed, Stack, sgd, vectors
from tests.tiers.rows import offload, with_stores
from torch import nn

from wherry.errors import WherryError
from wherry.parallel.comm import Comm
from wherry.testing import run_ranks
from wherry.testing.late import Chaos, ChaosLink, topology

ORDERS = ("step_major", "layer_major")
LAYER_MAJOR = {"wherry": {"accumulation": "layer_major"}}
VECTORS: dict[str, Any] = {"batch": vectors, "optimizer": sgd}


def windows(model: nn.Module, order: str, **how: Any) -> Run:
    """Train three windows at stage 3, unless the arguments of `train_engine` differ."""
    config = dict(how.pop("config", {}))
    config["wherry"] = {**config.get("wherry", {}), "accumulation": order}
    return train_engine(model, config=config, by_window=True, **{"stage": 3, "steps": 3, **how})


class OutFirst(Stack):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        return super().run(self.out(x))


def frozen(model: Any) -> nn.Module:
    """Freeze layers of each block, whose gradients do not tell when they are done with."""
    for block in model.blocks:
        block.linear.requires_grad_(False)
    return model


class Branching(Stack):
    """Blocks of which micro-batches of one window run different ones."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks if x.shape[0] % 2 else list(self.blocks)[1:]:
            x = block(x)
        return self.out(x)


SHAPES = MODELS | {
    "frozen": lambda: frozen(OutFirst()),
    "frozen, reentrant": lambda: frozen(Checkpointed(reentrant=True)),
    "branching": Branching,
}


def trainable(parameters: Any) -> torch.optim.Optimizer:
    return sgd([p for p in parameters if p.requires_grad])


@pytest.mark.parametrize(
    ("kind", "stage"),
    [("stack", 2), ("checkpointed", 3), ("checkpointed, reentrant", 3), ("frozen", 3), ("frozen, reentrant", 3)],
)
def test_four_micro_batches_communicate_like_one(kind: str, stage: int) -> None:
    """Compare results, calls, bytes, the peak of gathered weights and the engine's own counters."""
    watched: dict[Any, PeakGathered] = {}
    has_frozen = "frozen" in kind

    def seen(engine: Any, step: int) -> tuple[Any, ...]:
        if step == 0 and not has_frozen:
            watched[engine] = PeakGathered(engine)
        peak = 0 if has_frozen else watched[engine].take()
        traffic, counters = engine.comm.traffic, (engine.global_steps, engine.micro_steps)
        return dict(traffic.calls), dict(traffic.bytes), peak, counters

    model = make_model(SHAPES[kind])
    config = {"zero_optimization": {"stage3_prefetch_bucket_size": 0}}
    common: dict[str, Any] = {"ranks": 2, "batch": vectors, "optimizer": trainable}
    one = windows(model, "step_major", stage=stage, each_step=seen, config=config, **common)
    four = windows(model, "layer_major", stage=stage, accumulation=4, each_step=seen, config=config, **common)
    assert_close(four, train_plain(model, accumulation=4, steps=3, **common))
    late = {"all_reduce"} if "reentrant" in kind else set()
    if not late:  # the first window learns how often gradients of reentrant checkpoints arrive
        assert four.extra[0][0]["reduce_scatter"] == one.extra[0][0]["reduce_scatter"]
    for mine, theirs in zip(four.extra[2][:2], one.extra[2][:2], strict=True):
        for operation in (mine.keys() | theirs.keys()) - late:
            assert mine[operation] == theirs[operation], operation
    assert four.extra[2][2] <= one.extra[2][2] and (four.extra[2][2] > 0) == (stage == 3 and not has_frozen)
    assert (one.extra[2][3], four.extra[2][3]) == ((3, 3), (3, 12))


def turned(step: int, micro: int, rank: int) -> tuple[torch.Tensor, ...]:
    return vectors(step, micro + rank, 10 * rank + micro)


@pytest.mark.parametrize(
    ("kind", "stage", "batch"), [("called twice", 3, vectors), ("used outside", 3, vectors), ("branching", 2, turned)]
)
def test_micro_batches_that_run_units_in_another_order(kind: str, stage: int, batch: Any) -> None:
    model = make_model(SHAPES[kind])
    common: dict[str, Any] = {"ranks": 2, "accumulation": 4, "steps": 3, "batch": batch, "optimizer": sgd}
    assert_close(windows(model, "layer_major", stage=stage, **common), train_plain(model, **common))


def test_gradients_of_bf16_weights_are_added_in_fp32() -> None:
    """Add one large gradient and many small ones, which would vanish in bf16."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.layers[0](x)).sum() * 0 + (self.layers[0].weight * x[0, 0]).sum()

    def batch(step: int, micro: int, rank: int) -> tuple[torch.Tensor, ...]:
        return (torch.full((2, 4), 256.0 if micro == 7 else 0.5, dtype=torch.bfloat16),)

    def gradient(engine: Any, step: int) -> torch.Tensor:
        return engine.gradients("layers.0.weight") * 8

    more = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
    common: dict[str, Any] = {"accumulation": 8, "steps": 2, "batch": batch, "config": more}
    run = windows(make_model(Scale), "layer_major", each_step=gradient, **common)
    assert torch.equal(run.extra[1], torch.full((4, 4), 259.5))


def test_fp16_losses_carry_the_scale() -> None:
    common: dict[str, Any] = {"accumulation": 2, "config": {"fp16": {"enabled": True, "initial_scale_power": 8}}}
    one, other = (windows(make_model(), order, **common) for order in ORDERS)
    assert other.losses == pytest.approx(one.losses, rel=2e-3)
    assert other.norms == pytest.approx(one.norms, rel=2e-2) and all(math.isfinite(norm) for norm in other.norms)


def window(engine: Any, step: int) -> float:
    return float(engine.train_batch(iter([token_batch(step, micro, engine.comm.rank) for micro in range(2)])))


def test_an_exception_in_a_forward_leaves_the_engine_healthy() -> None:
    class WithHooks(TinyLM):
        def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.save_on_cpu():
                return super().forward(ids, targets)

    calls = []

    def fail_at_the_second(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("a bad batch")

    model: Any = make_model(WithHooks)
    plain = train_plain(model, accumulation=2, steps=4)
    engine = engine_of(model, settings(3, 2, more=LAYER_MAJOR))
    losses = [window(engine, 0)]
    hook = model.blocks[1].down.register_forward_pre_hook(fail_at_the_second)
    with pytest.raises(RuntimeError, match="a bad batch") as caught:
        window(engine, 1)
    assert any("step_major" in note for note in caught.value.__notes__)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert gathered(engine) == 0
    hook.remove()
    losses += [window(engine, step) for step in range(1, 4)]
    assert losses == pytest.approx(plain.losses, rel=1e-5)
    engine.close()


def test_an_error_of_one_rank_ends_all() -> None:
    def use(engine: Any) -> None:
        window(engine, 0)
        if engine.comm.rank == 1:
            engine.module.blocks[1].down.register_forward_pre_hook(lambda *_: {}["a bad batch"])
        window(engine, 1)

    with pytest.raises(KeyError, match="a bad batch"):
        on_ranks(use, accumulation=2, config=LAYER_MAJOR)


def test_calls_that_are_no_whole_window_are_refused() -> None:
    model = make_model()
    plain = train_plain(model, accumulation=2, steps=2)
    engine = engine_of(model, settings(3, 2, more=LAYER_MAJOR))
    losses, first = [window(engine, 0)], token_batch(1, 0, 0)
    with engine.no_sync(), pytest.raises(WherryError, match="decided by hand"):
        window(engine, 1)
    with pytest.raises(WherryError, match=r"backward of one of them; call engine\.train_batch\(iterator\)"):
        engine.backward(engine(*first))
    with pytest.raises(WherryError, match=r"call engine\.train_batch\(iterator\)"):
        engine(*first).backward()
    weight = next(engine.parameters())
    assert torch.autograd.grad(engine(*first), weight)[0].isfinite().all()
    engine.step()
    with pytest.raises(WherryError, match="window's 2 micro-batches 1 have run already"):
        window(engine, 1)
    engine.zero_grad()
    losses.append(window(engine, 1))
    engine.close()
    assert losses == pytest.approx(plain.losses, rel=1e-5)


@pytest.mark.parametrize(
    ("row", "ranks", "free"),
    [("offload-3-parameters", 1, 0), ("offload-3-parameters", 2, None), ("infinity", 2, 0)],
)
def test_a_window_moves_the_bytes_of_one_micro_batch(row: str, ranks: int, free: int | None, tmp_path: Path) -> None:
    """Count copies, reads, writes, gathers and reductions; `free` 0 sums gradients on the host."""
    model = make_model()

    def run(order: str, k: int) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
        def body(comm: Comm) -> Any:
            link = ChaosLink(Chaos(comm.rank), free=free)
            place, stores = with_stores(topology(comm, link.chaos, link=link))
            config = offload(row, tmp_path, "at_step")
            config["wherry"]["accumulation"] = order
            engine = engine_of(copy.deepcopy(model), settings(3, k, more=config), place)

            def totals() -> dict[str, int]:
                engine.settle()
                disk = [store.stats for store in stores]
                read, written = sum(s.bytes_read for s in disk), sum(s.bytes_written for s in disk)
                moved = {"up": link.bytes_up, "down": link.bytes_down, "read": read, "written": written}
                return moved | engine.comm.traffic.calls

            for step in range(2):  # the first window is step-major in any order
                before = totals()
                engine.train_batch(iter([token_batch(step, micro, comm.rank) for micro in range(k)]))
            counts = {name: count - before[name] for name, count in totals().items()}
            state = engine.module.state_dict()
            engine.close()
            return counts, state

        return run_ranks(ranks, body)[0]

    (one, _), (many, expected), (together, state) = run("step_major", 1), run("step_major", 4), run("layer_major", 4)
    assert together == one
    repeated = ["up"] if row == "offload-3-parameters" else ["up", "read"]
    for name in repeated + ["all_gather"] * (ranks > 1):
        assert one[name] > 0 and many[name] > 2 * one[name], name
    assert_near(state, expected)


# State shared by micro-batches that run together: random numbers, thread state, running statistics.


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
    windows(model, "layer_major", accumulation=3, steps=2, **VECTORS)
    masks = MaskCheck.seen[len(MaskCheck.seen) // 2 :]
    forward, again = masks[: len(masks) // 2], masks[len(masks) // 2 :]
    assert len(forward) == 3 * 4
    for mask in again:
        assert sum(torch.equal(mask, other) for other in forward) == 1
    # Each micro-batch has a stream of its own.
    assert len({tuple(mask.flatten().tolist()) for mask in forward}) == 12


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
    """Sums of two micro-batches have one order only: both orders of units give the same bits."""
    one, other = (windows(make_model(WithContexts), order, stage=stage, accumulation=2, **VECTORS) for order in ORDERS)
    assert_equal(other, one)
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_running_statistics_are_those_of_step_major_and_no_random_number_is_drawn() -> None:
    def statistics(engine: Any, step: int) -> dict[str, torch.Tensor]:
        return {name: buffer.clone() for name, buffer in engine.module.named_buffers()}

    before = torch.get_rng_state()
    common: dict[str, Any] = {"accumulation": 3, "each_step": statistics, **VECTORS}
    runs = [windows(make_model(MODELS["channels last"]), order, **common) for order in ORDERS]
    assert_close(*runs)
    assert_near(runs[1].extra[-1], runs[0].extra[-1])
    assert torch.equal(torch.get_rng_state(), before)
