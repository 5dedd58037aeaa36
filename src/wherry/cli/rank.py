"""What a rank's process runs: the user's script, as `python script.py` would, with its failure written down.

The launcher reads these records to show one traceback, that of the rank that failed first, after everything else.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import io
import json
import os
import re
import runpy
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import ModuleType

from wherry.cli import INTERRUPTED, USER_ERROR

FAULT_SUFFIX = ".fault"
_SECONDS_TO_UNWIND = 5
# How long a failed rank waits for the others to write down theirs, and one that has lost a peer for that peer.
_SECONDS_FOR_THE_OTHERS = 3.0
_SECONDS_FOR_THE_PEER = 5.0
# What a rank says whose peer has died or does not answer. It is a consequence, so any other failure is nearer to the
# cause.
_OF_A_PEER = (
    "PeerError: ",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "DistNetworkError",
    "Connection refused",
    "recvValue failed",
    "failed to recv",
    "ncclRemoteError",
    "ms for recv operation",
    "ms for send operation",
    "wait timeout after",
)
_PACKAGE = Path(__file__).parents[1]
_SET_PARENT_DEATH_SIGNAL = 1


def main() -> None:
    """`python -m wherry.cli.rank [--module] [--local-rank-arg] -- TARGET ARGUMENTS...`"""
    border = sys.argv.index("--")
    flags, target, arguments = sys.argv[1:border], sys.argv[border + 1], sys.argv[border + 2 :]
    if "--local-rank-arg" in flags:
        arguments = [f"--local_rank={os.environ['LOCAL_RANK']}", *arguments]
    _end_with_parent()
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:  # a crash in native code leaves the Python stack beside it
        faults = os.open(error_file + FAULT_SUFFIX, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        faulthandler.enable(faults, all_threads=True)
    sys.argv = [target, *arguments]
    attempt, attempts = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    if attempt != "0" and os.environ.get("RANK") == "0":
        print(f"wherry: a rank failed; all start again (restart {attempt} of {attempts})", file=sys.stderr, flush=True)
    status = 0
    try:
        if "--module" in flags:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            _run_script(target)
    except KeyboardInterrupt as interrupt:
        status, sys.last_value = INTERRUPTED, interrupt  # as the interpreter has it: the other ranks are told of it
    except SystemExit as ended:
        if ended.code is not None and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
            status = 1
        else:
            status = ended.code or 0
    except Exception as error:
        sys.last_value = error
        status = _fail(error, error_file, alone=target.startswith("wherry."))
        # A thread that nobody ends, or a communicator that waits for its peers, must not keep a failed rank alive. The
        # kernel needs no thread for that, which a rank without memory does not get.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        signal.alarm(_SECONDS_TO_UNWIND)
    _end(status)


def _end(status: int) -> None:
    """End the process with all that the interpreter does at its end, but for taking itself apart.

    A daemon thread that is inside native code of torch's meanwhile, as one that waits for a store, would abort the
    process when it comes back ("terminate called without an active exception"), whatever the script has done.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the threads that are no daemons
    atexit._run_exitfuncs()
    # Files that a script has left open are flushed, as the interpreter's end would do.
    written = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    left_open = [found for found in gc.get_objects() if issubclass(type(found), written)]
    for stream in (sys.stdout, sys.stderr, *left_open):
        with contextlib.suppress(Exception):
            stream.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(status & 0xFF)


def _end_with_parent() -> None:
    """Ask the kernel to end this process when the launcher is gone, however that came."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    if os.getppid() == 1 and os.environ.get("WHERRY_LAUNCHER_PID") not in (None, "1"):
        os.kill(os.getpid(), signal.SIGTERM)


def _run_script(path: str) -> None:
    # The script becomes the true __main__, which stays after it has run: pickling, multiprocessing and
    # functions called at exit find what they would find under plain `python script.py`.
    sys.path[0] = os.path.dirname(os.path.abspath(path))
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    module = ModuleType("__main__")
    module.__file__ = path
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _fail(error: Exception, error_file: str | None, *, alone: bool) -> int:
    """Write the failure down for the launcher, wait for the other ranks' own, and return the exit status.

    The launcher ends all ranks when one has ended. `alone`: a mistake of the user's is told by its message alone.
    """
    from wherry.errors import WherryError

    told = alone and isinstance(error, WherryError)
    status, message = USER_ERROR if told else 1, f"{type(error).__name__}: {error}"
    text = f"wherry: {error}\n" if told else _traceback(error)
    ended_rank = getattr(error, "ended_rank", None)
    lost = int(os.environ.get("WORLD_SIZE", "1")) > 1 and (ended_rank is not None or of_a_peer(text))
    silent, logged = False, False
    ended: list[int] = []  # the launcher ends all ranks once one has ended: not before this one has said its word
    before = signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    if error_file:
        path = Path(error_file)
        extra = {"py_callstack": text, "timestamp": str(int(time.time())), "time_ns": time.time_ns(), "status": status}
        extra["ended_rank"] = ended_rank
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")
        part.replace(path)
        # The launcher tells of the last attempt; and each rank's own log, if the ranks write some, is to be whole.
        last = os.environ.get("TORCHELASTIC_RESTART_COUNT") == os.environ.get("TORCHELASTIC_MAX_RESTARTS")
        logged = path.with_name("stderr.log").exists()
        silent = (not lost and _said_before(path, message)) or (last and not logged)
    if not silent:
        shown = f"lost a peer: {message.splitlines()[0]}\n" if error_file and lost else text
        who = "" if logged else f"[rank {os.environ.get('RANK', '?')}] "
        print(who + shown, file=sys.stderr, end="", flush=True)
    signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
    if ended:
        os.kill(os.getpid(), signal.SIGTERM)
    if lost:
        # Let the peer end first, which may be cleaning up still.
        time.sleep(_SECONDS_FOR_THE_PEER)
    return status


def _traceback(error: Exception) -> str:
    """Without the launcher's frames; and of a user's mistake or a lost peer, without those of Wherry that found it."""
    from wherry.errors import PeerError, WherryError

    trace = error.__traceback__
    ours = re.compile(rf"<frozen|.*(runpy\.py|{re.escape(__file__)})$")
    while trace is not None and ours.match(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    shown = traceback.TracebackException(type(error), error, trace)
    if isinstance(error, PeerError):
        shown.__cause__, shown.__suppress_context__ = None, True  # the transport's own words are in its message
    if isinstance(error, WherryError | PeerError):
        while shown.stack and Path(shown.stack[-1].filename).is_relative_to(_PACKAGE):
            shown.stack.pop()
    return "".join(shown.format())


def _said_before(path: Path, message: str) -> bool:
    """Wait until every rank here has failed, or a while; whether one of a lower number has failed of the same."""
    mine, ranks = int(os.environ["LOCAL_RANK"]), range(int(os.environ["LOCAL_WORLD_SIZE"]))
    files = [path.parents[1] / str(rank) / path.name for rank in ranks]
    deadline = time.monotonic() + _SECONDS_FOR_THE_OTHERS
    while not all(file.exists() for file in files) and time.monotonic() < deadline:
        time.sleep(0.02)
    return any(json.loads(file.read_bytes())["message"]["message"] == message for file in files[:mine] if file.exists())


def of_a_peer(text: str) -> bool:
    """Whether a failure is told of another rank's."""
    return any(words in text for words in _OF_A_PEER)


if __name__ == "__main__":
    main()
