"""The loss scale of fp16, the norm of the gradients, and the one multiplier that unscales, averages and clips them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from wherry.errors import NonFiniteError, WherryError

if TYPE_CHECKING:
    from wherry.config.blocks import FP16

_FACTOR = 2.0


class LossScaleError(NonFiniteError):
    """The loss scale cannot fall further, and gradients still overflow."""


class LossScaler:
    """A loss scale, fixed or dynamic.

    A dynamic scale doubles after `window` steps in a row without overflow. It halves on an overflow, but only once
    `hysteresis - 1` overflows have been let pass; doubling gives that patience back, and with
    `consecutive_hysteresis` so does every step without overflow. The first `grace` good steps after the start and after
    an overflow are not counted. An overflow at the minimum is an error, unless it `stops_at_min` is False.

    >>> scaler = LossScaler(8.0, dynamic=True, hysteresis=1)
    >>> scaler.update(overflow=True)
    >>> scaler.scale
    4.0
    """

    def __init__(
        self,
        scale: float,
        *,
        dynamic: bool = False,
        window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_scale: float = 1.0,
        grace: int = 0,
        stops_at_min: bool = True,
    ) -> None:
        if scale <= 0 or (dynamic and scale < min_scale):
            raise WherryError(f"loss scale: expected more than 0 and at least the minimum {min_scale:g}, got {scale:g}")
        if window < 1 or hysteresis < 1:
            raise WherryError(f"loss scale: window and hysteresis must be 1 or more, got {window} and {hysteresis}")
        self.scale = float(scale)
        self.dynamic = dynamic
        self.window = window
        self.hysteresis = hysteresis
        self.consecutive_hysteresis = consecutive_hysteresis
        self.min_scale = float(min_scale)
        self.grace = grace
        self.stops_at_min = stops_at_min
        self._patience = hysteresis
        self._good_steps = -grace

    @classmethod
    def from_config(cls, settings: FP16, **timing: Any) -> LossScaler:
        """The scaler that a config's block `fp16` asks for; a scale fixed at 1 when fp16 is off.

        `timing` is of a dynamic one, and stands above what the block says.
        """
        if not settings.enabled:
            return cls(1.0)
        if settings.loss_scale > 0:
            return cls(settings.loss_scale)
        said = {
            "window": settings.loss_scale_window,
            "hysteresis": settings.hysteresis,
            "consecutive_hysteresis": settings.consecutive_hysteresis,
            "min_scale": settings.min_loss_scale,
        }
        return cls(2.0**settings.initial_scale_power, dynamic=True, **{**said, **timing})

    def update(self, overflow: bool) -> None:
        """Take in how a step went. Raises `LossScaleError` when the scale should fall below its minimum."""
        if not self.dynamic:
            return
        if not overflow:
            self._good_steps += 1
            if self.consecutive_hysteresis:
                self._patience = self.hysteresis
            if self._good_steps == self.window:
                self._good_steps = 0
                self._patience = self.hysteresis
                self.scale *= _FACTOR
            return
        self._good_steps = -self.grace
        if self._patience > 1:
            self._patience -= 1
            return
        if self.scale <= self.min_scale and self.stops_at_min:
            raise LossScaleError(
                f"gradients overflow although the loss scale is at its minimum, {self.min_scale:g}: the model itself "
                "gives inf or NaN. Look at the loss of the last steps; lower the learning rate, clip gradients "
                "(gradient_clipping), train in bf16, or lower fp16.min_loss_scale"
            )
        self.scale = max(self.scale / _FACTOR, self.min_scale)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: where the scale stands, not how it is configured."""
        return {"scale": self.scale, "patience": self._patience, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken. A fixed scale stays as it is configured."""
        if not self.dynamic:
            return
        self.scale = max(float(state["scale"]), self.min_scale)
        self._patience = min(int(state["patience"]), self.hysteresis)
        self._good_steps = min(int(state["good_steps"]), self.window - 1)


def norm_and_multiplier(total_squares: float, scale: float, max_norm: float) -> tuple[float, float]:
    """The norm of the gradients times `scale`, and `scale` lowered to keep that norm within `max_norm` (0: no limit).

    >>> norm_and_multiplier(25.0, scale=1.0, max_norm=0.0)
    (5.0, 1.0)
    """
    norm = math.sqrt(total_squares) * scale if total_squares >= 0 else math.nan
    if max_norm > 0:
        return norm, scale * min(1.0, max_norm / (norm + 1e-6)) if norm == norm else math.nan
    return norm, scale
