"""TRL's trainers on the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from wherry.integrations.transformers import WherryMixin


class _OnEngine(WherryMixin):
    """A checkpoint is the engine's alone: weights in another form are written when the run has ended."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if getattr(self.model, "is_quantized", False) and self._wherry_config.working_dtype() is None:
            for parameter in self.model.parameters():
                if parameter.requires_grad:  # TRL has made them bf16, whatever the run computes in
                    parameter.data = parameter.data.float()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not _internal_call:
            super().save_model(output_dir, _internal_call)

    def is_last(self, start: Path) -> bool:
        """Whether a checkpoint is of the last step."""
        return _state_in(start).global_step >= self.args.max_steps

    def restore(self, start: Path) -> None:
        """Be where a checkpoint was made, without training from there."""
        self.state = _state_in(start)
        self._start_to_train()
        self._load(str(start))

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """The run's own is written with the finished model."""


def _state_in(start: Path) -> TrainerState:
    return TrainerState.load_from_json(str(start / TRAINER_STATE_NAME))


def trainer_class(method: str) -> type[Any]:
    import trl

    base = trl.DPOTrainer if method == "dpo" else trl.SFTTrainer
    return type(f"Wherry{base.__name__}", (_OnEngine, base), {})
