"""KV caches of Transformers models, to which a block that is recomputed in backward would append a second time."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from wherry.errors import WherryError
from wherry.fake import faking
from wherry.observe.log import say


def _class_of(module: str, name: str) -> Any:
    """A class of Transformers for isinstance(), without an import: no object is one where its module is not loaded."""
    return getattr(sys.modules.get(f"transformers.{module}"), name, ())


class KeyValueCaches:
    """`use_cache` in a model's configs, and in those of models within: false where gradients are recorded."""

    def __init__(self, model: nn.Module) -> None:
        base = _class_of("modeling_utils", "PreTrainedModel")
        self._configs: list[Any] = [each.config for each in model.modules() if isinstance(each, base)]
        self._kind = _class_of("cache_utils", "Cache")
        self._off: list[Any] = []
        self._on = True
        self.turn(on=False)
        if self._off and not faking():
            say(
                "activation_checkpointing: recomputation would append to the KV cache again, so config.use_cache is "
                "false in forwards with gradients; others, generate() and the model after close() have it as it was"
            )

    def turn(self, *, on: bool) -> None:
        """Set the configs for forwards to come."""
        if on is self._on:
            return
        self._on = on
        if not on:
            self._off = [config for config in self._configs if getattr(config, "use_cache", False)]
        for config in self._off:
            config.use_cache = on

    def refuse(self, unit: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a cache among the arguments of a unit that will be recomputed."""
        if any(isinstance(value, self._kind) for value in (*args, *kwargs.values())):
            raise WherryError(
                f"activation_checkpointing: {unit} was called with a KV cache, to which its recomputation would append "
                'again; leave use_cache=True and past_key_values out of forwards with gradients, or set "policy": '
                '"none"'
            )
