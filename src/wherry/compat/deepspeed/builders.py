"""`deepspeed.ops.op_builder`: nothing is built at first use here, so builders only say what there is."""

from __future__ import annotations

from typing import Any

from wherry.compat.deepspeed.parts import not_part_of_wherry

__all__ = ["CPUAdagradBuilder", "CPUAdamBuilder", "CPULionBuilder", "FusedAdamBuilder", "FusedLionBuilder", "OpBuilder"]


class OpBuilder:
    """An operation that DeepSpeed compiles. `present`: Wherry has its own, compiled at install."""

    NAME = ""
    present = False

    def is_compatible(self, verbose: bool = False) -> bool:
        return self.present

    def builder_available(self) -> bool:
        return self.present

    def absolute_name(self) -> str:
        return f"deepspeed.ops.{self.NAME}"

    def load(self, verbose: bool = False) -> Any:
        raise not_part_of_wherry(
            f"{type(self).__name__}().load()", "kernels are compiled at install and called by the optimizers themselves"
        )


class CPUAdamBuilder(OpBuilder):
    NAME, present = "cpu_adam", True


class CPUAdagradBuilder(OpBuilder):
    NAME, present = "cpu_adagrad", True


class CPULionBuilder(OpBuilder):
    NAME, present = "cpu_lion", True


class FusedAdamBuilder(OpBuilder):
    NAME, present = "fused_adam", True


class FusedLionBuilder(OpBuilder):
    NAME, present = "fused_lion", True


def __getattr__(name: str) -> Any:
    if not name.endswith("Builder"):
        raise AttributeError(f"module 'deepspeed.ops.op_builder' has no attribute {name!r}")
    return type(name, (OpBuilder,), {"NAME": name.removesuffix("Builder").lower()})
