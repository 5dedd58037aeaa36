"""What a model takes: its operations, counted while it runs, and the memory of its states, as tables.

Memory is from Wherry's own model of it.
"""

from __future__ import annotations

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


class FlopsProfiler:
    """Counts between `start_profile` and `stop_profile`."""

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model = model
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self._count = FlopCount()
        self._running = ExitStack()

    def start_profile(self, ignore_list: Any = None) -> None:
        self._count = FlopCount()
        self._running.enter_context(self._count.phase("forward"))
        self.started = True

    def stop_profile(self) -> None:
        self._running.close()

    def reset_profile(self) -> None:
        self._count = FlopCount()

    def end_profile(self) -> None:
        self.stop_profile()
        self.reset_profile()
        self.started = False

    def get_total_flops(self, as_string: bool = False) -> Any:
        total = self._count.total
        return number_to_string(total) if as_string else total

    def get_total_macs(self, as_string: bool = False) -> Any:
        total = self._count.total // 2
        return macs_to_string(total) if as_string else total

    def get_total_params(self, as_string: bool = False) -> Any:
        total = sum(getattr(p, "ds_numel", p.numel()) for p in self.model.parameters())
        return params_to_string(total) if as_string else total

    def get_total_duration(self, as_string: bool = False) -> Any:
        seconds = self._count.seconds
        return number_to_string(seconds) + "s" if as_string else seconds

    def print_model_profile(
        self, profile_step: int = 1, module_depth: int = -1, top_modules: int = 1, detailed: bool = True,
        output_file: str | None = None,
    ) -> None:  # fmt: skip
        self.stop_profile()  # what is under way is counted to here
        with open(output_file, "w", encoding="utf-8") if output_file else nullcontext() as file:
            if (engine := self.ds_engine) is not None:
                replicas = engine.dp_world_size or getattr(engine, "seq_dp_world_size", None)
                print(f"world size: {engine.world_size}\ndata parallel size: {replicas}", file=file)
                print(f"model parallel size: {engine.mp_world_size}", file=file)
            print(self._count.table(depth=module_depth), file=file)


class EngineProfile(FlopsProfiler):
    """What an engine has counted of the step that its config's `flops_profiler` names: the forward, as there."""

    def __init__(self, engine: Any, count: FlopCount | None) -> None:
        super().__init__(engine.module, engine)
        self._count = count or FlopCount()
        self.flops = self._count.phases["forward"]
        self.macs = self.flops // 2
        self.params = self.get_total_params()


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """
    >>> number_to_string(2097152)
    '2.1 M'
    """
    sizes = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}
    if units is None:
        units = next((unit for unit, size in sizes.items() if num >= size), "u") if num else ""
    return f"{round(num / sizes.get(units, 1.0), precision):g} {units}"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    return number_to_string(macs, units, precision) + "MACs"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    return number_to_string(params_num, "G" if units == "B" else units, precision).replace("G", "B").strip()


def get_model_profile(
    model: nn.Module, input_shape: tuple[int, ...] | None = None, args: Any = (), kwargs: Any = None,
    print_profile: bool = True, detailed: bool = True, module_depth: int = -1, top_modules: int = 1,
    warm_up: int = 1, as_string: bool = True, output_file: str | None = None, ignore_modules: Any = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:  # fmt: skip
    """`(flops, macs, parameters)` of one forward."""
    like = next(model.parameters(), torch.empty(0))
    arguments = [like.new_ones(input_shape)] if input_shape is not None else list(args)
    profiler = FlopsProfiler(model)
    run = model.generate if mode == "generate" else model
    with torch.no_grad():
        for _ in range(warm_up):
            run(*arguments, **(kwargs or {}))  # type: ignore[operator]
        profiler.start_profile()
        run(*arguments, **(kwargs or {}))  # type: ignore[operator]
        profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(module_depth=module_depth, output_file=output_file)
    return (
        profiler.get_total_flops(as_string),
        profiler.get_total_macs(as_string),
        profiler.get_total_params(as_string),
    )


# --- memory of states ---


def _needs(
    stage: int, parameters: int, layer: int, gpus: int, nodes: int, buffer_factor: float, optimizer: Tier, weights: Tier
) -> tuple[int, int, int]:
    """Bytes on the host of a node, on each GPU with the largest layer gathered, and of that layer alone."""
    placement = Placement.of_stage(stage, optimizer=optimizer, parameters=weights)
    tiers = states(int(parameters), placement, gpus * nodes, _COST).by_tier(placement)
    gathered = int(layer) * _COST.parameters
    return int(tiers[Tier.HOST] * gpus * buffer_factor), tiers[Tier.DEVICE] + gathered, gathered


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Bytes of states in the host memory of a node, and on each GPU."""
    gpus, nodes, optimizer = num_gpus_per_node, num_nodes, Tier.HOST if cpu_offload else Tier.DEVICE
    return _needs(2, total_params, 0, gpus, nodes, additional_buffer_factor, optimizer, Tier.DEVICE)[:2]


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """The same, and as the third the bytes of the largest layer, gathered: those of the GPU have it in them.

    `zero_init` says how the model is built; what training then keeps does not depend on it.
    """
    gpus, nodes, optimizer = num_gpus_per_node, num_nodes, Tier.HOST if cpu_offload else Tier.DEVICE
    weights = Tier.HOST if cpu_offload and cpu_offload_params else Tier.DEVICE
    factor = additional_buffer_factor
    return _needs(3, total_params, largest_layer_params, gpus, nodes, factor, optimizer, weights)


def _print_table(
    stage: int,
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the table of a model of so many parameters."""
    gpus, nodes, factor = num_gpus_per_node, num_nodes, additional_buffer_factor
    print(f"Memory of model states at ZeRO-{stage}, mixed precision and Adam,")
    in_layer = f", {largest_layer_params / 1e6:,.0f}M in the largest layer" if stage == 3 else ""
    print(f"for {total_params / 1e6:,.0f}M parameters{in_layer},")
    print(f"on {nodes} node{'s' * (nodes > 1)} with {gpus} GPU{'s' * (gpus > 1)} each:")
    print(f"{'host, per node':>16} | {'per GPU':>12} | where states rest")
    places = [(Tier.HOST, Tier.DEVICE), (Tier.DEVICE, Tier.DEVICE)]
    for optimizer, weights in [(Tier.HOST, Tier.HOST), *places] if stage == 3 else places:
        host, device, _ = _needs(stage, total_params, largest_layer_params, gpus, nodes, factor, optimizer, weights)
        rest = f"optimizer: {optimizer.value}, parameters: {weights.value}"
        print(f"{format_bytes(host):>16} | {format_bytes(device):>12} | {rest}")
    print("(activations come on top: see `wherry plan`)")


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the table of a model of so many parameters."""
    _print_table(2, total_params, 0, num_gpus_per_node, num_nodes, additional_buffer_factor)


estimate_zero3_model_states_mem_needs_all_cold = partial(_print_table, 3)


def _all_live(
    stage: int,
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the table of a model that is there."""
    total = sum({p: getattr(p, "ds_numel", p.numel()) for p in model.parameters()}.values())
    layers = ([getattr(p, "ds_numel", p.numel()) for p in m.parameters(recurse=False)] for m in model.modules())
    largest = max(map(sum, layers), default=0) if stage == 3 else 0
    _print_table(stage, total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor)


estimate_zero2_model_states_mem_needs_all_live = partial(_all_live, 2)
estimate_zero3_model_states_mem_needs_all_live = partial(_all_live, 3)
