"""Configs of any text, and configs of models: each mistake is one error, soon, before anything is built or fetched."""

from __future__ import annotations

import json
import socket
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.security.hostile import nested
from tests.security.kinds import GPT2

from wherry.cli import main
from wherry.config import ConfigError, load, parse_overrides
from wherry.config.source import LONGEST
from wherry.errors import WherryError
from wherry.plan.network import OfflineError, off_the_network
from wherry.sources import around, find
from wherry.train.config import build_config
from wherry.train.options import parse

HUGE = 10**24
MANY = LONGEST - 64  # characters of a text that is still read

# Texts of a config, and words of the error. Values that JSON can hold are in test_hostile_files.
TEXTS: list[tuple[str | bytes, str]] = [
    (r'{"wherry": {"run_dir": "a\u0000b"}}', "wherry.run_dir: holds a NUL or half of a character"),
    (b'{"optimizer": {"type": "Ad\0am"}}', "Invalid control character"),
    (b"{optimizer: {type: Ad\0am\n}}", "optimizer.type: holds a NUL"),
    (f'{{"train_batch_size": {HUGE}}}', "train_batch_size: is a number of 25 digits"),
    ('{"train_batch_size": 1e24}', "train_batch_size: nothing that can be set here is as large as"),
    ('{"wherry": {"host_memory": "1' + "0" * 400 + 'GB"}}', "nothing that can be set here is as large as"),
    ('{"train_batch_size": ' + "9" * 5000 + "}", "a number in it has thousands of digits"),
    ('{"a":' * 100_000, "nested too deeply"),
    (json.dumps(nested(100)), "nested too deeply"),
    ('{"' + "a." * 1000 + 'b": 1}', "nested too deeply"),
    ('{"train_batch_size": 4,\n"train_batch_size": 8}', "given twice, first on line 1"),
    ("{" + '"a":1,' * 2000 + '"a":1}', "and more; this does not look like a config"),
    ("{" + ",".join(f'"k{i}":1' for i in range(2000)) + "}", "and more; this does not look like a config"),
    ('{"' + "k" * (MANY - 100) + '": 1}', "characters) ..."),
    ("{" * 20_000, "not valid JSON or Hjson"),
    ("{a " + "/* " * 20_000, "{ not closed ({ of line 1): is the file whole?"),
    ("{" + " " * LONGEST + "}", "is longer than the 1,048,576"),
    ("", "is empty; write {} to take every default"),
    ("[1]", "expected an object with config keys"),
    (b'{"train_batch_size": "\xff"}', "is not UTF-8 text (byte 22)"),
    ('{"train_batch_size": 4}'.encode("utf-16"), "is not UTF-8 text (byte 0)"),
    (b"\x7fELF\x02\x01\x01\0" + bytes(range(128)) * 8, "not valid JSON or Hjson"),
    ('{"optimizer": {"type": "os.system"}}', "unknown optimizer"),
    ('{"optimizer": {"type": "lr_scheduler"}}', "unknown optimizer"),
]


def test_a_config_that_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text, told in TEXTS:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        with pytest.raises(ConfigError) as error:
            load(path)
        lines = str(error.value).splitlines()
        assert told in str(error.value), (text[:80], str(error.value)[:300])
        assert all(line.startswith(str(path)) for line in lines[:100]) and all(len(line) < 3000 for line in lines)


def test_a_problem_of_a_config_is_one_line_however_long_its_key() -> None:
    with pytest.raises(ConfigError) as error:
        load({"a\nwherry: all is well": 1, "x" * 10**5: 1})
    lines = str(error.value).splitlines()
    assert len(lines) == 2 and all(len(line) < 500 for line in lines) and r"a\nwherry" in lines[0]


def test_a_dict_or_an_override_that_cannot_be_meant_is_refused() -> None:
    endless: dict[str, Any] = {}
    endless["wherry"] = [endless]
    for tree, told in (
        ({"train_batch_size": 10**5000}, "is a number of 5,001 digits"),
        ({"wherry": {"run_dir": "\ud9ff"}}, "holds a NUL or half of a character"),
        (endless, "is the same object as one around it"),
        (nested(50_000), "nested too deeply"),
    ):
        for arguments in ({"source": tree}, {"source": {}, "overrides": tree}):
            with pytest.raises(ConfigError, match=told):
                load(**arguments)
    for assignment, told in (
        (f"train_batch_size={HUGE}", "is a number of 25 digits"),
        ("train_batch_size=" + "9" * 5000, "thousands of digits"),
        ("wherry=[" + "[" * 5000, "nested too deeply"),
        ("a." * 1000 + "b=1", "nested too deeply"),
    ):
        with pytest.raises(ConfigError, match=told):
            load({}, overrides=parse_overrides([assignment]))


def test_the_config_that_a_checkpoint_says_its_run_had_is_checked() -> None:
    for earlier in ({"optimizer": [1]}, {"scheduler": "x"}, {"gradient_clipping": HUGE}):
        with pytest.raises(WherryError, match="--resume: the config of the earlier run is none"):
            build_config(parse(["--steps", "6"]), 1000, bf16=False, given=None, earlier=earlier)


# Configs of models. Values that JSON can hold are in test_hostile_files and test_refusals.


def write_model(folder: Path, **values: Any) -> str:
    (folder / "config.json").write_text(json.dumps(GPT2 | values))
    return str(folder)


MODELS: list[tuple[bytes, str]] = [
    (b'{"model_type": "gpt2", "n_layer": ' + b"9" * 5000 + b"}", "4300 digits"),
    (b'{"model_type": "gpt2", "x": ' + b"[" * 100_000, "nested too deeply"),
    (b'{"model_type": "\xff"}', "cannot be read as a Hugging Face config"),
    (b"PK\3\4", "cannot be read as a Hugging Face config"),
    (b"[1]", 'has no "model_type"'),
    (b" " * (16 << 20) + b"{}", "is longer than the 16,777,216 bytes"),
]


def test_a_model_s_config_that_cannot_be_meant_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, told in MODELS:
        (tmp_path / "config.json").write_bytes(text)
        with pytest.raises(WherryError) as error:
            find(str(tmp_path))
        assert told in str(error.value)
    assert main(["plan", str(tmp_path), "--machine", "a100"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("wherry: MODEL: ") and told.count("\n") == 1


def test_a_config_may_count_layers_from_the_end(tmp_path: Path) -> None:
    folder = write_model(tmp_path, vision_feature_layer=-2, out_layers=[-1, 3], model_max_length=10**30)
    assert find(folder).sequence == 8


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


@pytest.mark.parametrize("name", ["pipeline", "Trainer", "modeling_utils", "GPT2Config", ""])
def test_of_transformers_only_models_are_called(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def called(*_: Any) -> None:
        raise AssertionError(name)

    if name == "pipeline":
        monkeypatch.setattr(transformers, "pipeline", called)
    with torch.device("meta"):
        made, _ = find(write_model(tmp_path, architectures=[name])).make(1, 8)
    assert type(made).__name__ == "GPT2LMHeadModel"


def test_numbers_that_are_too_long_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, told in (
        (["--params", "9" * 5000], "--params: expected a whole number"),
        (["--params", str(10**31)], "--params: expected a whole number"),
        (["--params", "7e9", "--ranks", "9" * 50], "--ranks: expected a whole number"),
        (["--params", "7e9", "--device-memory", "9" * 5000 + "GB"], "--device-memory: expected bytes"),
        (["--infinity", "--layers", "1", "--heads", "1", "--hidden", "9" * 5000], "--hidden: expected a number"),
    ):
        assert main(["plan", *flags]) == 2
        assert told in capsys.readouterr().err


# The network.

ASKING = {
    "backbone": {"model_type": "detr", "backbone": "a/b", "use_pretrained_backbone": True, "use_timm_backbone": False},
    "remote code": GPT2 | {"auto_map": {"AutoConfig": "a/b--c.C", "AutoModelForCausalLM": "a/b--m.M"}},
    "remote code alone": {"model_type": "evil", "auto_map": {"AutoConfig": "a/b--c.C"}},
    "kernel": GPT2 | {"attn_implementation": "kernels-community/flash-attn2"},
    "timm": {"model_type": "timm_backbone", "backbone": "hf-hub:a/b", "architectures": ["TimmBackbone"]},
    "timm's wrapper": {
        "model_type": "timm_wrapper",
        "architecture": "hf-hub:a/b",
        "architectures": ["TimmWrapperModel"],
    },
    "tokenizer": GPT2 | {"tokenizer_class": "X", "_name_or_path": "a/b"},
}
FETCHING = ("backbone", "kernel")
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


def test_a_plan_of_a_folder_asks_no_other_machine_unless_it_is_told_to(tmp_path: Path, forks: Any) -> None:
    (tmp_path / "looks.py").write_text(textwrap.dedent(LOOKS))
    words = [tmp_path / "looks.py", tmp_path, json.dumps(ASKING), *FETCHING]
    more = {"HF_HOME": str(tmp_path / "hub"), "NO_PROXY": "*", "HF_HUB_OFFLINE": "0"}
    done = forks.run(*words, folder=tmp_path, launched=False, **more)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.split("FOUND")[1])
    assert {name: asked for name, (_, asked) in found.items() if asked and "online" not in name} == {}
    # Online, these ask.
    assert {name for name, (_, asked) in found.items() if asked} == {f"{name} online" for name in FETCHING}
    assert [found[name][0] for name in FETCHING] == [2] * len(FETCHING)
    told = [line for line in done.stderr.splitlines() if "--online lets transformers fetch it" in line]
    assert len(told) == len(FETCHING) and not any("OFFLINE" in line for line in told)


def test_off_the_network_is_this_thread_for_this_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    write_model(tmp_path)
    offline = type(off_the_network("x"))
    assert isinstance(around(str(tmp_path)), offline)
    for other in (around(str(tmp_path), online=True), around("gpt2-10m"), around("a:b"), around(torch.nn.Linear)):
        assert not isinstance(other, offline)
