"""`wherry doctor`: each finding that is not fine has its advice."""

from __future__ import annotations

import json
import shutil
import sys
from collections import namedtuple
from importlib import metadata
from unittest import mock

import pytest
import torch

from wherry import native
from wherry.cli import doctor, main
from wherry.cli.doctor import NOTE, OK, PROBLEM, Finding, examine
from wherry.observe import memory
from wherry.observe.memory import HostMemory

MIB = 2**20
Usage = namedtuple("Usage", "total used free")


def findings() -> dict[str, Finding]:
    return {finding.name: finding for finding in examine()}


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend free memory, which other processes may have taken."""
    seen = HostMemory(resident=0, peak=0, available=8 << 30, total=16 << 30)
    monkeypatch.setattr(memory, "host_memory", lambda: seen)


def test_this_machine_is_fit(capsys, tmp_path, monkeypatch, roomy):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--json"]) == 0
    found = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    whole = "Python,torch,GPU,collectives,host memory,shared memory"
    assert {*whole.split(","), "native core", "disk I/O here", "disk space here", "transformers"} <= found.keys()
    assert all(finding["verdict"] in (OK, NOTE) for finding in found.values())
    # Whatever is noted comes with what to do about it or what follows from it.
    assert all(finding["advice"] for finding in found.values() if finding["verdict"] == NOTE)


def test_a_failing_check_is_a_problem(monkeypatch, capsys, roomy):
    monkeypatch.setenv("WHERRY_ISA", "z80")
    problems = {name: finding for name, finding in findings().items() if finding.verdict == PROBLEM}
    assert problems.keys() == {"native core", "disk I/O here"}
    assert all("z80" in finding.advice for finding in problems.values())
    assert main(["doctor"]) == 1
    assert "2 problems." in capsys.readouterr().out


def test_what_updates_states_on_the_host(monkeypatch):
    isas = native.available_isas()
    monkeypatch.delenv("WHERRY_ISA", raising=False)
    if len(isas) > 1:
        assert findings()["native core"].found.startswith(f"{isas[0]} kernels, ")
        monkeypatch.setenv("WHERRY_ISA", "portable")
        assert isas[0] == "portable" or f"unset it for {isas[0]}" in findings()["native core"].advice
    monkeypatch.setenv("WHERRY_ISA", "torch")
    fallback = findings()["native core"]
    assert (fallback.found, fallback.verdict) == ("not in use: torch fallback", NOTE)
    assert fallback.advice.startswith("WHERRY_ISA=torch asks for the torch fallback; meanwhile updates on the host run")


def test_what_the_system_is_short_of(monkeypatch):
    seen = HostMemory(resident=0, peak=0, available=900 * MIB, total=1000 * MIB)
    monkeypatch.setattr(memory, "host_memory", lambda: seen)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1000 * MIB, 0, 900 * MIB))
    results = findings()
    assert results["host memory"].verdict == PROBLEM and "free some" in results["host memory"].advice
    for name, words in (("disk space here", "12 bytes a parameter"), ("shared memory", "--shm-size")):
        assert results[name].verdict == NOTE and words in results[name].advice, name
    assert "900.0 MiB free" in results["disk space here"].found


def test_versions_that_are_too_old(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.8.1")

    def version(name: str) -> str:
        if name == "trl":
            raise metadata.PackageNotFoundError
        return {"transformers": "4.40.1.dev0", "accelerate": "1.10rc1"}.get(name, "99")

    monkeypatch.setattr(metadata, "version", version)
    results = findings()
    assert results["torch"].verdict == NOTE and "2.9 to 2.14" in results["torch"].advice
    advice = "5 or newer is known to work: pip install -U 'transformers>=5'"
    assert (results["transformers"].verdict, results["transformers"].advice) == (NOTE, advice)
    assert results["accelerate"].verdict == OK and results["not installed"].found == "trl; none is needed"


def test_extras_of_an_uninstalled_wherry_are_not_examined(monkeypatch):
    monkeypatch.setattr(metadata, "requires", mock.Mock(side_effect=metadata.PackageNotFoundError))
    result = findings()["Wherry"]
    assert (result.found, result.verdict) == ("run from its sources", NOTE) and "pip install wherry" in result.advice


def test_gpus_that_lack_something_and_those_of_other_kinds(monkeypatch):
    """Pretend a torch for GPUs, without any."""
    Device = namedtuple("Device", "name total_memory")
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    hidden = findings()["GPU"]
    assert hidden.verdict == NOTE and "nvidia-smi" in hidden.advice and "CUDA_VISIBLE_DEVICES" in hidden.advice
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Device("Some GPU", 8 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7 + index, 0))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    results = findings()
    assert results["collectives"].verdict == PROBLEM and "nccl" in results["collectives"].advice
    old = results["GPU"]
    assert (old.verdict, old.advice) == (NOTE, "GPU 0 computes bf16 slowly: use fp16, or fp32")
    assert old.found.endswith("Some GPU with 8.0 GiB; torch for 12.6")
    monkeypatch.setattr("wherry.plan.rates.gpus_here", lambda: [torch.device("xpu", index) for index in range(2)])
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda device: f"Card {device.index}")
    monkeypatch.setattr(torch.xpu, "mem_get_info", lambda device: (0, device.index << 30))
    assert findings()["GPU"] == Finding("GPU", "Card 0, Card 1 with 1.0 GiB; torch for xpu")


def test_a_machine_without_torch_is_looked_at_all_the_same(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    results = findings()
    assert results["torch"].verdict == PROBLEM and "pip install torch" in results["torch"].advice
    assert results["GPU"].verdict == NOTE and "torch" in results["GPU"].advice
    assert {"host memory", "disk space here"} <= results.keys()


def test_what_makes_states_on_the_host_and_the_disk_slower(monkeypatch, tmp_path):
    for node in ("node0", "node1"):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text("0-7\n")
    monkeypatch.setattr(doctor, "_NODES", tmp_path)
    pages = tmp_path / "enabled"
    monkeypatch.setattr(doctor, "_HUGE_PAGES", pages)
    pages.write_text("always madvise [never]\n")
    resource = pytest.importorskip("resource", reason="limits of a process are those of Unix")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 * MIB, 8 * MIB))
    results = findings()
    assert results["NUMA"].verdict == NOTE and "--numa-binding node" in results["NUMA"].advice
    assert results["locked memory"].found == "limit 8.0 MiB" and "ulimit -l" in results["locked memory"].advice
    assert results["pinned memory"].found == "not needed: there is no accelerator"
    assert results["huge pages"].found == "never" and "madvise" in results["huge pages"].advice
