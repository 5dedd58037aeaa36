from wherry.compat.deepspeed.tiling import TiledLinear, TiledLinearReturnBias
