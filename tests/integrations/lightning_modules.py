"""A program of the tests: a LightningModule trained `plain`, with `own` strategy or through the `alias`.

Run as `lightning_modules.py MODE FOLDER ACCUMULATION`; rank 0 writes what it saw to FOLDER/MODE.json.
"""

import json
import os
import sys

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

MODE, FOLDER, ACCUMULATION = sys.argv[1], sys.argv[2], int(sys.argv[3])
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
CONFIG = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}

if MODE == "alias" and not torch.cuda.is_available():
    # Lightning itself offers this strategy on GPUs only.
    import lightning.pytorch.strategies.deepspeed as theirs
    from lightning.pytorch.accelerators import CPUAccelerator

    theirs.CUDAAccelerator = CPUAccelerator
    theirs._validate_device_index_selection = lambda devices: None

if MODE == "own":
    from wherry.parallel import topology

    topology.default_device = None  # the engine is where the Trainer brings batches, and asks nobody else


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 16), nn.GELU())


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = None
        self.seen = []
        self.released_at_birth = False

    def configure_model(self):
        if self.net is None:
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(8, 16), Block(), Block(), nn.Linear(16, 1))

    def training_step(self, batch, index):
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("validation", (self.net(x) - y).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        self.released_at_birth = bool(self.net[1][0].weight.isnan().all())
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


generator = torch.Generator().manual_seed(0)
x = torch.randn(44, 8, generator=generator)
table = TensorDataset(x, x.sum(1, keepdim=True))


def loader():
    sampler = DistributedSampler(table, num_replicas=WORLD, rank=RANK, shuffle=False)
    return DataLoader(table, batch_size=8 // WORLD, sampler=sampler)


def strategy():
    if MODE == "plain":
        return "auto"
    if MODE == "alias":
        return theirs.DeepSpeedStrategy(config={**CONFIG, "zero_allow_untested_optimizer": True})
    from wherry.integrations.lightning import WherryStrategy

    return WherryStrategy(config=CONFIG)


def trainer(epochs, keep):
    saver = ModelCheckpoint(dirpath=os.path.join(FOLDER, MODE), filename="{epoch}", save_top_k=-1)
    return L.Trainer(
        strategy=strategy(), devices=WORLD, accelerator="cpu", max_epochs=epochs, accumulate_grad_batches=ACCUMULATION,
        gradient_clip_val=0.5, logger=False, callbacks=[saver] if keep else [], enable_checkpointing=keep,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip


def mean_over_ranks(values):
    tensor = torch.tensor(values)
    if WORLD > 1:
        torch.distributed.all_reduce(tensor)
    return (tensor / WORLD).tolist()


first = trainer(2, keep=True)
module = Module()
first.fit(module, loader(), loader())
found = {
    "losses": mean_over_ranks(module.seen),
    "validation": float(first.callback_metrics["validation"]),
    "rate": first.lr_scheduler_configs[0].scheduler.get_last_lr(),
    "released_at_birth": module.released_at_birth,
    "validated_again": first.validate(module, loader(), verbose=False)[0]["validation"],
}
found["files"] = sorted(os.listdir(os.path.join(FOLDER, MODE)))
again = trainer(2, keep=False)
resumed = Module()
again.fit(resumed, loader(), loader(), ckpt_path=os.path.join(FOLDER, MODE, "epoch=0.ckpt"))
found["resumed"] = mean_over_ranks(resumed.seen)
found["resumed_validation"] = float(again.callback_metrics["validation"])
if MODE == "own":
    # A second fit goes on with the weights that the first one left.
    third = trainer(1, keep=False)
    module.seen.clear()
    third.fit(module, loader())
    found["fitted_again"] = mean_over_ranks(module.seen)
    assert third.strategy.engine.placement.parameters.partitioned
if MODE == "alias" and RANK == 0:
    from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

    one_file = os.path.join(FOLDER, "whole.pt")
    convert_zero_checkpoint_to_fp32_state_dict(os.path.join(FOLDER, MODE, "epoch=1.ckpt"), one_file)
    whole = torch.load(one_file, weights_only=False)
    assert whole["epoch"] == 1 and set(whole["state_dict"]) == {n for n, _ in module.named_parameters()}
if RANK == 0:
    with open(os.path.join(FOLDER, f"{MODE}.json"), "w", encoding="utf-8") as file:
        json.dump(found, file)
