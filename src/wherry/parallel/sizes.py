"""Which tensors travel together, by their elements: what a plan must know of it without torch."""

SMALL = 1 << 19
"""A tensor of up to so many is small."""

TOGETHER = 1 << 22
"""At most so many travel together."""
