from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

LOADED = "tests.accelerator.plugin" in sys.modules

# A process that has an accelerator is unlike others: these tests have their own run, with the plugin.
collect_ignore_glob = [] if LOADED else ["test_*.py"]

if LOADED:
    import torch
    from tests.accelerator import emulated

    @pytest.fixture(autouse=True)
    def fresh_device(request: pytest.FixtureRequest) -> Iterator[None]:
        """Reset the seed, the limits and the errors of the test before."""
        emulated.take_failure()
        emulated.seed(0)
        emulated.lateness(0.6)
        emulated.poison_targets(True)
        emulated.limit(None)
        emulated.fail_after(None)
        torch.accelerator.reset_peak_memory_stats()
        yield
        emulated.limit(None)
        emulated.fail_after(None)
        # Raise the error of a late kernel that nothing has waited for.
        torch.accelerator.synchronize()
