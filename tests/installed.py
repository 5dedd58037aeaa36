"""What users install: an sdist, a wheel made of it, and an environment with that wheel and no sources of Wherry.

`python -m tests.installed FOLDER` leaves the environment in FOLDER/venv, and beside it what tests need to run there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
BESIDE_TESTS = ("docs", "examples")
_SDIST = "import sys; from scikit_build_core.build import build_sdist; print(build_sdist(sys.argv[1]))"


def _run(*words: object, **extra: str) -> str:
    done = subprocess.run(
        list(map(str, words)), cwd=ROOT, env=os.environ | extra, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def _pip(python: object, *words: object, **extra: str) -> None:
    # Offline, and never with a wheel that an earlier sdist of this place has left in pip's cache.
    command, *rest = words
    _run(python, "-m", "pip", "-q", "--no-cache-dir", command, "--no-deps", "--no-index", *rest, **extra)


def make_sdist(out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    return out / _run(sys.executable, "-c", _SDIST, out).split()[-1]


def make_wheel(sdist: Path, out: Path, *settings: str, **environment: str) -> Path:
    """The wheel that pip builds of it; `settings` are the build backend's."""
    flags = [f"--config-settings={setting}" for setting in settings]
    _pip(sys.executable, "wheel", "--no-build-isolation", *flags, "-w", out, sdist, **environment)
    (wheel,) = out.glob("*.whl")
    return wheel


def make_environment(wheel: Path, folder: Path) -> Path:
    """Install it in an environment that shares the other packages of this one; returns where its programs are."""
    venv.create(folder, symlinks=True)
    programs = folder / "bin"
    others = [path for path in sys.path if path.endswith("-packages")]
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    # A .pth file there is not read, as that of an editable install.
    (site / "others.pth").write_text("\n".join(others))
    _pip(programs / "python", "install", wheel)
    return programs


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    make_environment(make_wheel(make_sdist(folder), folder), folder / "venv")
    for name in ("tests", *BESIDE_TESTS):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
