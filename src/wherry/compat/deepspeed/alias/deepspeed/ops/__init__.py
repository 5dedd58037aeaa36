from deepspeed.ops import adagrad, adam, lion, op_builder

__compatible_ops__ = {"cpu_adam": True, "cpu_adagrad": True, "cpu_lion": True, "fused_adam": True, "fused_lion": True}
