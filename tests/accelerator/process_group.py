"""The process group backend "emulated_ccl": collectives of device memory that run late, in a stream of the group's.

init_process_group("cpu:gloo,emulated:emulated_ccl") takes it once this module is imported.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from tests.accelerator import emulated

NAME = "emulated_ccl"


def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> object:
    return emulated.device_lib.collectives(dist.ProcessGroupGloo(store, rank, size, timeout))


dist.Backend.register_backend(NAME, create, devices=[emulated.NAME])
