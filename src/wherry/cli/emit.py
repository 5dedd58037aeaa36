"""Job files for schedulers: the same ranks, started by Slurm, Kubernetes or SkyPilot."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wherry.cli.run import given_processes
from wherry.errors import WherryError


@dataclass(frozen=True)
class Job:
    """What a scheduler is asked to run."""

    name: str
    nodes: int
    processes: int
    command: tuple[str, ...]
    port: int = 29500
    gpus: bool = True
    # What pip installs Wherry from, as the job's machines see it. Without it they have Wherry already.
    install: str | None = None
    # Whether the script's `import deepspeed` is to give Wherry.
    as_deepspeed: bool = False

    @property
    def installing(self) -> list[str]:
        return [f"python -m pip install {_quoted(self.install)}"] if self.install else []

    @classmethod
    def of(cls, arguments: argparse.Namespace, nodes: str) -> Job:
        """The job that `wherry run`'s flags describe."""
        if ":" in nodes:
            raise WherryError(f"--emit {arguments.emit}: expected a fixed number of machines, got {nodes}")
        processes = given_processes(arguments) or "1"
        if not processes.isdigit():
            raise WherryError(f"--emit {arguments.emit}: expected a number of processes, got {processes!r}")
        for flag in ("on", "hostfile", "include", "exclude", "forward", "local_rank_arg", "follow_stdin"):
            if getattr(arguments, flag):
                raise WherryError(
                    f"--emit {arguments.emit}: --{flag.replace('_', '-')} has no place in a job file, where the "
                    "scheduler chooses the machines and torchrun starts the script; leave it out"
                )
        script = [arguments.training_script, *arguments.training_script_args]
        for word in (*script, arguments.install or ""):
            if not word.isascii() and not _is_text(word):
                raise WherryError(f"--emit {arguments.emit}: {word!r} is not text in UTF-8, as a job file is")
        return cls(
            name=_job_name(arguments.training_script),
            nodes=int(nodes),
            processes=int(processes),
            command=tuple(["-m", *script] if arguments.module else script),
            port=arguments.master_port or 29500,
            gpus=arguments.num_gpus is not None,
            install=_installable(arguments),
            as_deepspeed=arguments.as_deepspeed,
        )


def _job_name(script: str) -> str:
    stem = os.path.basename(script).removesuffix(".py")
    # Kubernetes allows 63 characters.
    return re.sub(r"[^a-z0-9-]+", "-", stem.lower())[:63].strip("-") or "wherry"


def _installable(arguments: argparse.Namespace) -> str | None:
    """What pip is told to install: a URL, or a path that it cannot take for a name on an index."""
    given: str | None = arguments.install
    if given is None and arguments.emit == "sky":
        raise WherryError(
            "--emit sky: new machines have no Wherry; give --install with a wheel or a clone of it in this folder, or "
            "with a URL that pip installs from"
        )
    if given is None or "://" in given:
        return given
    path = Path(given)
    if arguments.emit == "sky":
        if not path.exists() or not path.resolve().is_relative_to(Path.cwd()):
            raise WherryError(
                f"--install {given}: expected a wheel or a clone in this folder, which alone is copied there, or a URL"
            )
        path = path.resolve().relative_to(Path.cwd())
    return str(path) if path.is_absolute() else f"./{path}"


# Ahead of the launcher, so that whatever it starts finds the alias.
_ALIAS = 'export PYTHONPATH="$(python -m wherry.compat.deepspeed --path)${PYTHONPATH:+:$PYTHONPATH}"'


def emit(scheduler: str, job: Job) -> str:
    """The text of the job file."""
    return {"slurm": _slurm, "k8s": _kubernetes, "sky": _sky}[scheduler](job)


def _slurm(job: Job) -> str:
    gpus = f"\n#SBATCH --gpus-per-node={job.processes}" if job.gpus else ""
    install = job.installing or ["# Wherry is in the nodes' environment already: `--install` was not given."]
    prepare = "\n".join([*install, *([_ALIAS] if job.as_deepspeed else [])])
    return f"""#!/bin/bash
#SBATCH --job-name={job.name}
#SBATCH --nodes={job.nodes}
#SBATCH --ntasks-per-node=1{gpus}
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
set -euo pipefail
{prepare}

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# Machines that know their numbers meet without unpickling anything.
srun --kill-on-bad-exit=1 bash -c 'exec torchrun --node-rank="$SLURM_NODEID" "$@"' bash \\
    --nnodes="$SLURM_NNODES" \\
    --nproc-per-node={job.processes} \\
    --master-addr="$head" \\
    --master-port={job.port} \\
    {_joined(job.command)}
"""


def _kubernetes(job: Job) -> str:
    # The runtime gives torchrun the number of machines and where they meet, through PET_* variables.
    words = ("torchrun", *job.command)
    prepare = [*job.installing, *([_ALIAS] if job.as_deepspeed else [])]
    if prepare:
        words = ("bash", "-c", " && ".join([*prepare, 'exec "$@"']), "bash", *words)
    trainer: dict[str, Any] = {
        "image": _Quoted("IMAGE"),
        "numNodes": job.nodes,
        "numProcPerNode": job.processes,
        # Kubernetes puts a variable in place of $(NAME), and a $ in place of $$.
        "command": [_Quoted(re.sub(r"\$(?=[$(])", "$$", word)) for word in words],
    }
    if job.gpus:
        count = {"nvidia.com/gpu": job.processes}
        trainer["resourcesPerNode"] = {"requests": count, "limits": dict(count)}
    return f"# IMAGE: an image that holds your script{'' if job.install else ' and Wherry'}\n" + _yaml(
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": _Quoted(job.name)},
            "spec": {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer},
        }
    )


def _sky(job: Job) -> str:
    run = [
        *([_ALIAS] if job.as_deepspeed else []),
        'head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
        'torchrun --nnodes="$SKYPILOT_NUM_NODES" --node-rank="$SKYPILOT_NODE_RANK" \\',
        f'  --nproc-per-node={job.processes} --master-addr="$head" --master-port={job.port} \\',
        f"  {_joined(job.command)}",
    ]
    resources = {"cpus": "4+"} | ({"accelerators": _Quoted(f"H100:{job.processes}")} if job.gpus else {})
    return ("# H100: the GPU you want\n" if job.gpus else "") + _yaml(
        {
            "name": _Quoted(job.name),
            "num_nodes": job.nodes,
            "workdir": ".",
            "resources": resources,
            "setup": _Literal(f"{job.installing[0]}\n"),
            "run": _Literal("\n".join([*run, ""])),
        }
    )


# How a shell and YAML take text as it is.


def _joined(words: tuple[str, ...]) -> str:
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    """As a shell takes it, on one line: what begins a line may mean something to a scheduler."""
    if word.isprintable():
        return shlex.quote(word)
    shown = (
        c if c.isprintable() and c not in "\\'" else "".join(f"\\x{byte:02x}" for byte in c.encode()) for c in word
    )
    return f"$'{''.join(shown)}'"


def _is_text(word: str) -> bool:
    try:
        return bool(word.encode())
    except UnicodeEncodeError:
        return False


class _Quoted(str):
    """Text that YAML's readers are to take for text: they differ in which words they take for numbers."""


class _Literal(str):
    """Text of several lines, written as they are."""


def _yaml(job: dict[str, Any]) -> str:
    try:
        import yaml
    except ImportError as error:
        raise WherryError(f"--emit: {error}, which writes this file; run `pip install pyyaml`") from error

    class Dumper(yaml.SafeDumper):
        """Its own: representers belong to a class."""

    for kind, style in ((_Quoted, '"'), (_Literal, "|")):
        Dumper.add_representer(
            kind, lambda dumper, text, style=style: dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style)
        )
    written: str = yaml.dump(job, Dumper=Dumper, sort_keys=False, width=float("inf"))
    return written
