"""`deepspeed.utils.zero_to_fp32`: the names, for frameworks that import them."""

from __future__ import annotations

from typing import Any

from wherry.compat.deepspeed.parts import not_part_of_wherry

_INSTEAD = "checkpoints are safetensors: load one into an engine of any size, and call engine.save_16bit_model(folder)"


def _refuse(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> Any:
        raise not_part_of_wherry(f"zero_to_fp32.{name}", _INSTEAD)

    refuse.__name__ = name
    return refuse


get_fp32_state_dict_from_zero_checkpoint = _refuse("get_fp32_state_dict_from_zero_checkpoint")
convert_zero_checkpoint_to_fp32_state_dict = _refuse("convert_zero_checkpoint_to_fp32_state_dict")
load_state_dict_from_zero_checkpoint = _refuse("load_state_dict_from_zero_checkpoint")
get_model_state_file = _refuse("get_model_state_file")
get_optim_files = _refuse("get_optim_files")
main = _refuse("main")
