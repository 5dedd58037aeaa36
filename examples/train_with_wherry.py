"""A training script of one's own: the model and the data are plain PyTorch, and three calls are Wherry's.

wherry run --num_gpus 2 examples/train_with_wherry.py      (without a GPU: two processes)
"""

import torch
from torch import nn

import wherry

CONFIG = {
    "train_micro_batch_size_per_gpu": 64,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3},
}


class Classifier(nn.Module):
    """Tells in which of four quarters of a circle most of its input's points lie."""

    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.enter = nn.Linear(32, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(depth))
        self.leave = nn.Linear(width, 4)

    def forward(self, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.enter(points)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return nn.functional.cross_entropy(self.leave(x), labels)


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    points = torch.randn(64, 32, generator=generator)
    right, up = points[:, 0::2].mean(1) > 0, points[:, 1::2].mean(1) > 0
    return points, right.long() * 2 + up.long()


def main() -> None:
    torch.manual_seed(0)
    engine, _, _, _ = wherry.initialize(model=Classifier(), config=CONFIG)
    generator = torch.Generator().manual_seed(1 + engine.comm.rank)
    total = 0.0
    for step in range(1, 101):
        points, labels = (tensor.to(engine.device) for tensor in batch(generator))
        loss = engine(points, labels)
        engine.backward(loss)
        engine.step()
        total += loss.item()
        if engine.comm.rank == 0 and step % 20 == 0:
            print(f"step {step}  mean loss {total / 20:.3f}  gradient norm {engine.get_global_grad_norm():.3f}")
            total = 0.0
    engine.close()


if __name__ == "__main__":
    main()
