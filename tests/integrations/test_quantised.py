"""LoRA over bases in 4 and 8 bits of bitsandbytes and torchao, against the same without Wherry."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wherry
from wherry.errors import WherryError
from wherry.parallel.comm import Comm
from wherry.sharding.meta import StayingInMemory
from wherry.testing import run_ranks

if find_spec("peft") is None or find_spec("transformers") is None:
    pytest.skip("peft and transformers come with `pip install '.[transformers]'`", allow_module_level=True)

IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def quantisation(kind: str) -> Any:
    import transformers

    if kind.startswith("torchao"):
        pytest.importorskip("torchao", reason="torchao is not installed")
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

        return transformers.TorchAoConfig(Int8WeightOnlyConfig() if "int8" in kind else Float8WeightOnlyConfig())
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    if kind == "int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=kind == "nf4",
        bnb_4bit_compute_dtype=torch.float32,
    )


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


def loaded(folder: Path, kind: str) -> Any:
    """As from_pretrained quantises it."""
    import transformers

    with warnings.catch_warnings(action="ignore"):
        return adapted(
            transformers.AutoModelForCausalLM.from_pretrained(
                folder, quantization_config=quantisation(kind), dtype=torch.float32, device_map="cpu"
            )
        )


def outline(folder: Path, kind: str, *, with_values: bool = True) -> Any:
    """The same on the meta device; the engine quantises what it reads from the files."""
    import transformers
    from transformers.quantizers import AutoHfQuantizer

    quantiser = AutoHfQuantizer.from_config(quantisation(kind), pre_quantized=False)
    with wherry.Init(meta=True):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
        quantiser.preprocess_model(model=model, dtype=torch.float32, device_map=None)
        quantiser.postprocess_model(model)
    if with_values:
        wherry.load_pretrained(model, folder)
    return adapted(model)


def adapters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def train_plain(model: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    losses = []
    for _ in range(3):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, adapters(model)


def settings(stage: int, tier: str, folder: Path) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if tier != "none":
        zero["offload_param"] = {"device": tier, "nvme_path": str(folder)} if tier == "nvme" else {"device": tier}
    params = {"lr": 1e-2, "weight_decay": 0.0}
    return {"zero_optimization": zero, "optimizer": {"type": "AdamW", "params": params}}


def train(models: list[Any], config: dict[str, Any], finish: Callable[[Any], Any] = lambda engine: None) -> Any:
    def body(comm: Comm) -> Any:
        engine = wherry.initialize(model=models[comm.rank], config=config, mesh=comm)[0]
        losses = []
        for _ in range(3):
            loss = engine(input_ids=IDS, labels=IDS).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        found = finish(engine)
        return losses, adapters(engine.unwrap()), found

    return run_ranks(len(models), body)[0]


def assert_same(found: Any, expected: tuple[list[float], dict[str, torch.Tensor]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-5, msg=lambda told, n=name: f"{n}: {told}")


# Each kind, and each placement of the codes.
TRAINED = [
    ("nf4", 3, "nvme", 2), ("nf4", 2, "none", 2), ("int8", 3, "cpu", 1), ("fp4", 0, "none", 2),
    ("torchao int8", 3, "none", 2), ("torchao float8", 3, "cpu", 2),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "stage", "tier", "ranks"), TRAINED)
def test_trained_as_without_an_engine(
    folder: Path, tmp_path: Path, kind: str, stage: int, tier: str, ranks: int
) -> None:
    expected = train_plain(loaded(folder, kind))
    assert_same(train([loaded(folder, kind) for _ in range(ranks)], settings(stage, tier, tmp_path)), expected)


def test_adapters_on_the_meta_device_are_as_peft_draws_them(folder: Path, tmp_path: Path) -> None:
    """By hand, and by the Trainer's class; what would read the base's weights is told."""
    import transformers
    from peft import LoraConfig, get_peft_model

    expected = train_plain(adapted(transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)))

    def on_meta() -> Any:
        with wherry.Init(meta=True):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(folder))
        wherry.load_pretrained(model, folder)
        return model

    assert_same(train([adapted(on_meta()) for _ in range(2)], settings(3, "cpu", tmp_path)), expected)
    with StayingInMemory(), pytest.raises(WherryError, match="build the model with from_pretrained"):
        get_peft_model(on_meta(), LoraConfig(init_lora_weights="pissa", target_modules=["q_proj"]))


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_quantised_while_it_is_read(folder: Path, tmp_path: Path, kind: str) -> None:
    expected = train_plain(loaded(folder, kind))
    assert_same(train([outline(folder, kind) for _ in range(2)], settings(3, "cpu", tmp_path)), expected)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["nf4", "int8", "torchao int8", "torchao float8"])
def test_memory_and_checkpoints(folder: Path, tmp_path: Path, kind: str) -> None:
    """Codes are shared out; a checkpoint gives them, with their scales, to another number of ranks."""

    def held(engine: Any) -> tuple[int, int, dict[str, torch.Tensor]]:
        rows = [row for row in engine.memory() if row.state == "parameters"]
        assert all(row.bytes_expected == row.bytes_actual for row in rows)
        engine.save_checkpoint(tmp_path / "saved")
        engine.save_checkpoint(tmp_path / "adapters", exclude_frozen_parameters=True)
        state = {name: value.clone() for name, value in engine.module.state_dict().items() if "lora" not in name}
        engine.eval()
        with torch.no_grad():
            loss = float(engine(input_ids=IDS, labels=IDS).loss)
        return sum(row.bytes_actual for row in rows), loss, state

    config = settings(3, "cpu", tmp_path)
    _, _, (halved, expected, state) = train([loaded(folder, kind) for _ in range(2)], config, held)
    _, _, (whole, _, _) = train([loaded(folder, kind)], config, held)
    assert halved < 0.7 * whole  # scales are whole on both
    own = loaded(folder, kind).state_dict()
    assert state.keys() == {name for name in own if "lora" not in name}
    for name, value in state.items():
        same = value == own[name] if type(value) is torch.Tensor else value.dequantize() == own[name].dequantize()
        assert same.all(), name

    def wiped() -> Any:
        """The same, but that it has lost what it knew."""
        model = loaded(folder, kind)
        for module in model.modules():
            for parameter in module._parameters.values():
                quantised = getattr(parameter, "quant_state", None)
                if quantised is not None:
                    parameter.data.zero_()
                    quantised.absmax.zero_()
        return model

    def loading(comm: Comm, models: list[Any], saved: str) -> float:
        engine = wherry.initialize(model=models[comm.rank], config=settings(3, "none", tmp_path), mesh=comm)[0]
        engine.load_checkpoint(tmp_path / saved)
        engine.eval()
        with torch.no_grad():
            return float(engine(input_ids=IDS, labels=IDS).loss)

    for saved, make in (("saved", wiped), ("adapters", lambda: loaded(folder, kind))):
        fresh = [make() for _ in range(3)]
        assert run_ranks(3, partial(loading, models=fresh, saved=saved)) == pytest.approx([expected] * 3, rel=1e-6)


def test_without_values_there_are_no_codes(folder: Path) -> None:
    with pytest.raises(WherryError, match=r"Params4bit makes codes of values; call wherry\.load"):
        wherry.initialize(model=outline(folder, "nf4", with_values=False), config={"zero_optimization": {"stage": 3}})


@pytest.mark.parametrize("kind", ["nf4", "torchao int8"])
def test_the_trainer_takes_one_with_an_adapter(folder: Path, tmp_path: Path, kind: str) -> None:
    import transformers

    from wherry.integrations.transformers import WherryTrainer

    rows = [{"input_ids": ids, "labels": ids} for ids in IDS.repeat(4, 1)]
    losses = []
    for trainer_class in (transformers.Trainer, WherryTrainer):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, logging_steps=1, per_device_train_batch_size=2, use_cpu=True,
            learning_rate=1e-2, report_to=[], disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        trainer = trainer_class(model=loaded(folder, kind), args=arguments, train_dataset=rows)
        trainer.train()
        trainer.save_model(str(tmp_path / "adapter"))
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 4
