"""A LightningModule on Wherry: the module is Lightning's, and the strategy is Wherry's.

pip install '.[lightning]'         (in a clone of Wherry)
wherry run --num_gpus 2 examples/lightning_module.py
"""

import argparse
import os

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from wherry.integrations.lightning import WherryStrategy


class Module(lightning.LightningModule):
    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.width, self.depth = width, depth
        self.blocks: nn.ModuleList | None = None

    def configure_model(self) -> None:
        # Built here, the model goes to its shards block by block: no rank ever holds all of it.
        if self.blocks is None:
            block = lambda: nn.Sequential(nn.LayerNorm(self.width), nn.Linear(self.width, self.width))  # noqa: E731
            self.enter, self.leave = nn.Linear(32, self.width), nn.Linear(self.width, 1)
            self.blocks = nn.ModuleList(block() for _ in range(self.depth))

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        points, target = batch
        x = self.enter(points)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return (self.leave(x) - target).square().mean()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("validation", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--output", default="runs/lightning")
    options = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    points = torch.randn(1024, 32)
    target = points[:, :8].sum(1, keepdim=True)
    train, validation = (TensorDataset(points[part], target[part]) for part in (slice(0, 768), slice(768, None)))
    trainer = lightning.Trainer(
        strategy=WherryStrategy(config={"zero_optimization": {"stage": 3}}),
        accelerator="auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_epochs=options.epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(dirpath=options.output, filename="last")],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(train, batch_size=32, shuffle=True), DataLoader(validation, batch_size=32))
    if trainer.is_global_zero:
        print(f"validation {trainer.callback_metrics['validation']:.3f}; the checkpoint is in {options.output}")


if __name__ == "__main__":
    main()
