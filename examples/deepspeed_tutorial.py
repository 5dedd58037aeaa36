"""A script written for DeepSpeed, not changed. Wherry runs it:

    wherry run --as-deepspeed --num_gpus 2 examples/deepspeed_tutorial.py

fp16, optimizer state in host memory, and one update for four micro-batches.
"""

import deepspeed
import torch
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 4,
    "fp16": {"enabled": True, "initial_scale_power": 12},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "nvme_path": "/local_nvme"},
        "contiguous_gradients": True,
        "overlap_comm": True,
    },
}


class Model(nn.Module):
    def __init__(self, width=128, depth=4):
        super().__init__()
        self.enter = nn.Linear(64, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(depth))
        self.leave = nn.Linear(width, 64)

    def forward(self, data):
        x = self.enter(data)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return (self.leave(x).float() - data.float()).square().mean()


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model_engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config_params=CONFIG)

generator = torch.Generator().manual_seed(model_engine.global_rank)
losses = []
for _ in range(160):
    data = torch.randn(8, 64, generator=generator).half().to(model_engine.device)
    loss = model_engine(data)
    model_engine.backward(loss)
    model_engine.step()
    losses.append(loss.item())
if model_engine.global_rank == 0:
    steps = model_engine.global_steps
    print(f"{steps} updates: loss {losses[0]:.3f} -> {losses[-1]:.3f}, loss scale {model_engine.loss_scale:g}")
