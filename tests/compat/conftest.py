"""Fixtures of the tests of the alias."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from wherry.compat.deepspeed import engine


@pytest.fixture(autouse=True)
def no_process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let `initialize` start no group of torch.distributed, for ranks are threads; destroy a group that a test made."""
    monkeypatch.setattr(engine, "init_distributed", lambda **_: None)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
