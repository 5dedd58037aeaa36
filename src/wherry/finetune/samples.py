"""What the model says to a few prompts of the evaluation rows: before, during and after the training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from wherry.engine import Engine
from wherry.finetune.data import Prompt

NEW_TOKENS = 64


class SampleAnswers:
    """Answers prompts by the model as it is. All ranks answer all of them, as its weights may be shared out."""

    def __init__(self, prompts: Sequence[Prompt], tokenizer: Any, sequence: int, file: Path | None) -> None:
        self.prompts, self.tokenizer, self.file = list(prompts), tokenizer, file
        self.sequence = sequence

    def take(self, engine: Engine, step: int) -> list[tuple[str, str]]:
        """The likeliest answers of at most so many tokens, all at once."""
        if not self.prompts:
            return []
        model: Any = engine.module
        was_training = model.training
        model.eval()
        try:
            ids, mask = self._batch(engine.device)
            with torch.no_grad():
                written = model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    max_new_tokens=NEW_TOKENS,
                    do_sample=False,
                    use_cache=True,
                    pad_token_id=self.tokenizer.pad_token_id,
                    eos_token_id=self._ends(model),
                )
        finally:
            model.train(was_training)
        answers = self.tokenizer.batch_decode(written[:, ids.shape[1] :], skip_special_tokens=True)
        found = [(prompt.text, answer.strip()) for prompt, answer in zip(self.prompts, answers, strict=True)]
        if self.file is not None:
            with open(self.file, "a", encoding="utf-8") as file:
                for prompt, (text, answer) in zip(self.prompts, found, strict=True):
                    row = {"step": step, "prompt": text, "answer": answer, "expected": prompt.answer}
                    file.write(json.dumps(row) + "\n")
        return found

    def _ends(self, model: Any) -> list[int] | None:
        told = getattr(model.generation_config, "eos_token_id", None)
        found = {self.tokenizer.eos_token_id, *(told if isinstance(told, list) else [told])} - {None}
        return sorted(found) or None

    def _batch(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The prompts side by side, their ends together; of a long one the end."""
        rows = [prompt.ids[-max(1, self.sequence - NEW_TOKENS) :] for prompt in self.prompts]
        longest = max(map(len, rows))
        ids = torch.full((len(rows), longest), self.tokenizer.pad_token_id or 0)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, longest - len(row) :] = torch.tensor(row)
            mask[number, longest - len(row) :] = 1
        return ids.to(device), mask.to(device)
