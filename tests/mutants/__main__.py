"""Plant each fault of this folder in a copy of the project, and report whether the tests find it.

    python -m tests.mutants                    # every patch, by the fast tests of its room
    python -m tests.mutants NAME ...           # some of them
    python -m tests.mutants --whole --marks "not nightly"    # by all tests

Each patch is one fault that users would notice. A suite that misses one has lost a test.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from tests.rooms import paths_of

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MISSED = 0  # exit status of pytest
# These look at files, not at what the sources do.
LEFT_OUT = "tests/structure"


def fields(patch: Path) -> dict[str, str]:
    """The header of a patch: Fault, Room and Origin."""
    header = patch.read_text().partition("\ndiff --git")[0]
    return dict(line.split(": ", 1) for line in header.splitlines() if ": " in line)


def applies(patch: Path, root: Path = ROOT) -> bool:
    done = subprocess.run(["git", "apply", "--check", str(patch)], cwd=root, capture_output=True)
    return done.returncode == 0


def copy_project(root: Path, target: Path) -> Path:
    """Copy the project with an environment that imports the copy; return its interpreter."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=True)
    libraries = [str(path.relative_to(root)) for path in root.glob("src/wherry/native/*.so")]
    for name in (*listed.stdout.decode().split("\0"), *libraries):
        if name and (root / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)
    subprocess.run(["git", "init", "-q"], cwd=target, check=True)  # `git apply` looks for a repository
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(target / ".venv")], check=True)
    packages = next((target / ".venv").glob("lib/python*/site-packages"))
    (packages / "copy.pth").write_text(f"{target / 'src'}\n{sysconfig.get_path('purelib')}\n")
    return target / ".venv/bin/python"


def search(python: Path, folder: Path, tests: list[str], marks: str, workers: int) -> tuple[str, str, float]:
    """Run tests until one fails; return a verdict, the test that failed, and the seconds."""
    command = [str(python), "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", marks, "--timeout", "120"]
    command += ["--cheap-first", "--cpu-limit", "60"]  # a slow test has found nothing
    command += ["-n", str(workers), *(path for path in tests if (folder / path.split("::")[0]).exists())]
    began = time.monotonic()
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    seconds = time.monotonic() - began
    # With workers, the status after a failure may be that of an interrupted run.
    failures = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    if failures:
        return "found", failures[0].removeprefix("FAILED "), seconds
    if done.returncode == MISSED:
        return "MISSED", "", seconds
    return f"ERROR {done.returncode}", (done.stdout + done.stderr)[-300:], seconds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="patches to plant (default: all)")
    parser.add_argument("--marks", default="fast", help="tests to run, as for pytest -m (default: %(default)s)")
    parser.add_argument("--whole", action="store_true", help="run the whole suite, not only the tests of the room")
    parser.add_argument("--root", type=Path, default=ROOT, help="the project to copy (default: this one)")
    parser.add_argument("-n", "--workers", type=int, default=0, help="workers of pytest (default: none)")
    options = parser.parse_args()
    patches = [HERE / f"{name}.patch" for name in options.names] or sorted(HERE.glob("*.patch"))
    missed = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder).resolve() / "project"
        copy.mkdir()
        python = copy_project(options.root, copy)
        for patch in patches:
            said = fields(patch)
            tests = ["tests"] if options.whole else [path for path in paths_of([said["Room"]]) if path != LEFT_OUT]
            subprocess.run(["git", "apply", str(patch)], cwd=copy, check=True)
            try:
                verdict, test, seconds = search(python, copy, tests, options.marks, options.workers)
            finally:
                subprocess.run(["git", "apply", "-R", str(patch)], cwd=copy, check=True)
            if verdict == "found" and search(python, copy, [test.split(" - ")[0]], options.marks, 0)[0] != "MISSED":
                verdict = "ERROR: the test fails without the fault"
            missed += verdict != "found"
            print(f"{verdict:7} | {patch.stem} | {said['Room']} | {seconds:.0f} s | {test[:160]}", flush=True)
    print(f"{len(patches) - missed} of {len(patches)} found")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
