"""The engine's config of a fine-tuning and the arguments of its trainer, which agree by how they are made."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wherry.config import Config, load, parse_overrides
from wherry.config.problems import did_you_mean
from wherry.errors import WherryError
from wherry.finetune.model import lora_config
from wherry.finetune.options import FLAGS
from wherry.observe.log import say
from wherry.train.config import name_the_disk, put
from wherry.train.options import Options, keys_of

ROWS = 16
"""Of a step, where nothing says how many."""
EVALUATIONS = 4
_OF_TRAINER = ("sft", "dpo", "lora")
# Arguments of trainers that are flags here: what they do with rows of text, and what the engine does.
_ELSEWHERE = {
    "assistant_only_loss": "the loss is on the answers; --method pretrain learns chats whole",
    "completion_only_loss": "the loss is on the answers; --method pretrain learns rows whole",
    "dataset_text_field": "give --columns text=NAME",
    "max_length": "give --seq-length",
    "output_dir": "give --run-dir",
    "per_device_train_batch_size": "give --batch-size",
    "gradient_accumulation_steps": "give --gradient-accumulation-steps or --global-batch-size",
    "max_grad_norm": "give --clip-grad",
    "bf16": "give --precision",
    "fp16": "give --precision",
    "max_steps": "give --steps",
    "num_train_epochs": "give --epochs",
    "learning_rate": "give --lr",
    "weight_decay": "give --weight-decay",
    "seed": "give --seed",
    "warmup_steps": "give --lr-warmup-iters",
    "warmup_ratio": "give --lr-warmup-iters",
    "logging_steps": "give --log-interval",
    "eval_steps": "give --eval-interval",
    "save_steps": "give --save-interval",
    "save_total_limit": "give --keep-last",
    "packing": "give --packing",
    "resume_from_checkpoint": "give --resume",
    "gradient_checkpointing": "the plan chooses; or give --set activation_checkpointing.policy=recompute",
    "activation_checkpointing": "the plan chooses; or give --set activation_checkpointing.policy=recompute",
    "optim": "give --optimizer",
    **dict.fromkeys(
        ("adam_beta1", "adam_beta2", "adam_epsilon", "optim_args"),
        "give it to the optimizer, as in --set optimizer.params.betas=[0.9,0.95]",
    ),
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config", "parallelism_config"), "the engine is in their place"),
}
# Those of SFTConfig that are of the tokenizer, for every method.
_OF_TOKENIZER = {"eos_token", "chat_template_path", "truncation_mode"}
_SIZES = ("train_batch_size", "gradient_accumulation_steps")


def split(options: Options) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """What `--set` says of the engine's config, and of the arguments of TRL's and PEFT's."""
    ours: dict[str, Any] = {}
    theirs: dict[str, dict[str, Any]] = {name: {} for name in _OF_TRAINER}
    for key, value in parse_overrides(options.settings).items():
        whose, _, name = key.partition(".")
        if whose in theirs and name:
            theirs[whose][name] = value
        else:
            ours[key] = value
    return ours, theirs


def learning_rate(options: Options, method: str) -> float:
    rate = 1e-5 if options.lora is None else 2e-4
    return options.lr if options.lr is not None else rate / (10 if method == "dpo" else 1)


def build_config(options: Options, method: str, given: Mapping[str, Any] | None, *, bf16: bool, ranks: int) -> Config:
    """The engine's config, but for what the plan chooses."""
    config: dict[str, Any] = copy.deepcopy(dict(given or {}))
    config.setdefault("gradient_clipping", 1.0)
    if not isinstance(config.get("optimizer"), dict):
        config["optimizer"] = {"type": "AdamW", "params": {"weight_decay": 0.0}}
    if options.optimizer is not None:
        config["optimizer"] = {"type": options.optimizer, "params": {}}
    params = config["optimizer"].setdefault("params", {})
    if params.get("lr") in (None, "auto"):
        params["lr"] = learning_rate(options, method)
    if options.precision is None and bf16 and not any(name in config for name in ("bf16", "fp16")):
        config["bf16"] = {"enabled": True}
    for key, (flag, value) in keys_of(options, FLAGS).items():
        put(config, key, value, flag)
    for name in ("bf16", "fp16") if options.precision else ():
        if options.precision == name or name in config:
            put(config, f"{name}.enabled", options.precision == name, "--precision")
    own = config.setdefault("wherry", {})
    if isinstance(own, dict):  # else it is an error that is told
        own.setdefault("chunked_loss", True)
        reference_within = method == "dpo" and options.lora is not None  # the model with its adapters turned off
        if reference_within and own.get("accumulation") in (None, "auto"):
            own["accumulation"] = "step_major"
    ours, _ = split(options)
    for key, value in ours.items():
        put(config, key, value, "--set")
    zero = config.get("zero_optimization") or {}
    on_disk = any("nvme" in str(zero.get(f"offload_{name}")) for name in ("optimizer", "param"))
    if options.nvme_path is not None and on_disk:  # else the plan may choose it
        name_the_disk(config, options.nvme_path)
    whole, ranks = ranks, _readers(config, method, ranks)
    if all(config.get(name) in (None, "auto") for name in _SIZES):
        micro = config.get("train_micro_batch_size_per_gpu")
        least = ranks * micro if isinstance(micro, int) else ranks
        config["train_batch_size"] = math.ceil(ROWS / least) * least
    found = load(config)
    found.readers(whole)
    return found


def _readers(config: Mapping[str, Any], method: str, ranks: int) -> int:
    """How many of the ranks have different rows."""
    own = config.get("wherry")
    together = own.get("context_parallel", 1) if isinstance(own, dict) else 1
    if not isinstance(together, int) or together < 2:  # what is no number of ranks is told with the config
        return ranks
    if method == "dpo":
        raise WherryError(
            "--context-parallel: dpo compares whole rows, and ranks that share rows have their parts; leave it out"
        )
    return max(1, ranks // together)


def check_arguments(options: Options, method: str | None) -> None:
    """Raise what is said of adapters and to TRL that has no place, or is said otherwise; `method`, once it is known."""
    _, theirs = split(options)
    if options.lora is None and theirs["lora"]:
        raise WherryError(f"--set lora.{next(iter(theirs['lora']))}: all weights are trained; add --lora for adapters")
    if options.lora or theirs["lora"]:
        lora_config(options.lora or "", theirs["lora"])
    if method == "dpo" and options.packing:
        raise WherryError("--packing: dpo compares rows, of which each has a sequence; leave it out")
    for whose in ("sft", "dpo"):
        if given := theirs[whose]:
            _check_names(given, whose, method)


def _check_names(given: Mapping[str, Any], whose: str, method: str | None) -> None:
    import trl

    cls = trl.DPOConfig if whose == "dpo" else trl.SFTConfig
    known = {field.name for field in dataclasses.fields(cls) if field.init}
    for name in given:
        if name in _ELSEWHERE:
            raise WherryError(f"--set {whose}.{name}: this is said otherwise here; {_ELSEWHERE[name]}")
        if name not in known:
            meant = did_you_mean(name, known)
            raise WherryError(f"--set {whose}.{name}: TRL's {cls.__name__} has no such argument{meant}")
        if method is not None and (method == "dpo") is not (whose == "dpo") and name not in _OF_TOKENIZER:
            raise WherryError(f"--set {whose}.{name}: the method is {method}, which has nothing of {cls.__name__}")


def trainer_arguments(
    options: Options, method: str, config: Config, sequence: int, run_dir: Path,
    *, cpu: bool, ranks: int, evaluates: bool,
) -> Any:  # fmt: skip
    """TRL's SFTConfig or DPOConfig."""
    import trl

    cls = trl.DPOConfig if method == "dpo" else trl.SFTConfig
    known = {field.name for field in dataclasses.fields(cls) if field.init}
    sizes = config.batch(ranks)
    packing = options.packing or method == "pretrain"
    values: dict[str, Any] = {
        "output_dir": str(run_dir / "checkpoints"),
        "per_device_train_batch_size": sizes.micro,
        "per_device_eval_batch_size": sizes.micro,
        "gradient_accumulation_steps": sizes.accumulation,
        "learning_rate": config.optimizer.params.get("lr") if config.optimizer is not None else None,
        "max_grad_norm": config.gradient_clipping,
        "lr_scheduler_type": "cosine",
        "bf16": config.bf16.enabled,
        "fp16": config.fp16.enabled,
        "seed": options.seed,
        "use_cpu": cpu,
        # Rows have this length already, unless they are packed to it.
        "max_length": sequence if packing or method == "dpo" else None,
        "packing": packing,
        # The engine recomputes, where the plan says so.
        "gradient_checkpointing": False,
        "activation_checkpointing": False,
        "logging_steps": options.log_interval or (1 if cpu else 10),
        "logging_nan_inf_filter": False,
        "eval_strategy": "steps" if evaluates else "no",
        "save_strategy": "no" if options.no_save else "steps",
        "save_total_limit": options.keep_last or 2,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": not cpu,
    }
    if method == "dpo":
        del values["packing"]
    if config.wherry.context_parallel > 1:
        values["packing_strategy"] = "wrapped"
        if packing:
            say("packing: a row may begin and end within documents, as ranks that share it know no borders in it")
    _, theirs = split(options)
    given = theirs["dpo" if method == "dpo" else "sft"]
    # Releases differ in what they have.
    values = {name: value for name, value in values.items() if name in known}
    try:
        return cls(**(values | given))
    except (TypeError, ValueError) as error:
        raise WherryError(f"finetune: TRL's {cls.__name__} does not take its arguments: {error}") from error


def set_length(args: Any, options: Options, rows: int, ranks: int) -> None:
    """How long to train, once it is known how many rows there are: packed ones are fewer."""
    of_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * ranks
    steps = options.steps or max(1, math.ceil((options.epochs or 1.0) * math.ceil(rows / of_step)))
    args.max_steps = steps
    args.warmup_steps = int(0.03 * steps) if options.warmup is None else options.warmup
    args.eval_steps = options.eval_interval or math.ceil(steps / EVALUATIONS)
    args.save_steps = options.save_interval or steps
