"""Every name of the alias is where the table says, and what is not part of Wherry says so when it is used."""

from wherry.compat.deepspeed.names import MODULES

# Names that the table does not list: what they come from is looked up under another name, or made when asked for.
MADE = {
    "": "zero ops comm dist checkpointing runtime utils accelerator checkpoint moe version __version__ "
    "__version_major__ __version_minor__ __version_patch__ __git_hash__ __git_branch__",
    "zero": "TiledLinearReturnBias",
    "DeepSpeedEngine": "_zero3_consolidated_16bit_state_dict _consolidated_16bit_state_dict mpu",
    "utils": "groups zero_to_fp32",
    "utils.groups": "_get_data_parallel_group _get_data_parallel_rank _get_data_parallel_world_size "
    "_get_model_parallel_group _get_model_parallel_rank _get_model_parallel_world_size _get_sequence_parallel_group "
    "_get_sequence_parallel_rank _get_sequence_parallel_world_size _get_broadcast_src_rank "
    "_get_expert_parallel_group",
    "ops.op_builder": "AsyncIOBuilder",
    "comm": "all_reduce all_gather all_gather_into_tensor all_gather_object reduce_scatter reduce_scatter_tensor "
    "all_to_all all_to_all_single broadcast broadcast_object_list reduce gather scatter send recv isend irecv barrier "
    "monitored_barrier new_group destroy_process_group",
    "checkpoint.ds_to_universal": "main",
    "runtime.sequence_parallel.ulysses_sp": "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter",
}

CHECK = (
    f"MADE = {MADE!r}"
    + """
import importlib, pickle, sys
import wherry.compat.deepspeed as c
c.install()
for name in sys.argv[1:]:
    importlib.import_module(name)
import deepspeed
everything = {}
exec("from deepspeed import *", everything)
assert everything["ops"].adam and everything["runtime"].zero is everything["zero"]
assert {"accelerator", "comm", "utils", "initialize", "get_accelerator", "logger"} <= set(everything)
from deepspeed.moe.layer import MoE
from deepspeed.runtime.zero.config import ZeroStageEnum
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
from deepspeed.utils import z3_leaf_module
import deepspeed.utils.z3_leaf_module
assert deepspeed.utils.z3_leaf_module is z3_leaf_module and not z3_leaf_module(linear)
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
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for each in dir(module):
        getattr(module, each)
for path, names in MADE.items():
    try:
        owner = importlib.import_module(f"deepspeed.{path}".rstrip("."))
    except ModuleNotFoundError:
        owner = getattr(deepspeed, path)
    missing = [name for name in names.split() if not hasattr(owner, name)]
    assert not missing, (path, missing)
for name in ("nothing", "ops.nothing", "utils.groups.nothing", "ops.op_builder.nothing"):
    assert not hasattr(importlib.import_module(f"deepspeed.{name}".rpartition(".")[0]), "nothing")
copied = pickle.loads(pickle.dumps([deepspeed.DeepSpeedEngine, deepspeed.PipelineModule, ZeroStageEnum.weights]))
assert copied == [deepspeed.DeepSpeedEngine, deepspeed.PipelineModule, 3]
deepspeed.runtime.zero.stage3.estimate_zero3_model_states_mem_needs_all_cold(int(2.8e9), int(1e8), 8)
"""
)


def test_every_name_is_there_and_absent_parts_refuse(forks, tmp_path):
    names = [f"deepspeed.{module}".rstrip(".") for module in MODULES]
    assert len(names) > 50
    done = forks.run("-c", CHECK, *names, folder=tmp_path, launched=False)
    assert done.returncode == 0, done.stderr
    assert "2,800M parameters" in done.stdout


def test_a_leaf_is_not_cut_where_it_would_be_and_cuts_no_block():
    from torch import nn

    from wherry.compat.deepspeed.leaf_modules import set_z3_leaf_modules, unset_z3_leaf_modules
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
