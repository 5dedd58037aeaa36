"""Which tensors travel together, by their elements, and how over gloo: what a plan must know of it without torch."""

SMALL = 1 << 19
"""A tensor of up to so many is small."""

TOGETHER = 1 << 22
"""At most so many travel together."""

EXCHANGED = 1 << 24
"""Over gloo an exchange receives up to what is summed: of more bytes a reduce-scatter is an all-reduce in place."""

SWAPPED = 1 << 21
"""Over gloo two ranks sum so many bytes by an exchange, which receives as much; of more in place."""

SWAPPED_FROM = 1 << 12
"""Of less nothing is sooner there, and what is not of one kind meets no other: ranks apart, at a norm and at a unit's
reduction, are told of it, where two exchanges of other sizes would end the process."""

ABREAST = 2
"""gloo has so many threads: of more gathers at once none is there sooner."""
