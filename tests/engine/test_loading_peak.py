"""The peak of loading a model of 8 GB is its shards and one piece, on the host and on the disk."""

from __future__ import annotations

import json
import re
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wherry

RANKS = 8
SIZES: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 32000, "num_hidden_layers": 17, "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {**SIZES, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def outline(sizes: dict[str, Any]) -> Any:
    import transformers

    with wherry.Init(meta=True):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).to(torch.bfloat16)


def sparse_folder(model: nn.Module, folder: Path, files: int) -> int:
    """Write files as `transformers` does, of zeros that take no blocks of the disk; return their bytes."""
    folder.mkdir(parents=True)
    names = [f"model-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)]
    tensors = list(model.state_dict().items())
    where = {name: names[index * files // len(tensors)] for index, (name, _) in enumerate(tensors)}
    for file in names:
        header, end = {}, 0
        for name, tensor in tensors:
            if where[name] == file:
                header[name] = {
                    "dtype": "BF16",
                    "shape": list(tensor.shape),
                    "data_offsets": [end, end + tensor.nbytes],
                }
                end += tensor.nbytes
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(out.tell() + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return sum(tensor.nbytes for _, tensor in tensors)


def status(name: str) -> int:
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return 1024 * int(match[1])


def engine_of(sizes: dict[str, Any], folder: Path, offload: dict[str, Any]) -> Any:
    from peft import LoraConfig, get_peft_model

    from wherry.plan.imagined import FakeComm
    from wherry.sharding.meta import StayingInMemory

    model = outline(sizes)
    wherry.load_pretrained(model, folder)
    with StayingInMemory():
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    config = {"zero_optimization": {"stage": 3, **offload}}
    return wherry.initialize(model=model, config=config, mesh=FakeComm(0, RANKS))[0]


def loaded(sizes: dict[str, Any], folder: Path, offload: dict[str, Any]) -> dict[str, int]:
    """Return the rows of an engine's memory, and the growth of the process to its peak."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    engine = engine_of(sizes, folder, offload)
    took = status("VmHWM") - before
    rows = {f"{row.state} {row.tier}": row.bytes_actual for row in engine.memory()}
    engine.close()
    return {**rows, "took": took}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    disk = {"device": "nvme", "nvme_path": str(folder / "weights"), "max_in_cpu": 0}
    tiers: dict[str, dict[str, Any]] = {"host": {"offload_param": {"device": "cpu"}}, "disk": {"offload_param": disk}}
    sparse_folder(outline(SMALL), folder / "small", 2)
    for offload in tiers.values():
        loaded(SMALL, folder / "small", offload)  # imports at first use are not counted
    total = sparse_folder(outline(SIZES), folder / "large", 5)
    seen = {tier: loaded(SIZES, folder / "large", offload) for tier, offload in tiers.items()}
    json.dump({"total": total, **seen}, sys.stdout)


def test_8_gb_are_read_within_the_shards_and_one_piece(tmp_path: Path, forks: Any) -> None:
    """Load a Llama of Transformers with adapters of PEFT, as the first rank of eight."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("peaks are read from Linux's /proc")
    for name in ("transformers", "peft"):
        pytest.importorskip(name, reason="the extra `transformers` is not installed")
    program = "from tests.engine.test_loading_peak import main; main()"
    modules = forks.of("transformers", "peft", "wherry.integrations.bits")
    done = modules.run("-c", program, tmp_path, folder=tmp_path, launched=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    piece = 2 * SIZES["hidden_size"] * SIZES["vocab_size"]
    assert seen["total"] > 7.9e9
    assert seen["host"]["parameters host"] < 1.01 * seen["total"] / RANKS
    assert seen["host"]["took"] < 1.05 * (seen["host"]["parameters host"] + piece), seen
    assert seen["disk"]["parameters disk"] < 1.01 * seen["total"] / RANKS
    assert seen["disk"]["took"] < 1.15 * (seen["disk"]["parameters read host"] + piece), seen
