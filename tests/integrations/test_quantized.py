"""LoRA over bases in 4 and 8 bits of bitsandbytes and torchao, against the same without Wherry."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.harness import engine_of, on_ranks, settings, train, train_engine, train_plain, weights_of
from torch import nn

import wherry
from wherry.errors import WherryError
from wherry.integrations.bits import to_bits
from wherry.integrations.model_folder import read_model
from wherry.parallel.comm import Comm
from wherry.sharding.meta import StayingInMemory
from wherry.testing import run_ranks

if find_spec("peft") is None or find_spec("transformers") is None:
    pytest.skip("peft and transformers come with `pip install '.[transformers]'`", allow_module_level=True)

IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def quantization(kind: str) -> Any:
    import transformers

    if kind.startswith("torchao"):
        pytest.importorskip("torchao", reason="torchao is not installed")
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

        return transformers.TorchAoConfig(Int8WeightOnlyConfig() if "int8" in kind else Float8WeightOnlyConfig())
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    if kind == "int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.float32}
    return transformers.BitsAndBytesConfig(load_in_4bit=True, **nf4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in full precision."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def adapted(model: nn.Module) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    with StayingInMemory():
        return get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=LAYERS)).train()


def loaded(folder: Path, kind: str | None) -> Any:
    """Load a model with adapters as from_pretrained quantizes it."""
    import transformers

    how = {} if kind is None else {"quantization_config": quantization(kind), "device_map": "cpu"}
    with warnings.catch_warnings(action="ignore"):
        return adapted(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2, weight_decay=0.0)


COMMON: dict[str, Any] = {
    "steps": 3, "optimizer": adamw, "batch": lambda *_: {"input_ids": IDS, "labels": IDS},
}  # fmt: skip


def assert_trained_alike(models: list[Any], reference: Any, *, stage: int = 3, tier: str, disk: Path) -> None:
    offload = {"offload_param": {"device": tier, "nvme_path": str(disk)}} if tier else {}

    def body(comm: Comm) -> Any:
        config = settings(stage, more={"zero_optimization": offload})
        engine = engine_of(models[comm.rank], config, comm, adamw)
        return train(engine, 3, batch=COMMON["batch"]), weights_of(engine)

    losses, weights = run_ranks(len(models), body)[0]
    expected = train_plain(reference, **COMMON)
    assert losses == pytest.approx(expected.losses, rel=1e-6)
    adapters = [name for name in expected.weights if "lora" in name]
    assert len(adapters) == 2 * 2 * len(LAYERS)
    for name in adapters:
        torch.testing.assert_close(weights[name], expected.weights[name], rtol=1e-4, atol=1e-5)


# Each kind, and each placement of the codes.
TRAINED = [("nf4", 3, "nvme", 2), ("int8", 3, "cpu", 1), ("torchao int8", 2, "", 2), ("torchao float8", 3, "cpu", 2)]


@pytest.mark.parametrize(("kind", "stage", "tier", "ranks"), TRAINED)
def test_trained_as_without_an_engine(
    folder: Path, tmp_path: Path, kind: str, stage: int, tier: str, ranks: int
) -> None:
    models = [loaded(folder, kind) for _ in range(ranks)]
    assert_trained_alike(models, loaded(folder, kind), stage=stage, tier=tier, disk=tmp_path)


@pytest.mark.parametrize(("kind", "bits"), [(None, None), ("nf4", 4), ("int8", 8)])
def test_adapters_on_the_meta_device_are_as_peft_draws_them(
    folder: Path, tmp_path: Path, kind: str | None, bits: int | None
) -> None:
    """Train adapters beside wide weights, and beside weights that are quantized while they are read."""
    from peft import LoraConfig, get_peft_model

    models = [adapted(read_model(folder, torch.float32, "test", bits)) for _ in range(2)]
    assert_trained_alike(models, loaded(folder, kind), tier="cpu", disk=tmp_path)
    model = read_model(folder, torch.float32, "test", bits)
    with StayingInMemory(), pytest.raises(WherryError, match="build the model with from_pretrained"):
        get_peft_model(model, LoraConfig(init_lora_weights="pissa", target_modules=["q_proj"]))


@pytest.mark.long
def test_checkpoints_hold_codes_with_their_scales(folder: Path, tmp_path: Path) -> None:
    def loss_of(engine: Any) -> float:
        engine.eval()
        with torch.no_grad():
            return float(engine(input_ids=IDS, labels=IDS).loss)

    def save(engine: Any) -> float:
        assert all(row.bytes_expected == row.bytes_actual for row in engine.memory() if row.state == "parameters")
        engine.save_checkpoint(tmp_path / "saved")
        engine.save_checkpoint(tmp_path / "adapters", exclude_frozen_parameters=True)
        return loss_of(engine)

    expected = train_engine(loaded(folder, "nf4"), stage=3, ranks=2, finish=save, **COMMON).extra
    wiped = loaded(folder, "nf4")
    for parameter in wiped.parameters():
        quantized = getattr(parameter, "quant_state", None)
        if quantized is not None:
            parameter.data.zero_()
            quantized.absmax.zero_()
    for saved, model in (("saved", wiped), ("adapters", loaded(folder, "nf4"))):

        def load(engine: Any, saved: str = saved) -> float:
            engine.load_checkpoint(tmp_path / saved)
            return loss_of(engine)

        assert on_ranks(load, ranks=3, model=model, optimizer=adamw) == pytest.approx([expected] * 3, rel=1e-6)


def test_without_values_there_are_no_codes(folder: Path) -> None:
    import transformers

    with wherry.Init(meta=True):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    model = adapted(to_bits(model, 4, torch.float32, "test"))
    with pytest.raises(WherryError, match=r"Params4bit makes codes of values; call wherry\.load"):
        wherry.initialize(model=model, config={"zero_optimization": {"stage": 3}})
