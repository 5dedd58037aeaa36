"""Files of DeepSpeed's that are not what they should be: one clear line each, nothing run, and nothing left behind."""

from __future__ import annotations

import copy
import math
import os
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wherry.checkpoint.export import verified
from wherry.cli import main

SHAPES: list[dict[str, Any]] = [{"a.weight": (4, 3), "b.weight": (5,)}, {"a.bias": (3,)}]
RANKS = 2


class Theirs:
    """A checkpoint of DeepSpeed's of two ranks in memory: change it, then `write` it."""

    def __init__(self, stage: int) -> None:
        torch.manual_seed(0)
        self.stage = stage
        weights = {name: torch.randn(shape) for shapes in SHAPES for name, shape in shapes.items()}
        module = {name: torch.empty(0) if stage == 3 else value for name, value in weights.items()}
        self.model: dict[str, Any] = {
            "module": OrderedDict(module | {"seen": torch.tensor([3, 1])}),
            "buffer_names": ["seen"],
            "param_shapes": [OrderedDict((n, torch.Size(s)) for n, s in shapes.items()) for shapes in SHAPES],
            "shared_params": {"head": "a.weight"},
            "frozen_param_shapes": {"f": torch.Size([3])},
            "frozen_param_fragments": {"f": torch.ones(2 if stage == 3 else 3)},
            "global_steps": 5,
            "skipped_steps": 0,
            "global_samples": 20,
            "dp_world_size": RANKS,
            "ds_version": "0.19",
            "lr_scheduler": {"last_batch_iteration": 4},
            "epoch": 7,
        }
        self.models = [self.model, copy.deepcopy(self.model)]
        self.optimizers = []
        for _ in range(RANKS):
            flats = [torch.randn(self._size(shapes)) for shapes in SHAPES]
            inner = {
                "state": {i: {"step": torch.tensor(5.0), "exp_avg": torch.rand_like(f)} for i, f in enumerate(flats)},
                "param_groups": [{"lr": 0.5, "params": [0]}, {"lr": 0.5, "params": [1]}],
            }
            keys = ("fp32_flat_groups", "optimizer_state_dict") if stage == 3 else (
                "single_partition_of_fp32_groups", "base_optimizer_state",
            )  # fmt: skip
            self.optimizers.append({"optimizer_state_dict": dict(zip(keys, (flats, inner), strict=True))})
        self.flats, self.inner = keys

    def _size(self, shapes: dict[str, Any]) -> int:
        sizes = [math.prod(shape) for shape in shapes.values()]
        return sum(-(-size // RANKS) for size in sizes) if self.stage == 3 else -(-sum(sizes) // RANKS)

    @property
    def rank(self) -> dict[str, Any]:
        """What the second rank's file says."""
        return self.optimizers[1]["optimizer_state_dict"]

    def write(self, folder: Path) -> Path:
        (tag := folder / "step").mkdir(parents=True)
        for rank, model in enumerate(self.models[: RANKS if self.stage == 3 else 1]):
            name = f"zero_pp_rank_{rank}_" if self.stage == 3 else ""
            torch.save(model, tag / f"{name}mp_rank_00_model_states.pt")
        for rank, optimizer in enumerate(self.optimizers):
            torch.save(optimizer, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        (folder / "latest").write_text("step")
        return folder


def refused(source: Path, out: Path, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import-deepspeed", str(source), str(out)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("wherry: ") and said.count("\n") == 1 and "Traceback" not in said
    assert told in said, said
    assert not out.exists() or list(out.iterdir()) == []


@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_changed_by_nobody_is_imported(stage: int, tmp_path: Path) -> None:
    """The cases below are refused for what they change, and for nothing else."""
    assert main(["import-deepspeed", str(Theirs(stage).write(tmp_path / "in")), str(tmp_path / "out")]) == 0
    manifest = verified(tmp_path / "out" / "step")
    assert {name: entry.kind for name, entry in manifest.entries.items()} == {
        "a.weight": "parameter",
        "b.weight": "parameter",
        "a.bias": "parameter",
        "f": "frozen",
        "seen": "buffer",
    }
    assert manifest.engine["client_state"] == {"epoch": 7} and manifest.engine["optimizer"]["steps"] == 5


Change = Callable[[Any], Any]
HUGE = 10**24


def model(**values: Any) -> Change:
    return lambda theirs: theirs.model.update(values)


def module(**values: Any) -> Change:
    return lambda theirs: theirs.model["module"].update(values)


def without(key: str) -> Change:
    return lambda theirs: theirs.model.pop(key)


def optimizer(**values: Any) -> Change:
    """`flats` and `inner` are under names that depend on the stage."""
    return lambda theirs: theirs.rank.update({getattr(theirs, key, key): value for key, value in values.items()})


def inner(**values: Any) -> Change:
    return lambda theirs: theirs.rank[theirs.inner].update(values)


def state(**values: Any) -> Change:
    return lambda theirs: theirs.rank[theirs.inner]["state"][0].update(values)


def itself() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


def doubled(times: int) -> list[Any]:
    made: list[Any] = [1]
    for _ in range(times):
        made = [made, made]
    return made


def deep(depth: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


ODD = torch.randn(3).to_sparse()
VAST = torch.ones(1).expand(10**9, 1000)  # 4 TB of one number
CASES: dict[str, tuple[Change, str]] = {
    "no module": (without("module"), "module: field required"),
    "module: list": (model(module=[1]), "module: input should be a valid dictionary"),
    "module: no tensors": (module(x=1), "module: x: input should be an instance of Tensor"),
    "module: list of tensors": (module(x=[torch.ones(1)]), "module: x: input should be an instance of Tensor"),
    "module: sparse": (module(x=ODD), "module: x: expected a plain tensor"),
    "module: meta": (module(x=torch.empty(3, device="meta")), "module: x: expected a plain tensor"),
    "module: vast": (module(x=VAST), "module: x: expected 4,000,000,000,000 bytes in the file, got"),
    "module: the same bytes again and again": (
        lambda theirs: theirs.model["module"].update({f"x{i}": BIG for i in range(100)}),
        "are the same bytes of the file",
    ),
    "module: conjugated": (module(x=torch.ones(2, dtype=torch.complex64).conj()), "module: x: expected a plain tensor"),
    "module: dtype": (module(x=torch.ones(2, dtype=torch.complex128)), "module: x: expected a plain tensor"),
    "module: whole numbers that are trained": (
        module(**{"a.weight": torch.ones(4, 3, dtype=torch.int64)}),
        "a.weight is trained, and its weight is of torch.int64",
    ),
    "module: name that is none": (lambda theirs: theirs.model["module"].update({1: torch.ones(1)}), "valid string"),
    "module: empty name": (module(**{"": torch.ones(1)}), "module: : string should have at least 1 character"),
    "module: name that acts": (
        module(**{"x\x1b[2J": torch.ones(1)}),
        r"module: x\x1b[2J: expected a name that can be printed",
    ),
    "module: name with a line": (module(**{"x\nwherry: fine": torch.ones(1)}), r"x\nwherry: fine: expected a name"),
    "module: long name": (module(**{"x" * 100_000: torch.ones(1)}), "at most 1000 characters"),
    "shapes: none": (model(param_shapes=None), "has no param_shapes"),
    "shapes: empty": (model(param_shapes=[]), "has no param_shapes"),
    "shapes: dict": (model(param_shapes={"a": 1}), "param_shapes: "),
    "shapes: text": (model(param_shapes="ab"), "param_shapes: input should be a valid list"),
    "shapes: lists": (model(param_shapes=[[("a", 1)]]), "param_shapes: 0: input should be a valid dictionary"),
    "shapes: numbers": (model(param_shapes=[{"a": 12}]), "param_shapes: 0: a: "),
    "shapes: below 0": (model(param_shapes=[{"a": (-4, -3)}]), "param_shapes: 0: a: 0: "),
    "shapes: floats": (model(param_shapes=[{"a": (4.0, 3)}]), "param_shapes: 0: a: 0: input should be a valid integer"),
    "shapes: flags": (model(param_shapes=[{"a": (True,)}]), "param_shapes: 0: a: 0: input should be a valid integer"),
    "shapes: 25 digits": (model(param_shapes=[{"a": (HUGE,)}, {}]), "param_shapes: 0: a: 0: "),
    "shapes: 18 digits": (model(param_shapes=[{"a": (10**15, 10**3)}, {}]), "elements are there|each has"),
    "shapes: many dims": (model(param_shapes=[{"a": (1,) * 100}]), "at most 64 items"),
    "shapes: more than there is": (model(param_shapes=[{"a": (4, 300)}, {"b": (3,)}]), "elements are there|each has"),
    "shapes: one group": (model(param_shapes=[{"a": (20,)}]), "has weights of 2 groups, and the model has 1|each has"),
    "shapes: a group too many": (
        lambda theirs: theirs.model["param_shapes"].append({"x": (1,)}),
        "and the model has 3|each has",
    ),
    "shapes: twice": (model(param_shapes=[{"a": (17,)}, {"a": (3,)}]), "a is in two groups"),
    "frozen: trained too": (
        model(frozen_param_shapes={"a.bias": (3,)}),
        "a.bias is in two groups, or trained and frozen",
    ),
    "frozen: tied too": (
        model(frozen_param_shapes={"head": (3,)}),
        "head is in two groups, or trained and frozen or tied",
    ),
    "frozen: text": (model(frozen_param_shapes="ab"), "frozen_param_shapes: input should be a valid dictionary"),
    "frozen: shape": (model(frozen_param_shapes={"f": "3"}), "frozen_param_shapes: f: "),
    "frozen: fragments of another kind": (model(frozen_param_fragments=[1]), "frozen_param_fragments: input should be"),
    "frozen: no tensors": (
        model(frozen_param_fragments={"f": 1}),
        "frozen_param_fragments: f: input should be an instance",
    ),
    "frozen: no fragments": (
        lambda theirs: [each.update(frozen_param_fragments=None) for each in theirs.models],
        "f: of one dtype 0 of 3 elements",
    ),
    "frozen: too few": (model(frozen_param_shapes={"f": (300,)}), "of 300 elements are there"),
    "tied: list": (model(shared_params=["a"]), "shared_params: input should be a valid dictionary"),
    "tied: numbers": (model(shared_params={"a": 1}), "shared_params: a: input should be a valid string"),
    "buffers: number": (model(buffer_names=3), "buffer_names: input should be a valid list"),
    "buffers: numbers": (model(buffer_names=[3]), "buffer_names: 0: input should be a valid string"),
    "steps: text": (model(global_steps="5"), "global_steps: input should be a valid integer"),
    "steps: none": (model(global_steps=None), "global_steps: input should be a valid integer"),
    "steps: below 0": (model(global_steps=-1), "global_steps: input should be greater than or equal to 0"),
    "steps: 25 digits": (model(global_steps=HUGE), "global_steps: "),
    "steps: list": (model(skipped_steps=[1]), "skipped_steps: input should be a valid integer"),
    "samples": (model(global_samples=1.5), "global_samples: input should be a valid integer"),
    "ranks: 0": (model(dp_world_size=0), "dp_world_size: input should be greater than or equal to 1"),
    "ranks: 25 digits": (model(dp_world_size=HUGE), "dp_world_size: "),
    "version": (model(ds_version=[1]), "ds_version: input should be a valid string"),
    "version: long": (model(ds_version="1" * 1000), "ds_version: string should have at most 100 characters"),
    "client state: no end": (model(mine=itself()), "mine: expected at most 1,000,000 values, at most 64 deep"),
    "client state: far too much": (model(mine=doubled(60)), "mine: expected at most 1,000,000 values"),
    "client state: deep": (model(mine=deep(200)), "mine: expected at most 1,000,000 values, at most 64 deep"),
    "client state: vast": (model(mine=VAST), "mine: expected 4,000,000,000,000 bytes"),
    "client state: sparse": (model(mine={"a": [ODD]}), "mine: expected a plain tensor"),
    "schedule: no end": (model(lr_scheduler=itself()), "lr_scheduler: expected at most"),
    "optimizer: no states": (lambda theirs: theirs.optimizers[1].clear(), "optimizer_state_dict: field required"),
    "optimizer: list": (lambda theirs: theirs.optimizers[1].update(optimizer_state_dict=[1]), "optimizer_state_dict: "),
    "flats: missing": (lambda theirs: theirs.rank.pop(theirs.flats), "holds no fp32 weights with their states"),
    "flats: None": (optimizer(flats=None), "holds no fp32 weights with their states"),
    "flats: tensor": (optimizer(flats=torch.ones(9)), "expected floating-point numbers in one dim"),
    "flats: numbers": (optimizer(flats=[1, 2]), ": 0: input should be an instance of Tensor"),
    "flats: two dims": (
        optimizer(flats=[torch.ones(3, 3), torch.ones(2)]),
        "expected floating-point numbers in one dim",
    ),
    "flats: whole numbers": (
        optimizer(flats=[torch.ones(9, dtype=torch.int64), torch.ones(2)]),
        "expected floating-point",
    ),
    "flats: none": (optimizer(flats=[]), "has weights of 0 groups|states of"),
    "flats: one": (optimizer(flats=[torch.ones(9)]), "has weights of 1 groups|each has"),
    "flats: short": (optimizer(flats=[torch.ones(1), torch.ones(1)]), "elements are there|each has"),
    "flats: vast": (optimizer(flats=[torch.ones(1).expand(10**12), torch.ones(2)]), "bytes in the file, got"),
    "inner: missing": (lambda theirs: theirs.rank.pop(theirs.inner), "holds no fp32 weights with their states"),
    "inner: number": (optimizer(inner=3), "input should be "),
    "inner: list of numbers": (optimizer(inner=[1, 2]), "input should be "),
    "inner: too few": (optimizer(inner=[{}]), "has 2 flat weights, and states of 1"),
    "inner: no state": (lambda theirs: theirs.rank[theirs.inner].pop("state"), "state: field required"),
    "inner: state as a list": (inner(state=[1]), "state: input should be a valid dictionary"),
    "inner: state by name": (inner(state={"a": {}}), "state: a: input should be a valid integer"),
    "inner: groups": (inner(param_groups={"a": 1}), "param_groups: input should be a valid list"),
    "inner: groups of numbers": (inner(param_groups=[1]), "param_groups: 0: input should be a valid dictionary"),
    "inner: a tensor for a rate": (inner(param_groups=[{"lr": torch.ones(2)}]), "a tensor is not expected among"),
    "inner: a vast rate": (inner(param_groups=[{"lr": VAST}]), "lr: expected 4,000,000,000,000 bytes"),
    "state: list": (
        lambda theirs: theirs.rank[theirs.inner]["state"].update({0: [1]}),
        "input should be a valid dictionary",
    ),
    "state: two dims": (state(exp_avg=torch.ones(3, 3)), "exp_avg: expected floating-point numbers in one dim"),
    "state: whole numbers": (state(exp_avg=torch.ones(9, dtype=torch.int32)), "exp_avg: expected floating-point"),
    "state: short": (state(exp_avg=torch.ones(1)), "of exp_avg"),
    "state: on one rank alone": (lambda theirs: theirs.rank[theirs.inner]["state"][0].pop("exp_avg"), "of exp_avg"),
    "state: sparse": (state(exp_avg=ODD), "exp_avg: expected a plain tensor"),
    "state: a name that acts": (state(**{"x\x1b[2J": torch.ones(9)}), "string should match pattern"),
    "state: a name with a colon": (state(**{"exp_avg:0": torch.ones(9)}), "string should match pattern"),
    "state: steps below 0": (state(step=torch.tensor(-5.0)), "step: input should be greater than or equal to 0"),
    "state: steps without end": (state(step=torch.tensor(math.inf)), "step: input should be a "),
    "state: no steps": (state(step=torch.tensor(math.nan)), "step: input should be a "),
    "state: half a step": (state(step=5.5), "step: input should be a "),
    "state: steps in words": (state(step="5"), "step: input should be a valid integer"),
    "state: steps of 25 digits": (state(step=HUGE), "step: "),
    "state: vast steps": (state(step=torch.tensor(5.0).expand(10**9, 10**9)), "step: "),
}
BIG = torch.ones(10_000)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("change", "told"), CASES.values(), ids=CASES)
def test_what_does_not_fit_is_told(
    change: Change, told: str, stage: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = Theirs(stage)
    change(theirs)
    source = theirs.write(tmp_path / "in")
    assert main(["import-deepspeed", str(source), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("wherry: ") and said.count("\n") == 1 and "Traceback" not in said
    assert any(words in said for words in told.split("|")), said
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


# Folders, and files that are none of torch's.

MODEL, RANK_0, RANK_1 = (
    "step/mp_rank_00_model_states.pt",
    "step/zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "step/zero_pp_rank_1_mp_rank_00_optim_states.pt",
)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch was-here",)


def again(folder: Path, name: str) -> None:
    (folder / "step" / name).write_bytes((folder / RANK_1).read_bytes())


def cut(part: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = (folder / RANK_1).read_bytes()
        (folder / RANK_1).write_bytes(content[: int(part * len(content))])

    return change


def replaced(name: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


def compressed(path: Path) -> None:
    """Records that are far longer than the file."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", bytes(50_000_000))


def boasting(folder: Path) -> None:
    """A record that the archive says is of a terabyte."""
    path = folder / RANK_1
    content = bytearray(path.read_bytes())
    at = content.index(b"PK\1\2")
    content[at + 24 : at + 28] = (0xF0000000).to_bytes(4, "little")
    path.write_bytes(content)


def latest(text: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / "latest").write_bytes(text) and None


FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "latest: above": (latest(b"../in/step"), "expected the name of a folder"),
    "latest: dots": (latest(b".."), "expected the name of a folder"),
    "latest: absolute": (latest(b"/etc"), "expected the name of a folder"),
    "latest: empty": (latest(b""), "expected the name of a folder"),
    "latest: NUL": (latest(b"step\0"), "expected the name of a folder"),
    "latest: lines": (latest(b"step\nx"), "expected the name of a folder"),
    "latest: acts": (latest(b"\x1b[2J"), r"\x1b[2J': expected the name of a folder"),
    "latest: no text": (latest(b"\xff\xfe"), "latest cannot be read: it is no text"),
    "latest: long": (latest(b"x" * 5000), "latest cannot be read: is longer than the 4,096 bytes"),
    "latest: nowhere": (latest(b"step7"), "step7: there is no such folder"),
    "latest: FIFO": (replaced("latest", os.mkfifo), "latest cannot be read: is a FIFO"),
    "latest: folder": (replaced("latest", Path.mkdir), "latest cannot be read: is a directory"),
    "latest: device": (
        replaced("latest", lambda path: path.symlink_to("/dev/zero")),
        "latest cannot be read: is a device",
    ),
    "latest: loop": (
        replaced("latest", lambda path: path.symlink_to("latest")),
        "latest cannot be read: Too many levels",
    ),
    "model: FIFO": (replaced(MODEL, os.mkfifo), "model_states.pt cannot be read: is a FIFO"),
    "model: folder": (replaced(MODEL, Path.mkdir), "model_states.pt cannot be read: is a directory"),
    "model: device": (replaced(MODEL, lambda path: path.symlink_to("/dev/zero")), "cannot be read: is a device"),
    "model: nowhere": (replaced(MODEL, lambda path: path.symlink_to("x")), "cannot be read: No such file"),
    "model: gone": (lambda folder: (folder / MODEL).unlink(), "holds no *_model_states.pt"),
    "model: twice": (lambda folder: again(folder, "x_mp_rank_00_model_states.pt"), "are both of rank 0"),
    "model: a list": (lambda folder: torch.save([1], folder / MODEL), "model_states.pt: "),
    "model: a tensor": (lambda folder: torch.save(torch.ones(2), folder / MODEL), "model_states.pt: "),
    "optimizer: FIFO": (replaced(RANK_1, os.mkfifo), "optim_states.pt cannot be read: is a FIFO"),
    "optimizer: gone in the middle": (lambda folder: (folder / RANK_0).unlink(), "and none of rank 0"),
    "optimizer: gone at the end": (lambda folder: (folder / RANK_1).unlink(), "elements are there"),
    "optimizer: twice": (lambda folder: again(folder, f"bf16_{Path(RANK_1).name}"), "are both of rank 1"),
    "optimizer: one too many": (lambda folder: again(folder, Path(RANK_1).name.replace("1", "3", 1)), "none of rank 2"),
    "optimizer: of another stage": (
        lambda folder: torch.save(Theirs(3).optimizers[1], folder / RANK_1),
        "is of another ZeRO stage",
    ),
    "optimizer: cut": (cut(0.5), "cannot be read"),
    "optimizer: cut near its end": (cut(0.99), "cannot be read"),
    "optimizer: empty": (cut(0), "cannot be read"),
    "optimizer: no archive": (lambda folder: (folder / RANK_1).write_bytes(b"\x80\x02}q\0."), "is not a zip file"),
    "optimizer: another archive": (replaced(RANK_1, lambda path: zipfile.ZipFile(path, "w").close()), "cannot be read"),
    "optimizer: compressed": (replaced(RANK_1, compressed), "is not as torch stores one"),
    "optimizer: boasting": (boasting, "is not as torch stores one"),
    "optimizer: runs": (
        lambda folder: torch.save({"optimizer_state_dict": Evil()}, folder / RANK_1),
        "system, which is not loaded",
    ),
    "optimizer: foreign": (
        lambda folder: torch.save({"optimizer_state_dict": SimpleNamespace(a=1)}, folder / RANK_1),
        "types.SimpleNamespace, which is not loaded",
    ),
    "parallel": (
        lambda folder: (folder / "step" / "layer_00").touch(),
        "tensor or pipeline parallelism, which is not read",
    ),
}


@pytest.mark.parametrize(("change", "told"), FOLDERS.values(), ids=FOLDERS)
def test_a_folder_that_is_none_of_deepspeed_s_is_told(
    change: Callable[[Path], Any],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    source = Theirs(2).write(tmp_path / "in")
    change(source)
    refused(source, tmp_path / "out", told, capsys)
    assert not (tmp_path / "was-here").exists()


def test_a_tag_stays_inside_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = Theirs(2).write(tmp_path / "in")
    for tag in ("../in/step", "/etc", "..", "a\0b"):
        assert main(["import-deepspeed", str(source), str(tmp_path / "out"), "--tag", tag]) == 2
        assert "expected the name of a folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_file_that_was_changed_anywhere_is_told_or_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pickle has no checksum that torch looks at: what can be read is of the right form, all else is one line."""
    source = Theirs(2).write(tmp_path / "in")
    content = (path := source / RANK_1).read_bytes()
    for number, at in enumerate(range(60, len(content), 61)):
        changed = bytearray(content)
        changed[at] ^= 1 << number % 8
        path.write_bytes(changed)
        status = main(["import-deepspeed", str(source), str(tmp_path / f"out{number}")])
        said = capsys.readouterr().err
        assert (status, said) == (0, "") or (status == 2 and said.startswith("wherry: ") and said.count("\n") == 1), (
            said
        )


# Stage 0 keeps the optimizer in the model's file, and universal checkpoints have a folder for each parameter.


def whole(**values: Any) -> dict[str, Any]:
    state = {0: {"step": 5, "exp_avg": torch.ones(4, 3)}, 1: {"step": 5, "exp_avg": torch.ones(3)}}
    return {"state": state, "param_groups": [{"lr": 0.5, "params": [0, 1]}], **values}


def ended(**values: Any) -> dict[str, Any]:
    base = {"state": {0: {"step": 5, "exp_avg": torch.ones(15)}}, "param_groups": [{"lr": 0.5, "params": [0]}]}
    return {"optimizer_state_dict": base, "fp32_groups_flat": [torch.ones(15)], **values}


WHOLE: dict[str, tuple[dict[str, Any], str]] = {
    "state: list": (whole(state=[1]), "state: input should be a valid dictionary"),
    "state: number": (whole(state={0: 1}), "state: 0: input should be a valid dictionary"),
    "state: sparse": (whole(state={0: {"exp_avg": ODD}}), "exp_avg: expected a plain tensor"),
    "state: vast": (whole(state={0: {"exp_avg": VAST}}), "bytes in the file, got"),
    "state: whole numbers": (whole(state={0: {"exp_avg": torch.ones(4, 3).int()}}), "expected floating-point"),
    "state: a name that acts": (whole(state={0: {"x\x1b[2J": torch.ones(3)}}), "string should match pattern"),
    "state: steps below 0": (whole(state={0: {"step": -5}}), "step: input should be greater than or equal to 0"),
    "groups: none": (whole(param_groups=None), "param_groups: input should be a valid list"),
    "flats: two dims": (ended(fp32_groups_flat=[torch.ones(5, 3)]), "expected floating-point numbers in one dim"),
    "flats: vast": (ended(fp32_groups_flat=[torch.ones(1).expand(10**12)]), "bytes in the file, got"),
    "flats: no states": (ended(optimizer_state_dict=None), "optimizer_state_dict: input should be"),
    "scale: below 0": (ended(cur_scale=-1.0), "cur_scale: input should be greater than 0"),
    "scale: without end": (ended(cur_scale=math.inf), "cur_scale: input should be a finite number"),
    "scale: no window": (ended(scale_window=0), "scale_window: input should be greater than or equal to 1"),
    "scale: iterations of 25 digits": (ended(cur_iter=HUGE), "cur_iter: "),
    "moments: short": (
        ended(optimizer_state_dict={"state": {0: {"exp_avg": torch.ones(1)}}, "param_groups": [{"params": [0]}]}),
        "of exp_avg",
    ),
}


@pytest.mark.parametrize(("saved", "told"), WHOLE.values(), ids=WHOLE)
def test_a_whole_optimizer_that_does_not_fit_is_told(
    saved: dict[str, Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tag := tmp_path / "in" / "step").mkdir(parents=True)
    module = {"a": torch.randn(4, 3), "b": torch.randn(3)}
    for optimizer_of, fits in ((saved, False), (ended() if "fp32_groups_flat" in saved else whole(), True)):
        torch.save({"module": module, "optimizer": optimizer_of}, tag / "mp_rank_00_model_states.pt")
        if fits:
            assert main(["import-deepspeed", str(tag), str(tmp_path / "out")]) == 0
        else:
            refused(tag, tmp_path / "out", told, capsys)


def universal(folder: Path) -> Path:
    tag = folder / "step"
    for name, shapes in {"a": (4, 3), "b": (3,)}.items():
        (tag / "zero" / name).mkdir(parents=True)
        for state_name in ("fp32", "exp_avg"):
            torch.save({"param": torch.ones(shapes), "cat_dim": 0}, tag / "zero" / name / f"{state_name}.pt")
        torch.save(5, tag / "zero" / name / "step.pt")
    torch.save({"param_groups": [{"lr": 0.5, "params": [0]}]}, tag / "zero" / "optimizer_state.pt")
    model_file = {"module": {}, "param_shapes": [{"a": (4, 3), "b": (3,)}]}
    torch.save(model_file, tag / "mp_rank_00_model_states.pt")
    return tag


def put(name: str, value: Any) -> Callable[[Path], Any]:
    return lambda tag: torch.save(value, tag / "zero" / name)


def named(name: str) -> Callable[[Path], Any]:
    return lambda tag: (tag / "zero" / "a").rename(tag / "zero" / name)


UNIVERSAL: dict[str, tuple[Callable[[Path], Any], str]] = {
    "optimizer: runs": (put("optimizer_state.pt", {"param_groups": Evil()}), "system, which is not loaded"),
    "optimizer: list": (put("optimizer_state.pt", [1]), "optimizer_state.pt: "),
    "optimizer: no groups": (put("optimizer_state.pt", {}), "param_groups: field required"),
    "optimizer: scale": (
        put("optimizer_state.pt", {"param_groups": [], "loss_scale": {"scale": 0.0, "patience": 1, "good_steps": 0}}),
        "loss_scale: scale: input should be greater than 0",
    ),
    "state: runs": (put("a/fp32.pt", {"param": Evil()}), "system, which is not loaded"),
    "state: no tensor": (put("a/fp32.pt", {"param": 1}), "param: input should be an instance of Tensor"),
    "state: nothing": (put("a/exp_avg.pt", {}), "param: field required"),
    "state: sparse": (put("a/exp_avg.pt", ODD), "param: expected a plain tensor"),
    "state: vast": (put("a/exp_avg.pt", VAST), "bytes in the file, got"),
    "state: short": (put("a/exp_avg.pt", torch.ones(1)), "of exp_avg 1 of 12 elements"),
    "state: whole numbers": (put("a/exp_avg.pt", torch.ones(12).int()), "expected floating-point numbers"),
    "state: a name that acts": (put("a/x\x1b[2J.pt", torch.ones(12)), "expected the name of a state"),
    "state: no weight": (lambda tag: (tag / "zero/a/fp32.pt").unlink(), "no rank wrote it"),
    "state: FIFO": (replaced("zero/a/fp32.pt", os.mkfifo), "fp32.pt cannot be read: is a FIFO"),
    "state: device": (replaced("zero/a/fp32.pt", lambda path: path.symlink_to("/dev/zero")), "is a device"),
    "steps: words": (put("a/step.pt", "5"), "step: input should be a valid integer"),
    "steps: below 0": (put("a/step.pt", torch.tensor(-1.0)), "step: input should be greater than or equal to 0"),
    "parameter: gone": (named("c"), "has no folder of a, which is trained"),
    "parameter: a name that acts": (
        lambda tag: (tag / "zero" / "x\x1b[2J").mkdir(),
        "expected a name that can be printed",
    ),
}


@pytest.mark.parametrize(("change", "told"), UNIVERSAL.values(), ids=UNIVERSAL)
def test_a_universal_checkpoint_that_does_not_fit_is_told(
    change: Callable[[Path], Any],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    tag = universal(tmp_path / "in")
    assert main(["import-deepspeed", str(tag), str(tmp_path / "fits")]) == 0
    capsys.readouterr()
    change(tag)
    refused(tag, tmp_path / "out", told, capsys)
    assert not (tmp_path / "was-here").exists()
