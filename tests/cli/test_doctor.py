"""What `wherry doctor` says of machines that lack something: each thing amiss comes with what to do about it."""

from __future__ import annotations

import resource
import shutil
import sys
import tomllib
from collections import namedtuple
from importlib import metadata
from pathlib import Path

import pytest
import torch

from wherry.cli import doctor
from wherry.cli.doctor import NOTE, OK, PROBLEM, Finding
from wherry.observe import memory
from wherry.observe.memory import HostMemory

MIB = 2**20
Usage = namedtuple("Usage", "total used free")


def limits(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))


def told(finding: Finding) -> tuple[str, str, str]:
    return finding.name, finding.verdict, finding.advice


def test_what_the_system_is_short_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = HostMemory(resident=0, peak=0, available=900 * MIB, total=1000 * MIB)
    monkeypatch.setattr(memory, "host_memory", lambda: seen)
    name, verdict, advice = told(doctor._memory())
    assert (name, verdict) == ("host memory", PROBLEM) and "free some" in advice
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1000 * MIB, 0, 900 * MIB))
    for finding, words in ((doctor._disk_space(), "12 bytes a parameter"), (doctor._shared_memory(), "--shm-size")):
        assert finding.verdict == NOTE and words in finding.advice and "900" in finding.found
    limits(monkeypatch, 64 * 1024, 64 * 1024)
    assert told(doctor._locked_memory())[1:] == (
        NOTE,
        "buffers of the disk tier may stay unlocked, which is slower; raise it with `ulimit -l unlimited`",
    )
    limits(monkeypatch, resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert doctor._locked_memory() == Finding("locked memory", "no limit")
    limits(monkeypatch, 256, 4096)
    assert told(doctor._open_files()) == ("open files", NOTE, "raise it with `ulimit -n 4096`")
    pages = tmp_path / "enabled"
    monkeypatch.setattr(doctor, "_HUGE_PAGES", pages)
    for text, verdict in (("always madvise [never]", NOTE), ("always [madvise] never", OK)):
        pages.write_text(text)
        assert doctor._huge_pages().verdict == verdict
    for node, cores in (("node0", "0-7"), ("node1", "8-15")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cores)
    monkeypatch.setattr(doctor, "_NODES", tmp_path)
    numa = doctor._numa()
    assert numa.verdict == NOTE and "--numa-binding" in numa.advice and "node1 has cores 8-15" in numa.found


def test_versions_that_are_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.8.1")
    assert doctor._torch().verdict == NOTE and "2.9 to 2.14" in doctor._torch().advice

    def version(name: str) -> str:
        if name == "trl":
            raise metadata.PackageNotFoundError
        return {"transformers": "4.40.1"}.get(name, "99.0")

    monkeypatch.setattr(metadata, "version", version)
    found = {finding.name: finding for finding in doctor._integrations()}
    assert told(found["transformers"])[1:] == (NOTE, "5.0 or newer is known to work: pip install -U transformers")
    assert found["accelerate"].verdict == OK and found["not installed"].found == "trl; none is needed"


def test_gpus_that_lack_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a torch for GPUs, as far as it can be told of one that is not there."""
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor._accelerators().verdict == NOTE and "nvidia-smi" in doctor._accelerators().advice
    assert doctor._cuda().verdict == NOTE and "CUDA_VISIBLE_DEVICES" in doctor._cuda().advice
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7 + index, 0))
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 12060, raising=False)
    assert told(doctor._cuda())[1:] == (NOTE, "GPU 0 computes bf16 slowly: use fp16, or fp32")
    assert doctor._cuda().found == "12.6, driver for 12.6"
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert doctor._backends().verdict == PROBLEM and "nccl" in doctor._backends().advice
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    for reach, verdict in ((True, OK), (False, NOTE)):
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b, reach=reach: reach)
        finding = doctor._nccl()
        assert (finding.found, finding.verdict) == ("2.27.5", verdict)


def test_the_oldest_versions_are_those_of_the_extras() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    asked = [each for name in ("transformers", "lightning", "tensorboard", "wandb")
             for each in project["optional-dependencies"][name]]  # fmt: skip
    least = {name: doctor._release(version) for name, _, version in (each.partition(">=") for each in asked)}
    assert least == doctor._INTEGRATIONS


def test_a_machine_without_torch_is_looked_at_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    findings = {finding.name: finding for finding in doctor.examine()}
    assert findings["torch"].verdict == PROBLEM and "pip install torch" in findings["torch"].advice
    assert findings["accelerators"].verdict == NOTE and "torch" in findings["accelerators"].advice
    assert {"host memory", "disk space here", "locked memory"} <= findings.keys()
