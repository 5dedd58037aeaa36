"""The link to a GPU, with streams that are simulated: what is given to one is done late and in order, as on a GPU.

Device and host are one memory here, and what computes does so at once. Whoever has not waited for a copy, or overwrites
what one has yet to read, trains other bits.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import Run, TinyLM, assert_equal, make_model, train_engine
from tests.tiers.rows import ROWS
from tests.tiers.test_placements import STEPS, offload

from wherry.parallel.comm import Comm
from wherry.parallel.topology import Topology
from wherry.testing.late import Chaos, topology
from wherry.tickets import Ticket
from wherry.tiers.buffers import HostPool
from wherry.tiers.streams import CudaLink, _Copy


class Gpu:
    """Streams. `main`, which computes, does at once what it is given; others when somebody waits, or now and then."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.late: list[Stream] = []
        self.main = Stream(self)
        self.late.clear()
        self._own = threading.local()

    def current(self, device: object = None) -> Stream:
        return getattr(self._own, "stream", self.main)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """What the caller does itself inside, it does in the stream's order."""
        before = self.current()
        stream.reach(len(stream.work))
        self._own.stream = stream
        try:
            yield
        finally:
            self._own.stream = before

    def stir(self) -> None:
        for stream in self.random.sample(self.late, len(self.late)):
            if self.random.random() < 0.1:
                stream.reach(min(stream.done + 1, len(stream.work)))

    def synchronize(self, device: object = None) -> None:
        with self.lock:
            for stream in self.late:
                stream.reach(len(stream.work))


class Stream:
    def __init__(self, gpu: Gpu, device: object = None) -> None:
        self.gpu = gpu
        self.work: list[Callable[[], None] | None] = []
        self.done = 0
        gpu.late.append(self)

    def put(self, act: Callable[[], None]) -> None:
        with self.gpu.lock:
            self.work.append(act)
            if self is self.gpu.main:
                self.reach(len(self.work))
            else:
                self.gpu.stir()

    def wait_event(self, event: Event) -> None:
        self.put(event.synchronize)

    def reach(self, place: int) -> None:
        """Do what was given, so far."""
        with self.gpu.lock:
            while self.done < place:
                act = self.work[self.done]
                assert act is not None
                act()
                self.work[self.done] = None
                self.done += 1


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.stream, self.place = gpu.main, 0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or self.gpu.current()
        self.place = len(self.stream.work)

    def synchronize(self) -> None:
        self.stream.reach(self.place)

    def query(self) -> bool:
        with self.gpu.lock:
            self.gpu.stir()
            return self.stream.done >= self.place


class SimulatedLink(CudaLink):
    def __init__(self) -> None:
        super().__init__(torch.device("cuda", 0))
        self.device = torch.device("cpu")

    def _pinning(self, pin: bool) -> None:
        return None

    def _make_pool(self, pin: bool) -> HostPool:
        return HostPool(poison=True)

    def _copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor, on_host: bool) -> Ticket:
        def act() -> None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(target):
                target.copy_(source)

        stream.put(act)
        event = torch.cuda.Event()
        event.record(stream)
        return _Copy(self.device, event, on_host, target, source)

    def free_bytes(self) -> int | None:
        return None


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """From the call on torch has a GPU that is simulated, with late streams, of this seed."""

    def begin(seed: int) -> None:
        gpu = Gpu(seed)
        made = {"Stream": partial(Stream, gpu), "Event": partial(Event, gpu), "current_stream": gpu.current}
        for name, found in (*made.items(), ("stream", gpu.on), ("synchronize", gpu.synchronize)):
            monkeypatch.setattr(torch.cuda, name, found)

    return begin


def train(config: dict[str, Any], seed: int | None, **how: Any) -> Run:
    """With a `seed` on a device apart from the host, and streams."""

    def place(comm: Comm) -> Topology:
        return topology(comm) if seed is None else topology(comm, Chaos(10 * seed + comm.rank), link=SimulatedLink())

    return train_engine(make_model(lambda: TinyLM(blocks=8)), config=config, place=place, steps=STEPS, **how)


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("policy", ["at_step", "before_use", "in_backward", "delayed"])
@pytest.mark.parametrize("row", ["offload-2", "offload-3-parameters", "infinity"])
def test_streams_that_are_late_change_nothing(
    row: str, policy: str, ranks: int, accumulation: int, tmp_path: Path, simulated: Callable[[int], None]
) -> None:
    stage = ROWS[row][0]
    clip = 0.0 if policy == "in_backward" else 0.5
    config = offload(row, tmp_path, policy, "bf16")
    if policy == "delayed":
        config["wherry"]["delayed_update_warmup"] = 1
    how: dict[str, Any] = {"stage": stage, "ranks": ranks, "clip": clip, "accumulation": accumulation}
    calm = train(config, None, **how)
    simulated(ranks)
    assert_equal(train(config, ranks, **how), calm)
