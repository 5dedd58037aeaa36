"""The systems under comparison, each through its public API: one model, one optimizer step, one way to ask for it.

Every system trains the same model from the same seed with AdamW of the same settings, in fp32 on the CPU. Each is given
torch's fused AdamW, the fastest of torch's own; an engine may put another implementation in its place.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.published import PUBLISHED, build_published, published_parameters
from wherry.train.presets import Shape

if TYPE_CHECKING:
    import torch
    from torch import nn

LEARNING_RATE = 3e-4
WEIGHT_DECAY = 0.1
# Relative, over some steps of fp32: other orders of summing stay far below it, another update does not.
SAME_LOSS = 1e-3
# In bf16, of the first steps: rounding stays below it, and an update that is missing does not.
SAME_BF16_LOSS = 1e-2
# A lock that is older, while nothing compiles, is nobody's.
LOCK_SECONDS = 30.0
# A module that registers a device with torch, for the processes that measure.
DEVICE_MODULE = "BENCHMARK_DEVICE_MODULE"
# The folder for states on disk; unset, the system's for temporary files.
DISK_FOLDER = "BENCHMARK_DISK"
# Elements that leave a GPU together, and are updated together, by DeepSpeed: the embedding of a billion is one bucket.
BUCKET = 125_000_000
# Direct reads and writes are of whole ones, in memory as on disk.
SECTOR = 512
# What trains nothing: the forward and backward that no step can be sooner than.
COMPUTE = "compute"


class Trainee(Protocol):
    """A model being trained by some system."""

    def step(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Forward, backward, update; returns this rank's loss."""


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    # Sequences in a step, over all ranks.
    batch: int
    # Tokens of each; the model may have positions for more.
    length: int
    clip: float
    # Flats or parameters up to this many elements stay whole at stage 3; None leaves each system its own default.
    persistence: int | None = None
    # "fp32", or "bf16" with fp32 masters; what has no such mode computes in bf16 by autocast.
    dtype: str = "fp32"
    # Micro-batches of a step; the batch is divided among them.
    accumulation: int = 1
    # The order of a window, "layer_major" or "step_major", for a system that can choose; "" is the loop's own.
    order: str = ""
    # When a unit is updated, for a system that can choose.
    policy: str = "auto"
    # "host" or "device": the processor that updates offloaded state, for a system with this option; "" is its default.
    update_on: str = ""
    # Bytes of host memory for states, where an engine should not ask the system.
    host_memory: int | None = None
    # A model of Transformers' with this name in PUBLISHED, instead of GPT-2.
    published: str = ""
    # Blocks are computed again in the backward instead of keeping their activations.
    recompute: bool = False
    # "adamw", or "muon": torch's for matrices that are neither an embedding nor a head, and AdamW for the rest.
    optimizer: str = "adamw"
    # Where it is built: on the "host"; where it trains, on the "device", in the dtype of its working weights, if it is
    # too large to be built in fp32 first; or "meta", nowhere, by an engine that gives units their values one by one.
    built: str = "host"

    def model(self) -> nn.Module:
        import torch

        from wherry.train.model import GPT, GPTConfig

        torch.manual_seed(0)
        if self.published:
            with torch.device(device_type()):
                return build_published(self.published, self.dtype, self.recompute)
        shape = GPTConfig(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            sequence=self.sequence,
            vocabulary=self.vocabulary,
            checkpoint_activations=self.recompute,
        )
        if self.built == "host":
            return GPT(shape)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16 if self.dtype == "bf16" else torch.float32)
        try:
            with torch.device(device_type()):
                return GPT(shape)
        finally:
            torch.set_default_dtype(before)

    def batch_of(self, step: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A rank's share of a step's batch. Four batches take turns, so the loss falls and a wrong update shows."""
        import torch

        generator = torch.Generator().manual_seed(step % 4)
        tokens = torch.randint(0, self.vocabulary, (self.batch, self.length + 1), generator=generator)
        share = self.batch // ranks
        mine = tokens[rank * share : (rank + 1) * share]
        device = device_type()
        return mine[:, :-1].contiguous().to(device), mine[:, 1:].contiguous().to(device)

    @property
    def flops(self) -> float:
        """Count a step's operations: forward, backward, and the blocks' forward again where they are recomputed."""
        # Tiles of logits are computed again too.
        blocks = self.flops_per_token - (0 if self.published else 6 * self.vocabulary * self.hidden)
        return self.batch * self.length * (self.flops_per_token + self.recompute * blocks / 3)

    @property
    def flops_per_token(self) -> float:
        """Count the model's own operations, forward and backward."""
        per_token = Shape(self.layers, self.hidden, self.heads, self.length, self.vocabulary).flops_per_token()
        if self.published:
            config = PUBLISHED[self.published]
            width = config["num_attention_heads"] * config["head_dim"]
            per_token = 6 * (self.parameters + self.layers * width * self.length)
        return per_token

    @property
    def parameters(self) -> int:
        if self.published:
            return published_parameters(self.published)
        return Shape(self.layers, self.hidden, self.heads, self.sequence, self.vocabulary).parameters


def adamw(parameters: Any, *, fused: bool = True) -> torch.optim.Optimizer:
    import torch

    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=fused or None)


def mark_matrices(model: nn.Module) -> None:
    """The weights that Muon is for, by the same rule for all systems: DeepSpeed's."""
    for name, parameter in model.named_parameters():
        parameter.use_muon = parameter.dim() >= 2 and "embed" not in name and "head" not in name  # type: ignore[attr-defined]


def optimizers(model: nn.Module, recipe: Recipe, *, fused: bool = True) -> list[torch.optim.Optimizer]:
    """Torch's own, each for its parameters."""
    import torch

    if recipe.optimizer == "adamw":
        return [adamw(model.parameters(), fused=fused)]
    mark_matrices(model)
    parameters: list[Any] = list(model.parameters())
    muon = torch.optim.Muon([p for p in parameters if p.use_muon], lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    return [muon, adamw([p for p in parameters if not p.use_muon], fused=fused)]


def micro_batches(ids: torch.Tensor, labels: torch.Tensor, count: int) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    return zip(ids.chunk(count), labels.chunk(count), strict=True) if count > 1 else [(ids, labels)]


def mean(losses: list[torch.Tensor]) -> torch.Tensor:
    return losses[0] if len(losses) == 1 else sum(losses[1:], losses[0]) / len(losses)


class Torch:
    """A module whose `backward` leaves gradients in place: plain, or wrapped by torch's own systems."""

    def __init__(self, model: nn.Module, recipe: Recipe, *, fused: bool = True, autocast: bool = True) -> None:
        self.model = model
        self.clip = recipe.clip
        self.accumulation = recipe.accumulation
        self.autocast = autocast and recipe.dtype == "bf16"
        self.parameters = list(model.parameters())
        self.optimizers = optimizers(model, recipe, fused=fused)

    def step(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        import torch

        losses = []
        for index, micro in enumerate(micro_batches(ids, labels, self.accumulation), 1):
            with self.micro_batch(last=index == self.accumulation):
                if self.autocast:
                    with torch.autocast(ids.device.type, torch.bfloat16):
                        loss = self.model(*micro)
                else:
                    loss = self.model(*micro)
                (loss if self.accumulation == 1 else loss / self.accumulation).backward()
            losses.append(loss.detach())
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return mean(losses)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Around a micro-batch, which may be the last one of its window."""
        return nullcontext()


class Replicated(Torch):
    """DDP: until the last micro-batch nothing is reduced."""

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        model: Any = self.model
        found: AbstractContextManager[None] = nullcontext() if last else model.no_sync()
        return found


class FullyShard(Torch):
    """FSDP2: until the last micro-batch nothing is reduced, and weights are not gathered again for the next forward.

    Both are its own ways of accumulating, and exact: what they take is memory, of whole gradients and weights.
    """

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        if self.accumulation > 1:
            model: Any = self.model
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last)
        return nullcontext()


class Computing:
    """Forward and backward of a module that is whole on the device, in the dtype of its weights; these never change."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.model = model.bfloat16() if recipe.dtype == "bf16" else model
        # Of each step its begin, the end of its forward, and that of its backward.
        self.marks: list[list[Any]] = []

    def step(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        begin = _mark()
        loss = self.model(ids, labels)
        between = _mark()
        loss.backward()
        self.marks.append([begin, between, _mark()])
        self.model.zero_grad()
        return loss.detach()

    def phases(self, steps: int) -> dict[str, list[float]]:
        """Seconds of the forwards and of the backwards of the last steps, which are over."""
        last = self.marks[-steps:]
        return {
            "forward_s": [_between(begin, middle) for begin, middle, _ in last],
            "backward_s": [_between(middle, end) for _, middle, end in last],
        }


def _mark() -> Any:
    """This moment on the device, or on the CPU."""
    import torch

    if device_type() == "cpu":
        return time.perf_counter()
    event = torch.Event(device_type(), enable_timing=True)
    event.record()
    return event


def _between(begin: Any, end: Any) -> float:
    return end - begin if isinstance(begin, float) else float(begin.elapsed_time(end)) / 1e3


class Engine:
    """An engine with `backward` and `step` of its own: Wherry's and DeepSpeed's are called alike."""

    def __init__(self, engine: Any, recipe: Recipe) -> None:
        self.engine = engine
        self.accumulation = recipe.accumulation
        self.whole_windows = bool(recipe.order)

    def step(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.whole_windows:
            return self.engine.train_batch(iter(micro_batches(ids, labels, self.accumulation)))
        losses = []
        for micro in micro_batches(ids, labels, self.accumulation):
            loss = self.engine(*micro)
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach())
        return mean(losses)

    def settle(self) -> None:
        """What the engine has put off belongs to the steps that were measured."""
        if hasattr(self.engine, "settle"):
            self.engine.settle()


def _plain(recipe: Recipe, ranks: int) -> Trainee:
    return Torch(recipe.model(), recipe)


def _plain_default(recipe: Recipe, ranks: int) -> Trainee:
    return Torch(recipe.model(), recipe, fused=False)


def _compute(recipe: Recipe, ranks: int) -> Trainee:
    return Computing(recipe.model(), recipe)


def _ddp(recipe: Recipe, ranks: int) -> Trainee:
    from torch.nn.parallel import DistributedDataParallel

    start_group()
    return Replicated(DistributedDataParallel(recipe.model(), gradient_as_bucket_view=True), recipe)


def _fsdp2(offload: bool) -> Callable[[Recipe, int], Trainee]:
    def build(recipe: Recipe, ranks: int) -> Trainee:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        start_group()
        options: dict[str, Any] = {"mesh": init_device_mesh(device_type(), (ranks,))}
        if recipe.dtype == "bf16":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=device_type() != "cpu")
        model: Any = recipe.model().float()
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        return FullyShard(model, recipe, autocast=False)

    return build


@dataclass(frozen=True)
class Row:
    """A row of the placement table, as Wherry's and DeepSpeed's configs name it."""

    stage: int
    optimizer: str = "none"
    parameters: str = "none"
    # DeepSpeed's overlapped updates of states on the host, for releases that have them: "super_offload", "reflow".
    mode: str = ""

    @property
    def name(self) -> str:
        """2, 3-cpu, 3-nvme: the optimizer's tier; parameters rest where it does at stage 3."""
        if self.mode:
            return f"{self.stage}-{self.mode.partition('_')[0]}"
        return str(self.stage) if self.optimizer == "none" else f"{self.stage}-{self.optimizer}"

    def zero(self) -> dict[str, Any]:
        found: dict[str, Any] = {"stage": self.stage}
        for key, device in (("offload_optimizer", self.optimizer), ("offload_param", self.parameters)):
            if device != "none":
                found[key] = {"device": device, "pin_memory": device_type() != "cpu"}
            if device == "nvme":
                found[key]["nvme_path"] = disk_folder()
        if self.mode:
            found["offload_optimizer"][self.mode] = True
        return found


def _wherry(place: Row) -> Callable[[Recipe, int], Trainee]:
    def build(recipe: Recipe, ranks: int) -> Trainee:
        import wherry

        own: dict[str, Any] = {"update_policy": recipe.policy}
        if recipe.order:
            own["accumulation"] = recipe.order
        own |= {"update_on": recipe.update_on} if recipe.update_on else {}
        own |= {"host_memory": recipe.host_memory} if recipe.host_memory else {}
        if recipe.policy == "delayed":  # from the first step on, which warms up
            own["delayed_update_warmup"] = 1
        config = config_of(place, recipe, ranks) | {"wherry": own}
        if recipe.built == "meta":
            with wherry.Init(meta=True):
                model = replace(recipe, built="host").model()
        else:
            model = recipe.model()
        given: dict[str, Any] = {"optimizer": adamw}
        if recipe.optimizer == "muon":
            mark_matrices(model)
            given = {}
            config["optimizer"] = {"type": "Muon", "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}}
        return Engine(wherry.initialize(model=model, config=config, **given)[0], recipe)

    return build


def _deepspeed(place: Row) -> Callable[[Recipe, int], Trainee]:
    def build(recipe: Recipe, ranks: int) -> Trainee:
        import deepspeed

        model = recipe.model()
        # Its default prints a line every ten steps.
        config = config_of(place, recipe, ranks) | {"steps_per_print": 2**31}
        config["zero_optimization"] |= _beside_computing(place)
        config |= right_gradients(place, recipe, ranks)
        given: dict[str, Any] = {}
        if recipe.optimizer == "muon":
            options = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "ns_method": "standard"}
            config["optimizer"] = {"type": "Muon", "params": options}
            given["model_parameters"] = model.parameters()
        elif place.optimizer == "none":
            given["optimizer"] = adamw(model.parameters())
        else:
            # Offloaded states are updated by its own host optimizer, which the config asks for.
            options = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}
            config["optimizer"] = {"type": "AdamW", "params": options}
            given["model_parameters"] = model.parameters()
        deepspeed.init_distributed(dist_backend=_backend())
        return Engine(deepspeed.initialize(model=model, config=config, **given)[0], recipe)

    return build


def right_gradients(place: Row, recipe: Recipe, ranks: int) -> dict[str, Any]:
    """What DeepSpeed must be told so that it updates with the gradients that it has written to disk.

    It reads them into the places of one buffer, where partitions lie one behind the other, by direct reads. These take
    whole sectors of memory, so that behind the partition of a bias that is none they fail, and it says nothing of it.
    Pieces below a block of its reads stay in memory; optimizer states rest on disk as before.
    """
    if place.optimizer != "nvme" or recipe.hidden // ranks * 4 % SECTOR == 0:
        return {}
    largest = max(recipe.vocabulary, recipe.sequence, 4 * recipe.hidden) * recipe.hidden * 4 // ranks
    return {"aio": {"block_size": (largest // 2**20 + 1) * 2**20}}


def _beside_computing(place: Row) -> dict[str, Any]:
    """What DeepSpeed must be told on a GPU so that copies and updates of states on the host run beside the backward.

    At stage 2 gradients are copied on the stream that computes, unless communication overlaps; by default they leave in
    buckets of 5e8 elements, for updates in groups of 1e9, which is the whole of a model of a billion.
    """
    if place.optimizer == "none" or device_type() == "cpu":
        return {}
    return {"overlap_comm": True, "reduce_bucket_size": BUCKET, "sub_group_size": BUCKET}


def config_of(place: Row, recipe: Recipe, ranks: int) -> dict[str, Any]:
    zero = place.zero()
    if recipe.persistence is not None:
        zero["stage3_param_persistence_threshold"] = recipe.persistence
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": recipe.batch // ranks // recipe.accumulation,
        "gradient_accumulation_steps": recipe.accumulation,
        "gradient_clipping": recipe.clip,
        "zero_optimization": zero,
    }
    if recipe.dtype == "bf16":
        found["bf16"] = {"enabled": True}
    return found


def device_type() -> str:
    """Where the systems of this process train. Apple's has no streams and no float64: there it is the CPU."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None or found.type == "mps" else str(found.type)


def disk_folder() -> str:
    return os.environ.get(DISK_FOLDER) or tempfile.gettempdir()


def _backend() -> str:
    import torch.distributed as dist

    # Gradients that rest on the host are clipped there.
    kind = device_type()
    return "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"


def start_group() -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group(_backend())


RESIDENT = tuple(Row(stage) for stage in (0, 1, 2, 3))
OFFLOADED = (Row(2, "cpu"), Row(3, "cpu", "cpu"), Row(2, "nvme"), Row(3, "nvme", "nvme"))
OVERLAPPED = (Row(3, "cpu", mode="super_offload"), Row(3, "cpu", mode="reflow"))
PLACES = {place.name: place for place in (*RESIDENT, *OFFLOADED, *OVERLAPPED)}
# FSDP2 partitions everything, as stage 3 does.
FSDP2 = {"fsdp2": "3", "fsdp2-cpu": "3-cpu"}
SYSTEMS: dict[str, Callable[[Recipe, int], Trainee]] = {
    "plain": _plain,
    "plain-default": _plain_default,
    COMPUTE: _compute,
    "ddp": _ddp,
    "fsdp2": _fsdp2(offload=False),
    "fsdp2-cpu": _fsdp2(offload=True),
    **{f"deepspeed-{place.name}": _deepspeed(place) for place in PLACES.values()},
    **{f"wherry-{place.name}": _wherry(place) for place in RESIDENT + OFFLOADED},
}
# Bytes of a parameter: working weight, gradient, and what the optimizer keeps beside the working weight.
STATES = {"fp32": (4, 4, 8), "bf16": (2, 2, 12)}


def place_of(system: str) -> Row:
    """The row of the placement table that a system is in."""
    return PLACES.get(FSDP2.get(system, system.partition("-")[2]), PLACES["0"])


def peer_of(system: str, peer: str) -> str:
    """What DeepSpeed or FSDP2 is called in the place of a system of Wherry's."""
    place = system.partition(":")[0].partition("-")[2]
    if peer == "fsdp2":
        return {there: name for name, there in FSDP2.items()}.get(place, "")
    return f"{peer}-{place}"


def states_bytes(system: str, recipe: Recipe, ranks: int) -> float:
    """Bytes in memory of all ranks' states together, by the published formulas. What rests on disk is not in memory."""
    place = place_of(system)
    copies = [ranks if place.stage < level else 1 for level in (3, 2, 1)]
    # In bf16 torch's own systems compute by autocast, and keep fp32.
    weight, gradient, optimizer = STATES["fp32" if system.startswith(("plain", "ddp", "fsdp2")) else recipe.dtype]
    kept = [weight * (place.parameters != "nvme"), gradient, optimizer * (place.optimizer != "nvme")]
    return float(recipe.parameters * sum(count * nbytes for count, nbytes in zip(copies, kept, strict=True)))


def cannot_run(name: str) -> str | None:
    """Why a system cannot even be tried here."""
    if name.startswith("deepspeed"):
        found = importlib.util.find_spec("deepspeed")
        if found is None or found.origin is None:
            return "deepspeed is not installed (pip install '.[bench]')"
        if name == "deepspeed-2-nvme":
            return "DeepSpeed moves optimizer state to disk at stage 3 only"
        mode = place_of(name).mode
        if mode and mode not in Path(found.origin).with_name("runtime").joinpath("zero/offload_config.py").read_text():
            return f"this release of DeepSpeed has no {mode}"
    return None


def same_losses(difference: float, dtype: str = "fp32") -> bool:
    """Whether losses so far from plain PyTorch's are of the same training."""
    return difference <= (SAME_LOSS if dtype == "fp32" else SAME_BF16_LOSS)


def loss_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """How far any of them is from what it should be, relative to that."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


def _extensions() -> Path:
    """The folder in which torch compiles what is written in C++."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions"))


def compiled(operator: str) -> bool:
    """Tell whether an operator of DeepSpeed's has been compiled for some torch."""
    return any(_extensions().glob(f"**/{operator}.so"))


def remove_dead_locks() -> None:
    """DeepSpeed compiles at first use, under a lock that stays when its process is killed: all others then wait."""
    import psutil

    locks = list(_extensions().glob("**/lock"))
    if locks and not any(process.info["name"] == "ninja" for process in psutil.process_iter(["name"])):
        for lock in locks:
            with suppress(FileNotFoundError):  # whose process has just ended
                if time.time() - lock.stat().st_mtime > LOCK_SECONDS:
                    lock.unlink()


def remove_shared_memory(port: int) -> None:
    """DeepSpeed's ranks share memory by the name of their port, 69 MB each, which stays when they are killed."""
    for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        left.unlink(missing_ok=True)


def environment(ranks: int, gpu: bool) -> dict[str, str]:
    """What the systems read from the environment, the same for each."""
    return {} if gpu else {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(ranks)}
