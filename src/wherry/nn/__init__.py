"""Layers."""

from wherry.nn.gelu import GeluLinear
from wherry.nn.tiled import TiledLinear

__all__ = ["GeluLinear", "TiledLinear"]
