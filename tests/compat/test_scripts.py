"""A script written for DeepSpeed, run unchanged; where there is an oracle it is plain PyTorch.

The tutorial's script is run by tests/examples.
"""

from tests.cli.programs import script

# On two ranks at stage 3: what scripts use beside the loop.
SURFACE = """
import argparse, os, subprocess, sys, tempfile, types
import torch
from tests.models import Residual, Stack, vectors
import deepspeed, wherry
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_local_fp32_param

config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1, "warmup_min_lr": 1e-2, "warmup_max_lr": 1e-2}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
args = deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args(["--deepspeed"])
assert args.deepspeed and args.deepspeed_config is None

class mpu:  # what a Megatron-style script passes along
    get_model_parallel_rank = staticmethod(lambda: 0)
    get_model_parallel_world_size = staticmethod(lambda: 1)
    get_data_parallel_group = staticmethod(lambda: None)

deepspeed.checkpointing.configure(mpu, partition_activations=True)
deepspeed.checkpointing.model_parallel_cuda_manual_seed(7)

class Checkpointed(Residual):
    def forward(self, x):
        return deepspeed.checkpointing.checkpoint(super().forward, x)

torch.manual_seed(0)
model = Stack()
twin = Stack()
twin.load_state_dict(model.state_dict())
for block in model.blocks:
    block.__class__ = Checkpointed
engine, optimizer, loader, schedule = deepspeed.initialize(
    args, model, config=config, training_data=torch.arange(80).reshape(20, 4), mpu=mpu
)
assert engine.mp_world_size == 1 and engine.config["activation_checkpointing"]["policy"] == "none"
assert isinstance(engine, deepspeed.DeepSpeedEngine) and isinstance(engine, wherry.Engine)
assert isinstance(optimizer, deepspeed.runtime.base_optimizer.DeepSpeedOptimizer)
assert type(schedule).__name__ in deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES
assert len(loader) == 3 and next(iter(loader)).shape == (4, 4)
assert len(engine.deepspeed_io(list(range(12)), batch_size=3, route="eval")) == 2
assert engine.train_batch_size() == 8 and engine.get_global_grad_norm() is None

# Of weights that are held whole, ranks may make different numbers of forwards.
with deepspeed.zero.GatheredParameters(engine.parameters()), torch.no_grad():
    for micro in range(1 + dist.get_rank()):
        engine(*vectors(0, micro, 0))

# A question changes nothing; Accelerate is told the backend that it looks for where it starts the group.
class PartialState:
    _shared_state = {"backend": None}
sys.modules["accelerate.state"] = types.SimpleNamespace(PartialState=PartialState)
assert dist.get_world_size() == 2 and not dist.is_initialized() and PartialState._shared_state["backend"] is None
dist.init_distributed()
assert PartialState._shared_state["backend"] == "gloo" and dist.is_initialized()
del sys.modules["accelerate.state"]

# The oracle: one process, both ranks' batches.
own = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.0)
for step in range(3):
    engine.backward(engine(*vectors(step, 0, dist.get_rank())))
    engine.step()
    for rank in range(2):
        (twin(*vectors(step, 0, rank)) / 2).backward()
    torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    own.step()
    own.zero_grad()
for (n, ours), theirs in zip(model.named_parameters(), twin.parameters()):
    torch.testing.assert_close(safe_get_full_fp32_param(ours), theirs.data, rtol=0, atol=2e-5, msg=n)
weight = model.blocks[0].linear.weight
pieces = [None, None]
dist.all_gather_object(pieces, safe_get_local_fp32_param(weight))
torch.testing.assert_close(torch.cat(pieces), safe_get_full_fp32_param(weight).flatten())
whole, consolidated = engine.module_state_dict(), engine._zero3_consolidated_16bit_state_dict()
assert (consolidated is None) == (dist.get_rank() > 0)
if consolidated is not None:
    assert set(consolidated) == set(whole) and all(torch.equal(whole[n], t) for n, t in consolidated.items())
sent = dist.log_summary(return_dict=True)["summary"]
assert all(row["count"] and size for operation in ("all_gather", "reduce_scatter")
           for size, row in sent[f"engine: {operation}"].items())

with tempfile.TemporaryDirectory() as folder:
    folders = [folder]
    dist.broadcast_object_list(folders, src=0)
    engine.save_checkpoint(folders[0])
    if dist.get_rank() == 0:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, os.path.join(folder, "zero_to_fp32.py"), folder, os.path.join(folder, "whole")]
        subprocess.run(command, check=True, env=environment)
        masters = torch.load(os.path.join(folder, "whole", "pytorch_model.bin"))
        assert set(masters) == set(whole)
    dist.barrier()
engine.destroy()
assert not hasattr(weight, "ds_id")

# States shared out within groups of ranks.
config["zero_optimization"]["mics_shard_size"] = 1
with deepspeed.zero.Init(config_dict_or_path=config):
    torch.manual_seed(0)
    model = Stack()
engine, *_ = deepspeed.initialize(model=model, config=config)
engine.backward(engine(*vectors(0, 0, dist.get_rank())))
engine.step()
sent = dist.log_summary(return_dict=True)["summary"]
assert next(iter(sent["engine: all_reduce"].values()))["count"] > 1 and "engine: all_gather" not in sent
engine.destroy()
print("rank", dist.get_rank(), "is done")
"""


def test_what_scripts_use_beside_the_loop(forks, tmp_path):
    done = forks.of(as_deepspeed=True).run(script(tmp_path, SURFACE), ranks=2, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is done") == 2
