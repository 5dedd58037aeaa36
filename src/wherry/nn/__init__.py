"""Layers, and the loss of a large vocabulary."""

from wherry.nn.cross_entropy import chunked_cross_entropy
from wherry.nn.gelu import GeluLinear
from wherry.nn.tiled import TiledLinear

__all__ = ["GeluLinear", "TiledLinear", "chunked_cross_entropy"]
