"""Trainings of `wherry finetune`, and the same by TRL without Wherry; a program: `against_trl.py FOLDER CASES OUT`.

A case is "model how method stage tier", perhaps with the ranks that share a row and the micro-batches that run
together, or "model how method plain PARTS" for TRL's. How is full, lora, or lora over weights in 4 or 8 bits, as lora4.
Method is sft, dpo, or packed. Rank 0 writes losses and gradient norms by case.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
import trl
from accelerate.state import AcceleratorState, GradientState

import wherry
from wherry.finetune.config import build_config, set_length, trainer_arguments
from wherry.finetune.data import load_examples
from wherry.finetune.model import load, lora_config
from wherry.finetune.options import parse
from wherry.finetune.trainers import trainer_class

STEPS, ROWS = 3, 8
# The length of two rows.
PACKED = 28
together = wherry.Engine.backward_together
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def options_of(
    folder: Path, how: str, method: str, stage: str, tier: str, together: str = "1", window: str = "1"
) -> Namespace:
    data = folder / ("pairs.jsonl" if method == "dpo" else "rows.jsonl")
    words = ["model", f"--data={data}", f"--steps={STEPS}", f"--stage={stage}", "--precision=fp32", "--seed=3"]
    words += [f"--batch-size={ROWS * int(together) // WORLD // int(window)}", f"--global-batch-size={ROWS}"]
    words += [f"--context-parallel={together}", "--lr=0.01", "--log-interval=1"]
    words += ["--no-save", "--eval-interval=1000", "--lr-warmup-iters=0", "--clip-grad=0.5"]
    words += ["--lora=r=4"] if how != "full" else []
    words += ["--packing"] if method == "packed" else []
    words += [f"--bits={how[4:]}"] if how[4:].isdigit() else []
    words += ["--set=wherry.accumulation=layer_major"] if window != "1" else []
    words += [f"--offload-optimizer={tier}"] + ([f"--offload-param={tier}"] if stage == "3" else [])
    words += [f"--nvme-path={folder / 'disk'}"] if tier == "nvme" else []
    return parse(words)


def history(trainer: Any) -> list[list[float]]:
    return [[row["loss"], row["grad_norm"]] for row in trainer.state.log_history if "loss" in row]


def ours(folder: Path, model: str, options: Namespace, method: str) -> list[list[float]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / model)
    length = PACKED if options.packing else 64
    examples = load_examples(options.data, method, tokenizer, eval_split=0, seed=3, sequence=length)
    config = build_config(options, method, None, bf16=False, ranks=WORLD)
    out = folder / "out"
    arguments = trainer_arguments(options, method, config, length, out, cpu=True, ranks=WORLD, evaluates=False)
    reference = (
        {"ref_model": load(folder / model, torch.float32, model)} if method == "dpo" and not options.lora else {}
    )
    trainer = trainer_class(method)(
        model=load(folder / model, torch.float32, model, options.bits), args=arguments, train_dataset=examples.train,
        processing_class=tokenizer, wherry_config=config, **reference,
        peft_config=lora_config(options.lora, {}) if options.lora else None,
    )  # fmt: skip
    assert any(parameter.is_meta for parameter in trainer.model.parameters())  # nothing is loaded yet
    set_length(trainer.args, options, 48, config.readers(WORLD))
    with mock.patch.object(wherry.Engine, "backward_together", autospec=True, side_effect=together) as ran:
        trainer.train()
    windows = [len(call.args[1]) for call in ran.call_args_list]
    assert trainer.engine.layer_major == (
        "layer_major" in str(options.settings) and not (options.lora and method == "dpo")
    )
    assert windows == [config.batch(WORLD).accumulation] * STEPS * trainer.engine.layer_major
    trainer.engine.close()
    if reference:
        trainer.ref_model.close()
    return history(trainer)


def plain(folder: Path, model: str, options: Namespace, method: str, parts: int) -> list[list[float]]:
    """TRL from the rows as they stand, in one process, in so many micro-batches."""
    from datasets import Dataset

    rows = [json.loads(line) for line in Path(options.data).read_text().splitlines()]
    cls, of = (trl.DPOTrainer, trl.DPOConfig) if method == "dpo" else (trl.SFTTrainer, trl.SFTConfig)
    packed = {"packing": True} if options.packing else {}
    arguments = of(
        str(folder / "out"), per_device_train_batch_size=ROWS // parts, gradient_accumulation_steps=parts,
        max_steps=STEPS, learning_rate=0.01, seed=3, use_cpu=True,
        bf16=False, max_grad_norm=0.5, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
        max_length=PACKED if options.packing else 64, lr_scheduler_type="cosine", gradient_checkpointing=False,
        **packed,
    )  # fmt: skip
    whole = transformers.AutoModelForCausalLM.from_pretrained(
        folder / model, dtype=torch.float32, quantization_config=quantization(options.bits), device_map="cpu"
    )
    trainer = cls(
        model=whole, args=arguments, train_dataset=Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder / model),
        peft_config=lora_config(options.lora, {}) if options.lora else None,
    )  # fmt: skip
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:  # TRL makes adapters of quantized models bf16
            parameter.data = parameter.data.float()
    trainer.train()
    return history(trainer)


def quantization(bits: int | None) -> Any:
    if bits != 4:
        return None if bits is None else transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip


def run(folder: Path, case: str) -> list[list[float]]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    model, how, method, stage, *more = case.split()
    place, trained = ("2", "none") if stage == "plain" else (stage, *more), method.replace("packed", "sft")
    options = options_of(folder, how, method, *place)
    if stage == "plain":
        return plain(folder, model, options, trained, parts=int(more[0]))
    return ours(folder, model, options, trained)


def main() -> None:
    folder, cases, out = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    gc.freeze()  # Accelerate collects garbage for every trainer, over all imported modules
    found = {case: run(folder, case) for case in cases}
    if os.environ.get("RANK", "0") == "0":
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
