"""Lives of an engine: train, save, generate, train on, load, train again, and load elsewhere.

Factors of a training meet each other in as few cases as cover them. Each case runs late and with states anywhere, and
has to give the bits of the same training without offload, updated at the step, on a calm device.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from tests.covering import Case, covering, name_of
from tests.engine.harness import (
    LENGTH,
    VOCABULARY,
    Run,
    TinyLM,
    adamw,
    assert_close,
    assert_equal,
    make_model,
    settings,
    train_plain,
)
from tests.tiers.rows import ROWS, zero_block
from torch import nn
from torch.nn import functional as F

import wherry
from wherry.errors import WherryError
from wherry.optim import Muon
from wherry.parallel.comm import Comm, SoloComm
from wherry.parallel.topology import default_device
from wherry.testing import run_ranks, small_sizes
from wherry.testing.late import Chaos, ChaosLink, topology
from wherry.tiers.streams import Link

# ---- Factors

# Where optimizer state and parameters rest, as the config says it.
TIERS = {
    "device": ("none", "none"),
    "offload": ("cpu", "none"),
    "disk": ("nvme", "none"),
    "parameters-only": ("none", "cpu"),
    "offload-parameters": ("cpu", "cpu"),
    "disk-parameters": ("nvme", "cpu"),
    "infinity": ("nvme", "nvme"),
    "parameters-on-disk": ("cpu", "nvme"),
}
STATES_ON_DEVICE = ("device", "parameters-only")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": adamw,
    "8-bit": adamw,
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1),
    "AMSGrad": partial(torch.optim.Adam, lr=3e-3, amsgrad=True),
    "Adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "Muon": Muon,
}
TWO = ("exp_avg", "exp_avg_sq")
MOMENTS = {
    "AdamW": TWO,
    "8-bit": TWO,
    "SGD": ("momentum_buffer",),
    "Adagrad": ("sum",),
    "AMSGrad": (*TWO, "max_exp_avg_sq"),
    "Adafactor": ("row_var", "col_var", "variance"),
    "Muon": (*TWO, "momentum_buffer"),
}
# Parameters whose states are compared.
LOOKED_AT = ("embed.weight", "scale", "norm.bias", "1.up.weight", "1.down.bias")
FACTORS: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "tiers": tuple(TIERS),
    "policy": ("at_step", "before_use", "in_backward", "delayed"),
    "optimizer": tuple(OPTIMIZERS),
    "model": ("tied", "dropout", "frozen", "absent", "twice", "scalar"),
    "precision": ("fp32", "bf16", "bf16+fp32", "fp16"),
    "activations": ("keep", "recompute", "host", "disk"),
    "target": ("same", "alone", "pair", "four"),
    "window": ("one", "three", "layer-major"),
    "ranks": (1, 2),
    # Where states are updated that do not rest on the device.
    "updates": ("host", 0.3, 1.0),
    # Whether device and host have one memory, or two and late copies between them.
    "device": ("apart", "shared"),
    "sums": ("device", "host"),
    # Whether every flat is reduced, gathered and updated by itself, in pieces.
    "flats": ("alone", "joined"),
    "clip": (0.0, 0.5),
    "save": ("at once", "beside"),
}
BASE: Case = {name: values[0] for name, values in FACTORS.items()} | {
    "stage": 3,
    "tiers": "offload-parameters",
    "policy": "before_use",
    "target": "same",
    "flats": "joined",
}


def by_torch(case: Case) -> bool:
    """Tell whether an optimizer of torch's updates a case, and keeps its state itself."""
    on_device = case.get("tiers") in STATES_ON_DEVICE and case.get("device") != "shared"
    return case.get("optimizer") == "AMSGrad" or (on_device and case.get("optimizer") not in ("Muon", "Adafactor"))


def at(row: str) -> Case:
    """Find the factors of a row of tests/tiers/rows.py, or of `device-STAGE`."""
    stage, *tiers = ROWS.get(row) or (int(row[-1]), "none", "none")
    return {"stage": stage, "tiers": next(name for name, where in TIERS.items() if where == tuple(tiers))}


def allowed(case: Case) -> bool:
    """Reject what the engine refuses, and what is another case under another name. Factors may be missing."""
    get = case.get
    tiers, optimizer = get("tiers"), get("optimizer")
    states, parameters = TIERS[tiers] if tiers else ("cpu", "none")
    on_device = parameters == "none" or (parameters == "cpu" and get("device") == "shared")
    joined = get("flats") == "joined"
    return not (
        (parameters != "none" and get("stage", 3) < 3)
        or (get("policy") == "in_backward" and (get("clip") or get("precision") == "fp16"))
        or (get("policy") == "delayed" and states == "none" and get("device") != "shared")
        # Kernels of the host alone have moments in 8 bits, records on disk the states whose form is known.
        or (optimizer == "8-bit" and states == "none" and get("device") != "shared")
        or (optimizer == "AMSGrad" and (states == "nvme" or get("updates", "host") != "host"))
        # Ranks that are threads have one generator.
        or (get("model") == "dropout" and get("ranks", 1) > 1)
        # A gather ahead of joined flats on the device begins one twice that comes twice.
        or (get("model") == "twice" and get("stage") == 3 and on_device and get("ranks", 1) > 1 and joined)
        # Sums in fp32 of micro-batches that ran together are rounded on their way to sums on the host.
        or (get("window") == "layer-major" and get("precision") == "bf16+fp32" and get("sums") == "host")
    )


# Three factors that one branch of the engine looks at together.
TRIPLES = [("stage", "tiers", "policy"), ("window", "sums", "device"), ("policy", "window", "device")]
# Values that make a case longer.
COSTS = {
    ("ranks", 2): 2,
    ("ranks", 4): 5,
    ("window", "three"): 3,
    ("window", "layer-major"): 3,
    ("device", "shared"): 2,
    ("model", "twice"): 2,
}


def effort(case: Case) -> float:
    """Estimate how long a case takes, as its factors multiply."""
    get = case.get
    ranks = get("ranks", 1)
    there = {"four": 4, "pair": 2, "same": ranks}.get(get("target"), 1)
    slow = {"disk": 2.0, "host": 1.5, "recompute": 1.3}.get(get("activations"), 1.0)
    return (ranks + 0.4 * there) * (1 if get("window", "one") == "one" else 3) * slow


def cases(strength: int = 2, **fixed: tuple[Any, ...]) -> tuple[Case, ...]:
    """Choose cases of lives in which all values of `strength` factors meet; pairs meet in short cases."""
    factors = FACTORS | fixed
    if strength > 2:
        return covering(factors, itertools.combinations(factors, strength), allowed, COSTS)
    groups = [*itertools.combinations(factors, 2), *TRIPLES]
    return covering(factors, groups, lambda case: allowed(case) and effort(case) <= 9, COSTS)


# ---- Models, batches and configs


class Subject(TinyLM):
    """A model with what makes training one harder, by its kind."""

    def __init__(self, kind: str = "tied", blocks: int = 2) -> None:
        super().__init__(blocks + (kind == "twice"))
        self.kind = kind
        if kind == "frozen":
            self.blocks[1].requires_grad_(False)
        if kind == "scalar":
            self.scale = nn.Parameter(torch.tensor(1.5))
        if kind == "dropout":
            self.norm = nn.Sequential(nn.Dropout(0.2), self.norm)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor, event: str = "") -> torch.Tensor:
        x = self.embed(ids)
        if self.kind == "scalar":
            x = x * self.scale
        for index, block in enumerate(self.blocks):
            if (index, event, self.kind) != (1, "skip a block", "absent"):
                x = block(x)
        if self.kind == "twice":
            x = self.blocks[1](x)
        loss = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())
        return loss * 2**20 if event == "overflow" and x.dtype is torch.float16 else loss


def subject(case: Case, seed: int = 0) -> Subject:
    return make_model(partial(Subject, case["model"]), seed)  # type: ignore[return-value]


def optimizer_of(case: Case, parameters: Any, model: nn.Module | None = None) -> torch.optim.Optimizer:
    trained = [p for p in parameters if p.requires_grad]
    scalars = [p for p in trained if not p.dim()]
    groups: list[Any] = trained
    if scalars:
        groups = [{"params": [p for p in trained if p.dim()]}, {"params": scalars, "lr": 2e-2, "weight_decay": 0.0}]
    if model is not None and case["optimizer"] == "Muon":
        return Muon.for_model(model, groups, lr=1e-2, adamw_lr=3e-3)
    return OPTIMIZERS[case["optimizer"]](groups)


def batch(
    step: int, micro: int, rank: int = 0, ranks: int = 1, *, device: torch.device | None = None
) -> tuple[Any, ...]:
    """Draw one rank's part of a micro-batch, the whole of which is the same on any ranks, and what the model does."""
    generator = torch.Generator().manual_seed(100 * step + micro)
    ids = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=generator)[rank::ranks].to(device or default_device())
    event = "overflow" if step == 0 else "skip a block" if step == 1 or (step, micro) == (2, 1) else ""
    return ids[:, :-1], ids[:, 1:], event


def config_of(case: Case, folder: Path) -> dict[str, Any]:
    own: dict[str, Any] = {"update_policy": case["policy"], "checkpoint": {"async_save": case["save"] == "beside"}}
    zero = zero_block(case["stage"], *TIERS[case["tiers"]], folder)
    config: dict[str, Any] = {"wherry": own, "zero_optimization": zero}
    if case["updates"] != "host" or case["optimizer"] in ("Muon", "Adafactor"):
        own["update_on"] = case["updates"]
    if case["policy"] == "delayed":
        own["delayed_update_warmup"] = 1
    if case["window"] == "layer-major":
        own["accumulation"] = "layer_major"
    if case["optimizer"] == "8-bit":
        own["state_dtype"] = "int8"
    if case["precision"] == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 12, "hysteresis": 1}
    elif case["precision"] != "fp32":
        config["bf16"] = {"enabled": True}
    if case["precision"] == "bf16+fp32":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    block = {
        "keep": {},
        "recompute": {"policy": "recompute"},
        "host": {"policy": "offload", "cpu_checkpointing": True, "offload_min_bytes": 300},
        "disk": {"policy": "offload", "nvme_path": str(folder), "offload_min_bytes": 300},
    }[case["activations"]]
    if block:
        config["activation_checkpointing"] = block
    if case["flats"] == "joined":
        zero |= {"reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000}
    config = settings(case["stage"], 1 if case["window"] == "one" else 3, case["clip"], config)
    return config | {"train_micro_batch_size_per_gpu": 4 // case["ranks"]}


# ---- Where lives run


class ApartLink(Link):
    """A link of a device apart from the host, with copies made at once."""

    shared = False


@dataclass(eq=False)
class Machine:
    """Ranks that are threads, without an accelerator: a device apart from the host is one of late copies."""

    links: list[Link] = field(default_factory=list)
    # The device of an engine that a checkpoint is loaded into.
    quiet = "shared"
    # How near plain PyTorch on the CPU is.
    tolerance = 1e-5

    def kernels(self, case: Case) -> Any:
        """Tell by which kernels a case is updated: the host's round otherwise than torch's."""
        return case["device"] == "shared" or case["tiers"] not in STATES_ON_DEVICE

    def reference(self, case: Case) -> Case:
        """Find what a case of the same numbers without offload has of its own."""
        return {"tiers": "device", "device": "shared" if self.kernels(case) else "apart", "updates": "host"}

    def calm(self) -> None:
        """Let kernels and copies run at once."""

    def late(self, seed: int) -> None:
        """Let kernels and copies run late, in an order drawn by the seed."""

    def mesh(self, comm: Comm, case: Case, seed: int | None) -> Any:
        """Place a rank: calm without a seed."""
        apart = case["device"] == "apart"
        chaos = Chaos(1000 * seed + comm.rank) if seed is not None and apart else None

        def link(pin: bool) -> Link:
            if chaos is not None:
                self.links.append(ChaosLink(chaos, free=0 if case["sums"] == "host" else None))
            else:
                self.links.append((ApartLink if apart else Link)(torch.device("cpu")))
            return self.links[-1]

        return replace(topology(comm, chaos), link=link)

    def held(self) -> int:
        """Count bytes that closed engines have kept."""
        return sum(link.host.counters.in_use for link in self.links)


class Device(Machine):
    """A device with memory of its own, which ranks that are threads share."""

    quiet = "apart"

    def rounds_alone(self, case: Case) -> bool:
        """Tell whether an update on the device of states that rest elsewhere has bits of its own."""
        return case["optimizer"] in ("Muon", "Adafactor")  # products of matrices in bf16

    def kernels(self, case: Case) -> Any:
        if case["tiers"] in STATES_ON_DEVICE:
            return "device", "host"
        return "offload", case["updates"] if self.rounds_alone(case) else "host"

    def reference(self, case: Case) -> Case:
        tiers, updates = self.kernels(case)
        return {"tiers": tiers, "updates": updates, "sums": case["sums"]}  # a norm is measured where sums are

    def mesh(self, comm: Comm, case: Case, seed: int | None) -> Any:
        return comm

    def held(self) -> int:
        torch.accelerator.synchronize()
        for _ in range(2):  # the first may free graphs, whose hooks hold what the second frees
            gc.collect()
        if torch.accelerator.current_accelerator() == torch.device("cuda"):
            torch._C._cuda_clearCublasWorkspaces()
        return torch.accelerator.memory_allocated()


# ---- Lives

Steps = tuple[int, ...]
FIRST: Steps = (0, 1)


def second_of(case: Case) -> Steps:
    """Choose the steps after the save: a delayed update takes two."""
    return (2, 3) if case["policy"] == "delayed" else (2,)


def one_step(engine: Any, step: int, part: tuple[int, int]) -> torch.Tensor:
    """Train on a window of this rank's part; the mean loss, which no one has waited for."""
    count = engine.gradient_accumulation_steps()
    if count > 1 and engine.config["wherry"]["accumulation"] == "layer_major":
        return engine.train_batch(iter([batch(step, micro, *part) for micro in range(count)]))
    losses = []
    for micro in range(count):
        loss = engine(*batch(step, micro, *part))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach() / count)
    return torch.stack(losses).sum()


class Leg:
    """An engine of a case on one rank, and the record of its training."""

    def __init__(self, case: Case, swap: Path, mesh: Any, part: tuple[int, int], model: nn.Module) -> None:
        torch.manual_seed(part[0])  # dropout's
        self.case, self.part, self.run, self.model = case, part, Run(), copy.deepcopy(model)
        optimizer = optimizer_of(case, self.model.parameters(), self.model)
        config = config_of(case, swap)
        self.engine, *_ = wherry.initialize(model=self.model, optimizer=optimizer, mesh=mesh, config=config)

    def train(self, steps: Steps) -> list[torch.Tensor]:
        losses = [one_step(self.engine, step, self.part) for step in steps]
        self.run.norms.append(self.engine.get_global_grad_norm() or -1.0)
        self.run.losses += losses  # type: ignore[arg-type]
        return losses

    def generate(self) -> None:
        with torch.no_grad(), self.engine.gathered_for_generation():
            self.model.eval()
            self.run.losses.append(self.model(*batch(9, 0, *self.part)))
            self.model.train()

    def states(self) -> dict[str, torch.Tensor]:
        """Copy all weights, and masters and moments of some of the root and of a block, by `name:kind`."""
        kept: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and name.endswith(LOOKED_AT):
                for kind in ("master", *MOMENTS[self.case["optimizer"]]):
                    with suppress(WherryError):  # it has none before its first update, or of its kind of parameter
                        kept[f"{name}:{kind}"] = self.engine.states.full(name, kind).cpu()
        assert kept, "no state is compared"
        with wherry.gathered(self.model):
            return kept | {f"{name}:working": p.detach().cpu().clone() for name, p in self.model.named_parameters()}

    def end(self) -> Run:
        self.engine.settle()
        for state, tier, expected, actual in self.engine.memory():
            assert actual <= expected and (actual == expected or state != "parameters"), (state, tier, expected, actual)
        with wherry.gathered(self.model):
            self.run.weights = {name: p.detach().cpu().clone() for name, p in self.model.named_parameters()}
        self.run.losses = [float(loss) for loss in self.run.losses]
        self.run.extra = self.run.extra, self.engine.skipped_steps
        self.engine.close()
        return self.run


def straight(leg: Leg) -> Run:
    """Train without a save; the states where one would be."""
    leg.train(FIRST)
    leg.engine.settle()
    leg.run.extra = leg.states()
    leg.generate()
    leg.train(second_of(leg.case))
    return leg.end()


def whole(leg: Leg, saved: Path) -> Run:
    """Train, save, generate, train on; load, and train on again."""
    leg.train(FIRST)
    leg.engine.save_checkpoint(str(saved))
    leg.generate()
    first = leg.train(second_of(leg.case))
    leg.engine.wait_for_checkpoint()
    leg.engine.load_checkpoint(str(saved))
    again = leg.train(second_of(leg.case))
    assert list(map(float, again)) == list(map(float, first)), "as after the save"
    del leg.run.losses[-len(again) :]
    assert leg.run.norms.pop() == leg.run.norms[-1]
    return leg.end()


def elsewhere(leg: Leg, saved: Path, steps: Steps) -> Run:
    """Load into an engine that began with other weights; the states, and train on."""
    leg.engine.load_checkpoint(str(saved))
    leg.run.extra = leg.states()
    leg.train(steps)
    return leg.end()


@contextmanager
def sized(case: Case) -> Iterator[None]:
    """Make sums and flats of tiny models take the paths of large ones."""
    sizes = {"streamed": 512}
    if case["flats"] == "alone":
        sizes |= {"bucket": 1} if by_torch(case) else {"bucket": 1, "piece": 512}  # torch's cannot update pieces
    with pytest.MonkeyPatch.context() as patch, small_sizes(**sizes):
        patch.setattr("wherry.offload.ROOM_FOR_SUMS", 0.25 if case["sums"] == "device" else 0.0)
        yield


def on_ranks(
    body: Callable[[Leg], Run], case: Case, folder: Path, machine: Machine, *, seed: int | None = None, begin: int = 0
) -> Run:
    """Run a body on each rank, late with a seed; the first rank's record, with the mean of all ranks' losses."""
    swap, held = folder / "swap", machine.held()
    swap.mkdir(parents=True)
    model = subject(case, begin)  # by one thread, as all ranks have one generator

    def rank(comm: Comm) -> Run:
        return body(Leg(case, swap, machine.mesh(comm, case, seed), (comm.rank, comm.size), model))

    machine.calm() if seed is None else machine.late(seed)
    with sized(case):
        runs = [rank(SoloComm())] if case["ranks"] == 1 else run_ranks(case["ranks"], rank)
    run = runs[0]
    for other in runs[1:]:
        assert all(torch.equal(weight, run.weights[name]) for name, weight in other.weights.items())
    run.losses = mean_losses(runs)
    assert list(swap.iterdir()) == [], "a closed engine leaves no files"
    assert machine.held() <= held, "a closed engine gives all of the memory back"
    return run


def mean_losses(runs: list[Run]) -> list[float]:
    return [sum(losses) / len(runs) for losses in zip(*(run.losses for run in runs), strict=True)]


@functools.cache
def _reference(key: tuple[tuple[str, Any], ...], machine: Machine) -> Run:
    with TemporaryDirectory() as folder:
        return on_ranks(straight, dict(key), Path(folder), machine)


def reference_of(case: Case, machine: Machine) -> Run:
    """Train a case calm, updated at the step, without offload. Runs are kept by what numbers depend on."""
    policy = "delayed" if case["policy"] == "delayed" else "at_step"
    plain = BASE | {"policy": policy, "activations": "keep"} | machine.reference(case)
    numbers = ("stage", "ranks", "optimizer", "model", "precision", "window", "clip")
    plain |= {name: case[name] for name in numbers}
    plain["flats"] = "joined" if allowed(plain) else "alone"
    return _reference(tuple(plain.items()), machine)


TARGETS: dict[str, Case] = {
    "alone": {"ranks": 1, "stage": 0, "tiers": "device", "policy": "at_step"},
    "pair": {"ranks": 2, "stage": 3, "tiers": "infinity", "policy": "before_use"},
    "four": {"ranks": 4, "stage": 2, "tiers": "offload", "policy": "at_step"},
}


def target_of(case: Case, machine: Machine) -> Case:
    """Choose the engine that a case's checkpoint is loaded into, of another shape than the one that saved it."""
    other = {"activations": "keep", "flats": "joined", "updates": "host", "device": machine.quiet}
    if case["target"] == "same":  # but for the stage: one that sums in the same order
        other |= {"stage": case["stage"] ^ 1, "policy": "at_step"}
        other["tiers"] = "device" if case["tiers"] in STATES_ON_DEVICE else "offload"
    else:
        other |= TARGETS[case["target"]]
    if case["policy"] == "delayed":
        other["policy"] = "delayed"
    target = case | other
    if target["model"] == "twice" and target["stage"] == 3:
        target["flats"] = "alone"
    return target if allowed(target | {"model": "tied"}) else target | {"tiers": "offload"}


def has_same_sums(case: Case, target: Case, machine: Machine) -> bool:
    """Tell whether two cases add up the same terms in the same order, and update by the same kernels."""
    alike = case["ranks"] == target["ranks"] and machine.kernels(case) == machine.kernels(target)
    order = case["ranks"] == 1 or case["window"] == "one" or case["stage"] // 2 == target["stage"] // 2
    return alike and order and case["optimizer"] != "8-bit"


# Losses of one training whose terms are added up in another order.
CLOSE = {"fp32": 1e-5, "bf16": 2e-2, "bf16+fp32": 2e-2, "fp16": 5e-3}


def check(case: Case, folder: Path, machine: Machine) -> None:
    """Hold a case's life, and its checkpoint elsewhere, against the reference; where it is close, against torch."""
    calm, saved = reference_of(case, machine), folder / "saved"
    states, skipped = calm.extra
    seed = zlib.crc32(name_of(case).encode())
    late = on_ranks(partial(whole, saved=saved), case, folder / "life", machine, seed=seed)
    assert_equal(late, calm)
    assert late.extra[1] == skipped == (1 if case["precision"] == "fp16" else 0)
    if case["precision"] == "fp32" and case["policy"] != "delayed" and case["optimizer"] not in ("8-bit", "Muon"):
        assert_is_plain(case, calm, machine.tolerance)
    target = target_of(case, machine)
    exact = has_same_sums(case, target, machine)
    second = second_of(case)
    body = partial(elsewhere, saved=saved, steps=second if exact else second[:1])
    other = on_ranks(body, target, folder / "target", machine, begin=1)
    other_blocks = case["optimizer"] == "8-bit" and target["ranks"] * case["ranks"] > 1
    assert_states(other.extra[0], states, machine.kernels(case) == machine.kernels(target), other_blocks)
    if exact:
        assert_equal(other, Run(calm.losses[-len(second) :], calm.norms[-1:], calm.weights))
    elif case["model"] != "dropout":
        assert other.losses == pytest.approx(calm.losses[-len(second) :][:1], rel=CLOSE[case["precision"]])


def assert_is_plain(case: Case, run: Run, tolerance: float) -> None:
    """Compare a run with plain PyTorch's, whose norms are of every step and which generates nothing."""
    if case["model"] == "dropout":
        return
    plain = train_plain(
        subject(case),
        accumulation=1 if case["window"] == "one" else 3,
        steps=3,
        clip=case["clip"],
        optimizer=partial(optimizer_of, case),
        batch=lambda step, micro, rank: batch(step, micro, device=torch.device("cpu")),
    )
    plain.norms = plain.norms[1:]
    assert_close(Run([*run.losses[:2], *run.losses[3:]], run.norms, run.weights), plain, tolerance)


def assert_states(
    found: dict[str, torch.Tensor], saved: dict[str, torch.Tensor], rounds_alike: bool, other_blocks: bool
) -> None:
    """Compare weights, masters and moments by name; moments in 8 bits are coded anew where other blocks cut them."""
    assert found.keys() == saved.keys()
    for key, value in saved.items():
        kind = key.rpartition(":")[2]
        if kind == "working" and not rounds_alike:
            torch.testing.assert_close(found[key].float(), value.float(), rtol=2**-7, atol=0)
        elif kind in TWO and other_blocks:
            assert (found[key] - value).abs().max() <= 0.05 * value.abs().max(), key
        else:
            assert torch.equal(found[key], value), (key, found[key], value)
