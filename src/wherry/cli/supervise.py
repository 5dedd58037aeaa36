"""What watches ranks: starts them, passes on what they say, ends all when one fails, and says why it failed.

On this machine torch's elastic agent starts and restarts them. On several, over ssh or in a Ray cluster, each has a
`wherry run` of its own, whose words are passed on here, and whose end is ours.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from wherry.cli import INTERRUPTED
from wherry.cli.rank import FAULT_SUFFIX, of_a_peer
from wherry.errors import WherryError
from wherry.observe.stdout import CUT_OFF

# Begins the line that tells a failure to the launcher of several machines rather than to a person.
FAILURE_LINE = "wherry-failure "
_PASSED_ON = ("NCCL_", "GLOO_", "PYTHON", "WHERRY_", "UCX_", "HF_", "TORCH_", "LD_LIBRARY_PATH", "OMP_", "CUDA_HOME")
# What is named so may be a secret, and leaves this machine only if asked for.
_SECRET = re.compile(r"TOKEN$|(^|_)KEY$|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
# How long the ranks of other machines may take to end, which may be finishing a step, or cleaning up.
_SECONDS_TO_END = 40.0
_SECONDS_FOR_THE_PEER = 3.0


# The ranks of this machine.


def launch(arguments: argparse.Namespace, *, report: bool = False, told: Collection[int] = ()) -> int:
    """Start the ranks that torchrun's arguments describe, wait for them, and return the exit status.

    `report`: print each failure as a line of JSON, for the launcher on another machine to read. `told`: exit statuses
    of ranks that have said themselves why they end.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args

    from wherry.cli import rendezvous

    rendezvous.register()
    _quiet_agent()
    children_before = _children()
    os.environ["WHERRY_LAUNCHER_PID"] = str(os.getpid())
    # The ranks meet in a store; one of torch's own rendezvous still has the addresses of those that died, after a
    # restart, where it is shared.
    if arguments.max_restarts:
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    folder = None
    if arguments.log_dir is None:
        folder = arguments.log_dir = tempfile.mkdtemp(prefix="wherry-run-")
    try:
        try:
            config, command, command_arguments = config_from_args(_through_rank_module(arguments))
        except (ValueError, AssertionError) as error:
            raise WherryError(f"run: {error}") from error
        ranks = config.max_nodes * config.nproc_per_node
        with _unanswering() as unanswering:
            elastic_launch(config, command)(*command_arguments)
        rendezvous.leave()
        return 0
    except ChildFailedError as error:
        logs = Path(arguments.log_dir)
        failures = [RankFailure.of(rank, found, logs, unanswering) for rank, found in error.failures.items()]
        cause = root_cause(failures)
        _end_children_since(children_before)
        if cause.exit_status in (CUT_OFF, *told) and not cause.text:
            return cause.exit_status  # as when whoever read the output of a rank has seen enough
        sys.stdout.flush()
        lines = [failure.to_line() for failure in failures] if report else [cause.describe(failures, ranks)]
        print(*lines, sep="\n", file=sys.stderr, flush=True)
        return cause.exit_status
    except (RendezvousError, DistError) as error:
        raise WherryError(
            f"the launchers could not meet at {arguments.rdzv_endpoint or arguments.master_addr}: "
            f"{str(error) or 'not all of them came in time'}; check that the name is right, that the port is free and "
            "reachable, and that every machine has been started"
        ) from error
    except SignalException as error:
        if report and error.sigval != signal.SIGINT:
            # The launcher on the machine whose rank has lost one of these does not know why.
            for rank, why in unanswering.values():
                failure = RankFailure(rank, -error.sigval, "", "", time.time_ns(), recorded=False, unanswering=why)
                print(failure.to_line(), file=sys.stderr, flush=True)
        return INTERRUPTED if error.sigval == signal.SIGINT else 128 + error.sigval
    finally:
        _end_children_since(children_before)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


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


@contextlib.contextmanager
def _unanswering() -> Iterator[dict[int, tuple[int, str]]]:
    """By process, the ranks that could not answer when the agent ended them, and why.

    A process that is stopped hears of its end when it goes on. The agent would wait half a minute, and kill it.
    """
    import psutil
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    found: dict[int, tuple[int, str]] = {}
    end = SubprocessHandler.close

    def close(handler: SubprocessHandler, death_sig: signal.Signals | None = None) -> None:
        pid = handler.proc.pid
        with contextlib.suppress(psutil.Error):  # it has just ended
            process = psutil.Process(pid)
            rank = int(process.environ().get("RANK", handler.local_rank_id))
            if process.status() == psutil.STATUS_STOPPED:
                found[pid] = rank, "was stopped, as SIGSTOP does"
            elif death_sig == signal.SIGKILL:
                found.setdefault(pid, (rank, "did not end when it was told to"))
        end(handler, death_sig)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGCONT)

    SubprocessHandler.close = close  # type: ignore[assignment, method-assign]
    try:
        yield found
    finally:
        SubprocessHandler.close = end  # type: ignore[method-assign]


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


# Several machines.


class Node(Protocol):
    """A `wherry run` on a machine."""

    name: str
    prefix: str

    @property
    def output(self) -> Iterable[str]:
        """What it says, line by line, until it ends."""

    def wait(self) -> int:
        """Its exit status, when it has said all."""

    def close(self, *, interrupted: bool) -> None:
        """End it, as a Ctrl-C there would or at once."""

    def kill(self) -> None: ...


class ForwardedRun:
    """A node whose `wherry run` is a child of this process, or is reached by one, as by ssh.

    `first`: what its standard input begins with, which no list of processes shows.
    """

    def __init__(self, name: str, prefix: str, command: Sequence[str], *, first: str = "", **how: Any) -> None:
        self.name, self.prefix = name, prefix
        # A session of its own: Ctrl-C reaches this process alone, which then closes what the others read.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            **how,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and its output says why
            self._process.stdin.write(first)
            self._process.stdin.flush()

    @property
    def output(self) -> Iterable[str]:
        assert self._process.stdout is not None
        return self._process.stdout

    def wait(self) -> int:
        status = self._process.wait()
        return 128 - status if status < 0 else status

    def close(self, *, interrupted: bool) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended
            if interrupted:
                stdin.write("stop\n")
            stdin.close()

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def forwarded(flags: Sequence[str], arguments: argparse.Namespace, index: int, nodes: int, processes: int) -> list[str]:
    """The words behind `wherry run` on machine `index`: what was given here, and behind that its own part of it."""
    own = ["--follow-stdin", "--num_nodes", nodes, "--node_rank", index, "--nproc", processes]
    script = [arguments.training_script, *arguments.training_script_args]
    return [*flags, *map(str, own), *script]


def passed_on(named: Sequence[str]) -> dict[str, str]:
    """The settings of this environment that are to hold on every machine, and the variables that were asked for."""
    missing = next((name for name in named if name not in os.environ), None)
    if missing is not None:
        raise WherryError(
            f"--forward {missing}: there is no such variable in this environment; set it, or leave it out"
        )
    settings = {key: value for key, value in os.environ.items() if key.startswith(_PASSED_ON)}
    secrets = [key for key in settings if _SECRET.search(key) and key not in named]
    for key in secrets:
        print(f"wherry: {key} stays on this machine; `--forward {key}` hands it to the others", file=sys.stderr)
    return {key: settings[key] for key in settings.keys() - set(secrets)} | {name: os.environ[name] for name in named}


def follow(nodes: Sequence[Node], ranks: int) -> int:
    """Pass on what all nodes say, until all or one that fails have ended. Why it failed comes last."""
    failures: list[tuple[Node, RankFailure]] = []
    ended: SimpleQueue[tuple[Node, int | Exception]] = SimpleQueue()

    def pass_on(node: Node) -> None:
        try:
            for line in node.output:
                failure = RankFailure.from_line(line)
                if failure is not None:
                    failures.append((node, failure))
                else:
                    sys.stdout.write(node.prefix + line)
                    sys.stdout.flush()
            ended.put((node, node.wait()))
        except Exception as error:  # as when nobody reads what is said
            ended.put((node, error))

    threads = [threading.Thread(target=pass_on, args=(node,), daemon=True, name=node.name) for node in nodes]
    for thread in threads:
        thread.start()
    interrupted = False
    try:
        for _ in nodes:
            node, status = ended.get()
            if isinstance(status, Exception):
                raise status
            if status:
                if all(failure.of_a_peer for _, failure in failures):
                    # It only lost a peer: the one that was lost may still be telling why.
                    with contextlib.suppress(Empty):
                        ended.get(timeout=_SECONDS_FOR_THE_PEER)
                break
        else:
            return 0
    except KeyboardInterrupt:
        interrupted = True
        return INTERRUPTED
    finally:
        try:
            for each in nodes:
                each.close(interrupted=interrupted)
            deadline = time.monotonic() + _SECONDS_TO_END
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        finally:
            for each in nodes:
                each.kill()
    sys.stdout.flush()
    if not failures:
        print(f"wherry: the launcher on {node.name} ended with status {status}", file=sys.stderr, flush=True)
        return status
    told = [failure for _, failure in failures]
    cause = root_cause(told)
    where = next(node.name for node, failure in failures if failure is cause)
    print(f"wherry: on host {where}:\n{cause.describe(told, ranks)}", file=sys.stderr, flush=True)
    return cause.exit_status


# Why ranks failed.


@dataclass(frozen=True)
class RankFailure:
    """How one rank ended: its exit status (negative: the signal), and what it said."""

    rank: int
    status: int
    # The error's type and message, and its traceback. One that is not recorded has a stack at most.
    message: str
    text: str
    time_ns: int
    recorded: bool = True
    # Why it did not answer the others, where it is the launcher that has ended it.
    unanswering: str = ""
    # The rank that it waited for and that had ended, where that is the error.
    ended_rank: int | None = None

    @classmethod
    def of(cls, rank: int, found: Any, logs: Path, unanswering: dict[int, tuple[int, str]]) -> RankFailure:
        """What torch's agent has `found`: as the rank has recorded it, or with the stack of a crash in native code."""
        record = found.error_file_data.get("message")
        if isinstance(record, dict):
            extra, message = record["extraInfo"], record["message"]
            text = extra["py_callstack"]
            when = int(extra.get("time_ns", int(extra["timestamp"]) * 10**9))
            # Its own status, also when it has waited for the others' until the agent ended it.
            status, ended_rank = extra.get("status", found.exitcode), extra.get("ended_rank")
            return cls(rank, status, message, text, when, ended_rank=ended_rank)
        attempts = logs.glob(f"*/attempt_*/{found.local_rank}/error.json{FAULT_SUFFIX}")
        stacks = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(attempts, key=os.path.getmtime)]
        text = stacks[-1] if stacks else ""
        when, (_, why) = found.timestamp * 10**9, unanswering.get(found.pid, (rank, ""))
        return cls(rank, found.exitcode, "", text, when, recorded=False, unanswering=why)

    @property
    def of_a_peer(self) -> bool:
        return self.recorded and (self.ended_rank is not None or of_a_peer(self.text))

    @property
    def ordered(self) -> bool:
        """Whether it only ended as it was told to."""
        return self.status == -signal.SIGTERM and not self.unanswering

    @property
    def exit_status(self) -> int:
        if self.unanswering:
            return 1  # the signal was the launcher's
        return 128 - self.status if self.status < 0 else self.status

    def describe(self, failures: Sequence[RankFailure], ranks: int) -> str:
        """What a person reads of the cause of all `failures`, with its traceback at the end."""
        if self.recorded and self.text.startswith("wherry: "):
            return self.text.rstrip("\n")
        if self.recorded and self.ended_rank is not None:
            head = (
                f"rank {self.ended_rank} ended while rank {self.rank} waited for it, and all ranks have ended. The "
                f"traceback of rank {self.rank}:"
            )
        elif self.recorded:
            same = sorted(other.rank for other in failures if other.recorded and other.message == self.message)
            if len(same) == 1:
                head = f"rank {self.rank} failed, and all ranks have ended. Its traceback:"
            else:
                who = f"on all {ranks} ranks" if len(same) == ranks else f"on ranks {', '.join(map(str, same))}"
                head = f"the same error {who}, and all ranks have ended. The traceback of rank {self.rank}:"
        elif self.unanswering:
            head = f"rank {self.rank} {self.unanswering}: it did not answer the others, and the launcher has ended it."
        elif self.status < 0:
            name = signal.Signals(-self.status).name
            advice = " (SIGKILL often means that the machine ran out of memory: see dmesg)" if name == "SIGKILL" else ""
            head = f"rank {self.rank} was ended by {name}{advice}, and all ranks have ended."
        else:
            head = f"rank {self.rank} exited with status {self.status}, and all ranks have ended."
        if self.text and not self.recorded:
            head += " Its stack:"
        # The loss of a peer follows from its failure. Whatever else there is may not.
        others = sorted((failure for failure in failures if failure is not self), key=lambda failure: failure.rank)
        besides = [
            f"wherry: rank {other.rank} failed as well: {other.message.splitlines()[0]}\n"
            for other in others
            if other.recorded and not other.of_a_peer and other.message != self.message
        ]
        besides += [
            f"wherry: rank {other.rank} {other.unanswering}, and the launcher has ended it\n"
            for other in others
            if not other.recorded and other.unanswering
        ]
        text = self.text
        lost = min((other for other in others if other.of_a_peer), key=lambda other: other.time_ns, default=None)
        if self.unanswering and lost is not None:
            text += f"rank {lost.rank} waited for it: {lost.message.splitlines()[0]}"
        return f"{''.join(besides)}wherry: {head}\n\n{text}".rstrip()

    def to_line(self) -> str:
        return FAILURE_LINE + json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> RankFailure | None:
        """None of a line that is a rank's own, whatever it begins with."""
        try:
            return cls(**json.loads(line.removeprefix(FAILURE_LINE))) if line.startswith(FAILURE_LINE) else None
        except (ValueError, TypeError):
            return None


def root_cause(failures: Iterable[RankFailure]) -> RankFailure:
    """The failure that brought the others about: the earliest that is not the loss of a peer or the end we ordered.

    A rank that did not answer is the cause where the others have only lost it.
    """
    return min(failures, key=lambda f: (f.ordered, f.of_a_peer, bool(f.unanswering), f.time_ns))
