"""The test folders of each room of the sources, and the tests that a change calls for.

python -m tests.rooms          # pytest arguments for the files that differ from HEAD, or from main on a branch
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
SOURCES = "src/wherry"
# Run for every change of the sources.
ALWAYS = ("tests/test_lives.py", "tests/structure")
# A room is a folder or a module directly under src/wherry; one that is not named here has the tests of the engine.
TESTS: dict[str, tuple[str, ...]] = {
    "activations": ("activations",),
    "checkpoint": ("checkpoint", "engine/test_optimizers.py"),
    "cli": ("cli",),
    "compat": ("compat",),
    "config": ("config",),
    "dataloader": ("engine", "checkpoint/test_data.py"),
    "finetune": ("finetune",),
    "forecast": ("plan",),
    "integrations": ("integrations", "finetune"),
    "native": ("native", "disk"),
    "nn": ("nn", "scale", "integrations"),
    "observe": ("observe", "engine"),
    "offload": ("tiers", "disk", "engine"),
    "offload_states": ("tiers", "engine"),
    "optim": ("update", "native", "engine"),
    "parallel": ("parallel", "engine", "security/test_ranks_that_differ.py"),
    "plan": ("plan",),
    "pretrained": ("scale", "finetune"),
    "sharding": ("engine", "scale", "guard", "parallel"),
    "sources": ("scale", "plan", "security"),
    "testing": ("testing",),
    "tiers": ("tiers", "disk"),
    "train": ("train",),
    "update": ("update", "engine"),
    "window": ("engine", "tiers", "scale", "integrations/test_context_parallel.py"),
}
ENGINE = ("engine", "tiers", "scale")


def paths_of(rooms: Iterable[str]) -> list[str]:
    folders = {folder for room in rooms for folder in TESTS.get(room, ENGINE)}
    return [*(path for path in ALWAYS if (ROOT / path).exists()), *(f"tests/{folder}" for folder in sorted(folders))]


def room_of(path: str) -> str | None:
    """The room of a file of the sources."""
    parts = PurePosixPath(path).parts
    return PurePosixPath(parts[2]).stem if path.startswith(f"{SOURCES}/") and len(parts) > 2 else None


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def changed_files() -> list[str]:
    """Files that differ from where this branch left main, or from its last commit on a clean main."""
    base = _git("merge-base", "HEAD", "main")[0] if _git("branch", "--list", "main") else "HEAD"
    changed = _git("diff", "--name-only", base) + _git("ls-files", "--others", "--exclude-standard")
    return changed or _git("diff", "--name-only", "HEAD~1")


def importers(helper: PurePosixPath) -> list[str]:
    """Test files that import a helper of tests."""
    name = ".".join(helper.with_suffix("").parts)
    imports = re.compile(
        rf"(from|import) {re.escape(name)}\b|from {re.escape(name.rpartition('.')[0])} import .*\b{helper.stem}\b"
    )
    paths = (ROOT / "tests").rglob("test_*.py")
    return [str(path.relative_to(ROOT)) for path in sorted(paths) if imports.search(path.read_text())]


def near(changed: Iterable[str]) -> list[str]:
    """Pytest arguments for changed files: the tests of their rooms, and the folders of changed tests."""
    changed = list(changed)
    rooms = {room for path in changed if (room := room_of(path))}
    chosen = paths_of(rooms) if rooms else []
    for path in changed:
        parts = PurePosixPath(path).parts
        if parts[0] == "tests" and path.endswith(".py") and not parts[-1].startswith("test_"):
            chosen += importers(PurePosixPath(path))
        if parts[0] == "tests" and len(parts) > 2 and (ROOT / "tests" / parts[1]).is_dir() and parts[1] != "mutants":
            chosen.append("/".join(parts[:2]))
        elif parts[0] == "docs" or path.endswith(".md"):
            chosen += ["tests/docs", "tests/structure"]
        elif parts[0] in ("benchmarks", "examples"):
            chosen.append(f"tests/{parts[0]}")
        elif parts[0] == "tests" and parts[-1].startswith("test_") and (ROOT / path).exists():
            chosen.append(path)
        elif path == "tests/conftest.py":
            return ["tests"]
    return list(dict.fromkeys([*ALWAYS, *chosen]))


if __name__ == "__main__":
    arguments = near(changed_files())
    print(f"tests of this change: {' '.join(arguments)}", file=sys.stderr)
    print(*arguments)
