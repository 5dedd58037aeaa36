"""The flags of `wherry train`, and the config they and a file make together."""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Mapping
from typing import Any

from wherry.errors import WherryError
from wherry.train.presets import PRESETS, Shape

DEFAULT_PRESET = "gpt2-10m"
DEFAULT_MICRO_BATCH = 8
DEFAULT_STEPS = 150
_TRAIN, _MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
_ACCUMULATION = "gradient_accumulation_steps"
_OF_ADAM = ("adam", "adamw", "auto")
_OFFLOADED = ("offload_optimizer", "offload_param")


# The keys of the config that flags write.
_KEYS = {
    "batch_size": _MICRO,
    "global_batch_size": _TRAIN,
    "accumulation": _ACCUMULATION,
    "lr": "optimizer.params.lr",
    "weight_decay": "optimizer.params.weight_decay",
    "clip_grad": "gradient_clipping",
    "warmup": "scheduler.params.warmup_num_steps",
    "stage": "zero_optimization.stage",
    "offload_optimizer": "zero_optimization.offload_optimizer.device",
    "offload_param": "zero_optimization.offload_param.device",
    "host_memory": "wherry.host_memory",
    "keep_last": "wherry.checkpoint.keep_last",
    "async_save": "wherry.checkpoint.async_save",
}
Options = argparse.Namespace
"""What was asked on the command line, by the names that `build_parser` gives; None where nothing was."""


def build_parser() -> argparse.ArgumentParser:
    """Flags under the names of Megatron-style scripts; each may be written with dashes or underscores."""
    parser = argparse.ArgumentParser(
        prog="wherry train",
        usage="%(prog)s [FLAG ...]",
        formatter_class=_Dashed,
        description="Pre-train a GPT-2 on byte-level text. With no flag: 11M parameters, ZeRO-3 over two ranks, the "
        "standard library's sources, a few minutes on two CPU cores. Every flag may be written with underscores too.",
        epilog="Everything else is a key of the config: --set zero_optimization.offload_optimizer.device=cpu",
    )
    model = parser.add_argument_group("model")
    _add(model, "--preset", choices=(*PRESETS, "auto"), default=DEFAULT_PRESET, help="a known shape; auto: measured")
    _add(model, "--num-layers", type=_positive, help="blocks")
    _add(model, "--hidden-size", type=_positive, help="width of the residual stream")
    _add(model, "--num-attention-heads", type=_positive, help="attention heads (default: one per 64 of the width)")
    _add(model, "--seq-length", type=_positive, help="tokens of a sample")
    _add(model, "--vocab-size", type=_positive, help="rows of the token embedding; text is bytes, so at least 256")
    _add(model, "--checkpoint-activations", action="store_true", help="recompute each block in backward")
    _add(
        model, "--tensor-parallel", "--tensor-model-parallel-size", dest="tensor_parallel", type=_positive, default=1,
        help="ranks that share out each block's matrices",
    )  # fmt: skip
    _add(
        model, "--pipeline-parallel", "--pipeline-model-parallel-size", dest="pipeline_parallel", type=_positive,
        default=1, help="stages of blocks, each on ranks of its own; the head is then not tied to the embedding",
    )  # fmt: skip
    _add(
        model, "--untie-embeddings-and-output-weights", dest="untied", action="store_true",
        help="give the head weights of its own, as pipeline stages have it in any case",
    )  # fmt: skip
    train = parser.add_argument_group("training")
    _add(train, "--steps", "--train-iters", type=_positive, default=DEFAULT_STEPS, help="optimizer steps")
    _add(train, "--batch-size", "--micro-batch-size", type=_positive, help="samples of a micro-batch on each rank")
    _add(train, "--global-batch-size", type=_positive, help="samples of a step, over all ranks")
    _add(train, "--gradient-accumulation-steps", dest="accumulation", type=_positive, help="micro-batches of a step")
    _add(train, "--lr", type=float, help="peak learning rate of AdamW (default: 1e-3 at 11M, less for larger models)")
    _add(train, "--weight-decay", type=float, help="of AdamW (default: 0.1)")
    _add(train, "--clip-grad", type=float, help="gradients are clipped to this norm (default: 1.0; 0: not at all)")
    _add(train, "--lr-warmup-iters", dest="warmup", type=_none_or_more, help="steps until the peak (default: a tenth)")
    types = train.add_mutually_exclusive_group()
    _add(types, "--precision", choices=("fp32", "bf16", "fp16"), help="default: bf16 on a GPU that has it, else fp32")
    for dtype in ("bf16", "fp16"):
        _add(types, f"--{dtype}", dest="precision", action="store_const", const=dtype, help=f"--precision {dtype}")
    _add(train, "--stage", type=int, choices=(0, 1, 2, 3), help="ZeRO stage (default: 3)")
    _add(train, "--offload-optimizer", choices=("none", "cpu", "nvme"), help="where optimizer state rests")
    _add(train, "--offload-param", choices=("none", "cpu", "nvme"), help="where parameters rest, at stage 3")
    _add(train, "--nvme-path", metavar="FOLDER", help="the folder on disk for what is offloaded to nvme")
    _add(train, "--host-memory", metavar="SIZE", help="host memory that training states may take, like 3GB")
    # Scripts have the switch beside the file.
    train.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)
    _add(train, "--config", "--deepspeed-config", metavar="FILE", help="config file with DeepSpeed's key names")
    _add(train, "--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="a key of the config")
    _add(train, "--seed", type=_seed, default=1234, help="of the weights and of the order of the text")
    run = parser.add_argument_group("run")
    _add(run, "--data", metavar="PATH", help="a text file, or a folder of them")
    _add(run, "--run-dir", metavar="FOLDER", help="where metrics and config go (default: runs/<date>-<name>)")
    _add(run, "--log-interval", type=_positive, help="steps between lines (default: 1 on a CPU, 10 on a GPU)")
    _add(
        run, "--eval-interval", type=_none_or_more, default=0,
        help="steps between validations (default: at the end only)",
    )  # fmt: skip
    _add(run, "--eval-iters", dest="eval_batches", type=_positive, default=8, help="batches of a validation")
    _add(run, "--save", metavar="FOLDER", help="where checkpoints go (default: in the run's folder)")
    _add(run, "--save-interval", type=_positive, default=0, help="steps between checkpoints (default: none)")
    _add(run, "--keep-last", type=_positive, metavar="N", help="keep the last N checkpoints (default: all)")
    _add(run, "--async-save", action="store_const", const=True, help="write checkpoints while training goes on")
    _add(run, "--resume", metavar="auto|PATH", help="go on from a checkpoint; auto: the newest whole one, if any")
    _add(
        run, "--max-restarts", type=_none_or_more, default=0, metavar="N",
        help="start the ranks anew when one dies, N times",
    )  # fmt: skip
    _add(run, "--nproc", "--num-gpus", type=_positive, help="ranks (default: one per GPU, or two)")
    return parser


class _Dashed(argparse.HelpFormatter):
    """Shows each flag with dashes: the same with underscores would make the page twice as long."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = [name for name in action.option_strings if "_" not in name]
        if not shown or action.nargs == 0:
            return ", ".join(shown)
        value = self._format_args(action, "N" if action.type is not None else action.dest.upper())
        return f"{', '.join(shown)} {value}"


def _add(group: Any, *names: str, **settings: Any) -> None:
    spelled = [*names, *(f"--{name[2:].replace('-', '_')}" for name in names if "-" in name[2:])]
    group.add_argument(*spelled, **settings)


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


_positive, _none_or_more = _at_least(1), _at_least(0)


def _seed(text: str) -> int:
    value = _none_or_more(text)
    if value >= 2**64:  # torch's seeds are of 64 bits
        raise argparse.ArgumentTypeError(f"expected less than 2**64, got {value}")
    return value


def parse(argv: list[str]) -> Options:
    options = build_parser().parse_args(argv)
    del options.deepspeed  # a switch that says nothing without its file
    if options.max_restarts and options.resume is None:
        options.resume = "auto"
    return options


def shape_of(options: Options, base: Shape) -> Shape:
    """The preset's shape with the flags that were given in its place."""
    hidden = options.hidden_size or base.hidden
    heads = options.num_attention_heads
    if heads is None:
        heads = base.heads if options.hidden_size is None else max(1, hidden // 64)
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


def check_axes(options: Options, shape: Shape) -> None:
    """The axes that share a model out must divide it."""
    if shape.heads % options.tensor_parallel:
        raise WherryError(
            f"--tensor-parallel {options.tensor_parallel} does not divide the {shape.heads} attention heads, and each "
            "rank takes whole heads"
        )
    if shape.layers < options.pipeline_parallel:
        raise WherryError(
            f"--pipeline-parallel {options.pipeline_parallel}: the model has {shape.layers} blocks, and each stage "
            "takes one or more"
        )
    share = options.tensor_parallel * options.pipeline_parallel
    if options.nproc is not None and options.nproc % share:
        raise WherryError(
            f"--nproc {options.nproc} is not a multiple of {share}, the ranks that share one model "
            "(--tensor-parallel x --pipeline-parallel)"
        )


def peak_lr(parameters: int) -> float:
    """A learning rate that suits a model of this size: 1e-3 up to 20M parameters, then with the cube root down."""
    return min(1e-3, round(1e-3 * (2e7 / parameters) ** (1 / 3), 6))


def build_config(
    options: Options,
    parameters: int,
    *,
    bf16: bool,
    given: Mapping[str, Any] | None,
    earlier: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One config from our defaults, the user's file (`given`), the flags and `--set`, each over the one before it.

    A file is taken at its word: of our defaults it gets an optimizer where it has none, and what it leaves to "auto".
    A resumed run has, instead of our optimizer and schedule, those of the `earlier` run.
    """
    config = _defaults(options, parameters, bf16=bf16 and options.precision is None)
    if given is not None:
        config = _under_file(config, given)
    if earlier is not None:
        _keep(config, earlier, given, options.steps)
    if options.global_batch_size is not None:
        config.pop(_ACCUMULATION, None)
    if options.warmup is not None and not isinstance(config.get("scheduler"), dict):
        raise WherryError(
            f"--lr-warmup-iters {options.warmup}: the config has no schedule, so nothing would warm up; give it a "
            'block "scheduler", or leave the flag out'
        )
    for flag, key in _KEYS.items():
        if (value := getattr(options, flag)) is not None:
            _put(config, key, value, f"--{flag.replace('_', '-')}")
    for name in ("bf16", "fp16") if options.precision else ():
        if options.precision == name or name in config:
            _put(config, f"{name}.enabled", options.precision == name, "--precision")
    if options.nvme_path is not None:
        _name_the_disk(config, options.nvme_path)
    own = {name: copy.deepcopy(config.get(name)) for name in ("optimizer", "scheduler")}
    for setting in options.settings:
        key, equals, text = setting.partition("=")
        if not equals or not all(key.split(".")):
            raise WherryError(f"--set {setting}: expected KEY=VALUE, such as zero_optimization.stage=2")
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = text
        _put(config, key, value, f"--set {setting}")
    # As in a file, "auto" is what there would be without it.
    config.update({name: block for name, block in own.items() if config.get(name) == "auto"})
    if config["optimizer"] is None:
        raise WherryError("optimizer: it is null, and nothing is trained without one; leave it out for AdamW")
    return config


def _put(config: dict[str, Any], key: str, value: Any, flag: str) -> None:
    """Write `a.b=value`; blocks that are missing or left open are made."""
    *path, last = key.split(".")
    block = config
    for depth, name in enumerate(path, 1):
        if block.get(name) in (None, "auto"):
            block[name] = {}
        elif block[name] is True and name == "zero_optimization":  # an old form of stage 1
            block[name] = {"stage": 1}
        block = block[name]
        if not isinstance(block, dict):
            raise WherryError(f"{flag}: {'.'.join(path[:depth])} is {block!r} in the config, not a block")
    block[last] = value


def _name_the_disk(config: dict[str, Any], folder: str) -> None:
    zero = config.get("zero_optimization")
    blocks = {name: (zero if isinstance(zero, dict) else {}).get(name) for name in _OFFLOADED}
    on_disk = {name: b for name, b in blocks.items() if isinstance(b, dict) and b.get("device") == "nvme"}
    if not on_disk:
        raise WherryError(
            f"--nvme-path {folder}: nothing rests on disk; add --offload-optimizer nvme, or --offload-param nvme, or "
            "leave it out"
        )
    for name, block in on_disk.items():
        block["nvme_path"] = folder
        if name == "offload_param":
            # What is sent to disk by a flag is to be there.
            block.setdefault("max_in_cpu", 0)


def _keep(config: dict[str, Any], earlier: Mapping[str, Any], given: Mapping[str, Any] | None, steps: int) -> None:
    """What a resumed run goes on with where no file says it. A schedule that would end before the run is stretched."""
    from wherry.config.source import nested

    written = nested(given or {})
    if written.get("optimizer") not in (None, "auto"):
        return
    kept = ["optimizer"]
    kept += ["scheduler"] if written.get("scheduler") in (None, "auto") else []
    kept += ["gradient_clipping"] if given is None else []
    config.update({name: copy.deepcopy(earlier[name]) for name in kept if name in earlier})
    schedule = (config.get("scheduler") or {}).get("params", {})
    if schedule.get("total_num_steps") is not None:
        schedule["total_num_steps"] = max(schedule["total_num_steps"], steps)


def _defaults(options: Options, parameters: int, *, bf16: bool) -> dict[str, Any]:
    warmup = max(1, options.steps // 10) if options.warmup is None else options.warmup
    return {
        _MICRO: options.batch_size or DEFAULT_MICRO_BATCH,
        # A pipeline is full with a micro-batch for each stage, and mostly full with twice as many.
        _ACCUMULATION: 2 * options.pipeline_parallel if options.pipeline_parallel > 1 else 1,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": peak_lr(parameters), "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        },
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": max(options.steps, warmup + 1),
                "warmup_num_steps": warmup,
                "warmup_type": "linear",
                "cos_min_ratio": 0.1,
            },
        },
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3},
        **({"bf16": {"enabled": True}} if bf16 else {}),
    }


def _under_file(defaults: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    from wherry.config.source import nested

    config = nested(given)
    if config.get("optimizer") in (None, "auto"):
        config["optimizer"] = defaults["optimizer"]
        config.setdefault("scheduler", "auto")
    if config.get("scheduler") == "auto":
        config["scheduler"] = defaults["scheduler"]
    optimizer, scheduler = config["optimizer"], config.get("scheduler")
    if isinstance(optimizer, dict) and str(optimizer.get("type")).lower() in _OF_ADAM:
        _fill_auto(optimizer, defaults["optimizer"], tuple(defaults["optimizer"]["params"]))
    if isinstance(scheduler, dict):
        _fill_auto(scheduler, defaults["scheduler"], ("total_num_steps", "warmup_num_steps"))
    if config.get(_MICRO) == "auto" and config.get(_TRAIN) in (None, "auto"):
        config[_MICRO] = defaults[_MICRO]
    # What is still left open follows from the others; a resumed run reads them as numbers.
    return {
        key: value for key, value in config.items() if value != "auto" or key not in (_TRAIN, _MICRO, _ACCUMULATION)
    }


def _fill_auto(block: dict[str, Any], ours: Mapping[str, Any], parameters: tuple[str, ...]) -> None:
    """Our values for parameters that are "auto", or our whole block for one that is left open altogether."""
    params = block.get("params") or {}
    if block.get("type") == "auto" and all(value in (None, "auto") for value in params.values()):
        block.update(copy.deepcopy(dict(ours)))
    else:
        params.update({name: ours["params"][name] for name in parameters if params.get(name) == "auto"})
