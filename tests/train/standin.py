"""A small engine in plain PyTorch: the loop's tests need no more, and it is the oracle of what the loop should do."""

import torch


class PlainEngine:
    def __init__(self, model, *, lr=1e-2, accumulation=1):
        self.model = model
        self.device = torch.device("cpu")
        self.skipped_steps = 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.accumulation = accumulation
        self.modes = []
        self.batches = []

    def __call__(self, ids, labels):
        self.batches.append(ids)
        return self.model(ids, labels)

    def train_batch(self, data):
        total = 0.0
        for _ in range(self.accumulation):
            loss = self(*next(data)) / self.accumulation
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def get_global_grad_norm(self):
        return 1.5

    def get_lr(self):
        return [group["lr"] for group in self.optimizer.param_groups]

    def train(self, mode=True):
        self.modes.append(mode)
        self.model.train(mode)

    def memory(self):
        return [("parameters", "device", 2048, 2048), ("optimizer", "host", 4096, 4096)]
