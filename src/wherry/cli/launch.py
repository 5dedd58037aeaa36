"""Ranks on this machine, through torch's elastic agent. When one dies all end, and its traceback comes last."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wherry.cli.rank import FAULT_SUFFIX, INTERRUPTED, of_a_peer
from wherry.errors import WherryError
from wherry.observe.stdout import CUT_OFF

FAILURE_LINE = "wherry-failure "
"""Begins the line that tells a failure to the launcher of several machines rather than to a person."""


@dataclass(frozen=True)
class Failure:
    """How one rank ended: its exit status (negative: the signal), and what it said."""

    rank: int
    status: int
    # The error's type and message, and its traceback. One that is not recorded has a stack at most.
    message: str
    text: str
    time_ns: int
    of_a_peer: bool
    recorded: bool = True

    @property
    def exit_status(self) -> int:
        return 128 - self.status if self.status < 0 else self.status

    def describe(self, failures: Sequence[Failure], ranks: int) -> str:
        """What a person reads of the cause of all `failures`, with its traceback at the end."""
        if self.recorded and self.text.startswith("wherry: "):
            return self.text.rstrip("\n")
        if self.recorded:
            same = sorted(other.rank for other in failures if other.recorded and other.message == self.message)
            if len(same) == 1:
                head = f"rank {self.rank} failed, and all ranks have ended. Its traceback:"
            else:
                who = f"on all {ranks} ranks" if len(same) == ranks else f"on ranks {', '.join(map(str, same))}"
                head = f"the same error {who}, and all ranks have ended. The traceback of rank {self.rank}:"
        elif self.status < 0:
            name = signal.Signals(-self.status).name
            advice = " (SIGKILL often means that the machine ran out of memory: see dmesg)" if name == "SIGKILL" else ""
            head = f"rank {self.rank} was ended by {name}{advice}, and all ranks have ended."
        else:
            head = f"rank {self.rank} exited with status {self.status}, and all ranks have ended."
        if self.text and not self.recorded:
            head += " Its stack:"
        # The loss of a peer follows from its failure. Whatever else there is may not.
        besides = [
            f"wherry: rank {other.rank} failed as well: {other.message.splitlines()[0]}\n"
            for other in sorted(failures, key=lambda failure: failure.rank)
            if other.recorded and not other.of_a_peer and other.message != self.message
        ]
        return f"{''.join(besides)}wherry: {head}\n\n{self.text}".rstrip()

    def to_line(self) -> str:
        return FAILURE_LINE + json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Failure:
        return cls(**json.loads(line.removeprefix(FAILURE_LINE)))


def root_cause(failures: Iterable[Failure]) -> Failure:
    """The failure that brought the others about: the earliest that is not the loss of a peer or the end we ordered."""
    return min(failures, key=lambda f: (f.status == -signal.SIGTERM, f.of_a_peer, f.time_ns))


def launch(arguments: argparse.Namespace, *, report: bool = False) -> int:
    """Start the ranks that torchrun's arguments describe, wait for them, and return the exit status.

    `report`: print each failure as a line of JSON, for the launcher on another machine to read.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    _quiet_agent()
    children_before = _children()
    os.environ["WHERRY_LAUNCHER_PID"] = str(os.getpid())
    # The ranks meet in a store; a shared one still has the addresses of those that died, after a restart.
    if arguments.max_restarts:
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    folder = None
    if arguments.log_dir is None:
        folder = arguments.log_dir = tempfile.mkdtemp(prefix="wherry-run-")
    try:
        config, command, command_arguments = _torchrun_config(arguments)
        ranks = config.max_nodes * config.nproc_per_node
        elastic_launch(config, command)(*command_arguments)
        return 0
    except ChildFailedError as error:
        failures = [_failure(rank, found, arguments.log_dir) for rank, found in error.failures.items()]
        cause = root_cause(failures)
        _end_children_since(children_before)
        if cause.exit_status == CUT_OFF and not cause.text:
            return CUT_OFF  # whoever read the output of a rank has seen enough
        sys.stdout.flush()
        told = [failure.to_line() for failure in failures] if report else [cause.describe(failures, ranks)]
        print(*told, sep="\n", file=sys.stderr, flush=True)
        return cause.exit_status
    except (RendezvousError, DistError) as error:
        raise WherryError(
            f"the launchers could not meet at {arguments.rdzv_endpoint or arguments.master_addr}: {error}; check that "
            "the name is right, that the port is free and reachable, and that every machine has been started"
        ) from error
    except SignalException as error:
        return INTERRUPTED if error.sigval == signal.SIGINT else 128 + error.sigval
    finally:
        _end_children_since(children_before)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _torchrun_config(arguments: argparse.Namespace) -> tuple[Any, Any, list[str]]:
    from torch.distributed.run import config_from_args

    try:
        return config_from_args(_through_rank_module(arguments))
    except (ValueError, AssertionError) as error:
        raise WherryError(f"run: {error}") from error


def _quiet_agent() -> None:
    # The agent's own account of a failure would hide ours; LOGLEVEL asks for it.
    if "LOGLEVEL" not in os.environ:
        for name in ("torch.distributed.elastic", "torch.distributed.run"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
            for other, logger in list(logging.root.manager.loggerDict.items()):
                if other.startswith(name + ".") and isinstance(logger, logging.Logger):
                    logger.setLevel(logging.CRITICAL)


def _through_rank_module(arguments: argparse.Namespace) -> argparse.Namespace:
    """The same arguments with `wherry.cli.rank` between the interpreter and the script."""
    if arguments.no_python or arguments.run_path:
        return arguments
    through = argparse.Namespace(**vars(arguments))
    flags = ["--module"] if arguments.module else []
    if getattr(arguments, "local_rank_arg", False):
        flags.append("--local-rank-arg")
    through.module = True
    through.training_script = "wherry.cli.rank"
    through.training_script_args = [*flags, "--", arguments.training_script, *arguments.training_script_args]
    return through


def _failure(rank: int, found: Any, log_dir: str) -> Failure:
    record = found.error_file_data.get("message")
    if isinstance(record, dict):
        extra, message = record["extraInfo"], record["message"]
        text = extra["py_callstack"]
        when = int(extra.get("time_ns", int(extra["timestamp"]) * 10**9))
        # Its own, also when it has waited for the others' until the agent ended it.
        return Failure(rank, extra.get("status", found.exitcode), message, text, when, of_a_peer(text))
    stack = _native_stack(log_dir, found.local_rank)
    return Failure(rank, found.exitcode, "", stack, found.timestamp * 10**9, False, recorded=False)


def _native_stack(log_dir: str, local_rank: int) -> str:
    """The Python stack at a crash in native code, from this rank's last attempt."""
    files = sorted(Path(log_dir).glob(f"*/attempt_*/{local_rank}/error.json{FAULT_SUFFIX}"), key=os.path.getmtime)
    return files[-1].read_text(encoding="utf-8", errors="replace") if files else ""


def _children() -> set[Any]:
    import psutil

    return set(psutil.Process().children(recursive=True))


def _end_children_since(before: set[Any]) -> None:
    """End, and wait for, whatever the agent has left: a second Ctrl-C interrupts its own ending of them."""
    import psutil

    children = _children() - before
    for child in children:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(children, timeout=5)
