"""Configs, and configs of models, that nobody would write: each is one clear error, soon, and little memory."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.programs import environment

import wherry
from wherry.cli import main
from wherry.config import ConfigError, load, parse_overrides
from wherry.config.source import LONGEST
from wherry.errors import WherryError
from wherry.plan.network import OfflineError, off_the_network
from wherry.regular import open_regular, read_regular
from wherry.sources import around, find
from wherry.train.config import build_config
from wherry.train.options import parse

HUGE = 10**24
MANY = LONGEST - 64  # characters, and still a text that is read


def nested(depth: int) -> Any:
    tree: Any = {}
    for _ in range(depth):
        tree = {"a": tree}
    return tree


# The text of a config, and words of its error.
TEXTS: dict[str, tuple[str | bytes, str]] = {
    "NUL in a path": (r'{"wherry": {"run_dir": "a\u0000b"}}', "wherry.run_dir: holds a NUL or half of a character"),
    "NUL in a list": (
        r'{"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": ["/a", "/b\u0000"]}}}',
        "nvme_path.1: holds a NUL",
    ),
    "NUL in the text": (b'{"optimizer": {"type": "Ad\0am"}}', "Invalid control character"),
    "NUL in a text without quotes": (b"{optimizer: {type: Ad\0am\n}}", "optimizer.type: holds a NUL"),
    "NUL for a parameter": (
        r'{"optimizer": {"type": "Rprop", "params": {"x": "\u0000"}}}',
        "optimizer.params.x: holds a NUL",
    ),
    "half a character": (r'{"wherry": {"run_dir": "\ud800"}}', "wherry.run_dir: holds a NUL or half of a character"),
    "size of 25 digits": (f'{{"train_batch_size": {HUGE}}}', "train_batch_size: is a number of 25 digits"),
    "size below that": (f'{{"train_batch_size": {-HUGE}}}', "train_batch_size: is a number of 25 digits"),
    "size as a float": ('{"train_batch_size": 1e24}', "train_batch_size: nothing that can be set here is as large as"),
    "size of 64 bits": (f'{{"train_batch_size": {2**63}}}', "train_batch_size: is a number of 20 digits"),
    "size below 1": ('{"train_batch_size": -1}', "expected at least 1, got -1"),
    "bucket": (f'{{"zero_optimization": {{"reduce_bucket_size": {HUGE}}}}}', "is a number of 25 digits"),
    "bytes": ('{"wherry": {"host_memory": "1' + "0" * 400 + 'GB"}}', "nothing that can be set here is as large as"),
    "number without end": ('{"gradient_clipping": 1e400}', "gradient_clipping: expected a number, got inf"),
    "integer without end": ('{"train_batch_size": Infinity}', "train_batch_size: expected an integer, got inf"),
    "no number": ('{"gradient_clipping": NaN}', "gradient_clipping: expected a number, got nan"),
    "no number for a rate": (
        '{"optimizer": {"type": "Adam", "params": {"lr": NaN}}}',
        "optimizer.params.lr: expected a number, got nan",
    ),
    "thousands of digits": ('{"train_batch_size": ' + "9" * 5000 + "}", "a number in it has thousands of digits"),
    "thousands of digits in Hjson": ("{train_batch_size: " + "9" * 5000 + "\n}", "has thousands of digits"),
    "deep": ('{"a":' * 100_000, "nested too deeply"),
    "deep lists": ('{"a":' + "[" * 100_000, "nested too deeply"),
    "deep Hjson": ("{a:" * 10_000, "nested too deeply"),
    "deep and whole": (json.dumps(nested(100)), "nested too deeply"),
    "deep by dots": ('{"' + "a." * 1000 + 'b": 1}', "nested too deeply"),
    "twice": ('{"train_batch_size": 4,\n"train_batch_size": 8}', "given twice, first on line 1"),
    "twice in a block": ('{"fp16": {"enabled": true, "enabled": false}}', "fp16.enabled: given twice"),
    "thousands of times": ("{" + '"a":1,' * 20_000 + '"a":1}', "and more; this does not look like a config"),
    "thousands of keys": (
        "{" + ",".join(f'"k{i}":1' for i in range(20_000)) + "}",
        "and more; this does not look like a config",
    ),
    "a long key": ('{"' + "k" * (MANY - 100) + '": 1}', "characters) ..."),
    "a long value": ('{"optimizer": {"type": "' + "k" * (MANY - 100) + '"}}', "unknown optimizer"),
    "braces": ("{" * (MANY // 2), "not valid JSON or Hjson"),
    "braces in lines": ("{\n" * (MANY // 4), "not valid JSON or Hjson"),
    "comments that do not end": ("{a " + "/* " * (MANY // 3), "not valid JSON or Hjson"),
    "quotes": ("{" + '"' * (MANY - 1), "not valid JSON or Hjson"),
    "brackets": ('{"a": 1}' + "]" * 100_000, "not valid JSON or Hjson"),
    "longer than a config": ("{" + " " * LONGEST + "}", "is longer than the 1,048,576"),
    "empty": ("", "is empty"),
    "a list": ("[1]", "expected an object"),
    "no UTF-8": (b'{"train_batch_size": "\xff"}', "is not UTF-8 text (byte 22)"),
    "UTF-16": ('{"train_batch_size": 4}'.encode("utf-16"), "is not UTF-8 text (byte 0)"),
    "UTF-32": ('{"train_batch_size": 4}'.encode("utf-32"), "is not UTF-8 text (byte 0)"),
    "bytes of a program": (b"\x7fELF\x02\x01\x01\0" + bytes(range(128)) * 8, "not valid JSON or Hjson"),
    "params of another kind": ('{"optimizer": {"type": "Adam", "params": [1]}}', "expected an object"),
    "a block of another kind": ('{"zero_optimization": [3]}', "expected an object"),
    "type of another kind": ('{"optimizer": {"type": {"a": 1}}}', "expected the name of an optimizer"),
    "a type with dots": ('{"optimizer": {"type": "os.system"}}', "unknown optimizer"),
    "a type of Python's": ('{"optimizer": {"type": "__class__"}}', "unknown optimizer"),
    "a private type": ('{"optimizer": {"type": "lr_scheduler"}}', "unknown optimizer"),
}


@pytest.mark.parametrize(("text", "told"), TEXTS.values(), ids=TEXTS)
def test_a_config_that_cannot_be_meant_is_refused(text: str | bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError) as error:
        load(path)
    assert told in str(error.value), str(error.value)[:300]
    assert all(line.startswith(str(path)) for line in str(error.value).splitlines()[:100])
    assert all(len(line) < 3000 for line in str(error.value).splitlines())


def itself() -> Any:
    tree: dict[str, Any] = {}
    tree["wherry"] = [tree]
    return tree


TREES: dict[str, tuple[Any, str]] = {
    "size": ({"train_batch_size": HUGE}, "is a number of 25 digits"),
    "size of thousands of digits": ({"train_batch_size": 10**5000}, "is a number of 5,001 digits"),
    "NUL": ({"wherry": {"run_dir": "a\0"}}, "holds a NUL"),
    "half a character": ({"wherry": {"run_dir": "\ud9ff"}}, "holds a NUL"),
    "itself": (itself(), "is the same object as one around it"),
    "deep": (nested(90), "nested too deeply"),
    "very deep": (nested(50_000), "nested too deeply"),
}


@pytest.mark.parametrize(("tree", "told"), TREES.values(), ids=TREES)
def test_a_dict_or_an_override_that_cannot_be_meant_is_refused(tree: Any, told: str) -> None:
    for arguments in ({"source": tree}, {"source": {}, "overrides": tree}):
        with pytest.raises(ConfigError) as error:
            load(**arguments)
        assert told in str(error.value)


@pytest.mark.parametrize(
    ("assignment", "told"),
    [
        (f"train_batch_size={HUGE}", "is a number of 25 digits"),
        ("train_batch_size=" + "9" * 5000, "thousands of digits"),
        ("wherry=" + '{"a":' * 5000, "nested too deeply"),
        ("wherry=[" + "[" * 5000, "nested too deeply"),
        ("a." * 1000 + "b=1", "nested too deeply"),
    ],
    ids=["size", "digits", "deep", "deep list", "dots"],
)
def test_a_flag_that_cannot_be_meant_is_refused(assignment: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        load({}, overrides=parse_overrides([assignment]))
    assert told in str(error.value)


# What is no file of text at all.


def fifo(path: Path) -> str:
    os.mkfifo(path)
    return "is a FIFO, expected a regular file"


def folder(path: Path) -> str:
    path.mkdir()
    return "is a directory, expected a regular file"


def device(path: Path) -> str:
    path.symlink_to("/dev/zero")
    return "is a device, expected a regular file"


def a_socket(path: Path) -> str:
    with socket.socket(socket.AF_UNIX) as made:
        os.chdir(path.parent)  # addresses are short
        made.bind(path.name)
    return "is a socket, expected a regular file"


def loop(path: Path) -> str:
    path.symlink_to(path.name)
    return "Too many levels of symbolic links"


def half_a_gigabyte(path: Path) -> str:
    with open(path, "wb") as file:
        file.truncate(500_000_000)  # without a block on the disk
    return "is longer than the"


def nothing(path: Path) -> str:
    return "No such file or directory"


@pytest.mark.parametrize("make", [fifo, folder, device, a_socket, loop, half_a_gigabyte, nothing])
def test_what_is_no_short_regular_file_is_not_read(
    make: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By any of the doors: nothing waits for a writer, or reads without end."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.json"
    told = make(path)
    with pytest.raises(OSError, match=told):
        read_regular(path, 1000)
    with pytest.raises(ConfigError) as refused:
        load(path)
    assert f"{path}: cannot be read: {told}" in str(refused.value)
    with pytest.raises(ConfigError, match=r"cannot be read|no such file"):
        wherry.initialize(model=torch.nn.Linear(2, 2), config=str(path))
    for command in (
        ["config", "check", str(path)],
        ["plan", "gpt2-10m", "--machine", "a100", "--config", str(path)],
        ["train", "--nproc", "1", "--config", str(path)],
        ["plan", str(tmp_path), "--machine", "a100"],
    ):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert ("config.json" in said or "no such file" in said) and "Traceback" not in said and said.count("\n") == 1


def test_a_path_that_is_none_is_an_error_of_the_system() -> None:
    for path in ("a\0b", "\ud800"):
        with pytest.raises(OSError, match="is no path"):
            open_regular(path)


def test_a_regular_file_is_read_to_its_limit(tmp_path: Path) -> None:
    (path := tmp_path / "file").write_bytes(b"12345")
    assert read_regular(path, 5) == b"12345"
    with pytest.raises(OSError, match="is longer than the 4 bytes"):
        read_regular(path, 4)
    # Of a file whose length nobody knows before it is read.
    assert len(read_regular("/proc/self/status", 1 << 20)) > 100
    with pytest.raises(OSError, match="is longer than"):
        read_regular("/proc/self/status", 100)


@pytest.mark.parametrize(
    "earlier",
    [
        {"optimizer": [1]},
        {"optimizer": {"type": "Adam", "params": {"lr": "x"}}},
        {"scheduler": {"type": "WarmupLR", "params": [1]}},
        {"scheduler": "x"},
        {"gradient_clipping": HUGE},
    ],
    ids=str,
)
def test_the_config_that_a_checkpoint_says_its_run_had_is_checked(earlier: Any) -> None:
    with pytest.raises(WherryError, match="--resume: the config of the earlier run is none"):
        build_config(parse(["--steps", "6"]), 1000, bf16=False, given=None, earlier=earlier)


# Configs of models.


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers keeps the standard error of the first test."""
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "critical")


GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 8, "n_positions": 8}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 8,
    "vocab_size": 8,
    "max_position_embeddings": 8,
}


def model(**values: Any) -> str:
    return json.dumps(GPT2 | values)


def llama(**values: Any) -> str:
    return json.dumps(LLAMA | values)


MODELS: dict[str, tuple[str | bytes, str]] = {
    "width": (llama(hidden_size=HUGE), "hidden_size: expected a number of at most"),
    "width of 13 digits": (llama(hidden_size=10**13), "hidden_size: expected a number of at most"),
    "width of 12 digits": (llama(hidden_size=10**12), "overflow"),
    "width of 9 digits": (llama(hidden_size=10**9), "none is as large"),
    "width below 0": (llama(hidden_size=-8), "negative dimension -8"),
    "width of 0": (model(n_embd=0), "fails: ZeroDivisionError"),
    "width in words": (llama(hidden_size="8"), "expected int, got str"),
    "width as a float": (llama(hidden_size=8.5), "expected int, got float"),
    "width without end": (b'{"model_type": "llama", "hidden_size": 1e400}', "expected int, got float"),
    "width as a list": (llama(hidden_size=[8]), "expected int, got list"),
    "width as a flag": (llama(hidden_size=True), "expected int, got bool"),
    "layers": (llama(num_hidden_layers=10**9), "num_hidden_layers: expected a number from 0 to 10,000"),
    "layers below 0": (llama(num_hidden_layers=-5), "num_hidden_layers: expected a number from 0"),
    "layers of GPT-2": (model(n_layer=10**9), "n_layer: expected a number from 0 to 10,000, got 1,000,000,000"),
    "layers in a part": (
        json.dumps({"model_type": "llava", "text_config": LLAMA | {"num_hidden_layers": 10**9}}),
        "text_config.num_hidden_layers: expected a number from 0 to",
    ),
    "depths": (
        json.dumps({"model_type": "swin", "depths": [2, 10**9]}),
        "depths: expected a number from -10,000 to 10,000",
    ),
    "experts": (json.dumps({"model_type": "mixtral", "num_local_experts": 10**9}), "num_local_experts: expected"),
    "labels": (model(num_labels=10**9), "num_labels: expected a number from 0 to 100,000"),
    "heads": (llama(num_attention_heads=-1), "num_attention_heads: expected a number from 0"),
    "heads that do not divide": (llama(num_attention_heads=3), "multiple of the number of attention heads"),
    "vocabulary": (model(vocab_size=HUGE), "vocab_size: expected a number of at most"),
    "vocabulary below 0": (model(vocab_size=-8), "negative dimension -8"),
    "positions": (model(n_positions=HUGE), "n_positions: expected a number of at most"),
    "positions below 0": (model(n_positions=-8), "expected 1 or more, got -8"),
    "number elsewhere": (model(x={"y": [HUGE]}), "x.y: expected a number of at most"),
    "dropout": (b'{"model_type": "gpt2", "n_layer": 1, "resid_pdrop": NaN}', "dropout"),
    "thousands of digits": (b'{"model_type": "gpt2", "n_layer": ' + b"9" * 5000 + b"}", "4300 digits"),
    "deep": (b'{"model_type": "gpt2", "x": ' + b"[" * 100_000, "nested too deeply"),
    "deep and whole": (model(x=nested(50)), "nested too deeply"),
    "deep lists": (b'{"model_type": "gpt2", "x": ' + b"[" * 200 + b"]" * 200 + b"}", "nested too deeply"),
    "no object": (b"[1]", 'has no "model_type"'),
    "no kind": (b"{}", 'has no "model_type"'),
    "kind of another kind": (model(model_type=["gpt2"]), 'has no "model_type"'),
    "kind that nobody knows": (model(model_type="evil"), "Unrecognized model identifier: evil"),
    "kind with NUL": (model(model_type="gpt2\0"), r"Unrecognized model identifier: gpt2\x00"),
    "no UTF-8": (b'{"model_type": "\xff"}', "cannot be read as a Hugging Face config"),
    "no JSON": (b"PK\3\4", "cannot be read as a Hugging Face config"),
    "too long": (b" " * (16 << 20) + b"{}", "is longer than the 16,777,216 bytes"),
    "names of Python's": (model(cls=1, self=2), "does not take"),
    "a dtype of torch's that is none": (model(torch_dtype="__loader__"), "MODEL: "),
    "a kernel of the hub": (model(attn_implementation="kernels-community/flash-attn2"), "kernels"),
}


@pytest.mark.parametrize(("text", "told"), MODELS.values(), ids=MODELS)
def test_a_model_s_config_that_cannot_be_meant_is_refused(
    text: str | bytes, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is looped over or allocated."""
    path = tmp_path / "config.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    assert main(["plan", str(tmp_path), "--machine", "a100"]) == 2
    said = capsys.readouterr().err
    (line,) = [line for line in said.splitlines() if line.startswith("wherry: ")]
    assert told in line and "Traceback" not in said, line


def test_a_config_may_count_layers_from_the_end(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(model(vision_feature_layer=-2, out_layers=[-1, 3], model_max_length=10**30))
    assert find(str(tmp_path)).sequence == 8


def test_a_model_of_too_many_modules_is_not_built_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts under whatever name."""
    monkeypatch.setattr("wherry.sources._MOST_MODULES", 500)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "albert", "architectures": ["AlbertModel"], "inner_group_num": 10**9,
                    "embedding_size": 8, "hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 8})
    )  # fmt: skip
    with pytest.raises(WherryError, match="a model of more than 500 modules"), torch.device("meta"):
        find(str(tmp_path)).make(1, 8)
    assert len(torch.nn.modules.module._global_module_registration_hooks) == 0


@pytest.mark.parametrize("name", ["pipeline", "AutoTokenizer", "Trainer", "modeling_utils", "GPT2Config", "x y", ""])
def test_of_transformers_only_models_are_called(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def called(*_: Any) -> None:
        raise AssertionError(name)

    if name == "pipeline":
        monkeypatch.setattr(transformers, "pipeline", called)
    (tmp_path / "config.json").write_text(model(architectures=[name]))
    with torch.device("meta"):
        made, _ = find(str(tmp_path)).make(1, 8)
    assert type(made).__name__ == "GPT2LMHeadModel"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--params", "9" * 5000], "--params: expected a whole number"),
        (["--params", str(10**31)], "--params: expected a whole number"),
        (["--params", "7e9", "--ranks", "9" * 50], "--ranks: expected a whole number"),
        (["--params", "7e9", "--device-memory", "9" * 5000 + "GB"], "--device-memory: expected bytes"),
        (["--infinity", "--layers", "1", "--heads", "1", "--hidden", "9" * 5000], "--hidden: expected a number"),
    ],
    ids=["params", "params of 32 digits", "ranks", "memory", "hidden"],
)
def test_numbers_that_are_too_long_are_refused(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *flags]) == 2
    assert told in capsys.readouterr().err


# The network.

ASKING = {
    "backbone": {"model_type": "detr", "backbone": "a/b", "use_pretrained_backbone": True, "use_timm_backbone": False},
    "backbone of another": {"model_type": "dpt", "backbone": "a/b", "is_hybrid": False},
    "remote code": GPT2 | {"auto_map": {"AutoConfig": "a/b--c.C", "AutoModelForCausalLM": "a/b--m.M"}},
    "remote code alone": {"model_type": "evil", "auto_map": {"AutoConfig": "a/b--c.C"}},
    "kernel": GPT2 | {"attn_implementation": "kernels-community/flash-attn2"},
    "kernel of anyone": GPT2 | {"attn_implementation": "a/b@main:c"},
    "timm": {"model_type": "timm_backbone", "backbone": "hf-hub:a/b", "architectures": ["TimmBackbone"]},
    "timm's wrapper": {
        "model_type": "timm_wrapper",
        "architecture": "hf-hub:a/b",
        "architectures": ["TimmWrapperModel"],
    },
    "tokenizer": GPT2 | {"tokenizer_class": "X", "_name_or_path": "a/b"},
}
FETCHING = ("backbone", "backbone of another", "kernel", "kernel of anyone")
LOOKS = """
    import json, socket, sys, threading
    from pathlib import Path

    asked = []
    def answer():
        while True:
            connection, _ = listening.accept()
            asked.append(connection.recv(1000).split(b"\\r\\n")[0].decode())
            connection.sendall(b"HTTP/1.1 404 Not Found\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n")
            connection.close()
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(50)
    threading.Thread(target=answer, daemon=True).start()
    import os
    os.environ["HF_ENDPOINT"] = "http://127.0.0.1:%d" % listening.getsockname()[1]
    from transformers.integrations import hub_kernels
    from wherry.cli import main

    # As if the package was there, and fetched.
    def fetched(name, **_):
        asked.append(name)
        raise ValueError(name)
    hub_kernels.is_kernels_available = lambda: True
    hub_kernels.get_kernel_hub = fetched

    folder, found = Path(sys.argv[1]), {}
    for name, config in json.loads(sys.argv[2]).items():
        for flags in ([], ["--online"]) if name in sys.argv[3:] else ([],):
            (folder / "config.json").write_text(json.dumps(config))
            asked.clear()
            status = main(["plan", str(folder), "--machine", "a100", *flags])
            found[name + " online" * bool(flags)] = [status, list(asked)]
            print("----", name, *flags, file=sys.stderr)
    print("FOUND", json.dumps(found))
"""


def test_a_plan_of_a_folder_asks_no_other_machine_unless_it_is_told_to(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LOOKS), str(tmp_path), json.dumps(ASKING), *FETCHING],
        env=environment() | {"HF_HOME": str(tmp_path / "hub"), "NO_PROXY": "*"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.split("FOUND")[1])
    assert {name: asked for name, (_, asked) in found.items() if asked and "online" not in name} == {}
    # Online there is somebody to ask: these are such as would.
    assert {name for name, (_, asked) in found.items() if asked} == {f"{name} online" for name in FETCHING}
    assert [found[name][0] for name in FETCHING] == [2, 2, 2, 2]
    said = [line for line in done.stderr.splitlines() if "--online lets transformers fetch it" in line]
    assert len(said) == 4 and not any("OFFLINE" in line for line in said)


def test_off_the_network_is_this_thread_for_this_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from huggingface_hub import constants

    before = socket.getaddrinfo, constants.HF_HUB_OFFLINE
    with socket.socket() as listening, socket.socket(socket.AF_UNIX) as local:
        listening.bind(("127.0.0.1", 0))
        listening.listen(3)
        monkeypatch.chdir(tmp_path)
        local.bind("local")
        local.listen(1)
        address = listening.getsockname()

        def connect() -> None:
            socket.create_connection(address).close()

        with off_the_network("x"):
            for reaching in (
                connect,
                lambda: socket.getaddrinfo("localhost", 1),
                lambda: socket.socket().connect(address),
            ):
                with pytest.raises(OfflineError):
                    reaching()
            others: list[BaseException] = []
            thread = threading.Thread(target=lambda: others.append(_outcome(connect)))
            thread.start()
            thread.join()
            assert others == [None], "another thread goes on"
            with socket.socket(socket.AF_UNIX) as mine:
                mine.connect("local")
            assert constants.HF_HUB_OFFLINE
        connect()
        with (
            pytest.raises(WherryError, match=r"MODEL: x names what is not on this machine.*--online"),
            off_the_network("x"),
        ):
            connect()
    assert before == (socket.getaddrinfo, constants.HF_HUB_OFFLINE) and "connect" not in vars(socket.socket)


def _outcome(work: Callable[[], None]) -> Any:
    try:
        return work()
    except Exception as error:
        return error


def test_only_what_a_file_describes_is_planned_off_the_network(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(model())
    offline = type(off_the_network("x"))
    assert isinstance(around(str(tmp_path)), offline)
    for other in (around(str(tmp_path), online=True), around("gpt2-10m"), around("a:b"), around(torch.nn.Linear)):
        assert not isinstance(other, offline)
