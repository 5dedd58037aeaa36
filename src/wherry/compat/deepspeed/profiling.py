"""Count a model's operations while it runs, and estimate the memory of its states by Wherry's own model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from wherry.observe.flops import FlopCount
from wherry.observe.memory import format_bytes
from wherry.placement import Placement, Tier
from wherry.plan.model_states import Cost, states

_COST = Cost.of("bf16", "adamw")
_UNITS = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3}


class FlopsProfiler:
    """A count of the operations between `start_profile` and `stop_profile`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._count = FlopCount()
        self._running = ExitStack()

    def start_profile(self) -> None:
        self._count = FlopCount()
        self._running.enter_context(self._count.phase("forward"))

    def stop_profile(self) -> None:
        self._running.close()

    def end_profile(self) -> None:
        self.stop_profile()
        self._count = FlopCount()

    def get_total_flops(self, as_string: bool = False) -> Any:
        return _shown(self._count.total, as_string)

    def get_total_macs(self, as_string: bool = False) -> Any:
        return _shown(self._count.total // 2, as_string, "MACs")

    def get_total_params(self, as_string: bool = False) -> Any:
        total = _shown(sum(map(_elements, self.model.parameters())), as_string)
        return total.replace("G", "B").strip() if as_string else total

    def print_model_profile(
        self, profile_step: int = 1, module_depth: int = -1, top_modules: int = 1, detailed: bool = True,
        output_file: str | None = None,
    ) -> None:  # fmt: skip
        """Stop, and print the count of each module, or where not `detailed` of the largest of each depth."""
        self.stop_profile()
        with open(output_file, "w", encoding="utf-8") if output_file else nullcontext() as file:
            print(self._count.table(module_depth, 0 if detailed else top_modules), file=file)


def _elements(parameter: Any) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())


def _shown(number: int, as_string: bool, of: str = "") -> Any:
    """
    >>> _shown(2097152, True, "MACs")
    '2.1 MMACs'
    """
    if not as_string:
        return number
    unit, size = next(((unit, size) for unit, size in _UNITS.items() if number >= size), ("", 1.0))
    return f"{round(number / size, 2):g} {unit}{of}"


def get_model_profile(
    model: nn.Module, input_shape: tuple[int, ...] | None = None, args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None, print_profile: bool = True, detailed: bool = True, module_depth: int = -1,
    top_modules: int = 1, warm_up: int = 1, as_string: bool = True, output_file: str | None = None,
    ignore_modules: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Run forwards and count the last; returns `(flops, macs, parameters)`."""
    like = next(model.parameters(), torch.empty(0))
    inputs = [like.new_ones(input_shape)] if input_shape is not None else args or ()
    profiler = FlopsProfiler(model)
    with torch.no_grad():
        for _ in range(warm_up):
            model(*inputs, **(kwargs or {}))
        profiler.start_profile()
        model(*inputs, **(kwargs or {}))
        profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(1, module_depth, top_modules, detailed, output_file)
    totals = (profiler.get_total_flops, profiler.get_total_macs, profiler.get_total_params)
    return tuple(total(as_string) for total in totals)


# --- memory of states ---


def _print_table(
    stage: int, total_params: float, largest_layer_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:  # fmt: skip
    """Print the needs of a model of so many parameters, by where its states rest."""
    gpus, nodes, factor = num_gpus_per_node, num_nodes, additional_buffer_factor
    largest = int(largest_layer_params) if stage == 3 else 0
    in_layer = f", {largest / 1e6:,.0f}M in the largest layer" if stage == 3 else ""
    print(f"Memory of model states at ZeRO-{stage}, mixed precision and Adam,")
    print(f"for {total_params / 1e6:,.0f}M parameters{in_layer},")
    print(f"on {nodes} node{'s' * (nodes > 1)} with {gpus} GPU{'s' * (gpus > 1)} each:")
    print(f"{'host, per node':>16} | {'per GPU':>12} | where states rest")
    tiers = [(Tier.HOST, Tier.DEVICE), (Tier.DEVICE, Tier.DEVICE)]
    for optimizer, weights in [(Tier.HOST, Tier.HOST), *tiers] if stage == 3 else tiers:
        placement = Placement.of_stage(stage, optimizer=optimizer, parameters=weights)
        needs = states(int(total_params), placement, gpus * nodes, _COST).by_tier(placement)
        host = int(needs[Tier.HOST] * gpus * factor)
        # A GPU holds the gathered weights of one layer at a time.
        device = needs[Tier.DEVICE] + largest * _COST.parameters
        rest = f"optimizer: {optimizer.value}, parameters: {weights.value}"
        print(f"{format_bytes(host):>16} | {format_bytes(device):>12} | {rest}")
    print("(activations come on top: see `wherry plan`)")


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the table of stage 2, where no layer is gathered."""
    _print_table(2, total_params, 0, num_gpus_per_node, num_nodes, additional_buffer_factor)


def _all_live(stage: int, model: nn.Module, *counts: Any, **named: Any) -> None:
    """Print the table of a model."""
    largest = max((sum(map(_elements, module.parameters(recurse=False))) for module in model.modules()), default=0)
    _print_table(stage, sum(map(_elements, model.parameters())), largest, *counts, **named)


estimate_zero3_model_states_mem_needs_all_cold = partial(_print_table, 3)
estimate_zero2_model_states_mem_needs_all_live = partial(_all_live, 2)
estimate_zero3_model_states_mem_needs_all_live = partial(_all_live, 3)
