"""Train with an installed wheel: `python tests/native/smoke.py`, in an environment with Wherry and its requirements."""

from pathlib import Path

import torch

import wherry
from wherry import native


def main() -> None:
    here = Path(__file__).parents[2]
    assert not Path(wherry.__file__).is_relative_to(here / "src"), f"{wherry.__file__}: this is the sources, no wheel"
    assert native.library() is not None, f"the native library is not in use: {native.why_not()}"
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
    offloaded = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    config = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}, "zero_optimization": offloaded}
    with wherry.initialize(model=model, config=config)[0] as engine:
        losses = []
        for _ in range(5):
            loss = engine(torch.ones(4, 16, dtype=torch.bfloat16, device=engine.device)).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    kernels = " ".join(native.available_isas())
    print(f"{wherry.__file__}: {wherry.__version__}, {kernels} kernels, torch {torch.__version__}")


if __name__ == "__main__":
    main()
