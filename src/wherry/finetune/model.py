"""The model of a fine-tuning: where it comes from, its adapters, and the folder that it ends in."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry.config.problems import did_you_mean
from wherry.errors import WherryError
from wherry.integrations.bits import in_bits, left_wide
from wherry.integrations.model_folder import FINISHED, read_model
from wherry.observe.log import logger

if TYPE_CHECKING:
    import torch

    from wherry.engine import Engine

# Short names of what people set most.
_SHORT = {"alpha": "lora_alpha", "dropout": "lora_dropout", "target": "target_modules", "modules": "target_modules"}


def lora_config(text: str, more: Mapping[str, Any]) -> Any:
    """PEFT's config from `r=16,alpha=32`, and from what `--set lora.` says."""
    import peft

    values: dict[str, Any] = {"r": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise WherryError(f"--lora: expected NAME=VALUE, like r=16, got {part!r}")
        values[_SHORT.get(name.strip(), name.strip())] = _value(value.strip())
    values |= {_SHORT.get(name, name): value for name, value in more.items()}
    known = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    for name in values:
        if name not in known:
            raise WherryError(f"--lora: PEFT's LoraConfig has no {name}{did_you_mean(name, known | set(_SHORT))}")
    values.setdefault("lora_alpha", 2 * values["r"] if isinstance(values["r"], int) else 32)
    try:
        return peft.LoraConfig(**values)
    except (TypeError, ValueError) as error:
        raise WherryError(f"--lora: {error}") from None


def _value(text: str) -> Any:
    """A number, true or false, several names joined by +, or text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    if "+" in text:
        return text.split("+")
    return {"true": True, "false": False}.get(text.lower(), text)


def load(folder: Path, dtype: torch.dtype, name: str, bits: int | None = None) -> Any:
    """The model on the meta device, which knows by which name it was asked for."""
    import transformers

    model = read_model(folder, dtype, "finetune", bits)
    if bits is not None and (wide := left_wide(model)) > (coded := in_bits(model)) // 20:
        logger.warning(
            "%d weights of %s stay as they are, and %d are held in %d bits: what is no linear layer of its own, as "
            "experts, is not quantized", wide, folder, coded, bits,
        )  # fmt: skip
    model.config._name_or_path = model.name_or_path = name
    model.config.use_cache = False
    if (folder / "generation_config.json").exists():
        try:
            model.generation_config = _valid(transformers.GenerationConfig.from_pretrained(folder))
        except Exception as error:
            raise WherryError(f"finetune: {folder / 'generation_config.json'} cannot be read: {error}") from error
    return model


def _valid(config: Any) -> Any:
    """As it can be saved again: published ones say how to draw, and not that it is to be drawn."""
    try:
        config.validate(strict=True)
    except ValueError:
        config.do_sample = True
        config.validate(strict=True)
    return config


# At the end.


def write(
    engine: Engine, trainer: Any, tokenizer: Any, run_dir: Path, dtype: torch.dtype, card: Callable[[], str]
) -> Path:
    """Write the finished model, or its adapter, as Transformers and PEFT load it; every rank calls it.

    The folder gets its name once it is whole.
    """
    from wherry.checkpoint.errors import on_first

    folder, partial = run_dir / FINISHED, run_dir / f".{FINISHED}.partial"
    chief, comm = engine.comm.rank == 0, engine.comm
    on_first(comm, f"writing {folder}", lambda: shutil.rmtree(partial, ignore_errors=True))
    model: Any = engine.module
    if hasattr(model, "peft_config"):
        trainer.save_model(str(partial))
    elif _is_converted(model):
        # Transformers has these weights under other names and in other shapes in files than in memory.
        state = engine.consolidated_state_dict(dtype)
        if chief:
            model.save_pretrained(partial, state_dict=state)
    else:
        engine.save_16bit_model(partial, dtype=dtype)

    def finish() -> None:
        if not hasattr(model, "peft_config"):
            model.config.dtype = dtype
            model.config.use_cache = True
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(partial)
            if model.can_generate():
                model.generation_config.save_pretrained(partial)
        (partial / "training_args.bin").unlink(missing_ok=True)
        tokenizer.save_pretrained(partial)
        (partial / "README.md").write_text(card(), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)

    on_first(comm, f"writing {folder}", finish)
    return folder


def _is_converted(model: Any) -> bool:
    from transformers.conversion_mapping import get_model_conversion_mapping

    return bool(get_model_conversion_mapping(model, add_legacy=False))
