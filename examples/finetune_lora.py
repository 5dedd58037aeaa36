"""Fine-tune a language model with LoRA: transformers' Trainer on Wherry, ZeRO-3, the frozen weights partitioned too.

    pip install '.[transformers]'          (in a clone of Wherry)
    wherry run --num_gpus 2 examples/finetune_lora.py --model path/to/model --text notes.txt

Without --model a tiny random one is made on the spot, and without --text it learns this file.
"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainingArguments

import wherry
from wherry.integrations.transformers import WherryTrainer

CONFIG = {"bf16": {"enabled": "auto"}, "gradient_clipping": "auto", "zero_optimization": {"stage": 3}}


class Pieces(Dataset):
    """A text as pieces of one length."""

    def __init__(self, tokens: list[int], length: int) -> None:
        self.pieces = torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def model_and_tokens(name: str | None, text: str):
    if name is None:
        config = LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
        )
        return LlamaForCausalLM(config), list(text.encode())
    tokenizer = AutoTokenizer.from_pretrained(name)
    return AutoModelForCausalLM.from_pretrained(name), tokenizer(text)["input_ids"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a name that from_pretrained knows")
    parser.add_argument("--text", type=Path, default=Path(__file__))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--output", default="runs/lora")
    options = parser.parse_args()

    torch.manual_seed(0)
    with wherry.Init(config=CONFIG):  # partitioned while it is built: no rank ever holds the whole model
        model, tokens = model_and_tokens(options.model, options.text.read_text(encoding="utf-8"))
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    gpu = torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        bf16=gpu,
        use_cpu=not gpu,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
    )
    data = Pieces(tokens, options.length)
    trainer = WherryTrainer(model=model, args=arguments, train_dataset=data, wherry_config=CONFIG)
    trainer.train()
    trainer.save_model(options.output)
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; the adapter is in {options.output}")


if __name__ == "__main__":
    main()
