"""Compiles the emulated accelerator, once for each version of its sources and of torch."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import torch

HERE = Path(__file__).parent
NAME = "emulated_device"
UNITS = ("runtime.cpp", "kernels.cpp", "process_group.cpp", "autocast.cpp")


def flags() -> list[str]:
    include = Path(torch.__file__).parent / "include"
    return [
        *("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-w", f"-DTORCH_EXTENSION_NAME={NAME}"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{path}" for path in (include, include / "torch/csrc/api/include", sysconfig.get_paths()["include"])),
    ]


def call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def build() -> Path:
    """The path of the compiled extension. Test workers that start at once wait for the one that compiles it."""
    digest = hashlib.sha256(f"{torch.__version__} {sys.version} {flags()}".encode())
    for source in sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")]):
        digest.update(source.read_bytes())
    folder = HERE.parents[1] / "build/accelerator" / digest.hexdigest()[:16]
    library = folder / f"{NAME}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return library
        objects = [str(folder / f"{unit}.o") for unit in UNITS]
        with ThreadPoolExecutor(2) as pool:
            compiler = os.environ.get("CXX", "g++")
            commands = [
                (compiler, *flags(), "-c", str(HERE / unit), "-o", made)
                for unit, made in zip(UNITS, objects, strict=True)
            ]
            for _ in pool.map(lambda command: call(*command), commands):
                pass
        libraries = Path(torch.__file__).parent / "lib"
        link = ["-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10"]
        partial = f"{library}.{os.getpid()}"
        call(compiler, "-shared", *objects, f"-L{libraries}", f"-Wl,-rpath,{libraries}", *link, "-o", partial)
        os.replace(partial, library)
        for made in objects:
            os.unlink(made)
    return library


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location(NAME, build())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
