"""`deepspeed.profiling.flops_profiler`: operations of a model, counted while it runs."""

from __future__ import annotations

from typing import Any

from torch import nn

from wherry.observe.flops import FlopCount


class FlopsProfiler:
    """Counts between `start_profile` and `stop_profile`."""

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model = model
        self._count: FlopCount | None = None
        self._running: Any = None

    def start_profile(self, ignore_list: Any = None) -> None:
        self._count = FlopCount(self.model)
        self._count.__enter__()

    def stop_profile(self) -> None:
        if self._count is not None:
            self._count.__exit__(None, None, None)

    def end_profile(self) -> None:
        self._count = None

    def reset_profile(self) -> None:
        self._count = None

    def get_total_flops(self, as_string: bool = False) -> Any:
        total = self._count.total if self._count is not None else 0
        return f"{total / 1e9:.2f} G" if as_string else total

    def get_total_macs(self, as_string: bool = False) -> Any:
        total = (self._count.total if self._count is not None else 0) // 2
        return f"{total / 1e9:.2f} GMACs" if as_string else total

    def get_total_params(self, as_string: bool = False) -> Any:
        total = sum(p.numel() for p in self.model.parameters())
        return f"{total / 1e6:.2f} M" if as_string else total

    def get_total_duration(self, as_string: bool = False) -> Any:
        seconds = self._count.seconds if self._count is not None else 0.0
        return f"{seconds * 1e3:.2f} ms" if as_string else seconds

    def print_model_profile(
        self, profile_step: int = 1, module_depth: int = -1, top_modules: int = 1, detailed: bool = True,
        output_file: str | None = None,
    ) -> None:  # fmt: skip
        text = self._count.table(depth=module_depth) if self._count is not None else "nothing was profiled"
        if output_file:
            with open(output_file, "w", encoding="utf-8") as file:
                file.write(text + "\n")
        else:
            print(text)


def get_model_profile(
    model: nn.Module, input_shape: tuple[int, ...] | None = None, args: Any = (), kwargs: Any = None,
    print_profile: bool = True, detailed: bool = True, module_depth: int = -1, top_modules: int = 1,
    warm_up: int = 1, as_string: bool = True, output_file: str | None = None, ignore_modules: Any = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:  # fmt: skip
    """`(flops, macs, parameters)` of one forward."""
    import torch

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
