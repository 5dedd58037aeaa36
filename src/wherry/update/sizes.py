"""How much one update takes at a time: what a plan must know of it without torch."""

BATCH_NUMEL = 1 << 18
"""Flats together up to this many elements are updated in one call: below it, calling costs more than updating."""
