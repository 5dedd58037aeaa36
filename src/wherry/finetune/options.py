"""The flags of `wherry finetune`, which may also come from a YAML file; many are those of `wherry train`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wherry.config.problems import Parser, did_you_mean
from wherry.errors import WherryError
from wherry.sources import without_page
from wherry.train.options import FLAGS as OF_TRAIN
from wherry.train.options import Flag, Options, dashed, flag, keys_of, none_or_more, positive

FILE = "finetune.yaml"
"""In a run's folder: what repeats the run."""

METHODS = ("sft", "dpo", "pretrain")
_TRAINS = {each.settings["dest"]: each for flags in OF_TRAIN.values() for each in flags}


def _shared(dest: str, **settings: Any) -> Flag:
    """A flag of `wherry train`, with what is to be said otherwise of it."""
    found = _TRAINS[dest]
    key = settings.pop("key", found.key)
    return found._replace(settings={**found.settings, **settings}, key=key)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if value < 0 or (value >= 1 and value != int(value)):
        raise argparse.ArgumentTypeError(f"expected a share below 1, or a number of rows, got {text!r}")
    return value


FLAGS: dict[str, tuple[Flag, ...]] = {
    "model": (
        flag("--lora", nargs="?", const="", metavar="r=16,...",
             help="train adapters of low rank beside the frozen weights: r (16), alpha (2r), dropout (0), target "
             "(all-linear, or names joined by +), and what else PEFT's LoraConfig has"),
        flag("--bits", type=int, choices=(4, 8),
             help="with --lora: hold the frozen weights in so many bits, by bitsandbytes: nf4 with double "
             "quantization, or int8"),
        flag("--full", action="store_true", help="train all weights (the default)"),
        flag("--method", choices=METHODS,
             help="default: by the data; sft: learn the answers; dpo: prefer one answer to another; pretrain: learn "
             "the text whole"),
        _shared("seq_length", help="tokens of a row; longer ones are cut (default: 1024, or what the model takes)"),
    ),
    "data": (
        flag("--data", metavar="DATA",
             help="JSON, JSONL, Parquet, CSV or text files, a folder of them, or the name of a data set; chats, "
             "instructions, prompts with completions, text and preference pairs are known by their columns"),
        flag("--eval-data", metavar="DATA", help="rows to evaluate on (default: some of --data are kept apart)"),
        flag("--eval-split", type=_share, metavar="SHARE",
             help="how much of --data to keep apart: a share, or a number of rows (default: 0.05; 0: none)"),
        flag("--columns", metavar="NAME=COLUMN,...", help="which column is which, as in prompt=question"),
        flag("--packing", action="store_true", help="put several short rows into one sequence"),
        flag("--skip-bad-rows", action="store_true", help="leave out rows that cannot be trained on"),
    ),
    "training": (
        flag("--epochs", type=float, help="how often to go through the data (default: 1, where there are no --steps)"),
        _shared("steps", help="optimizer steps"),
        _shared("batch_size", help="rows of a micro-batch on each rank (default: what fits, by the plan)"),
        _shared("global_batch_size", help="rows of a step, over all ranks (default: 16)"),
        _shared("accumulation"),
        _shared("optimizer"),
        _shared("lr", help="peak learning rate (default: 1e-5; 2e-4 with --lora; of dpo a tenth)"),
        _shared("weight_decay", help="default: 0"),
        _shared("clip_grad"),
        _shared("warmup", key=None, help="steps until the peak (default: 3%% of them)"),
        *(each for each in OF_TRAIN["training"] if each.settings["dest"] == "precision"),
        _shared("stage", help="ZeRO stage (default: by the plan)"),
        _shared("offload_optimizer", help="where optimizer state rests (default: by the plan)"),
        _shared("offload_param", help="where weights rest, at stage 3 (default: by the plan)"),
        flag("--context-parallel", type=positive, key="wherry.context_parallel",
             help="ranks that share each row, of which each has a part (default: 1)"),
        _shared("nvme_path", help="the folder on disk for what rests there, which the plan then may choose too"),
        _shared("host_memory"),
        _shared("config"),
        _shared("settings", help="a key of the config, or with sft., dpo. or lora. before it an argument of TRL's "
                "SFTConfig or DPOConfig or of PEFT's LoraConfig"),
        _shared("seed", help="of the order of the rows and of adapters (default: 1234)"),
    ),
    "run": (
        _shared("run_dir"),
        _shared("log_interval"),
        _shared("eval_interval", help="steps between evaluations, with a sample of what the model says (default: four "
                "in a run)"),
        flag("--samples", type=none_or_more, default=3, help="prompts of the evaluation rows to answer (default: 3)"),
        _shared("save_interval"),
        _shared("no_save", help="write no checkpoint; the finished model is written all the same"),
        _shared("keep_last", key=None, help="keep the last N checkpoints (default: 2)"),
        _shared("resume", help="go on from a run's folder or one of its checkpoints; auto: from the newest whole "
                "one of --run-dir, if any"),
        _shared("max_restarts"),
        _shared("nproc", help="ranks (default: one per GPU, or one)"),
    ),
}  # fmt: skip


_IN_CHECKPOINT = ("bits", "lr", "weight_decay")
_TRAINING = {each.settings["dest"]: each for name in ("model", "data", "training") for each in FLAGS[name][::-1]}
_NO_TRAINING = ("settings", "config", "nvme_path", "host_memory")


def build_parser(prog: str = "wherry finetune") -> argparse.ArgumentParser:
    parser = Parser(
        prog=prog,
        usage="wherry finetune MODEL --data DATA [FLAG ...]\n       wherry finetune RUN.yaml [FLAG ...]",
        description="Train a published model further on your own data, on whatever this machine has: where weights, "
        "gradients and optimizer state rest, the micro-batch and what is recomputed are planned, and told. The "
        "finished model is in the run's folder, as model/. Trainers are TRL's.",
        epilog="A YAML file holds the same flags by their names, as in `data: notes.jsonl`; those of the command line "
        f"come over it. Every run writes one, {FILE}, that repeats it.",
    )
    parser.add_argument(
        "model", metavar="MODEL", nargs="?",
        help="a folder that transformers loads, a run of wherry train, a model's name on the hub, or a YAML file",
    )  # fmt: skip
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        exclusive = {"precision": group.add_mutually_exclusive_group(), "lora": group.add_mutually_exclusive_group()}
        exclusive["full"] = exclusive["lora"]
        for each in flags:
            exclusive.get(each.settings["dest"], group).add_argument(*each.names, **each.settings)
    return parser


def parse(argv: list[str]) -> Options:
    """The options of a command, over those of its file or of the run that it resumes."""
    words = [dashed(word) for word in argv]
    given = build_parser().parse_args(words)
    file = _file_of(given)
    options, notes = given, list[str]()
    if file is not None:
        values = read_file(file)
        named = words_of(values, file)
        in_file = build_parser(prog=str(file)).parse_args(named)
        for rivals in (("lora", "full"), ("steps", "epochs")):  # one of the two replaces the other
            if any(getattr(given, each) for each in rivals) or (given.lora is not None and "lora" in rivals):
                named = [word for word in named if not word.startswith(tuple(f"--{each}" for each in rivals))]
        if given.full:  # and what goes with adapters
            named = [word for word in named if not word.startswith(("--bits", "--set=lora."))]
        options = build_parser().parse_args([*named, *words])
        options.run_dir = given.run_dir
        options.model = in_file.model = values.get("model") if given.model in (None, str(file)) else given.model
        # A flag of the command line comes over what the file sets.
        over = set(keys_of(given, FLAGS))
        kept = [each for each in in_file.settings if each.partition("=")[0] not in over]
        options.settings = [*kept, *given.settings]
        if given.resume is not None:
            notes = _unlike(given, in_file)
    options.notes = notes
    if options.max_restarts and options.resume is None:
        options.resume = "auto"
    if options.resume == "auto" and options.run_dir is None:
        raise WherryError("--resume auto: it looks for the newest checkpoint of a run; name its folder with --run-dir")
    for name, what in (("model", "a MODEL, a folder that transformers loads"), ("data", "--data")):
        if getattr(options, name) is None:
            raise WherryError(f"finetune: {what} is missing; try `wherry finetune MODEL --data DATA`")
    options.model = without_page(options.model)
    if options.bits is not None and options.lora is None:
        raise WherryError(
            f"--bits {options.bits}: weights in few bits cannot be trained themselves; add --lora for adapters"
        )
    if options.no_save and options.save_interval:
        raise WherryError("--no-save: --save-interval asks for checkpoints; leave one of the two out")
    if options.steps is not None and options.epochs is not None:
        raise WherryError("--epochs: how long to train is said by --steps already; leave one of the two out")
    if options.epochs is not None and not options.epochs > 0:
        raise WherryError(f"--epochs: expected more than 0, got {options.epochs:g}")
    return options


def _unlike(given: Options, before: Options) -> list[str]:
    """What a run goes on with that it has not begun with; an error of what its checkpoint says."""
    notes = []
    for name, each in _TRAINING.items():
        value, was = getattr(given, name), getattr(before, name)
        if value in (None, False, was) or name in _NO_TRAINING:
            continue
        told, had = f"{each.names[0]} {value}", "its default" if was is None else str(was)
        if name in _IN_CHECKPOINT:
            raise WherryError(f"{told}: the run that goes on has {had}, by its checkpoint; leave it out")
        notes.append(f"the run goes on with {told}, and has begun with {had}")
    return notes


def _file_of(given: Options) -> Path | None:
    """The file that a command names as its model, or that the run which it resumes has written."""
    if given.model is not None and given.model.endswith((".yaml", ".yml")):
        return Path(given.model)
    if given.resume is None:
        return None
    start = Path(given.run_dir or "") if given.resume == "auto" else Path(given.resume)
    found = next((folder / FILE for folder in (start, *start.parents[:2]) if (folder / FILE).exists()), None)
    if found is None and given.model is None:
        raise WherryError(f"--resume {given.resume}: there is no run of `wherry finetune` in it, which has a {FILE}")
    if found is not None and given.run_dir is None:
        given.run_dir = str(found.parent)
    return found


def read_file(path: Path) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WherryError(f"finetune: {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise WherryError(f"finetune: {path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise WherryError(f"finetune: {path}: expected names and values, like `model: FOLDER`, got {found!r:.60}")
    found = {str(name).replace("_", "-"): value for name, value in found.items()}
    known = {each.names[0][2:] for flags in FLAGS.values() for each in flags} | {"model"}
    for name in found:
        if name not in known:
            raise WherryError(f"finetune: {path}: {name}: there is no such flag{did_you_mean(name, known)}")
    return found


def words_of(values: Mapping[str, Any], file: Path) -> list[str]:
    """What a file has, as on a command line."""
    words = []
    for name, value in values.items():
        if name == "model" or value is None or value is False:
            continue
        if name == "set":
            if not isinstance(value, dict):
                raise WherryError(f"finetune: {file}: set: expected keys and values, like `bf16.enabled: true`")
            words += [f"--set={key}={json.dumps(each)}" for key, each in flat(value)]
        elif isinstance(value, list):
            raise WherryError(f"finetune: {file}: {name}: expected one value, got a list")
        elif value is True:
            words.append(f"--{name}")
        elif isinstance(value, dict):
            words.append(f"--{name}=" + ",".join(f"{key}={each}" for key, each in value.items()))
        else:
            words.append(f"--{name}={value}")
    return words


def flat(tree: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def as_file(options: Options, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """What `read_file` reads to the same options, with the values that were `chosen` for keys of the config."""
    from wherry.config import parse_overrides

    defaults = vars(build_parser().parse_args([]))
    here = {"resume", "run_dir", "max_restarts", "settings"}  # of this command, and not of what it trains
    by_dest = {each.settings["dest"]: each for flags in FLAGS.values() for each in reversed(flags)}
    found: dict[str, Any] = {"model": _absolute(options.model)}
    for dest, each in by_dest.items():
        value = getattr(options, dest)
        if dest not in here and value != defaults[dest]:
            found[each.names[0][2:]] = _absolute(value) if dest in ("data", "eval_data", "config") else value
    if options.lora is not None:
        found["lora"] = options.lora or True
    settings = {**chosen, **parse_overrides(options.settings)}
    return found | ({"set": settings} if settings else {})


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if Path(path).exists() else path
