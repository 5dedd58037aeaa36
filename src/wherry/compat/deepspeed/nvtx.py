"""`deepspeed.utils.nvtx`: a function of the script's, as a span of the device's profiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from wherry.compat.deepspeed.accelerator import get_accelerator

Function = TypeVar("Function", bound=Callable[..., Any])

# Scripts set it to False.
enable_nvtx = True
DEEPSPEED_NVTX_DOMAIN = "DeepSpeed"


def is_compiling() -> bool:
    return torch.compiler.is_compiling()


def instrument_w_nvtx(func: Function) -> Function:
    """`func`, whose calls are spans, where torch does not compile them."""

    @functools.wraps(func)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not enable_nvtx or is_compiling():
            return func(*args, **kwargs)
        accelerator = get_accelerator()
        domain = {"domain": DEEPSPEED_NVTX_DOMAIN} if getattr(accelerator, "supports_nvtx_domain", False) else {}
        accelerator.range_push(func.__qualname__, **domain)
        try:
            return func(*args, **kwargs)
        finally:
            accelerator.range_pop(**domain)

    return wrapped  # type: ignore[return-value]
