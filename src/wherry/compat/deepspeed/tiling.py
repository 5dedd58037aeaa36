"""`deepspeed.zero.TiledLinear`: `wherry.nn.TiledLinear` with DeepSpeed's arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from wherry.compat.deepspeed.parts import absent, not_part_of_wherry
from wherry.nn.tiled import TiledLinear as WherryTiledLinear

__all__ = ["TiledLinear", "TiledLinearReturnBias"]


class TiledLinear(WherryTiledLinear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Any = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        if input_is_already_split or not combine_out_splits or linear_cls is not nn.Linear:
            raise not_part_of_wherry(
                "TiledLinear with split inputs or outputs, or of another class", "use whole tensors and nn.Linear"
            )
        super().__init__(in_features, out_features, in_splits, out_splits, bias, **kwargs)
        if init_linear is not None:
            self.copy_params_from(init_linear)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        self.load_state_dict(other.state_dict())


TiledLinearReturnBias = absent("deepspeed.zero.TiledLinearReturnBias", "use TiledLinear, and add the bias outside")
