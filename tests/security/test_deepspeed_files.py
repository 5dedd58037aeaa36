"""Checkpoints of DeepSpeed's: what fits is imported, and folders and pickles that do not fit are refused in a line.

Values inside the files are in test_hostile_files and test_refusals.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.security.hostile import Runs
from tests.security.kinds import Theirs, write_universal

from wherry.checkpoint.export import verified
from wherry.cli import main

MODEL, RANK_0, RANK_1 = (
    "step/mp_rank_00_model_states.pt",
    "step/zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "step/zero_pp_rank_1_mp_rank_00_optim_states.pt",
)


def write_two_ranks(folder: Path) -> None:
    Theirs(2).write(folder)


def refused(source: Path, out: Path, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import-deepspeed", str(source), str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("wherry: ") and error.count("\n") == 1 and "Traceback" not in error
    assert told in error, error
    assert not out.exists() or list(out.iterdir()) == []


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_is_imported(stage: int, tmp_path: Path) -> None:
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


def again(name: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / "step" / name).write_bytes((folder / RANK_1).read_bytes())


def cut(part: float) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        content = (folder / RANK_1).read_bytes()
        (folder / RANK_1).write_bytes(content[: int(part * len(content))])

    return change


def saved(value: Any, name: str = RANK_1) -> Callable[[Path], Any]:
    return lambda folder: torch.save(value, folder / name)


def compressed(folder: Path) -> None:
    """Records that are far longer than the file."""
    with zipfile.ZipFile(folder / RANK_1, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", bytes(5_000_000))


def overstated(folder: Path) -> None:
    """A record of 4 GB, by what the archive says."""
    content = bytearray((path := folder / RANK_1).read_bytes())
    at = content.index(b"PK\1\2")
    content[at + 24 : at + 28] = (0xF0000000).to_bytes(4, "little")
    path.write_bytes(content)


CHANGES: list[tuple[Callable[[Path], Any], Callable[[Path], Any], str]] = [
    (write_two_ranks, lambda folder: (folder / MODEL).unlink(), "holds no *_model_states.pt"),
    (write_two_ranks, again("x_mp_rank_00_model_states.pt"), "are both of rank 0"),
    (write_two_ranks, saved([1], MODEL), "model_states.pt: "),
    (write_two_ranks, lambda folder: (folder / RANK_0).unlink(), "and none of rank 0"),
    (write_two_ranks, lambda folder: (folder / RANK_1).unlink(), "elements are there"),
    (write_two_ranks, again(f"bf16_{Path(RANK_1).name}"), "are both of rank 1"),
    (write_two_ranks, again(Path(RANK_1).name.replace("1", "3", 1)), "none of rank 2"),
    (write_two_ranks, saved(Theirs(3).optimizers[1]), "is of another ZeRO stage"),
    (write_two_ranks, cut(0.5), "cannot be read"),
    (write_two_ranks, cut(0.99), "cannot be read"),
    (write_two_ranks, lambda folder: (folder / RANK_1).write_bytes(b"\x80\x02}q\0."), "is not a zip file"),
    (write_two_ranks, compressed, "is not as torch stores one"),
    (write_two_ranks, overstated, "is not as torch stores one"),
    (write_two_ranks, saved({"optimizer_state_dict": Runs()}), "mkdir, which is not loaded"),
    (write_two_ranks, saved(SimpleNamespace(a=1)), "types.SimpleNamespace, which is not loaded"),
    (
        write_two_ranks,
        lambda folder: (folder / "step/layer_00").touch(),
        "tensor or pipeline parallelism, which is not",
    ),
    (
        write_universal,
        lambda folder: (folder / "step/zero/a/fp32.pt").unlink(),
        "zero/a/fp32.pt cannot be read: No such",
    ),
    (
        write_universal,
        lambda folder: (folder / "step/zero/a").rename(folder / "step/zero/c"),
        "has no folder of a, whi",
    ),
    (write_universal, lambda folder: (folder / "step/zero/x\x1b[2J").mkdir(), "expected a name that can be printed"),
    (write_universal, saved(torch.ones(12), "step/zero/a/x\x1b[2J.pt"), "expected the name of a state"),
    (write_universal, saved(torch.ones(1), "step/zero/a/exp_avg.pt"), "of exp_avg 1 of 12 elements"),
    (write_universal, saved("5", "step/zero/a/step.pt"), "step: input should be a valid integer"),
    (write_universal, saved(torch.tensor(-1.0), "step/zero/a/step.pt"), "step: input should be greater than or equal"),
]


@pytest.mark.parametrize("write", [write_two_ranks, write_universal])
def test_a_folder_that_does_not_fit_is_refused(
    write: Callable[[Path], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, (change, told) in enumerate((change, told) for each, change, told in CHANGES if each is write):
        folder = tmp_path / str(number)
        write(folder)
        if write is write_universal:
            torch.save({"param_groups": [{"lr": 0.5, "params": [0]}]}, folder / "step/zero/optimizer_state.pt")
        if not number:
            assert main(["import-deepspeed", str(folder / "step"), str(tmp_path / "fits")]) == 0
            capsys.readouterr()
        change(folder)
        refused(folder / "step", tmp_path / "out", told, capsys)
    assert not (tmp_path / "ran").exists()


def test_a_file_with_a_changed_bit_is_refused_or_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """torch looks at no checksum of a pickle: what can be read is of the right form, all else is one line."""
    source = Theirs(2).write(tmp_path / "in")
    content = (path := source / RANK_1).read_bytes()
    for number, at in enumerate(range(60, len(content), 151)):
        damaged = bytearray(content)
        damaged[at] ^= 1 << number % 8
        path.write_bytes(damaged)
        status = main(["import-deepspeed", str(source), str(tmp_path / f"out{number}")])
        told = capsys.readouterr().err
        assert (status, told) == (0, "") or (status == 2 and told.startswith("wherry: ") and told.count("\n") == 1), (
            told
        )
