"""Rows to fine-tune a small model on: what the functions of Python's standard library do, by their own words.

    python examples/docstrings.py notes.jsonl
    wherry finetune MODEL --data notes.jsonl

Each row asks for a function and has the first line of its docstring as the answer.
"""

import importlib
import inspect
import json
import sys
import warnings
from collections.abc import Iterator

# Those that speak while they are imported, open windows, or leave with the process.
LEFT_OUT = {"antigravity", "this", "idlelib", "turtle", "turtledemo", "tkinter", "test", "lib2to3"}
LONGEST = 100


def rows() -> Iterator[dict[str, str]]:
    seen = set()
    for name in sorted(sys.stdlib_module_names):
        if name.startswith("_") or name in LEFT_OUT:
            continue
        try:
            module = importlib.import_module(name)
        except Exception:  # a module of another platform
            continue
        for function, found in inspect.getmembers(module, callable):
            told = (inspect.getdoc(found) or "").split("\n")[0].strip()
            if function.startswith("_") or getattr(found, "__module__", None) != name or not told.isascii():
                continue
            if told.endswith(".") and len(told) <= LONGEST and told not in seen:
                seen.add(told)
                yield {"prompt": f"What does {name}.{function} do?", "completion": f" {told}"}


def main() -> None:
    warnings.simplefilter("ignore")
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        count = sum(bool(file.write(json.dumps(row) + "\n")) for row in rows())
    print(f"{sys.argv[1]}: {count} questions with their answers")


if __name__ == "__main__":
    main()
