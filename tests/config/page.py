"""The page docs/config.md: `python -m tests.config.page > docs/config.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from wherry.config.reference import KeyInfo, catalog, sentence

# A config as a tutorial prints it: with a trailing comma, and one that is missing.
TUTORIAL = """{
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {
            "device": "cpu",
        }
        "contiguous_gradients": true,
        "overlap_comm": true
    }
}
"""

_INTRO = """# Config

This page is written by `python -m tests.config.page` from the schema that validates configs.

A config is a file, a dict, or text in JSON or [Hjson](https://hjson.github.io): comments, trailing commas and a
missing comma between lines are fine; a key given twice is an error. Files written for DeepSpeed load as they are.

- An unknown key is an error, with its line and the key that was perhaps meant. All problems are reported at once.
- `"auto"` and `null` are values of every key, and mean its default, unless the key has `auto` as a choice of its own
  or says what `auto` does.
- Whole numbers may be written like `5e8`.
- A key marked *no effect* is accepted. Those whose values ask for other than what happens are named in one line when
  training begins; `wherry config check FILE` says of each why it does nothing here.
- Batch sizes: any two of `train_batch_size`, `train_micro_batch_size_per_gpu` and `gradient_accumulation_steps` give
  the third. With only one of them, accumulation (or else the micro-batch) is 1; with none, both are.
- A dotted key at the top, like `"zero_optimization.stage": 2`, means the key inside the block, which goes first if it
  is given too.
- Schedules count from 0, as those of torch: the first update uses the schedule's value at step 0, the second that at
  step 1. (DeepSpeed's first two updates both use step 0, so its warm-up runs one step later.)

Two variables of the environment say what runs the host's part, where the best choice by itself is not wanted:
`WHERRY_ISA` (avx512, avx2, neon, portable, or torch for the fallback without the native library) the optimizers, and
`WHERRY_DISK` (io_uring, threads, or buffered) the reads and writes of the disk tier. `wherry doctor` says what is in
use, and why nothing better is.

`wherry config check FILE` checks a file, `wherry config explain KEY` says what a key does, and
`wherry config schema` prints a JSON schema for editors: save it and point to it with a key `"$schema"`.
"""


def markdown() -> str:
    """The page docs/config.md."""
    parts = [_INTRO]
    keys = [info for info in catalog() if not info.of]
    top = [info for info in keys if "." not in info.path and not info.is_block]
    parts.append(_section("The top", [info for info in top if info.effect in ("acts", "none")]))
    for info in keys:
        if info.is_block:
            parts.append(_block_section(info, keys))
    for info in keys:
        if info.path in ("optimizer.params", "scheduler.params"):
            parts += _params_sections(info.path)
    parts.append(_other_section("Other spellings", [info for info in keys if info.effect == "renamed"]))
    parts.append(_other_section("Not part of Wherry", [info for info in keys if info.effect == "refused"]))
    return "\n".join(parts)


def _block_section(info: KeyInfo, keys: list[KeyInfo]) -> str:
    inner = [key for key in keys if key.block == info.path and not key.is_block]
    status = "" if info.effect == "acts" else f" *{sentence(info.status)}*"
    shown = [key for key in inner if key.effect in ("acts", "none")]
    return _section(f"`{info.path}`", shown, info.text + status, info.why)


def _params_sections(path: str) -> Iterator[str]:
    infos = [info for info in catalog() if info.of and info.block == path]
    for name in dict.fromkeys(info.of for info in infos):
        yield _section(f"`{path}` of {name}", [info for info in infos if info.of == name])


def _section(title: str, infos: list[KeyInfo], text: str = "", idle: str = "") -> str:
    lines = [f"## {title}", ""]
    if text:
        lines += [text, ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for info in infos:
        says_so = info.effect != "acts" and info.why != idle
        status = f" *{sentence(info.status)}*" if says_so else ""
        name = info.name
        default = f"`{info.default}`" if info.default not in ("unset", "required", "") else info.default
        lines.append(f"| `{name}` | {_cell(info.type)} | {default} | {_cell(info.text + status)} |")
    return "\n".join(lines) + "\n"


def _other_section(title: str, infos: list[KeyInfo]) -> str:
    lines = [f"## {title}", "", "| key | |", "|---|---|"]
    lines += [f"| `{info.path}` | {_cell(sentence(info.text) + ' ' + sentence(info.status))} |" for info in infos]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    sys.stdout.write(markdown())
