"""Every name of the alias is where the table says, and what is not part of Wherry says so when it is used."""

from wherry.compat.deepspeed.names import MODULES

# Names that the table does not list: what they come from is looked up under another name, or made when asked for.
MADE = {
    "": "zero ops comm dist checkpointing runtime utils accelerator checkpoint moe version __version__ "
    "__version_major__ __version_minor__ __version_patch__ __git_hash__ __git_branch__",
    "zero": "TiledLinearReturnBias",
    "DeepSpeedEngine": "_zero3_consolidated_16bit_state_dict _consolidated_16bit_state_dict mpu",
    "utils": "groups zero_to_fp32",
    "utils.groups": "_get_data_parallel_group _get_model_parallel_group _get_sequence_parallel_group "
    "_get_sequence_parallel_rank",
    "ops.op_builder": "AsyncIOBuilder",
    "comm": "all_reduce all_gather all_gather_into_tensor all_gather_object reduce_scatter reduce_scatter_tensor "
    "all_to_all all_to_all_single broadcast broadcast_object_list reduce gather scatter send recv isend irecv barrier "
    "monitored_barrier new_group destroy_process_group",
    "runtime.sequence_parallel.ulysses_sp": "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter",
}

CHECK = (
    f"MADE = {MADE!r}"
    + """
import importlib, pickle, sys
import wherry.compat.deepspeed as c
c.install()
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for each in dir(module):
        getattr(module, each)
import deepspeed
everything = {}
exec("from deepspeed import *", everything)
assert {"accelerator", "comm", "utils", "initialize", "get_accelerator", "logger"} <= set(everything)
from deepspeed.moe.layer import MoE
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.pipe.module import PipelineModule
class Mine(PipelineModule):
    pass
for use in (MoE, Mine, deepspeed.init_inference):
    try:
        use()
    except NotImplementedError as error:
        assert "is not part of Wherry; " in str(error), error
    else:
        raise AssertionError(use)
import torch
linear = torch.nn.Linear(8, 6)
# Accelerate makes all host optimizers with the words of Adam.
for make in (deepspeed.ops.adagrad.DeepSpeedCPUAdagrad, deepspeed.ops.lion.DeepSpeedCPULion):
    make([{"params": list(linear.parameters())}], lr=0.1, weight_decay=0.0, adamw_mode=False)
groups = deepspeed.utils.groups
class Grid:
    get_tensor_model_parallel_world_size = staticmethod(lambda: 4)
    get_tensor_model_parallel_rank = staticmethod(lambda: 3)
    get_data_parallel_rank = staticmethod(lambda: 5)
groups.mpu = Grid
assert (groups._get_model_parallel_world_size(), groups._get_model_parallel_rank()) == (4, 3)
assert groups._get_data_parallel_rank() == 5 and groups._get_sequence_parallel_world_size() == 1
for path, names in MADE.items():
    try:
        owner = importlib.import_module(f"deepspeed.{path}".rstrip("."))
    except ModuleNotFoundError:
        owner = getattr(deepspeed, path)
    missing = [name for name in names.split() if not hasattr(owner, name)]
    assert not missing, (path, missing)
def refused(use):
    try:
        use()
    except NotImplementedError as error:
        return str(error)
    raise AssertionError(use)
for module in ("", ".utils", ".utils.groups", ".comm", ".ops.op_builder", ".runtime.lr_schedules", ".checkpointing"):
    owner = importlib.import_module(f"deepspeed{module}") if module != ".checkpointing" else deepspeed.checkpointing
    class Derived(owner.Nothing):
        pass
    assert "Nothing is not part of Wherry; it has the names" in refused(Derived), module
    assert not hasattr(owner, "_nothing")
assert "did you mean set_z3_leaf_modules?" in refused(deepspeed.utils.set_z3_leaf_module)
from deepspeed.runtime.constants import ROUTE_TRAIN
for use in (ROUTE_TRAIN, lambda: ROUTE_TRAIN == "train", lambda: {}.get(ROUTE_TRAIN), lambda: f"{ROUTE_TRAIN}"):
    assert "read the dict of the config" in refused(use)
from wherry.compat.deepspeed.names import ABSENT_MODULES
for module in ABSENT_MODULES:
    importlib.import_module(f"deepspeed.{module}")
copied = pickle.loads(pickle.dumps([deepspeed.DeepSpeedEngine, deepspeed.PipelineModule, ZeroStageEnum.weights]))
assert copied == [deepspeed.DeepSpeedEngine, deepspeed.PipelineModule, 3]
"""
)


def test_every_name_is_there_and_absent_parts_refuse(forks, tmp_path):
    names = [f"deepspeed.{module}".rstrip(".") for module in MODULES]
    assert len(names) > 50
    done = forks.run("-c", CHECK, *names, folder=tmp_path, launched=False)
    assert done.returncode == 0, done.stderr
