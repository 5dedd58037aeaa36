"""`wherry generate`: what a model writes, of a run here or of any folder that transformers loads."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from wherry.config.problems import Parser
from wherry.errors import WherryError
from wherry.integrations.model_folder import EXPECTED, adapter_in, base_of, folder_on, opened, read_model, stored

if TYPE_CHECKING:
    import torch

# What a forward needs beside the weights: its activations, and the keys and values of what it has read.
ROOM_BESIDE = 1.2


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="wherry generate",
        description="Go on from a prompt, with the model of a run, of a checkpoint or of a folder that transformers "
        "loads; where its tokenizer has a chat template, answer it. Without a prompt each line of standard input is "
        "one, until an empty one. Weights that do not fit on one device are shared out over all GPUs, or rest in host "
        "memory, from which a block at a time comes.",
        epilog="No code that comes with a model is run, and nothing is fetched: a name of the hub is looked up in its "
        "cache on this machine.",
    )
    flag = parser.add_argument
    flag("model", metavar="MODEL", help=EXPECTED)
    flag("prompt", metavar="PROMPT", nargs="?", help="what to go on from")
    flag(
        "--max-new-tokens",
        type=_number(int, 1),
        default=200,
        metavar="N",
        help="at most so many (default: 200); where a model's positions end it goes on from the last half of them",
    )
    flag(
        "--temperature",
        type=_number(float, 0),
        default=0.8,
        metavar="T",
        help="how freely tokens are drawn (default: 0.8; 0: the likeliest each time)",
    )
    flag("--top-k", type=_number(int, 1), metavar="K", help="draw from the K likeliest alone")
    flag("--top-p", type=_number(float, 0, 1), metavar="P", help="draw from the likeliest that make up P alone")
    flag("--adapter", metavar="FOLDER", help="an adapter of PEFT's over MODEL (default: MODEL itself, if it is one)")
    flag("--raw", action="store_true", help="go on from the prompt as it stands, with no chat template around it")
    flag("--seed", type=_number(int, 0), metavar="N", help="the same seed writes the same (default: another each time)")
    flag("--dtype", choices=("fp32", "bf16", "fp16"), help="of the weights (default: as in the files)")
    flag(
        "--bits",
        type=int,
        choices=(4, 8),
        help="hold the weights in so many bits, by bitsandbytes, as `wherry finetune --lora --bits` does",
    )
    flag("--nproc", type=_number(int, 1), metavar="N", help="share the weights out over N ranks")
    flag("--offload-param", choices=("none", "cpu", "nvme"), help="where weights rest until their block runs")
    flag("--nvme-path", metavar="FOLDER", help="the folder on disk for --offload-param nvme")
    return parser


def _number(kind: type[int] | type[float], least: float, most: float = math.inf) -> Callable[[str], Any]:
    def check(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if least <= kind(text) <= most:
                return kind(text)
        upto = f" to {most:g}" if math.isfinite(most) else " or more"
        whole = "whole " if kind is int else ""
        raise argparse.ArgumentTypeError(f"expected a {whole}number, {least:g}{upto}, got {text!r}")

    return check


def main(argv: list[str]) -> int:
    arguments = build_parser().parse_intermixed_args(argv)  # the prompt may come last
    if (arguments.offload_param == "nvme") is not (arguments.nvme_path is not None):
        raise WherryError("generate: --offload-param nvme and --nvme-path FOLDER go together; give both or neither")
    if arguments.prompt is not None:  # a terminal may send what is not UTF-8
        arguments.prompt = os.fsencode(arguments.prompt).decode(errors="replace")
    if find_spec("transformers") is None:
        raise WherryError("generate: it needs transformers: pip install 'wherry[transformers]'")
    model = folder_on(arguments.model, "generate", fetch=False)
    if arguments.adapter is None and (adapter := adapter_in(model)) is not None:
        arguments.adapter = str(adapter)
        model = base_of(adapter, "generate")
    with opened(model, "generate") as folder:
        arguments.model = folder
        place = _place(arguments)
        print(f"wherry: {place.why}", file=sys.stderr, flush=True)
        arguments.nproc, arguments.offload_param = place.ranks, place.offload
        if place.ranks > 1:
            return _launch(arguments)
        from wherry.cli.sampling import write

        return write(arguments)


def _launch(arguments: argparse.Namespace) -> int:
    """The same command on each of several ranks of this machine."""
    from wherry.cli import run, supervise

    flags = vars(arguments).copy()
    words = [str(flags.pop("model")), *([prompt] if (prompt := flags.pop("prompt")) is not None else [])]
    raw = ["--raw"] if flags.pop("raw") else []
    given = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items() if value is not None] + raw
    how = ["--nproc", str(arguments.nproc), "--module", "wherry.cli.sampling"]
    launched = run.build_parser().parse_args([*how, *given, "--", *words])
    run.resolve(launched, "1")
    return supervise.launch(launched)


# Where its weights go.


class _Whereabouts(NamedTuple):
    ranks: int
    offload: str
    why: str


def _place(arguments: argparse.Namespace) -> _Whereabouts:
    """On one device if there is room, else over all GPUs, else in host memory; or what the flags say."""
    from wherry.cli.run import device_count
    from wherry.observe.memory import format_bytes, free_on_gpu
    from wherry.plan.rates import device_name
    from wherry.tiers.host import free_host_memory
    from wherry.tiers.streams import accelerator

    nbytes, dtype = weights_in(arguments.model, arguments.dtype, arguments.bits)
    what = f"{format_bytes(nbytes)} of weights in {str(dtype).removeprefix('torch.')}"
    what += f" and in {arguments.bits} bits" if arguments.bits is not None else ""
    gpus, device = device_count(), accelerator()
    if arguments.nproc is not None or arguments.offload_param is not None:
        ranks, offload = arguments.nproc or 1, arguments.offload_param or "none"
        rest = {"none": "", "cpu": ", resting in host memory", "nvme": f", resting in {arguments.nvme_path}"}[offload]
        return _Whereabouts(ranks, offload, f"{what}, on {ranks} rank{'s' * (ranks > 1)}{rest}, as asked for")
    host = free_host_memory()
    if device is None:
        if nbytes * ROOM_BESIDE <= host:
            return _Whereabouts(1, "none", f"{what}, on the CPU: {format_bytes(host)} of memory are free")
        raise _no_room(what, f"{format_bytes(host)} of memory are free")
    free = free_on_gpu(device)
    each = f"{format_bytes(free)} are free on {'each' if gpus > 1 else 'the'} {device_name(device)}"
    if nbytes * ROOM_BESIDE <= free:
        return _Whereabouts(1, "none", f"{what}, on one device: {each}")
    if gpus > 1 and nbytes * ROOM_BESIDE <= free * gpus:
        return _Whereabouts(gpus, "none", f"{what}, shared out over {gpus} GPUs: {each}")
    if nbytes <= host:
        return _Whereabouts(1, "cpu", f"{what}, resting in host memory, a block at a time on the device: {each}")
    raise _no_room(what, f"{each}, and {format_bytes(host)} of host memory")


def _no_room(what: str, free: str) -> WherryError:
    return WherryError(
        f"generate: {what} fit nowhere here: {free}. Give --offload-param nvme --nvme-path FOLDER, and they rest on "
        "disk; or --dtype bf16, if they are wider now"
    )


def weights_in(folder: Path, asked: str | None, bits: int | None = None) -> tuple[int, torch.dtype]:
    """Bytes of a folder's weights in memory, and their dtype: that of the largest tensor, if none is asked for."""
    from wherry.checkpoint.export import DTYPES
    from wherry.integrations.bits import in_bits

    count, codes, dtype = stored(folder)
    if asked is None and dtype not in DTYPES.values():
        raise WherryError(f"generate: {folder} holds weights in {dtype}, which no forward takes; give a --dtype")
    working = DTYPES[asked] if asked else dtype
    if bits is not None:
        coded = in_bits(read_model(folder, working, "generate", bits))
        count, codes = count - coded, codes + coded * bits // 8
    return count * working.itemsize + codes, working
