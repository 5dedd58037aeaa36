"""Every module of the alias can be imported, and what is not part of Wherry says so when it is used."""

from tests.forks import ENGINE, Forks

from wherry.compat.deepspeed.names import MODULES

# What scripts and frameworks reach for, by the module or class that has it.
NAMES = {
    "": "initialize init_distributed add_config_arguments init_inference tp_model_init DeepSpeedEngine DeepSpeedConfig "
    "DeepSpeedConfigError OnDevice PipelineModule zero ops comm dist checkpointing runtime utils accelerator "
    "checkpoint log_dist logger version __version__ __version_major__ __version_minor__ __version_patch__ __git_hash__ "
    "__git_branch__",
    "ops": "__compatible_ops__",
    "accelerator": "get_accelerator",
    "DeepSpeedEngine": "forward backward scale step zero_grad is_gradient_accumulation_boundary no_sync train eval "
    "set_gradient_accumulation_boundary coalesce_grad_reduction was_step_applied get_global_grad_norm get_lr get_mom "
    "get_type compile is_compiled destroy empty_partition_cache offload_states reload_states mpu global_rank "
    "local_rank world_size dp_world_size mp_world_size monitor config communication_data_type train_batch_size "
    "train_micro_batch_size_per_gpu gradient_accumulation_steps zero_optimization zero_optimization_stage "
    "zero_optimization_partition_gradients zero_optimization_partition_weights gradient_clipping fp16_enabled "
    "zero_gather_16bit_weights_on_model_save bfloat16_enabled steps_per_print set_train_batch_size "
    "set_train_micro_batch_size deepspeed_io get_batch_info save_checkpoint load_checkpoint save_16bit_model "
    "save_fp16_model _zero3_consolidated_16bit_state_dict _consolidated_16bit_state_dict module_state_dict "
    "load_module_state_dict train_batch",
    "zero": "Init GatheredParameters register_external_parameter unregister_external_parameter TiledLinear "
    "TiledLinearReturnBias ZeroParamStatus MiCS_Init unwrap_model_for_generation",
    "runtime.zero.offload_states": "get_state_devices",
    "runtime.zero.partition_parameters": "zero_wrapper_for_fp_tensor_constructor _orig_torch_arange get_accelerator "
    "ZeroParamStatus Init GatheredParameters",
    "runtime.zero.stage_1_and_2": "estimate_zero2_model_states_mem_needs_all_live "
    "estimate_zero2_model_states_mem_needs_all_cold estimate_zero2_model_states_mem_needs DeepSpeedZeroOptimizer",
    "runtime.zero.stage3": "estimate_zero3_model_states_mem_needs_all_live "
    "estimate_zero3_model_states_mem_needs_all_cold estimate_zero3_model_states_mem_needs "
    "DeepSpeedZeroOptimizer_Stage3",
    "runtime.zero.offload_config": "OffloadDeviceEnum OffloadStateTypeEnum",
    "runtime.utils": "see_memory_usage clip_grad_norm_",
    "runtime.lr_schedules": "VALID_LR_SCHEDULES WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest",
    "runtime.base_optimizer": "DeepSpeedOptimizer",
    "runtime.engine": "DeepSpeedEngine",
    "utils": "safe_get_full_fp32_param safe_set_full_fp32_param safe_get_full_grad safe_set_full_grad "
    "safe_get_full_optimizer_state safe_set_full_optimizer_state safe_get_local_fp32_param safe_set_local_fp32_param "
    "safe_get_local_grad safe_set_local_grad safe_get_local_optimizer_state safe_set_local_optimizer_state "
    "safe_update_full_grad_vectorized set_z3_leaf_modules unset_z3_leaf_modules get_z3_leaf_modules "
    "set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix unset_z3_leaf_modules_by_name "
    "unset_z3_leaf_modules_by_suffix z3_leaf_module z3_leaf_parameter RepeatingLoader logger log_dist "
    "instrument_w_nvtx groups is_initialized OnDevice zero_to_fp32",
    "utils.groups": "_get_data_parallel_group _get_data_parallel_rank _get_data_parallel_world_size "
    "_get_model_parallel_group _get_model_parallel_rank _get_model_parallel_world_size _get_sequence_parallel_group "
    "_get_sequence_parallel_rank _get_sequence_parallel_world_size _get_broadcast_src_rank "
    "_get_expert_parallel_group mpu initialize",
    "utils.zero_to_fp32": "get_fp32_state_dict_from_zero_checkpoint convert_zero_checkpoint_to_fp32_state_dict "
    "load_state_dict_from_zero_checkpoint get_model_state_file get_optim_files",
    "ops.adam": "DeepSpeedCPUAdam FusedAdam",
    "ops.adagrad": "DeepSpeedCPUAdagrad",
    "ops.lion": "DeepSpeedCPULion FusedLion",
    "ops.op_builder": "AsyncIOBuilder CPUAdamBuilder FusedAdamBuilder CPULionBuilder CPUAdagradBuilder",
    "comm": "init_distributed all_reduce all_reduce_coalesced all_gather all_gather_into_tensor all_gather_coalesced "
    "all_gather_object reduce_scatter reduce_scatter_tensor reduce_scatter_fn all_to_all all_to_all_single broadcast "
    "broadcast_object_list reduce gather scatter send recv isend irecv barrier monitored_barrier new_group get_rank "
    "get_world_size get_local_rank get_world_group get_global_rank ReduceOp is_initialized destroy_process_group "
    "log_summary configure",
    "checkpointing": "configure is_configured checkpoint non_reentrant_checkpoint reset get_cuda_rng_tracker "
    "model_parallel_cuda_manual_seed CheckpointFunction CudaRNGStatesTracker partition_activations_in_checkpoint "
    "set_num_layers",
    "checkpoint.utils": "clone_tensors_for_torch_save",
    "checkpoint.ds_to_universal": "main",
    "launcher.runner": "DEEPSPEED_ENVIRONMENT_NAME main",
    "moe.layer": "MoE",
    "runtime.sequence_parallel.ulysses_sp": "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter",
}

CHECK = (
    f"NAMES = {NAMES!r}"
    + """
import importlib, sys
import wherry.compat.deepspeed as c
c.install()
for name in sys.argv[1:]:
    importlib.import_module(name)
import deepspeed
from deepspeed.moe.layer import MoE
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder
class Mine(PipelineModule):
    pass
assert CPUAdamBuilder().is_compatible() and not AsyncIOBuilder().is_compatible()
for use in (MoE, Mine, AsyncIOBuilder().load, deepspeed.init_inference):
    try:
        use()
    except NotImplementedError as error:
        assert "is not part of Wherry; " in str(error), error
    else:
        raise AssertionError(use)
import torch
linear, x = torch.nn.Linear(8, 6), torch.ones(2, 8)
tiled = deepspeed.zero.TiledLinear(8, 6, in_splits=2, out_splits=3, init_linear=linear)
torch.testing.assert_close(tiled(x), linear(x))
assert deepspeed.accelerator.get_accelerator().current_device_name()
# Accelerate makes all host optimizers with the words of Adam.
for make in (deepspeed.ops.adagrad.DeepSpeedCPUAdagrad, deepspeed.ops.lion.DeepSpeedCPULion):
    make([{"params": list(linear.parameters())}], lr=0.1, weight_decay=0.0, adamw_mode=False)
groups = deepspeed.utils.groups
assert groups._get_model_parallel_world_size() == 1 and groups._get_model_parallel_group() is None
class Grid:
    get_tensor_model_parallel_world_size = staticmethod(lambda: 4)
    get_tensor_model_parallel_rank = staticmethod(lambda: 3)
    get_data_parallel_rank = staticmethod(lambda: 5)
groups.mpu = Grid
assert (groups._get_model_parallel_world_size(), groups._get_model_parallel_rank()) == (4, 3)
assert groups._get_data_parallel_rank() == 5 and groups._get_sequence_parallel_world_size() == 1
groups.initialize(ep_size=1)
assert groups.mpu is None and groups._get_data_parallel_rank() == 0
missing = []
for path, names in NAMES.items():
    try:
        owner = importlib.import_module(f"deepspeed.{path}".rstrip("."))
    except ModuleNotFoundError:
        owner = getattr(deepspeed, path)
    missing += [f"{path}.{name}" for name in names.split() if not hasattr(owner, name)]
assert not missing, missing
deepspeed.runtime.zero.stage3.estimate_zero3_model_states_mem_needs_all_cold(int(2.8e9), int(1e8), 8)
"""
)


def test_every_module_can_be_imported_and_absent_parts_refuse(tmp_path):
    names = [f"deepspeed.{module}".rstrip(".") for module in MODULES]
    assert len(names) > 50
    with Forks(*ENGINE) as forks:
        done = forks.run("-c", CHECK, *names, folder=tmp_path, launched=False)
    assert done.returncode == 0, done.stderr
    assert "2,800M parameters" in done.stdout


def test_a_leaf_is_not_cut_where_it_would_be_and_cuts_no_block():
    from torch import nn

    from wherry.compat.deepspeed.utils import set_z3_leaf_modules, unset_z3_leaf_modules
    from wherry.sharding.grouping import plan_units

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.experts = nn.Linear(4, 4), Experts()

    def units(model):
        return [plan.name for plan in plan_units(model)]

    alone = nn.ModuleDict({"embed": nn.Embedding(5, 4), "experts": Experts()})
    assert units(alone) == ["root", "experts.each.0", "experts.each.1", "experts.each.2"]
    assert len(set_z3_leaf_modules(alone, [Experts])) == 1
    assert units(alone) == ["root", "experts"]
    unset_z3_leaf_modules(alone, [Experts])
    assert len(units(alone)) == 4
    blocks = nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(2))})
    assert len(set_z3_leaf_modules(blocks, ["Experts"])) == 2
    assert units(blocks) == ["root", "blocks.0", "blocks.1"]
