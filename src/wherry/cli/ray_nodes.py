"""`wherry run --on ray`: a placement group with a bundle a machine, and a `wherry run` in each of them."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from wherry.cli import INTERRUPTED
from wherry.cli.run import given_processes
from wherry.cli.supervise import ForwardedRun, follow, forwarded, passed_on
from wherry.errors import WherryError

_SECONDS_BEFORE_A_WORD = 5.0
_PREFIX = "[rank ${rank}] "
_REFUSED = ("hostfile", "include", "exclude", "ssh", "ssh_port", "node_rank", "master_addr", "master_port")


def run_on_ray(arguments: argparse.Namespace, flags: Sequence[str]) -> int:
    """Run the script on the machines of a Ray cluster; when a rank or a machine is lost, all start again if allowed."""
    for name in _REFUSED:
        if getattr(arguments, name) not in (None, ""):
            raise WherryError(f"--on ray: --{name} has no place here, Ray chooses the machines; leave it out")
    settings = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": _PREFIX} | passed_on(arguments.forward)
    try:
        import ray
    except ImportError as error:
        raise WherryError(f"--on ray: {error}; run `pip install wherry[ray]`") from error
    try:
        # Of the cluster that RAY_ADDRESS names, or of the one that this machine is in.
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise WherryError(
            "--on ray: no Ray cluster is here; start one with `ray start --head`, or give its address in RAY_ADDRESS"
        ) from error
    try:
        nodes, bundle = _shape(arguments, ray.nodes())
        group = ray.util.placement_group([bundle] * nodes, strategy="STRICT_SPREAD")
        restarts = int(arguments.max_restarts or 0)
        for attempt in range(restarts + 1):
            if attempt:
                print(f"wherry: a rank failed; all start again (restart {attempt} of {restarts})", file=sys.stderr)
            if not group.wait(_SECONDS_BEFORE_A_WORD):
                print(f"wherry: waiting until Ray has {nodes} machines with {_in_words(bundle)} free", file=sys.stderr)
                while not group.wait(_SECONDS_BEFORE_A_WORD):
                    continue
            status = _attempt(arguments, flags, settings, group, nodes, bundle)
            if status in (0, INTERRUPTED):
                break
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        # The placement group goes with its driver.
        ray.shutdown()


def _shape(arguments: argparse.Namespace, machines: list[dict[str, Any]]) -> tuple[int, dict[str, int]]:
    """How many machines, and what each rank takes of one: a GPU, in a cluster that has any, and a CPU."""
    resources = [machine["Resources"] for machine in machines if machine["Alive"]]
    kind = "GPU" if any(found.get("GPU") for found in resources) else "CPU"
    given = given_processes(arguments)
    if given is not None and not given.isdigit():
        raise WherryError(f"--on ray: expected a number of processes, got {given!r}")
    able = [found for found in resources if found.get(kind, 0) >= int(given or 1)]
    if given is not None:
        processes = int(given)
    else:
        processes = int(min(found[kind] for found in able)) if kind == "GPU" else 1
    nodes = str(arguments.num_nodes or arguments.nnodes or len(able))
    if not nodes.isdigit() or int(nodes) < 1:
        raise WherryError(f"--on ray: expected a number of machines, got {nodes}; give --num_nodes and --num_gpus")
    return int(nodes), {"CPU": processes} | ({"GPU": processes} if kind == "GPU" else {})


def _in_words(bundle: dict[str, int]) -> str:
    return " and ".join(f"{count} {kind}{'s' * (count != 1)}" for kind, count in bundle.items())


def _attempt(
    arguments: argparse.Namespace,
    flags: Sequence[str],
    settings: dict[str, str],
    group: Any,
    nodes: int,
    bundle: dict[str, int],
) -> int:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    machine = ray.remote(_RayActor)
    actors: list[Any] = [
        machine.options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            # It answers while it runs.
            max_concurrency=2,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        ).remote()
        for index in range(nodes)
    ]
    try:
        places = ray.get([actor.place.remote() for actor in actors])
    except ray.exceptions.RayError as error:
        print(f"wherry: a machine was lost before its ranks began: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    address, port = places[0]
    # Torch's launcher says which rank a line is of, unless what ranks say is to go elsewhere.
    told = [] if arguments.tee != "0" or arguments.redirects != "0" else ["--tee", "3"]
    own = [*flags, *told, "--max-restarts", "0", "--master_addr", address, "--master_port", str(port)]
    started = [
        _RayNode(actor, name, forwarded(own, arguments, index, nodes, bundle["CPU"]), settings)
        for index, (actor, (name, _)) in enumerate(zip(actors, places, strict=True))
    ]
    return follow(started, nodes * bundle["CPU"])


class _RayActor:
    """An actor: the `wherry run` of one machine, and its words."""

    def place(self) -> tuple[str, int]:
        """This machine's address, and a port that is free there."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def run(self, words: Sequence[str], settings: dict[str, str], folder: str) -> Iterator[str | int]:
        self.child = ForwardedRun(
            "",
            "",
            [sys.executable, "-u", "-m", "wherry", "run", *words],
            # The driver's folder where machines share it, else that of Ray's runtime environment.
            cwd=folder if os.path.isdir(folder) else None,
            # Ray has given the threads of one rank to the actor of all of them: each is to have its part.
            env={key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | settings,
        )
        # Ray sends into a generator, and `yield from` would hand that on.
        for line in self.child.output:  # noqa: UP028
            yield line
        yield self.child.wait()

    def close(self, interrupted: bool) -> None:
        self.child.close(interrupted=interrupted)


class _RayNode:
    """The driver's end of a machine."""

    def __init__(self, actor: Any, name: str, words: Sequence[str], settings: dict[str, str]) -> None:
        self.name, self.prefix = name, ""
        self._actor = actor
        self._said = actor.run.options(num_returns="streaming").remote(words, settings, os.getcwd())
        self._status = 1

    @property
    def output(self) -> Iterator[str]:
        import ray

        try:
            for reference in self._said:
                said = ray.get(reference)
                if isinstance(said, int):
                    self._status = said
                else:
                    yield said
        except ray.exceptions.RayError as error:
            yield f"wherry: the machine {self.name} is lost: {str(error).splitlines()[0]}\n"

    def wait(self) -> int:
        return self._status

    def close(self, *, interrupted: bool) -> None:
        self._actor.close.remote(interrupted)

    def kill(self) -> None:
        import ray

        ray.kill(self._actor)
