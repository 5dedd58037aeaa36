"""`wherry export`, `wherry inspect` and `wherry import-deepspeed`: checkpoints from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry.config.problems import Parser
from wherry.errors import WherryError, one_line, printable

if TYPE_CHECKING:
    from wherry.checkpoint.format import Manifest

_LONGEST_PATH = 4096
_CKPT = "a checkpoint, or a folder of them or of a run, whose latest is meant"


def export(argv: list[str]) -> int:
    parser = Parser(
        prog="wherry export",
        description="Write a checkpoint's weights as safetensors files that transformers loads. Optimizer states are "
        "left out. A checkpoint of `wherry train` becomes a GPT-2 of transformers' own, with a tokenizer of bytes; its "
        "matrices are in memory one at a time. Of any other model less than 100 MiB at a time are.",
    )
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, help=_CKPT)
    parser.add_argument("out", metavar="OUT", type=Path, help="folder for the files")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="of the weights (default: as trained)")
    parser.add_argument("--max-shard-size", "--max_shard_size", default="5GB", metavar="SIZE", help="bytes of a file")
    arguments = parser.parse_args(argv)
    from wherry.checkpoint import export as exporting
    from wherry.observe.memory import format_bytes
    from wherry.plan.quantities import parse_bytes
    from wherry.train.gpt2 import translation_of

    size = parse_bytes(arguments.max_shard_size, "--max-shard-size")

    dtype = exporting.DTYPES[arguments.dtype] if arguments.dtype else None
    try:
        done = exporting.export(
            arguments.checkpoint, arguments.out, dtype=dtype, max_shard_size=size, translation_of=translation_of
        )
    except OSError as error:
        raise WherryError(f"export: {error.filename or arguments.out}: {error.strerror}") from error
    print(printable(f"{done.folder}: {done.tensors} tensors, {format_bytes(done.bytes)}"))
    if not done.with_config:
        print("the model was none of transformers', so there is no config.json; add the model's own to load it there")
    return 0


def inspect(argv: list[str]) -> int:
    parser = Parser(prog="wherry inspect", description="Say what is inside a checkpoint, and whether it is whole.")
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, help=_CKPT)
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--no-verify", action="store_true", help="do not read the files to check them")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    arguments = parser.parse_args(argv)
    from wherry.checkpoint import folder as folders
    from wherry.checkpoint.checks import read_manifest
    from wherry.checkpoint.export import find

    path = find(arguments.checkpoint)
    manifest = read_manifest(path)
    problems = [] if arguments.no_verify else folders.damage(path, manifest)
    if arguments.json:
        import json

        print(json.dumps(_as_json(path, manifest, problems), indent=2))
    else:
        _print(path, manifest, problems, verified=not arguments.no_verify, tensors=arguments.tensors)
        others = [tag for tag in folders.newest_first(path.parent) if tag != path.name]
        if others:
            _line(f"beside it: {', '.join(others)}", 4)
    return 1 if problems else 0


def _facts(path: Path, manifest: Manifest) -> dict[str, Any]:
    from wherry.observe.memory import format_bytes

    parameters = list(manifest.parameters())
    optimizer = manifest.engine.get("optimizer")
    trained = sum(entry.numel for _, entry in parameters if entry.kind == "parameter")
    frozen = sum(entry.numel for _, entry in parameters if entry.kind == "frozen")
    facts = {
        "step": f"{manifest.step:,}",
        "written": f"{manifest.created[:19]}Z by Wherry {manifest.versions.get('wherry', '?')}",
        "ranks": str(manifest.world_size),
        "placement": ", ".join(f"{row[0]} {row[1]} on {row[2]}" for row in manifest.placement if len(row) == 3),
        "parameters": f"{trained:,} trained" + (f", {frozen:,} frozen" if frozen else ""),
        "buffers": str(sum(1 for _ in manifest.buffers())),
        "dtypes": ", ".join(sorted({entry.dtype for _, entry in parameters})),
        "files": f"{len(manifest.files)}, {format_bytes(manifest.bytes)}",
    }
    if optimizer is not None:
        states = ", ".join(manifest.state_names()) or "no state"
        facts["optimizer"] = f"{optimizer.get('type', '?')} after {optimizer.get('steps', 0):,} updates: {states}"
    client = manifest.engine.get("client_state")
    if isinstance(client, dict) and client:
        facts["client state"] = ", ".join(client)
    return facts


def _print(path: Path, manifest: Manifest, problems: list[str], *, verified: bool, tensors: bool) -> None:
    print(one_line(str(path), _LONGEST_PATH))
    for name, value in _facts(path, manifest).items():
        _line(f"  {name + ':':<14}{value}", 16)
    whole = "not checked" if not verified else "DAMAGED" if problems else "every byte checked"
    print(f"  {'whole:':<14}{whole}")
    for problem in problems:
        _line(f"    {problem}", 6)
    if tensors:
        for name, entry in manifest.entries.items():
            also = f" (also {', '.join(map(one_line, entry.aliases))})" if entry.aliases else ""
            states = ", ".join(map(one_line, entry.states))
            _line(f"  {one_line(name)}  {tuple(entry.shape)} {entry.dtype} {entry.kind}: {states}{also}", 6)


def _line(text: str, indent: int) -> None:
    """Print a line that may hold what a file says, and what goes beyond the terminal below it."""
    import shutil
    import textwrap

    width = shutil.get_terminal_size().columns
    rest = " " * indent
    print(textwrap.fill(printable(text), width, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False))


def _as_json(path: Path, manifest: Manifest, problems: list[str]) -> dict[str, Any]:
    return {
        "path": str(path),
        "facts": _facts(path, manifest),
        "problems": problems,
        "tensors": {name: vars(entry) | {"states": list(entry.states)} for name, entry in manifest.entries.items()},
    }


def import_deepspeed(argv: list[str]) -> int:
    parser = Parser(
        prog="wherry import-deepspeed",
        description="Turn a checkpoint of DeepSpeed's (ZeRO stage 0 to 3) into one of Wherry's. Nothing in it is run: "
        "its pickles are read with torch's weights_only.",
    )
    parser.add_argument("source", metavar="IN", type=Path, help="the folder with `latest`, or one tag's folder")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder for the checkpoint")
    parser.add_argument("--tag", help="the tag to read (default: what `latest` says), and to write")
    arguments = parser.parse_args(argv)
    from wherry.compat.deepspeed.importing import import_checkpoint

    try:
        path = import_checkpoint(arguments.source, arguments.out, arguments.tag)
    except OSError as error:
        raise WherryError(f"import-deepspeed: {error.filename or ''}: {error.strerror}") from error
    print(one_line(str(path), _LONGEST_PATH))
    return 0
