"""Precision: `fp16`, `bf16`, `torch_autocast` and `data_types`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from wherry.config.fields import Block, Dtype, Flag, Integer, Number, Text, key, renamed, to_dtype


class FP16(Block):
    enabled: Flag = key(False, "Working weights in fp16, with a loss scale and fp32 master weights.")
    auto_cast: Flag = key(False, "Cast the floating-point inputs of the model to fp16.")
    loss_scale: Number = key(0.0, "A fixed loss scale; 0 means dynamic.", ge=0)
    initial_scale_power: Integer = key(16, "The dynamic loss scale starts at 2 to this power.", ge=0, le=126)
    loss_scale_window: Integer = key(1000, "Steps without overflow after which the loss scale doubles.", ge=1)
    hysteresis: Integer = key(2, "Overflows before the loss scale is halved.", ge=1)
    consecutive_hysteresis: Flag = key(False, "A step without overflow restores the full hysteresis.")
    min_loss_scale: Number = key(1.0, "The dynamic loss scale does not fall below this.", gt=0)
    fp16_master_weights_and_grads: Flag = key(False, "Master weights in fp16. true is refused: they are fp32.")


class BF16(Block):
    enabled: Flag = key(False, "Working weights in bf16, with fp32 master weights and no loss scale.")
    immediate_grad_update: Flag = key(
        False,
        "Accumulate each gradient as it comes.",
        inert="gradients are always accumulated as they come",
        met=True,
    )
    check_grad_overflow: Flag = key(
        True, "Skip a step whose gradients hold inf or NaN; false is the same as `wherry.nonfinite: ignore`."
    )
    bf16_master_weights_and_grads: Flag = key(
        False, "Master weights in bf16. true is refused: they are fp32, or wherry.master split."
    )
    bf16_optimizer_states: Flag = key(False, 'Moments in bf16; the same as "wherry": {"state_dtype": "bf16"}.')
    check_overflow: Any = renamed("check_grad_overflow", "Another spelling.")


class TorchAutocast(Block):
    enabled: Flag = key(
        False,
        "Run the engine's forward under torch.autocast. Weights, gradients and optimizer state keep their own types.",
    )
    dtype: Annotated[Literal["bf16", "fp16"], BeforeValidator(to_dtype)] = key(
        "bf16", "The type that autocast casts to. fp16 scales the loss as torch.amp.GradScaler does by default."
    )
    lower_precision_safe_modules: list[Text] | None = key(
        None,
        "Module classes whose gradients and weights travel in the lower precision.",
        inert="weights travel in their own type, and gradients in that or in communication_data_type",
    )


class DataTypes(Block):
    grad_accum_dtype: Dtype | None = key(
        None, "The type in which gradients are accumulated over micro-batches. Unset: that of the working weights."
    )
    param_dtype: Dtype | None = key(
        None, "The type of the working weights, where neither fp16 nor bf16 says it. Unset: as the model has them."
    )
    buffer_dtype: Dtype | None = key(
        None, "The type of the model's floating-point buffers. Unset: as the model has them."
    )
