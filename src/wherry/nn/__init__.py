"""Layers."""

from wherry.nn.tiled import TiledLinear

__all__ = ["TiledLinear"]
