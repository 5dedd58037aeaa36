"""A program: one rank of several loads a model of 8 GB from sparse files, and prints its peak memory."""

from __future__ import annotations

import json
import re
import struct
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import wherry

RANKS = 8
SIZES: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 32000, "num_hidden_layers": 17, "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {**SIZES, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
# Of small weights, as bitsandbytes makes a few copies of one while it quantizes it on a CPU.
THIN: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 28, "vocab_size": 4000}


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


def engine_of(sizes: dict[str, Any], folder: Path, offload: dict[str, Any], bits: int | None = None) -> Any:
    from peft import LoraConfig, get_peft_model

    from wherry.integrations.bits import to_bits
    from wherry.plan.imagined import FakeComm
    from wherry.sharding.meta import StayingInMemory

    model = outline(sizes)
    wherry.load_pretrained(model if bits is None else to_bits(model, bits, torch.bfloat16, "test"), folder)
    with StayingInMemory():
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    config = {"zero_optimization": {"stage": 3, **offload}}
    return wherry.initialize(model=model, config=config, mesh=FakeComm(0, RANKS))[0]


def loaded(sizes: dict[str, Any], folder: Path, offload: dict[str, Any], bits: int | None = None) -> dict[str, int]:
    """Return the rows of an engine's memory, and the growth of the process to its peak."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    engine = engine_of(sizes, folder, offload, bits)
    took = status("VmHWM") - before
    rows = {f"{row.state} {row.tier}": row.bytes_actual for row in engine.memory()}
    engine.close()
    return {**rows, "took": took}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    disk = {"device": "nvme", "nvme_path": str(folder / "weights"), "max_in_cpu": 0}
    tiers: dict[str, dict[str, Any]] = {"host": {"offload_param": {"device": "cpu"}}, "disk": {"offload_param": disk}}
    bits = int(sys.argv[2]) if len(sys.argv) > 2 else None
    if bits is not None:
        tiers.pop("disk")
    sparse_folder(outline(SMALL), folder / "small", 2)
    for offload in tiers.values():
        loaded(SMALL, folder / "small", offload, bits)  # imports at first use are not counted
    sizes = SIZES if bits is None else {**SIZES, **THIN}
    model = outline(sizes)
    total = sparse_folder(model, folder / "large", 5)
    piece = max(parameter.nbytes for parameter in model.parameters())
    del model
    tiers_seen = {tier: loaded(sizes, folder / "large", offload, bits) for tier, offload in tiers.items()}
    blocks = sum(file.stat().st_blocks * 512 for file in (folder / "large").glob("*"))
    json.dump({"total": total, "piece": piece, "on disk": blocks, **tiers_seen}, sys.stdout)
