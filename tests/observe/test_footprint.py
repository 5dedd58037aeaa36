"""Count the bytes of tensors, whichever thread frees them."""

from __future__ import annotations

from typing import Any

import torch

from wherry.observe.footprint import WORKING, Footprint


def test_a_storage_that_goes_while_another_one_is_counted() -> None:
    """Another thread, which updates or writes to disk, may free the storage at any moment."""

    class Live(dict[str, int]):
        def get(self, *given: Any) -> Any:
            found = super().get(*given)
            held.clear()
            return found

    with Footprint() as footprint:
        held = [torch.empty(8)]
        footprint._live = Live(footprint._live)
        kept = torch.empty(4)
        assert footprint.live == {WORKING: kept.nbytes}
