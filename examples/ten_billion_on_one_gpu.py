"""Ten billion parameters on one GPU of 32 GB: 16-bit weights on the GPU, gradients and optimizer state in host memory.

    wherry run --num_gpus 1 examples/ten_billion_on_one_gpu.py
    wherry run examples/ten_billion_on_one_gpu.py --layers 2 --hidden 64 --heads 2 --sequence 32 --steps 5   (anywhere)

It needs about 180 GB of host memory: 12 bytes a parameter for masters and moments, and the gradients. The data are
random tokens, which no model learns: this shows memory and speed. `wherry plan` says beforehand what fits.
"""

import argparse
import time

import torch

import wherry
from wherry.train.model import GPT, GPTConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 50), ("hidden", 4096), ("heads", 32), ("sequence", 1024), ("vocabulary", 50304),
                          ("batch", 10), ("steps", 20)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    config = {
        "train_micro_batch_size_per_gpu": options.batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    torch.manual_seed(0)
    # In 16 bits from the beginning: 20 GB of host memory instead of 40.
    torch.set_default_dtype(torch.bfloat16)
    shape = {name: getattr(options, name) for name in ("layers", "hidden", "heads", "sequence", "vocabulary")}
    model = GPT(GPTConfig(**shape, checkpoint_activations=True))
    torch.set_default_dtype(torch.float32)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    engine, _, _, _ = wherry.initialize(model=model, config=config)
    print(f"{parameters / 1e9:.2f} billion parameters; {engine.placement.name}")
    for row in engine.memory():
        print(f"  {row.state:10} {row.tier:12} {row.bytes_actual / 1e9:8.2f} GB")

    for step in range(1, options.steps + 1):
        begun = time.perf_counter()
        tokens = torch.randint(0, options.vocabulary, (options.batch, options.sequence + 1)).to(engine.device)
        loss = engine(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        seconds = time.perf_counter() - begun
        print(f"step {step}  loss {loss.item():.3f}  {options.batch * options.sequence / seconds:,.0f} tokens/s")
    engine.close()


if __name__ == "__main__":
    main()
