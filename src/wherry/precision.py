"""What a forward computes in, by the config: autocast around it, and the type of what it is given."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from wherry.sharding.autograd import with_tensors

if TYPE_CHECKING:
    from wherry.config import Config


class Precision:
    """One engine's. `autocast()` is entered around each forward; `casts_inputs` says whether `cast` is needed."""

    def __init__(self, config: Config, device: torch.device) -> None:
        dtype = config.autocast_dtype()
        self.autocast: Callable[[], AbstractContextManager[Any]] = (
            nullcontext if dtype is None else partial(torch.autocast, device.type, dtype)
        )
        self.casts_inputs = config.fp16.enabled and config.fp16.auto_cast

    def cast(self, inputs: Any) -> Any:
        """The same with all floating point tensors in fp16."""
        return with_tensors(inputs, lambda tensor: tensor.half() if tensor.is_floating_point() else tensor)
