"""Finding and loading the native library, and the choice of instruction set."""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_uint32, c_void_p
from dataclasses import dataclass
from pathlib import Path

from wherry.errors import WherryError

ABI_VERSION = 1
ENVIRONMENT = "WHERRY_ISA"
# In order of preference. The numbers are the library's own.
ISA_CODES = {"avx512": 3, "avx2": 2, "neon": 4, "portable": 1}
ISAS = (*ISA_CODES, "torch")

# name: result, arguments
_PROTOTYPES: dict[str, tuple[type | None, list[type]]] = {
    "wherry_has_isa": (c_int, [c_int]),
    "wherry_pool_create": (c_void_p, [c_int, c_void_p, c_int, c_char_p, c_int64]),
    "wherry_pool_destroy": (None, [c_void_p]),
    "wherry_job_wait": (None, [c_void_p]),
    "wherry_job_done": (c_int, [c_void_p]),
    "wherry_job_free": (None, [c_void_p]),
    "wherry_plan_create": (c_void_p, [c_int, c_void_p, c_int64]),
    "wherry_plan_free": (None, [c_void_p]),
    "wherry_plan_submit": (c_void_p, [c_void_p, c_void_p, c_char_p, c_int64, c_float, c_void_p, c_void_p]),
    "wherry_plan_run": (None, [c_void_p, c_char_p, c_int64, c_float, c_void_p, c_void_p]),
    "wherry_cast": (None, [c_int, c_void_p, c_void_p, c_int32, c_void_p, c_int32, c_int64]),
    "wherry_accumulate": (None, [c_int, c_void_p, c_void_p, c_int32, c_void_p, c_int32, c_float, c_int64]),
    "wherry_split": (None, [c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_int64]),
    "wherry_join": (None, [c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_int64]),
    "wherry_quantize": (None, [c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_int32, c_int64]),
    "wherry_dequantize": (None, [c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_int32, c_int64]),
    "wherry_sum_squares": (c_double, [c_int, c_void_p, c_void_p, c_int32, c_int64]),
    "wherry_limit": (None, [c_int, c_void_p, c_int32, c_void_p, c_int64]),
    "wherry_has_crc32": (c_int32, []),
    "wherry_crc32": (c_uint32, [c_uint32, c_void_p, c_int64]),
    "wherry_crc32c": (c_uint32, [c_void_p, c_int64]),
    "wherry_disk_probe_uring": (c_int, []),
    "wherry_disk_open": (c_void_p, [c_int, c_void_p, c_int32, c_int64, c_int32, c_void_p]),
    "wherry_disk_close": (None, [c_void_p]),
    "wherry_disk_submit": (
        c_void_p,
        [c_void_p, c_int32, c_void_p, c_int64, c_int64, c_void_p, c_int32, c_void_p],
    ),
    "wherry_disk_wait": (c_int32, [c_void_p, c_int64]),
    "wherry_disk_failure": (c_int32, [c_void_p, c_void_p]),
    "wherry_disk_drop": (None, [c_void_p]),
    "wherry_disk_add_memory": (c_int32, [c_void_p, c_void_p, c_int64]),
    "wherry_disk_remove_memory": (c_int32, [c_void_p, c_void_p]),
    "wherry_disk_counters": (None, [c_void_p, c_void_p]),
    "wherry_disk_inject": (None, [c_void_p, c_int32, c_int64, c_int64, c_int32, c_int64, c_int64]),
}


@dataclass(frozen=True)
class _LoadedLibrary:
    library: ctypes.CDLL | None
    reason: str


@functools.cache
def _load(path: Path) -> _LoadedLibrary:
    if not path.exists():
        return _LoadedLibrary(
            None,
            f"{path.name} is not in {path.parent}: there was no C++ compiler when Wherry was installed, or its build "
            "failed; install one (g++ or clang++), then reinstall with `pip install -v` to see the build",
        )
    try:
        library = ctypes.CDLL(str(path))
        version = library.wherry_abi_version()
    except (OSError, AttributeError) as error:
        return _LoadedLibrary(None, f"{path} does not load: {error}; reinstall Wherry to build it again")
    if version != ABI_VERSION:
        return _LoadedLibrary(
            None, f"{path} has interface version {version}, expected {ABI_VERSION}; reinstall Wherry to build it again"
        )
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return _LoadedLibrary(library, "")


def _built() -> _LoadedLibrary:
    return _load(Path(__file__).with_name("libwherry.so"))


def _forced() -> str:
    name = os.environ.get(ENVIRONMENT, "").strip().lower()
    if name and name not in ISAS:
        raise WherryError(f"{ENVIRONMENT}={name!r}: expected one of {', '.join(ISAS)}, or unset to choose by CPU")
    return name


def library() -> ctypes.CDLL | None:
    """The native library, or None where the torch fallback is active (`why_not` says why)."""
    return None if _forced() == "torch" else _built().library


def why_not() -> str:
    """Why `library()` is None; empty when it is there."""
    return f"{ENVIRONMENT}=torch asks for the torch fallback" if _forced() == "torch" else _built().reason


@functools.cache
def _native_isas() -> tuple[str, ...]:
    built = _built().library
    return () if built is None else tuple(name for name, code in ISA_CODES.items() if built.wherry_has_isa(code))


def available_isas() -> tuple[str, ...]:
    """The instruction sets that this machine and this build have, the preferred one first; "torch" is the fallback."""
    return (*_native_isas(), "torch")


def isa() -> str:
    """The instruction set in use: `WHERRY_ISA`, else the best one available."""
    forced = _forced()
    return checked_isa(forced, ENVIRONMENT) if forced else available_isas()[0]


def checked_isa(name: str, where: str) -> str:
    """`name` if it is available, else an error that names `where` it came from."""
    if name in available_isas():
        return name
    because = _built().reason or f"this machine has {', '.join(available_isas())}"
    raise WherryError(f"{where}={name!r} is not available: {because}")


@dataclass(frozen=True)
class Kernels:
    """The library and the number of the instruction set to call it with. `library` None: the torch fallback."""

    library: ctypes.CDLL | None
    code: int


def engine(name: str | None = None) -> Kernels:
    """The engine of the named instruction set, or of the one in use."""
    return _engine(name, os.environ.get(ENVIRONMENT, ""))


@functools.cache
def _engine(name: str | None, forced: str) -> Kernels:
    """For this value of the environment. Every pass asks: it is looked up once."""
    chosen = isa() if name is None else checked_isa(name, "isa")
    return Kernels(None, 0) if chosen == "torch" else Kernels(_built().library, ISA_CODES[chosen])
