"""Scripts written for DeepSpeed."""

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

class Model(nn.Module):
    def __init__(self, width=16, blocks=2, vocabulary=31):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, batch):
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())

def batches(rank, count, vocabulary=31):
    g = torch.Generator().manual_seed(rank)
    return [torch.randint(0, vocabulary, (4, 8), generator=g) for _ in range(count)]
"""

MEGATRON = (
    MODEL
    + """
import argparse
import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.lr_schedules import WarmupDecayLR

class mpu:  # what a Megatron-style script passes along
    get_model_parallel_rank = staticmethod(lambda: 0)
    get_model_parallel_world_size = staticmethod(lambda: 1)
    get_model_parallel_group = staticmethod(lambda: None)
    get_data_parallel_rank = staticmethod(lambda: torch.distributed.get_rank())
    get_data_parallel_world_size = staticmethod(lambda: torch.distributed.get_world_size())
    get_data_parallel_group = staticmethod(lambda: torch.distributed.group.WORLD)

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=None)
parser.add_argument("--num-layers", type=int)
parser.add_argument("--hidden-size", type=int)
parser.add_argument("--checkpoint-activations", action="store_true")
parser.add_argument("--deepspeed-activation-checkpointing", action="store_true")
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
assert args.deepspeed and args.local_rank == int(__import__("os").environ["LOCAL_RANK"])

get_accelerator().set_device(args.local_rank)
deepspeed.init_distributed(dist_backend="nccl")
assert deepspeed.comm.get_world_size() == torch.distributed.get_world_size() == 2
deepspeed.checkpointing.configure(mpu, deepspeed_config=args.deepspeed_config, partition_activations=True)
assert deepspeed.checkpointing.is_configured()
deepspeed.checkpointing.model_parallel_cuda_manual_seed(7)
checkpoint = deepspeed.checkpointing.checkpoint
with deepspeed.checkpointing.get_cuda_rng_tracker().fork():
    torch.rand(3)

class Checkpointed(Block):
    def forward(self, x):
        return checkpoint(super().forward, x)

model = Model(args.hidden_size, args.num_layers)
if args.checkpoint_activations:
    for block in model.blocks:
        block.__class__ = Checkpointed
optimizer = deepspeed.ops.adam.FusedAdam(model.parameters(), lr=1e-2, weight_decay=0.01)
schedule = WarmupDecayLR(optimizer, total_num_steps=20, warmup_max_lr=1e-2, warmup_num_steps=2)
engine, optimizer, _, schedule = deepspeed.initialize(
    model=model, optimizer=optimizer, args=args, lr_scheduler=schedule, mpu=mpu, dist_init_required=False
)
assert engine.zero_optimization_stage() == 3 and engine.mp_world_size == 1
assert engine.config["activation_checkpointing"]["policy"] == "none"  # the script makes its own
data = batches(args.local_rank, 4)
losses = []
for _ in range(6):
    for batch in data:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
assert losses[-1] < losses[0], losses
assert engine.get_lr()[0] == schedule.get_last_lr()[0] != 1e-2
torch.distributed.barrier()
print("rank", args.local_rank, "is done")
"""
)

# On two ranks at stage 3: what scripts reach for beside the loop.
SURFACE = (
    MODEL
    + """
import sys, types
import deepspeed, wherry
from deepspeed import comm as dist
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.offload_states import get_state_devices
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import (safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state,
    safe_get_local_fp32_param, safe_get_local_grad, safe_set_full_fp32_param, safe_set_full_grad,
    safe_set_full_optimizer_state, safe_set_local_grad, safe_update_full_grad_vectorized, logger, log_dist)

torch.manual_seed(0)
model = Model()
twin = Model()
twin.load_state_dict(model.state_dict())
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1, "warmup_min_lr": 1e-2, "warmup_max_lr": 1e-2}},
    "bf16": {"enabled": False},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
engine, optimizer, loader, schedule = deepspeed.initialize(
    model=model, config=config, training_data=torch.arange(80).reshape(20, 4)
)
assert isinstance(engine, deepspeed.DeepSpeedEngine) and isinstance(engine, wherry.Engine)
assert isinstance(optimizer, deepspeed.runtime.base_optimizer.DeepSpeedOptimizer)
assert type(schedule).__name__ in deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES
assert len(loader) == 3 and next(iter(loader)).shape == (4, 4)
assert len(engine.deepspeed_io(list(range(12)), batch_size=3, route="eval")) == 2
assert engine.get_batch_info() == (8, 4, 1) and engine.get_global_grad_norm() is None

weight = model.blocks[0].up.weight
assert weight.ds_shape == twin.blocks[0].up.weight.shape and weight.ds_numel == weight.ds_shape.numel()
assert weight.shape == torch.Size([0])
assert weight.ds_status == ZeroParamStatus.NOT_AVAILABLE and weight.ds_status != ZeroParamStatus.AVAILABLE
with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
    assert weight.ds_status == ZeroParamStatus.AVAILABLE
    assert torch.equal(weight.data, twin.blocks[0].up.weight.data)
    if dist.get_rank() == 0:
        weight.data[0, 0] = 0.5
with torch.no_grad():
    twin.blocks[0].up.weight[0, 0] = 0.5
weight.all_gather()
assert weight[0, 0].item() == 0.5
weight.partition()
assert weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
with deepspeed.zero.GatheredParameters(model.parameters(), enabled=False):
    assert weight.ds_status == ZeroParamStatus.NOT_AVAILABLE

# Of weights that are held whole, ranks may make different numbers of forwards.
with deepspeed.zero.GatheredParameters(engine.parameters()), torch.no_grad():
    for batch in batches(0, 1 + dist.get_rank()):
        engine(batch)

# A question changes nothing; Accelerate is told the backend that it looks for where it starts the group.
class PartialState:
    _shared_state = {"backend": None}
sys.modules["accelerate.state"] = types.SimpleNamespace(PartialState=PartialState)
assert dist.get_world_size() == 2 and not dist.is_initialized() and PartialState._shared_state["backend"] is None
dist.init_distributed()
assert PartialState._shared_state["backend"] == "gloo" and dist.is_initialized()
del sys.modules["accelerate.state"]

assert get_state_devices(engine, OffloadStateTypeEnum.hp_params) == {engine.device}
try:
    get_state_devices(engine, "weights")
    raise AssertionError("a state of no such name")
except ValueError as error:
    assert "weights is no state; they are lp_params" in str(error)

# The oracle: one process, both ranks' batches.
own = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.0)
data = [batches(rank, 3) for rank in range(2)]
name = "blocks.0.up.weight"
for step in range(3):
    loss = engine(data[dist.get_rank()][step])
    engine.backward(loss)
    for rank in range(2):
        (twin(data[rank][step]) / 2).backward()
    grads = {n: p.grad for n, p in twin.named_parameters()}
    torch.testing.assert_close(safe_get_full_grad(weight), grads[name], rtol=1e-4, atol=1e-6)
    if step == 1:  # the same edit of the gradients on both sides
        safe_set_full_grad(weight, safe_get_full_grad(weight) * 0.5)
        grads[name].mul_(0.5)
        safe_update_full_grad_vectorized([model.head.bias], lambda gradient, parameter: gradient + 0.01)
        grads["head.bias"].add_(0.01)
        safe_set_local_grad(model.embed.weight, safe_get_local_grad(model.embed.weight) * 0.25)
        grads["embed.weight"].mul_(0.25)
    engine.step()
    own.step()
    own.zero_grad()
    assert safe_get_full_grad(weight) is None
    if step == 1:  # and of master and moments
        value = safe_get_full_optimizer_state(weight, "exp_avg") * 2
        safe_set_full_optimizer_state(weight, value, "exp_avg")
        own.state[twin.blocks[0].up.weight]["exp_avg"].mul_(2)
        safe_set_full_fp32_param(model.head.bias, torch.full((31,), 0.125))
        twin.head.bias.data.fill_(0.125)
for (n, ours), theirs in zip(model.named_parameters(), twin.parameters()):
    torch.testing.assert_close(safe_get_full_fp32_param(ours), theirs.data, rtol=0, atol=2e-5, msg=n)
    for moment in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(
            safe_get_full_optimizer_state(ours, moment), own.state[theirs][moment], rtol=1e-3, atol=1e-6, msg=n)
pieces = [None, None]
dist.all_gather_object(pieces, safe_get_local_fp32_param(weight))
torch.testing.assert_close(torch.cat(pieces), safe_get_full_fp32_param(weight).flatten())
whole, consolidated = engine.module_state_dict(), engine._zero3_consolidated_16bit_state_dict()
assert whole[name].shape == weight.ds_shape and (consolidated is None) == (dist.get_rank() > 0)
if consolidated is not None:
    assert set(consolidated) == set(whole) and all(torch.equal(whole[n], t) for n, t in consolidated.items())

sent = dist.log_summary(return_dict=True)["summary"]
assert all(row["count"] and size for operation in ("all_gather", "reduce_scatter")
           for size, row in sent[f"engine: {operation}"].items())
tensor = torch.ones(2)
dist.all_reduce(tensor)
assert tensor.tolist() == [2.0, 2.0]
import os, subprocess, tempfile
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
with engine.coalesce_grad_reduction():
    engine.backward(engine(data[0][0]))
assert engine.optimizer.parameter_offload.forward_hooks
engine.destroy()
assert not hasattr(weight, "ds_id")
try:
    engine(data[0][0])
    raise AssertionError("a destroyed engine runs")
except ValueError as error:
    assert "has been destroyed; call deepspeed.initialize again" in str(error)

# States shared out within groups of ranks.
from deepspeed.runtime.zero.mics import MiCS_Init
del config["bf16"]
config["zero_optimization"]["mics_shard_size"] = 1
with deepspeed.zero.MiCS_Init(config_dict_or_path=config):
    torch.manual_seed(0)
    model = Model()
assert deepspeed.zero.MiCS_Init is MiCS_Init and model.head.weight.isnan().all()
engine, *_ = deepspeed.initialize(model=model, config=config)
engine.backward(engine(data[dist.get_rank()][0]))
engine.step()
sent = dist.log_summary(return_dict=True)["summary"]
assert next(iter(sent["engine: all_reduce"].values()))["count"] > 1 and "engine: all_gather" not in sent
weights = [None, None]
dist.all_gather_object(weights, model.head.weight.detach())
assert torch.equal(*weights) and not weights[0].isnan().any()
engine.destroy()
print("rank", dist.get_rank(), "is done")
"""
)
