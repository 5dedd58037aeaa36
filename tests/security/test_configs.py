"""Configs that are no files, and configs of models: each mistake is one error before anything is built or fetched.

Files of any content are in test_hostile_files and test_refusals.
"""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.security.hostile import nested
from tests.security.kinds import GPT2, write_model

from wherry.config import ConfigError, load, parse_overrides
from wherry.errors import WherryError
from wherry.plan.network import OfflineError, off_the_network
from wherry.sources import around, find
from wherry.train.config import build_config
from wherry.train.options import parse

HUGE = 10**24


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
        ("train_batch_size=" + "9" * 5000, "thousands of digits"),
        ("wherry=[" + "[" * 5000, "nested too deeply"),
        ("a." * 1000 + "b=1", "nested too deeply"),
    ):
        with pytest.raises(ConfigError, match=told):
            load({}, overrides=parse_overrides([assignment]))
    with pytest.raises(WherryError, match="--resume: the config of the earlier run is none"):
        build_config(parse(["--steps", "6"]), 1000, bf16=False, given=None, earlier={"gradient_clipping": HUGE})


# Configs of models.


def test_a_model_of_too_many_modules_is_not_built_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts under whatever name."""
    monkeypatch.setattr("wherry.sources._MOST_MODULES", 500)
    sizes = dict.fromkeys(("embedding_size", "hidden_size", "intermediate_size"), 8)
    albert = {"model_type": "albert", "architectures": ["AlbertModel"], "num_attention_heads": 1, **sizes}
    with pytest.raises(WherryError, match="a model of more than 500 modules"), torch.device("meta"):
        find(write_model(tmp_path, **albert, inner_group_num=10**9)).make(1, 8)
    assert len(torch.nn.modules.module._global_module_registration_hooks) == 0


def test_of_transformers_only_models_are_called(tmp_path: Path) -> None:
    for name in ("pipeline", "Trainer", "GPT2Config"):
        with torch.device("meta"):
            made, _ = find(write_model(tmp_path, architectures=[name])).make(1, 8)
        assert type(made).__name__ == "GPT2LMHeadModel", name


# The network.

ASKING = {
    "backbone": {"model_type": "detr", "backbone": "a/b", "use_pretrained_backbone": True, "use_timm_backbone": False},
    "remote code": GPT2 | {"auto_map": {"AutoConfig": "a/b--c.C", "AutoModelForCausalLM": "a/b--m.M"}},
    "kernel": GPT2 | {"attn_implementation": "kernels-community/flash-attn2"},
}
FETCHING = ("backbone", "kernel")
LOOKS = """
import json, os, sys
from pathlib import Path
from transformers.integrations import hub_kernels
from wherry.cli import main

asked = []
sys.addaudithook(lambda event, given: asked.append(given) if event == "socket.getaddrinfo" else None)

# As if the package was there, and fetched.
def fetched(name, **_):
    asked.append(name)
    raise ValueError(name)
hub_kernels.is_kernels_available = lambda: True
hub_kernels.get_kernel_hub = fetched

found = []
for name, config in json.loads(sys.argv[1]).items():
    for flags in ([], ["--online"]) if name in sys.argv[2:] else ([],):
        Path("config.json").write_text(json.dumps(config))
        asked.clear()
        main(["plan", os.getcwd(), "--machine", "a100", *flags])
        found += [name + "".join(flags)] if asked else []
print("FOUND", json.dumps(found))
"""


def test_a_plan_of_a_folder_asks_no_other_machine_unless_it_is_told_to(tmp_path: Path, forks: Any) -> None:
    hub = {"HF_HOME": str(tmp_path / "hub"), "HF_ENDPOINT": "http://127.0.0.1:9"}  # where none listens
    more = {**hub, "NO_PROXY": "*", "HF_HUB_OFFLINE": "0"}
    done = forks.run("-c", LOOKS, json.dumps(ASKING), *FETCHING, folder=tmp_path, launched=False, **more)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.split("FOUND")[1]) == [f"{name}--online" for name in FETCHING]
    told = [line for line in done.stderr.splitlines() if "--online lets transformers fetch it" in line]
    assert len(told) == len(FETCHING) and not any("OFFLINE" in line for line in told)


def test_off_the_network_is_this_thread_for_this_time(tmp_path: Path) -> None:
    from huggingface_hub import constants

    def connect() -> None:
        socket.create_connection(address).close()

    before = socket.getaddrinfo, constants.HF_HUB_OFFLINE
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as another:
        address = listening.getsockname()
        reaching = (connect, lambda: socket.getaddrinfo("localhost", 1), lambda: socket.socket().connect(address))
        with off_the_network("x"):
            for reach in reaching:
                with pytest.raises(OfflineError):
                    reach()
            another.submit(connect).result()
            with socket.socket(socket.AF_UNIX) as local, pytest.raises(FileNotFoundError):
                local.connect(str(tmp_path / "x"))
            assert constants.HF_HUB_OFFLINE
        connect()
        told = r"MODEL: x names what is not on this machine.*--online"
        with pytest.raises(WherryError, match=told), off_the_network("x"):
            connect()
    assert before == (socket.getaddrinfo, constants.HF_HUB_OFFLINE) and "connect" not in vars(socket.socket)


def test_only_what_a_file_describes_is_planned_off_the_network(tmp_path: Path) -> None:
    offline = type(off_the_network("x"))
    assert isinstance(around(write_model(tmp_path)), offline)
    for other in (around(str(tmp_path), online=True), around("gpt2-10m"), around("a:b"), around(torch.nn.Linear)):
        assert not isinstance(other, offline)
