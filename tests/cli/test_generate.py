"""`wherry generate`: its text, wherever weights rest; its choice of a place; and its errors."""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.train.exported import SHAPE, ours_of, saved

from wherry.cli import generate, main, supervise
from wherry.cli.sampling import Stream, prompts
from wherry.errors import WherryError
from wherry.parallel.comm import SoloComm
from wherry.plan import rates
from wherry.tiers import host, streams


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, with a model that has more rows than there are bytes."""
    pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
    folder = tmp_path_factory.mktemp("run")
    saved(folder / "checkpoints", heads=3)
    (folder / "config.json").write_text("{}")  # the run's own
    return folder


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    assert main(["export", str(run), str(run / "out")]) == 0
    return run / "out"


def likeliest(run: Path, prompt: str, count: int) -> str:
    """Generate by our own model, a byte at a time; where its positions end, go on from the last half of them."""
    model, ids = ours_of(run), list(prompt.encode())
    seen = ids
    with torch.no_grad():
        for _ in range(count):
            if len(seen) >= SHAPE.sequence:
                seen = seen[-(SHAPE.sequence // 2) :]
            byte = int(model(torch.tensor([seen]))[0, -1, :256].argmax())
            seen, ids = [*seen, byte], [*ids, byte]
    return bytes(ids).decode(errors="replace")


@contextmanager
def given_input(data: bytes) -> Iterator[None]:
    """Replace standard input by these bytes."""
    before = os.dup(0)
    read, write = os.pipe()
    os.write(write, data)
    os.close(write)
    os.dup2(read, 0)
    os.close(read)
    try:
        yield
    finally:
        os.dup2(before, 0)
        os.close(before)


GREEDY = ["--temperature", "0", "--max-new-tokens", "40"]


def test_text_is_that_of_the_likeliest_bytes(run, tmp_path, monkeypatch, capsys):
    """Generate from a run's folder, whose export is removed, past the last position, and without rows beyond bytes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["generate", str(run), "ab", *GREEDY]) == 0
    said = capsys.readouterr()
    assert said.out == likeliest(run, "ab", 40) + "\n"
    assert main(["generate", str(run), "--max-new-tokens", "1", "caf\udce9"]) == 0  # as a terminal sends Latin-1
    assert capsys.readouterr().out.startswith("caf\N{REPLACEMENT CHARACTER}")
    assert "wherry: 282.0 KiB of weights in float32, on " in said.err
    assert not list(tmp_path.iterdir())


def test_text_ends_at_the_end_token_of_the_tokenizer(run, exported, tmp_path, capsys):
    """The config of the model names no such token."""
    expected = likeliest(run, "ab", 2)
    folder = tmp_path / "ends"
    shutil.copytree(exported, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": expected[-1]}))
    assert main(["generate", str(folder), "ab", *GREEDY]) == 0
    assert len(capsys.readouterr().out) <= len(expected) + 1


@pytest.mark.parametrize(
    "flags", [["--offload-param", "cpu"], ["--offload-param", "nvme", "--nvme-path", "disk"]], ids=["cpu", "nvme"]
)
def test_wherever_the_weights_rest(run, exported, flags, tmp_path, monkeypatch, capsys):
    """The folder may be called as a preset."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(exported, "gpt2-124m")
    assert main(["generate", "gpt2-124m", "ab", *GREEDY, *flags]) == 0
    assert capsys.readouterr().out == likeliest(run, "ab", 40) + "\n"


def as_rank(rank: int, flags: list[str], typed: bytes) -> str:
    """Generate on one rank of several and return what it prints; rank 0 alone reads its input."""
    from wherry.cli.sampling import write

    with given_input(typed if rank == 0 else b"none of it"), redirect_stdout(io.StringIO()) as shown:
        assert write(generate.build_parser().parse_args(flags)) == 0
    return shown.getvalue()


@pytest.fixture
def of_ranks(exported, monkeypatch) -> list[str]:
    """The arguments with which the command launches two ranks."""
    launches: list[Any] = []
    monkeypatch.setattr(supervise, "launch", lambda arguments: launches.append(arguments) or 0)
    assert main(["generate", str(exported), *GREEDY, "--nproc", "2", "--seed", "0"]) == 0
    assert (launches[0].nproc_per_node, launches[0].training_script) == ("2", "wherry.cli.sampling")
    return launches[0].training_script_args


def test_ranks_are_given_flags_of_zero(of_ranks):
    assert "--seed=0" in of_ranks and "--temperature=0.0" in of_ranks


def test_ranks_write_one_text_for_each_line(run, of_ranks, warm):
    shown = warm(2).run(as_rank, of_ranks, b"ab\nc\n\nnot read\n")
    assert shown == [f"{likeliest(run, 'ab', 40)}\n{likeliest(run, 'c', 40)}\n", ""]


def test_the_same_seed_draws_the_same(exported, capsys):
    texts = []
    for seed, *flags in (["1"], ["1"], ["2"], ["1", "--top-k", "1"], ["3", "--top-p", "0.0"], ["1", "--dtype", "bf16"]):
        assert main(["generate", str(exported), "ab", "--max-new-tokens", "8", "--seed", seed, *flags]) == 0
        said = capsys.readouterr()
        texts.append(said.out)
    assert "of weights in bfloat16" in said.err
    assert texts[0] == texts[1] != texts[2] and texts[3] == texts[4] != texts[0]


# Text as it comes.


class Bytes:
    """A tokenizer, as far as a stream needs one."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode(errors="replace")


@given(text=st.text(st.sampled_from("aé\n €\N{GRINNING FACE}"), min_size=8, max_size=20))
def test_a_character_is_shown_when_it_is_whole(text):
    with redirect_stdout(io.StringIO()) as shown, mock.patch.object(Stream, "PIECE", 12):
        stream = Stream(Bytes(), shown=True)
        for ids in (b"prompt", *(bytes([byte]) for byte in text.encode())):
            stream.put(torch.tensor([list(ids)]))
            assert text.startswith(shown.getvalue())
        stream.end()
        stream.finish()
    assert shown.getvalue() == text + "\n" * (not text.endswith("\n"))


def test_each_line_is_a_prompt_until_an_empty_one():
    for rest in (b"", b"\nmore\n"):
        with given_input("one\nzw\u00f6lf \r\n".encode() + rest):
            assert list(prompts(SoloComm())) == ["one", "zw\u00f6lf "]


# Where the weights go.

GB = 10**9


# GPUs, free gigabytes of each, those of the host, flags, and the place.
PLACES = [
    (0, 0, 20, "", (1, "none", "on the CPU")),
    (4, 20, 99, "", (1, "none", "on one device")),
    (4, 6, 99, "", (4, "none", "shared out over 4 GPUs")),
    (4, 2, 99, "", (1, "cpu", "resting in host memory")),
    (4, 20, 99, "--nproc 2", (2, "none", "on 2 ranks, as asked for")),
    (1, 20, 99, "--offload-param nvme --nvme-path d", (1, "nvme", "on 1 rank, resting in d, as asked for")),
    (0, 0, 9, "", None),
    (2, 3, 9, "", None),
]


def test_the_place(monkeypatch):
    from wherry.cli import run
    from wherry.observe import memory as memories

    monkeypatch.setattr(rates, "device_name", lambda _: "card")
    monkeypatch.setattr(generate, "weights_in", lambda *_: (10 * GB, torch.bfloat16))
    for gpus, each, memory, flags, expected in PLACES:
        monkeypatch.setattr(run, "device_count", lambda gpus=gpus: gpus)
        monkeypatch.setattr(streams, "accelerator", lambda gpus=gpus: torch.device("cuda") if gpus else None)
        monkeypatch.setattr(memories, "free_on_gpu", lambda _, each=each: each * GB)
        monkeypatch.setattr(host, "free_host_memory", lambda memory=memory: memory * GB)
        arguments = generate.build_parser().parse_args(["folder", *flags.split()])
        if expected is None:
            with pytest.raises(WherryError, match=r"fit nowhere here.*--offload-param nvme --nvme-path FOLDER"):
                generate._place(arguments)
        else:
            place = generate._place(arguments)
            assert (place.ranks, place.offload) == expected[:2] and expected[2] in place.why


# What is refused.


def test_folders_without_a_usable_model_are_errors(run, exported, tmp_path, monkeypatch, capsys):
    def error_of(folder: Path | str, *flags: str) -> str:
        assert main(["generate", str(folder), *(flags or ["hi"])]) == 2
        said = capsys.readouterr()
        assert not said.out and "Traceback" not in said.err
        return said.err

    def changed(name: str, but: str = "", **config: Any) -> Path:
        folder = tmp_path / name
        shutil.copytree(exported, folder, ignore=lambda *_: [but])
        if config:
            values = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(values | config))
        return folder

    page = "https://huggingface.co/me/tiny/tree/main"
    runs = tmp_path / "runs"
    for age, name in enumerate("abcd"):
        (runs / name / "checkpoints").mkdir(parents=True)
        os.utime(runs / name, (9 - age, 9 - age))
    without = changed("without", "tokenizer.json")
    (without / "tokenizer_config.json").unlink()
    for folder, message in (
        (page, "me/tiny: there is no such folder; a model of the hub is fetched by `hf download me/tiny`"),
        (run.with_name(f"{run.name}x"), f'{run}x: there is no such folder, did you mean "{run}"?'),
        (tmp_path, "is no checkpoint and holds none: there is no manifest.json in it; expected"),
        (runs, f"; name one of its runs, newest first: {runs}/a, {runs}/b, {runs}/c; expected"),
        (without, "the model has no tokenizer"),
        (saved(tmp_path / "old"), "has no config.json that transformers knows; add it to what `wherry export"),
        (changed("kind", model_type="unheard-of"), "does not take"),
        (changed("quantized", quantization_config={"quant_method": "gptq"}), "in few bits by gptq"),
        (changed("headless", architectures=["GPT2Model"]), "GPT2Model, which is no causal language model"),
        (changed("layers", n_layer=3), "load_pretrained"),
    ):
        assert message in error_of(folder)
    no_adapter = error_of(exported, "hi", "--adapter", str(tmp_path))
    assert f"--adapter {tmp_path}: there is no adapter_config.json in it" in no_adapter
    assert "the prompt is empty" in error_of(exported, "")
    assert "go together" in error_of(exported, "hi", "--nvme-path", str(tmp_path))
    monkeypatch.setattr(generate, "find_spec", lambda _: None)
    assert error_of(run) == "wherry: generate: it needs transformers: pip install 'wherry[transformers]'\n"


def test_code_that_comes_with_a_model_is_not_run(exported, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(exported, folder)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    named = {"AutoConfig": "evil.A", "AutoModelForCausalLM": "evil.A", "AutoTokenizer": ["evil.A", "evil.A"]}
    for file in ("config.json", "tokenizer_config.json"):
        values = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(values | {"auto_map": named}))
    assert main(["generate", str(folder), "hi", "--max-new-tokens", "3"]) in (0, 2)
    assert not (tmp_path / "ran").exists()
