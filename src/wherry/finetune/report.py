"""What is said of a run: before it, as its facts, and after it, as the card of the model that it has made."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import wherry
from wherry.checkpoint.export import IN_RUN
from wherry.finetune.options import FILE
from wherry.integrations.bits import in_bits
from wherry.integrations.model_folder import FINISHED
from wherry.plan.rates import device_name
from wherry.train.loop import Ending, Outcome
from wherry.train.report import Facts, count

if TYPE_CHECKING:
    from wherry.finetune.job import FineTuning


def facts_of(job: FineTuning, trainer: Any, start: Path | None) -> Facts:
    sizes = job.config.batch(job.comm.size)
    rows = [count(sizes.micro, "row")]
    rows += [count(sizes.accumulation, "micro-batch", "es")] if sizes.accumulation > 1 else []
    rows += [count(job.readers, "rank")] if job.readers > 1 else []
    together = job.comm.size // job.readers
    shared = f", each shared by {together} ranks" if together > 1 else ""
    whole, trained = (trainer.model.num_parameters(only_trainable=only) for only in (False, True))
    coded = f", {in_bits(trainer.model):,} in {job.bits} bits" if job.bits is not None else ""
    facts = [
        ("model", f"{job.name}: {whole:,} parameters, {trained:,} of them trained{coded}"),
        ("data", job.examples.source),
        ("batch", f"{' x '.join(rows)}, at most {job.sequence} tokens each{shared}"),
        (
            "updates",
            f"{_optimizer(job)}, lr {trainer.args.learning_rate:g}, {job.config.working_precision() or 'fp32'}",
        ),
    ]
    cpu = f"CPU, {count(torch.get_num_threads(), 'thread')} a rank; its memory is the host's"
    facts.append(("device", cpu if job.device.type == "cpu" else device_name(job.device)))
    if start is not None:
        facts.append(("resumed", str(start)))
    facts.append(("folder", str(job.run_dir)))
    return facts


def _optimizer(job: FineTuning) -> str:
    return job.config.optimizer.type if job.config.optimizer is not None else "AdamW"


def question(text: str, tokenizer: Any) -> str:
    """What a user says in a prompt that the chat template has made; else the prompt as it stands."""
    if not getattr(tokenizer, "chat_template", None):
        return text
    mark = "\x00"
    asked = [{"role": "user", "content": mark}]
    before, _, after = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True).partition(mark)
    return text[len(before) : -len(after)] if after and text.startswith(before) and text.endswith(after) else text


def then_of(job: FineTuning, outcome: Outcome) -> Facts:
    folder = shlex.quote(str(job.run_dir))
    if outcome.ending is Ending.FINISHED:
        return [
            ("ask it", _ask(job, str(job.run_dir / FINISHED))),
            ("do it again, or otherwise", f"wherry finetune {shlex.quote(str(job.run_dir / FILE))} --run-dir OTHER"),
        ]
    if outcome.ending is not Ending.DIVERGED and any((job.run_dir / IN_RUN).glob("checkpoint-*")):
        return [("go on", f"wherry finetune --resume {folder}")]
    return []


def _ask(job: FineTuning, folder: str) -> str:
    asked = question(job.examples.prompts[0].text, job.tokenizer)[:120] if job.examples.prompts else "Hello"
    bits = f" --bits {job.options.bits}" if job.options.bits is not None else ""
    return f"wherry generate {shlex.quote(folder)} {shlex.quote(asked)}{bits}"


def card_of(job: FineTuning, trainer: Any, outcome: Outcome) -> str:
    """The model's README: what it was made of, in the form that the hub reads."""
    import peft
    import transformers
    import trl

    options, args = job.options, trainer.args
    adapter = options.lora is not None
    named = not os.path.isabs(job.name) and not Path(job.name).exists()
    head = ["---", *([f"base_model: {job.name}"] if named else [])]
    head += [f"library_name: {'peft' if adapter else 'transformers'}", "pipeline_tag: text-generation"]
    head += ["tags:", "- wherry", "- trl", f"- {job.method}", *(["- lora"] if adapter else []), "---"]
    coded = f", beside weights in {job.bits} bits of bitsandbytes" if job.bits is not None else ""
    size = args.train_batch_size * args.gradient_accumulation_steps * job.readers
    versions = f"Wherry {wherry.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    rows = [
        ("base model", job.name if named else Path(job.name).name),
        ("method", f"{job.method}, {'LoRA: ' + (options.lora or 'r=16') if adapter else 'all weights'}{coded}"),
        ("data", f"{job.examples.source}; {job.examples.format}"),
        ("steps", f"{outcome.steps:,} of {size} rows, each of at most {job.sequence} tokens"),
        ("updates", f"{_optimizer(job)}, peak learning rate {args.learning_rate:g}, {args.lr_scheduler_type.value}"),
        ("loss", f"{outcome.first_loss:.4f} at first, {outcome.last_loss:.4f} at last"),
        ("evaluation loss", f"{outcome.validation_loss:.4f}"),
        ("seed", options.seed),
        ("with", f"{versions}, TRL {trl.__version__}, PEFT {peft.__version__}"),
    ]
    rows = [row for row in rows if "nan" not in str(row[1])]
    lines = ["", f"# {job.run_dir.name}", "", "| | |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows), ""]
    lines += ["## Use", "", "```python"]
    if adapter:
        lines += [
            "from peft import AutoPeftModelForCausalLM",
            "",
            'model = AutoPeftModelForCausalLM.from_pretrained(".")',
        ]
    else:
        lines += [
            "from transformers import AutoModelForCausalLM",
            "",
            'model = AutoModelForCausalLM.from_pretrained(".")',
        ]
    lines += ["```", "", "```", _ask(job, "."), "```", ""]
    return "\n".join(head + lines)
