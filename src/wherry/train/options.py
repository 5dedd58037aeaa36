"""The flags of `wherry train`: one table with their defaults, help, and the keys of the config that they write."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from wherry.config.problems import Parser
from wherry.errors import WherryError
from wherry.plan.grid import Grid
from wherry.train.presets import DEFAULT, PRESETS, Shape, name_of

Options = argparse.Namespace
"""What was asked on the command line, by the `dest` of each flag; None where nothing was."""


def _at_least(least: int) -> Callable[[str], int]:
    def check(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"expected at least {least}, got {value}")
        return value

    return check


positive, none_or_more = _at_least(1), _at_least(0)


def _seed(text: str) -> int:
    value = none_or_more(text)
    if value >= 2**64:  # torch's seeds are of 64 bits
        raise argparse.ArgumentTypeError(f"expected less than 2**64, got {value}")
    return value


def _optimizer(text: str) -> str:
    from wherry.config.optimizer import optimizer_name

    try:
        return optimizer_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _steps(text: str) -> str:
    from wherry.config.fields import to_steps

    try:
        return to_steps(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class Flag(NamedTuple):
    """A flag under its names in Megatron-style scripts, what argparse is told of it, and the key that it writes."""

    names: tuple[str, ...]
    settings: dict[str, Any]
    key: str | None


def flag(*names: str, key: str | None = None, **settings: Any) -> Flag:
    settings.setdefault("dest", names[0][2:].replace("-", "_"))
    if "type" in settings and "choices" not in settings:
        settings.setdefault("metavar", "N")
    return Flag(names, settings, key)


_ZERO, _CHECKPOINT = "zero_optimization", "wherry.checkpoint"
_TIERS = ("none", "cpu", "nvme")
FLAGS = {
    "model": (
        flag("--preset", choices=(*PRESETS, "auto"),
              help=f"a known shape (default: {DEFAULT}, or the checkpoint's); auto: measured"),
        flag("--num-layers", type=positive, help="blocks"),
        flag("--hidden-size", type=positive, help="width of the residual stream"),
        flag("--num-attention-heads", type=positive, help="attention heads (default: one per 64 of the width)"),
        flag("--seq-length", type=positive, help="tokens of a sample"),
        flag("--vocab-size", type=positive, help="rows of the token embedding; text is bytes, so at least 256"),
        flag("--checkpoint-activations", action="store_true", help="recompute each block in backward"),
        flag("--tensor-parallel", "--tensor-model-parallel-size", type=positive, default=1,
              help="ranks that share out each block's matrices"),
        flag("--pipeline-parallel", "--pipeline-model-parallel-size", type=positive, default=1,
              help="stages of blocks, each on ranks of its own; the head is then not tied to the embedding"),
        flag("--untie-embeddings-and-output-weights", dest="untied", action="store_true",
              help="give the head weights of its own, as pipeline stages have it in any case"),
    ),
    "training": (
        flag("--steps", "--train-iters", type=positive, help="optimizer steps (default: 150, or the resumed run's)"),
        flag("--batch-size", "--micro-batch-size", type=positive, key="train_micro_batch_size_per_gpu",
              help="samples of a micro-batch on each rank"),
        flag("--global-batch-size", type=positive, key="train_batch_size", help="samples of a step, over all ranks"),
        flag("--gradient-accumulation-steps", dest="accumulation", type=positive, key="gradient_accumulation_steps",
              help="micro-batches of a step"),
        flag("--optimizer", type=_optimizer, metavar="NAME",
              help="AdamW (the default), Adam, Lion, Adagrad, SGD, Muon, Adafactor, Lamb, or one of torch.optim"),
        flag("--lr", type=float, key="optimizer.params.lr",
              help="peak learning rate (default: by optimizer; of AdamW 1e-3 at 11M, less for larger models)"),
        flag("--weight-decay", type=float, key="optimizer.params.weight_decay",
              help="default: 0.1 of AdamW, 0.5 of Lion, none where it is not decoupled"),
        flag("--clip-grad", type=float, key="gradient_clipping",
              help="gradients are clipped to this norm (default: 1.0; 0: not at all)"),
        flag("--lr-warmup-iters", dest="warmup", type=none_or_more, key="scheduler.params.warmup_num_steps",
              help="steps until the peak (default: a tenth)"),
        flag("--precision", choices=("fp32", "bf16", "fp16"), help="default: bf16 on a GPU that has it, else fp32"),
        flag("--bf16", dest="precision", action="store_const", const="bf16", help="--precision bf16"),
        flag("--fp16", dest="precision", action="store_const", const="fp16", help="--precision fp16"),
        flag("--stage", type=int, choices=(0, 1, 2, 3), key=f"{_ZERO}.stage", help="ZeRO stage (default: 3)"),
        flag("--offload-optimizer", choices=_TIERS, key=f"{_ZERO}.offload_optimizer.device",
              help="where optimizer state rests"),
        flag("--offload-param", choices=_TIERS, key=f"{_ZERO}.offload_param.device",
              help="where parameters rest, at stage 3"),
        flag("--nvme-path", metavar="FOLDER", help="the folder on disk for what is offloaded to nvme"),
        flag("--host-memory", metavar="SIZE", key="wherry.host_memory",
              help="host memory that training states may take, like 3GB"),
        # Scripts have the switch beside the file.
        flag("--deepspeed", action="store_true", help=argparse.SUPPRESS),
        flag("--config", "--deepspeed-config", metavar="FILE", help="config file with DeepSpeed's key names"),
        flag("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="a key of the config"),
        flag("--seed", type=_seed, help="of the weights and of the order of the text (default: 1234)"),
    ),
    "run": (
        flag("--data", metavar="PATH", help="a text file, or a folder of them"),
        flag("--profile", type=_steps, metavar="STEPS", key="wherry.profile.steps",
              help="write where time and memory go in these, like 5 or 5-7, into the run's folder"),
        flag("--run-dir", metavar="FOLDER",
              help="where metrics and config go (default: runs/<date>-<name>, or the resumed run's)"),
        flag("--log-interval", type=positive, default=0,
              help="steps between lines (default: 1 on a CPU, 10 on a GPU)"),
        flag("--eval-interval", type=none_or_more, default=0,
              help="steps between validations (default: at the end only)"),
        flag("--eval-iters", dest="eval_batches", type=positive, default=8, help="batches of a validation"),
        flag("--save", metavar="FOLDER", help="where checkpoints go (default: in the run's folder)"),
        flag("--save-interval", type=positive, default=0,
              help="steps between checkpoints (default: one at the end, or at Ctrl-C)"),
        flag("--no-save", action="store_true", help="write no checkpoint"),
        flag("--keep-last", type=positive, metavar="N", key=f"{_CHECKPOINT}.keep_last",
              help="keep the last N checkpoints (default: all)"),
        flag("--async-save", action="store_true", key=f"{_CHECKPOINT}.async_save",
              help="write checkpoints while training goes on"),
        flag("--resume", metavar="auto|PATH",
              help="go on from a checkpoint, or the latest of a run's folder; auto: from the newest whole one of this "
              "run, if any, which is runs/<name> unless --run-dir or --save says otherwise"),
        flag("--max-restarts", type=none_or_more, default=0, metavar="N",
              help="start the ranks anew when one dies, N times"),
        flag("--nproc", "--num-gpus", type=positive, help="ranks (default: one per GPU, or two)"),
    ),
}  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """The flags of the table."""
    parser = Parser(
        prog="wherry train",
        usage="%(prog)s [FLAG ...]",
        description="Pre-train a GPT-2 on byte-level text. With no flag: 11M parameters, ZeRO-3 over two ranks, the "
        "standard library's sources, a few minutes on two CPU cores. Every flag may be written with underscores too.",
        epilog="Everything else is a key of the config: --set zero_optimization.offload_optimizer.device=cpu",
    )
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        precision = group.add_mutually_exclusive_group()
        for each in flags:
            owner = precision if each.settings["dest"] == "precision" else group
            owner.add_argument(*each.names, **each.settings)
    return parser


def parse(argv: list[str]) -> Options:
    options = build_parser().parse_args([dashed(word) for word in argv])
    del options.deepspeed  # a switch that says nothing without its file
    if options.max_restarts and options.resume is None:
        options.resume = "auto"
    asked = [flag for flag, value in (("--save", options.save), ("--save-interval", options.save_interval)) if value]
    if options.no_save and asked:
        raise WherryError(f"--no-save: {asked[0]} asks for checkpoints; leave one of the two out")
    # A place that the same command finds again.
    options.fixed_run_dir = options.resume == "auto" and options.save is None and options.run_dir is None
    if options.fixed_run_dir:
        measured = options.preset == "auto"
        options.run_dir = f"runs/{'gpt2-auto' if measured else name_of(shape_of(options))}"
    return options


def dashed(word: str) -> str:
    """A flag that was written with underscores, as it is known; a value as it is."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def keys_of(options: Options, table: Mapping[str, Iterable[Flag]] = FLAGS) -> dict[str, tuple[str, Any]]:
    """By key of the config: the flag that was given and writes it, and its value."""
    written = {each.key: each for flags in table.values() for each in flags if each.key is not None}
    values = {key: (each.names[0], getattr(options, each.settings["dest"])) for key, each in written.items()}
    return {key: given for key, given in values.items() if given[1] is not None and given[1] is not False}


def grid_of(options: Options) -> Grid:
    return Grid(options.tensor_parallel, options.pipeline_parallel)


# What describes a model: the field of its shape, and the flag.
SHAPE_FLAGS = {
    "layers": "--num-layers",
    "hidden": "--hidden-size",
    "heads": "--num-attention-heads",
    "sequence": "--seq-length",
    "vocabulary": "--vocab-size",
}


def shape_of(options: Options, base: Shape | None = None) -> Shape:
    """The preset's shape, or `base`, with the flags that were given in its place."""
    base = base or PRESETS.get(options.preset, PRESETS[DEFAULT])
    hidden = options.hidden_size or base.hidden
    heads = options.num_attention_heads or (max(1, hidden // 64) if options.hidden_size else base.heads)
    shape = Shape(
        layers=options.num_layers or base.layers,
        hidden=hidden,
        heads=heads,
        sequence=options.seq_length or base.sequence,
        vocabulary=options.vocab_size or base.vocabulary,
    )
    if shape.hidden % shape.heads:
        raise WherryError(
            f"--hidden-size {shape.hidden} does not divide by --num-attention-heads {shape.heads}; "
            "give a width that is a multiple of the number of heads"
        )
    if shape.vocabulary < 256:
        raise WherryError(f"--vocab-size {shape.vocabulary}: text is read as bytes, which takes at least 256")
    return shape
