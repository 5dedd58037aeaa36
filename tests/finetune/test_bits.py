"""`wherry finetune --lora --bits`: what is planned, held, told and refused, and folders that have codes already."""

from __future__ import annotations

import json
import logging
import re
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tests.finetune.tiny import make_folder, write_rows
from torch._subclasses import FakeTensorMode

import wherry
from wherry import config as configs
from wherry.cli import main as wherry_command
from wherry.cli.finetune import main
from wherry.errors import WherryError
from wherry.finetune.model import load
from wherry.finetune.options import parse
from wherry.finetune.place import source_for
from wherry.integrations.bits import to_bits
from wherry.integrations.model_folder import read_model, stored
from wherry.parallel.comm import Comm
from wherry.plan.forecaster import Forecaster
from wherry.plan.machines import known
from wherry.plan.parts import Outline
from wherry.sharding.meta import StayingInMemory
from wherry.sources import find
from wherry.testing import run_ranks

if absent := [name for name in ("peft", "bitsandbytes") if find_spec(name) is None]:
    pytest.skip(f"{absent[0]} is not installed", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("rows_cache", "measured")

RUN = ["--lora=r=4", "--lr=0.01", "--precision=fp32", "--batch-size=4", "--global-batch-size=8", "--eval-split=4"]
# Leaves nothing for the planner to search.
PLACED = ["--stage=3", "--offload-optimizer=cpu", "--offload-param=cpu"]
IDS = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, chat: Any) -> Path:
    folder = tmp_path_factory.mktemp("bits")
    make_folder(folder / "llama", "llama", chat)
    write_rows(folder)
    return folder


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights beside which tables of 16 and 256 values are little."""
    import transformers

    path = tmp_path_factory.mktemp("wide")
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def adapted(model: Any) -> Any:
    import peft

    with StayingInMemory():
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))


def loss_of(model: Any) -> float:
    with torch.no_grad():
        return float(model.eval()(input_ids=IDS[:, :32], labels=IDS[:, :32]).loss)


def engine_of(folder: Path, bits: int | None = None) -> Any:
    model = read_model(folder, torch.float32, "test", bits).requires_grad_(False)
    return wherry.initialize(model=model, config={"zero_optimization": {"stage": 3}})[0]


def plain(folder: Path, **quantization: Any) -> Any:
    import transformers

    told = {"quantization_config": transformers.BitsAndBytesConfig(**quantization)} if quantization else {}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu", **told)


NF4: dict[str, Any] = dict(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32
)


@pytest.mark.long
def test_a_plan_counts_what_an_engine_holds(wide: Path) -> None:
    cpu = {"device": "cpu"}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_param": cpu, "offload_optimizer": cpu}
    values = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}}
    source = source_for(find(str(wide)), lambda model: adapted(to_bits(model, 4, torch.float32, "test")), 1)
    forecaster = Forecaster(source, known("4090"), 2, 64)
    config = configs.load(values)

    def held(comm: Comm) -> dict[str, int]:
        model = adapted(read_model(wide, torch.float32, "test", 4))
        engine = wherry.initialize(model=model, config=values, mesh=comm)[0]
        engine.backward(engine(input_ids=IDS, labels=IDS).loss)
        engine.step()
        scales = sum(flat.scales_nbytes for unit in engine.units for flat in unit.flats)
        held = {row.state: row.bytes_actual for row in engine.memory()}
        return {"parameters": held["parameters"] - scales, "optimizer": held["optimizer"], "scales": scales}

    found = run_ranks(2, held)[0]
    for estimate in (forecaster.quick(config), forecaster.exact(config)):
        for state in ("parameters", "optimizer"):
            planned = sum(row.bytes for row in estimate.rows if row.category == state)
            assert planned == pytest.approx(found[state], rel=0.05)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = source.make(2, 64)[0]
        outline = Outline.of(model)
    buffers = sum(buffer.nbytes for name, buffer in model.named_buffers() if "scales" in name)
    tables = 4 * (16 + 256 + 1) * 14  # by which codes are read, of each weight
    assert buffers + tables == pytest.approx(found["scales"], rel=0.01)
    # Embeddings stay wide: more bytes than a block of codes that has more parameters.
    assert (outline.largest_unit, outline.largest_codes) == (4096 * 512, 0)
    assert outline.codes == 2 * (4 * 512 * 512 + 3 * 512 * 1024) // 2


def test_folders_of_codes_and_layers_the_other_way_round_read_as_transformers_reads_them(
    folder: Path, tmp_path: Path
) -> None:
    import transformers

    coded = plain(folder / "llama", **NF4)
    coded.save_pretrained(tmp_path / "coded")
    _, codes, dtype = stored(tmp_path / "coded")
    assert 15360 / 2 < codes < 15360 and dtype is torch.float32  # with scales in bytes, and how to read them
    models = engine_of(tmp_path / "coded"), engine_of(folder / "llama", 4), plain(folder / "llama", **NF4)
    assert len(set(map(loss_of, models))) == 1
    config = transformers.GPT2Config(vocab_size=256, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    for bits, told in ((4, NF4), (8, {"load_in_8bit": True})):
        expected = loss_of(plain(tmp_path / "gpt2", **told))
        assert loss_of(engine_of(tmp_path / "gpt2", bits)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("storage", "half"), [("bfloat16", "fp16"), ("float32", "bf16")])
def test_codes_are_never_cast_whatever_type_stores_them(folder: Path, tmp_path: Path, storage: str, half: str) -> None:
    plain(folder / "llama", **NF4, bnb_4bit_quant_storage=storage).save_pretrained(tmp_path)
    true = load_file(tmp_path / "model.safetensors")
    config = {half: {"enabled": True}, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}

    def shown(comm: Comm) -> dict[str, torch.Tensor]:
        model = read_model(tmp_path, torch.float32, "test").requires_grad_(False)
        model = wherry.initialize(model=model, config=config, mesh=comm)[0].module
        with wherry.gathered(model.parameters()):
            return {name: p.detach().clone() for name, p in model.named_parameters() if "proj" in name}

    for found in run_ranks(2, shown):
        assert len(found) == 14
        for name, codes in found.items():
            assert codes.view(torch.uint8).equal(true[name].view(torch.uint8)), name


@pytest.mark.long
def test_a_run_over_4_bits_says_so_and_goes_on_to_the_same_bits(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    model, run = folder / "llama", tmp_path / "run"
    words = [str(model), f"--data={folder / 'chats.jsonl'}", *RUN, *PLACED, "--bits=4", f"--run-dir={run}"]
    assert main([*words, "--steps=4", "--save-interval=2"]) == 0
    assert yaml.safe_load((run / "finetune.yaml").read_text())["bits"] == 4
    card = (run / "model" / "README.md").read_text()
    assert "library_name: peft" in card and "beside weights in 4 bits" in card and "--bits 4\n" in card
    # The model answers a question as a user asks it, and the prompt that is rendered of it, as in the last sample.
    command = shlex.split(re.search(r"wherry (generate .+)", capsys.readouterr().out)[1])  # type: ignore[index]
    sample = json.loads((run / "samples.jsonl").read_text().splitlines()[-3])
    assert "<|im_start|>" not in command[2] and "<|im_start|>" in sample["prompt"]
    for prompt, *raw in ([command[2]], [sample["prompt"], "--raw"]):
        asked = ["generate", command[1], prompt, "--bits=4", "--temperature=0", "--max-new-tokens=64", *raw]
        assert wherry_command(asked) == 0
        said = capsys.readouterr()
        assert said.out.removeprefix(prompt).strip() == sample["answer"] != ""
        assert "wherry: 108.1 KiB of weights in float32 and in 4 bits, on" in said.err
    ended = load_file(run / "model" / "adapter_model.safetensors")
    assert all(tensor.dtype is torch.float32 for tensor in ended.values())
    # Killed in its last save: the checkpoint before it is taken.
    shutil.rmtree(run / "model")
    (run / "checkpoints" / "checkpoint-4" / "trainer_state.json").write_text("{")
    assert main(["--resume", str(run)]) == 0 and "checkpoint-4: it is not whole" in caplog.text
    again = load_file(run / "model" / "adapter_model.safetensors")
    with pytest.raises(WherryError, match="--bits 8: the run that goes on has 4, by its checkpoint"):
        main(["--resume", str(run), "--bits=8", "--steps=8"])
    assert parse([str(run / "finetune.yaml"), "--full"]).bits is None
    assert ended.keys() == again.keys() and all(torch.equal(ended[name], again[name]) for name in ended)


@pytest.mark.long
def test_what_cannot_be_is_told(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    model, rows = folder / "llama", f"--data={folder / 'rows.jsonl'}"
    coded, other = tmp_path / "coded", tmp_path / "other"
    for path, quantization in ((coded, NF4), (other, {"load_in_8bit": True})):
        plain(model, **quantization).save_pretrained(path)
        transformers.AutoTokenizer.from_pretrained(model).save_pretrained(path)
    for words, told in (
        ([str(model), rows, "--bits=4"], "--bits 4: weights in few bits cannot be trained themselves; add --lora"),
        ([str(coded), rows], "has weights in 4 bits already, which cannot be trained themselves; add --lora"),
        ([str(coded), rows, "--lora", "--bits=8"], "--bits 8: .* in 4 bits already; leave --bits out"),
        ([str(other), rows, "--lora"], "in 8 bits by bitsandbytes; .*of the model that they were made of, .*--bits 8"),
    ):
        with pytest.raises(WherryError, match=told):
            main([*words, "--steps=2", f"--run-dir={tmp_path / 'run'}"])
    assert wherry_command(["generate", str(coded), "hi", "--bits=8"]) == 2
    assert "generate: --bits 8: " in capsys.readouterr().err
    file = coded / "config.json"
    told = json.loads(file.read_text())
    for wrong, why in (
        ("nf4", "config.json: quantization_config cannot be read"),
        ({"quant_method": "awq"}, "holds weights in few bits by awq"),
        ({**told["quantization_config"], "bnb_4bit_quant_type": 7}, "quantization_config of the model's config.json"),
    ):
        file.write_text(json.dumps({**told, "quantization_config": wrong}))
        with pytest.raises(WherryError, match=why):
            main([str(coded), rows, "--lora", "--steps=2", f"--run-dir={tmp_path / 'run'}"])
    monkeypatch.setattr("transformers.utils.import_utils.is_bitsandbytes_available", lambda: False)
    with pytest.raises(WherryError, match="pip install --upgrade bitsandbytes"):
        read_model(model, torch.float32, "finetune", 4)


def test_weights_that_stay_wide_are_told_of(folder: Path, chat: Any, caplog: pytest.LogCaptureFixture) -> None:
    make_folder(folder / "mixtral", "mixtral", chat)
    with caplog.at_level(logging.WARNING, "wherry"):
        load(folder / "llama", torch.float32, "llama", 4)
        assert not caplog.records
        load(folder / "mixtral", torch.float32, "mixtral", 4)
    experts, attention = 2 * 4 * 3 * 32 * 48 + 2 * 4 * 32, 2 * (2 * 32 * 32 + 2 * 32 * 16)
    assert f"{experts} weights of {folder / 'mixtral'} stay as they are, and {attention} are held in 4" in caplog.text
