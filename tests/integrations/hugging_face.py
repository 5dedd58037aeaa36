"""A program of the tests: the same fine-tuning with Trainer, Accelerate and DPOTrainer, in one of three modes.

`plain`: without Wherry. `alias`: unchanged code, `import deepspeed` gives Wherry. `own`: Wherry's own classes.
Run as `hugging_face.py MODE FOLDER`; rank 0 writes what it saw to FOLDER/MODE.json.
"""

import glob
import json
import os
import sys
from contextlib import nullcontext
from unittest import mock

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

MODE, FOLDER = sys.argv[1:3]
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
ZERO = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
AUTO = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "zero_optimization": {**ZERO, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
    "steps_per_print": float("inf"),
}

from accelerate import Accelerator, DeepSpeedPlugin  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed  # noqa: E402
from transformers.trainer_pt_utils import LabelSmoother  # noqa: E402


def start_anew():
    """Accelerate's state is the process's: a script with one of these needs nothing of this."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_DYNAMO_BACKEND"):
        os.environ.pop(name, None)


class Tokens(Dataset):
    def __init__(self, count):
        self.ids = torch.randint(0, 64, (count, 12), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def tiny_config(vocabulary=64):
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip


def in_mode(trainer, config=None):
    """Return a Trainer's class in this mode, more keywords of its arguments, and its own."""
    config = config or {key: value for key, value in AUTO.items() if key != "optimizer"}
    if MODE == "alias":
        return trainer, {"deepspeed": config}, {}
    if MODE == "own":
        from wherry.integrations.transformers import WherryMixin

        return type("Own", (WherryMixin, trainer), {}), {}, {"wherry_config": config}
    return trainer, {}, {}


def log_of(trainer):
    rows = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [[row["loss"], row["grad_norm"], row["learning_rate"]] for row in rows]


def with_trainer(resume=None):
    """Train, evaluate, save; or resume, with a model that is built partitioned."""
    start_anew()
    cls, more, extra = in_mode(Trainer, AUTO)
    building, placing = nullcontext(), nullcontext()
    if MODE == "own":
        import wherry

        building = wherry.Init(config=AUTO, enabled=bool(resume))
        # The engine is where the Trainer brings batches, and asks for no other device.
        placing = mock.patch("wherry.parallel.topology.default_device", None)
    out = os.path.join(FOLDER, MODE)
    args = TrainingArguments(
        output_dir=out, per_device_train_batch_size=4 // WORLD, gradient_accumulation_steps=2, max_steps=4,
        logging_steps=1, learning_rate=1e-2, warmup_steps=1, max_grad_norm=0.9, report_to=[],
        save_steps=2, use_cpu=MODE != "alias", disable_tqdm=True, eval_strategy="steps", eval_steps=2,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True, **more,
    )  # fmt: skip
    set_seed(5 if resume else 0)  # the checkpoint must replace the weights
    with building:
        model = LlamaForCausalLM(tiny_config())
    trainer = cls(model=model, args=args, train_dataset=Tokens(32), eval_dataset=Tokens(8), **extra)
    with placing:
        before = trainer.evaluate()["eval_loss"] if MODE != "alias" else None
        trainer.train(resume_from_checkpoint=resume)
    # The "best" is the first, of step 2.
    assert trainer.state.best_model_checkpoint == os.path.join(out, "checkpoint-2")
    found = {"log": log_of(trainer), "evaluation": trainer.evaluate()["eval_loss"]}
    # A loss that depends on the class of the model inside.
    trainer.label_smoother = LabelSmoother(epsilon=0.1)
    found["smoothed"] = trainer.evaluate()["eval_loss"]
    trainer.label_smoother = None
    if not resume:
        found["before"] = before
    trainer.save_model(os.path.join(out, "final"))
    if MODE != "plain":
        assert trainer.model_wrapped.world_size == WORLD
        assert type(trainer.model_wrapped).__mro__[-3].__name__ != "DistributedDataParallel"
    prompt = {"input_ids": Tokens(2).ids[:, :4], "attention_mask": torch.ones(2, 4, dtype=torch.long)}
    # Ranks that generate fewer tokens go on until all are done.
    tokens = trainer.model.generate(**prompt, max_new_tokens=6 - 2 * RANK, do_sample=False, pad_token_id=0)
    found["generated"] = tokens.tolist()
    if WORLD > 1:
        everybodys = [None] * WORLD
        torch.distributed.all_gather_object(everybodys, found["generated"])
        assert [row[: len(mine)] for row, mine in zip(everybodys[0], everybodys[1], strict=True)] == everybodys[1]
    return found


def with_pretrained():
    """Read what was saved: under zero.Init where a config asks for it."""
    start_anew()
    path = os.path.join(FOLDER, "plain", "final")
    more = {}
    if MODE == "alias":
        from transformers.integrations import HfDeepSpeedConfig

        more["keep"] = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 4 // WORLD, "zero_optimization": ZERO})
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    if MODE == "alias":
        import deepspeed

        # Partitioned since it was built: this rank reads placeholders.
        assert all(weight.isnan().all() for weight in model.parameters())
        model, *_ = deepspeed.initialize(model=model, config=more["keep"].config)
    model.eval()
    with torch.no_grad():
        return float(model(input_ids=Tokens(8).ids, labels=Tokens(8).ids).loss)


def with_accelerate():
    """Micro-batches, a schedule that the script moves, and a state that is saved and loaded again."""
    start_anew()
    if MODE == "alias":
        plugin = DeepSpeedPlugin(
            zero_stage=3, gradient_accumulation_steps=2, gradient_clipping=0.5, zero3_save_16bit_model=True,
            offload_optimizer_device="cpu",
        )  # fmt: skip
        accelerator = Accelerator(deepspeed_plugin=plugin)
        assert accelerator.num_processes == WORLD
    else:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0)
    block = lambda: nn.Sequential(nn.Linear(16, 16), nn.GELU())  # noqa: E731
    model = nn.Sequential(nn.Embedding(32, 16), block(), block(), nn.Linear(16, 32))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.8, 0.99), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9 ** (step // WORLD))  # a step for each rank
    data = DataLoader(torch.randint(0, 32, (64,), generator=torch.Generator().manual_seed(0)), batch_size=8 // WORLD)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)

    def train(batches):
        losses = []
        for batch in batches:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(batch), (batch + 1) % 32)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")) if WORLD > 1 else float(loss))
        return losses

    found = {"losses": train(batch for _ in range(2) for batch in data), "rate": schedule.get_last_lr()}
    whole = accelerator.get_state_dict(model)
    found["weights"] = {name: float(value.double().sum()) for name, value in whole.items()} if RANK == 0 else {}
    if MODE == "alias":
        accelerator.save_state(os.path.join(FOLDER, "state"))
        assert glob.glob(os.path.join(FOLDER, "state", "pytorch_model", "*"))
        after = train(data)
        accelerator.load_state(os.path.join(FOLDER, "state"))
        assert train(data) == after
    return found


def words():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(50))]
    inner = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return names, PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def with_dpo():
    """Train against a second model as reference, by a loss that reads weights in a backward of its own."""
    from datasets import Dataset as Table
    from trl import DPOConfig, DPOTrainer

    start_anew()
    cls, more, extra = in_mode(DPOTrainer)
    names, tokenizer = words()
    generator = torch.Generator().manual_seed(0)
    text = lambda: " ".join(names[3 + i] for i in torch.randint(0, 50, (4,), generator=generator))  # noqa: E731
    table = Table.from_list([{"prompt": text(), "chosen": " " + text(), "rejected": " " + text()} for _ in range(24)])
    args = DPOConfig(
        output_dir=os.path.join(FOLDER, MODE + "-dpo"), per_device_train_batch_size=8 // WORLD, max_steps=3,
        logging_steps=1, learning_rate=1e-2, report_to=[], save_strategy="no", use_cpu=MODE != "alias", bf16=False,
        disable_tqdm=True, **more,
    )  # fmt: skip
    set_seed(0)
    model = os.path.join(FOLDER, "plain", "final")
    trainer = cls(model=model, args=args, train_dataset=table, processing_class=tokenizer, **extra)
    trainer.train()
    return {"log": log_of(trainer)}


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


def with_adafactor():
    """Train blocks that the engine compiles with the Trainer's Adafactor, which needs whole parameters."""
    start_anew()
    config = AUTO | {"zero_optimization": ZERO}  # sizes that are "auto" ask for a hidden_size
    del config["optimizer"]
    cls, more, extra = in_mode(Trainer, config)
    if MODE != "plain":
        more |= {"torch_compile": True, "torch_compile_backend": "eager"}
    args = TrainingArguments(
        output_dir=FOLDER, per_device_train_batch_size=4 // WORLD, max_steps=4, logging_steps=1, learning_rate=1e-2,
        optim="adafactor", report_to=[], save_strategy="no", use_cpu=MODE != "alias", disable_tqdm=True, **more,
    )  # fmt: skip
    set_seed(0)
    trainer = cls(model=Blocks(), args=args, train_dataset=Tokens(16), **extra)
    trainer.train()
    assert [block._compiled_call_impl is not None for block in trainer.model.blocks] == [MODE != "plain"] * 2
    if MODE != "plain":
        kind = type(trainer.model_wrapped.optimizer.optimizer if MODE == "alias" else trainer.engine.optimizer.instance)
        assert kind.__name__ == "Adafactor", kind
    return {"log": log_of(trainer)}


def with_a_layer_that_the_adapter_copies():
    """PEFT copies a layer that is partitioned already, and asks for its state on the rank that saves."""
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file

    import wherry
    from wherry.integrations.transformers import WherryTrainer

    start_anew()
    set_seed(0)
    with wherry.Init(config={"zero_optimization": ZERO}):
        model = LlamaForCausalLM(tiny_config())
    lora = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["norm"], task_type="CAUSAL_LM")
    out = os.path.join(FOLDER, "copied")
    args = TrainingArguments(
        output_dir=out, per_device_train_batch_size=4, max_steps=1, report_to=[], save_strategy="no", use_cpu=True,
        learning_rate=1e-2, disable_tqdm=True,
    )  # fmt: skip
    own = {"wherry_config": {"zero_optimization": ZERO}}
    trainer = WherryTrainer(model=get_peft_model(model, lora), args=args, train_dataset=Tokens(8), **own)
    trainer.train()
    trainer.save_model(out)
    if RANK == 0:
        adapter = load_file(os.path.join(out, "adapter_model.safetensors"))
        norm = adapter["base_model.model.model.norm.weight"]
        assert 0 < (norm - 1).abs().max() < 0.1, norm


def main():
    if MODE == "own":
        with_a_layer_that_the_adapter_copies()
    found = {"trainer": with_trainer(), "pretrained": with_pretrained()}
    if MODE != "plain":
        found["resumed"] = with_trainer(os.path.join(FOLDER, MODE, "checkpoint-2"))
    if MODE != "own":
        found["accelerate"] = with_accelerate()
    found |= {"dpo": with_dpo(), "adafactor": with_adafactor()}
    if RANK == 0:
        with open(os.path.join(FOLDER, MODE + ".json"), "w", encoding="utf-8") as file:
            json.dump(found, file)


main()
