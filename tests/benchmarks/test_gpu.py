"""The GPU's benchmarks, run on the CPU at toy size: rows, reasons, the deadline, the bound, the trace."""

import json
from dataclasses import replace

import pytest

from benchmarks import bounds, fragments, gpu, gpu_offload, trace
from benchmarks.bounds import Rates, Work
from wherry.observe import machine

pytestmark = pytest.mark.usefixtures("forked_rooms")


@pytest.fixture(autouse=True)
def no_watch(monkeypatch):
    monkeypatch.setattr(machine.Load, "__init__", lambda self, sample_s=0.0, of=machine.Load.__init__: of(self, 0.0))


SMALLEST = ["--toy", "--quick", "--rounds", "1", "--steps", "1", "--deadline", "250"]


def test_the_longest_term_bounds_a_step_and_shared_processors_add_up():
    work = Work(flops=2e12, host_update=26e9, up=4e9, down=2e9, disk_read=10e9)
    gpu_rates = Rates(matrix=1e12, host_update=13e9, device_memory=1e12, up=1e9, down=1e9, disk_read=1e9)
    assert bounds.bound(work, gpu_rates) == (10.0, "disk_read")
    assert bounds.bound(replace(work, disk_read=0.0), gpu_rates) == (4.0, "up")
    # Without a GPU the cores that compute are those that update, and nothing is copied.
    assert bounds.bound(replace(work, up=0.0, down=0.0, disk_read=0.0), Rates(1e12, 13e9)) == (4.0, "compute")


def test_the_least_work_of_a_step_by_placement():
    n = 10**9
    assert bounds.work_of(n, 1.0, "bf16") == Work(1.0, host_update=26e9)
    resident = bounds.work_of(n, 1.0, "bf16", gpu=True)
    assert resident == Work(1.0, device_memory=26e9)
    offload = bounds.work_of(n, 1.0, "bf16", offload_optimizer="cpu", gpu=True)
    assert offload == Work(1.0, host_update=26e9, up=2e9, down=2e9)  # 2 psi down and 2 psi up
    infinity = bounds.work_of(n, 1.0, "bf16", offload_optimizer="nvme", offload_param="nvme", gpu=True)
    assert infinity == Work(1.0, host_update=26e9, up=4e9, down=2e9, disk_read=14e9, disk_write=12e9)


def test_policies_and_peers_side_by_side(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "POLICIES", ("at_step", "no such policy", "in_backward"))
    monkeypatch.setattr(gpu, "CLIPS", (1.0,))
    path = tmp_path / "gpu.json"
    assert gpu.main([*SMALLEST, "--stages", "side", "--peers", "fsdp2-cpu", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    by_name = {row["system"]: row for row in found["rows"] if row["case"].get("clip") == 1.0}
    assert "wherry-2-cpu in_backward" not in by_name  # it cannot clip
    ours = by_name["wherry-2-cpu at_step"]
    assert ours["value"] > 0 and ours["of_limit"] == pytest.approx(ours["bound_s"] / ours["value"])
    assert set(ours["ratio"]) == {"wherry-3-cpu", "wherry-2", "fsdp2-cpu"}
    assert by_name["fsdp2-cpu"]["value"] > 0
    # The one that cannot be built says why, and costs nobody else anything.
    assert "no such policy" in by_name["wherry-2-cpu no such policy"]["reason"]
    assert found["complete"] and {"matrix", "host_update"} <= {row["case"].get("rate") for row in found["rows"]}
    assert "of bound" in capsys.readouterr().out


def test_sizes_tokens_fragments_and_the_largest_model(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "CAPS", (8, 32))
    monkeypatch.setattr(gpu, "TOY", {"1b": gpu.TOY["1b"]})
    path = tmp_path / "gpu.json"
    assert gpu.main([*SMALLEST, "--stages", "tokens,fragments,small,largest", "--json", str(path)]) == 0
    rows = [row for row in json.loads(path.read_text())["rows"] if "measure" in row["case"]]
    unused = [row for row in rows if row["case"]["measure"] == "fragments"]
    assert [row["system"] for row in unused] == list(gpu.UNUSED) == list(fragments.SYSTEMS)
    assert all(row["case"]["allocator"] == "simulated" and row["excess_bytes"] > 0 for row in unused)
    rows = [row for row in rows if row not in unused]
    assert [row["case"]["tokens"] for row in rows if row["case"]["measure"] == "tokens in a step"] == [32, 64, 128]
    capped = [row["case"]["cap_gib"] for row in rows if row["case"]["measure"] == "published sizes"]
    assert capped == [32, None]
    largest = [row for row in rows if row["case"]["measure"] == "largest model"]
    assert [row["case"]["cap_gib"] for row in largest] == list(gpu.CAPS)
    assert all(row["layers"] > 0 and row["predicted_by"] == "dry run" for row in largest)
    assert all(row["reason"] is None and row["loss"] > 0 for row in rows)
    assert "fragments of the allocator (simulated)" in capsys.readouterr().out


def test_what_the_deadline_leaves_out_is_named(tmp_path):
    path = tmp_path / "gpu.json"
    assert gpu.main([*SMALLEST[:-1], "1", "--stages", "tokens", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["case"]["measure"] for row in rows] == ["rates", "tokens"]
    assert all("left out" in row["reason"] for row in rows)


def test_the_size_of_the_published_run(tmp_path, capsys):
    path = tmp_path / "offload.json"
    assert gpu_offload.main([*SMALLEST, "--json", str(path)]) == 0
    (row,) = [row for row in json.loads(path.read_text())["rows"] if "measure" in row["case"]]
    assert row["case"]["cap_gib"] == 32 and row["tokens_per_s"] > 0 and row["trace"]["steps"] == gpu_offload.STEPS
    assert gpu.SIZES["10b"].parameters == pytest.approx(10.3e9, rel=0.01)


def test_the_overlap_is_read_from_the_trace(tmp_path):
    def event(category, name, begin, end):
        return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin}

    events = [
        event("kernel", "gemm", 0, 100),
        event("kernel", "gemm", 50, 120),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 100, 140),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 110, 150),
        event("gpu_memcpy", "Memcpy DtoD", 0, 500),
        event("cpu_op", "aten::mm", 0, 500),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = trace.overlap(path)
    assert found["kernel_s"] == pytest.approx(120e-6) and found["up_s"] == found["down_s"] == pytest.approx(40e-6)
    assert found["copies_beside_kernels_s"] == pytest.approx(20e-6) and found["hidden"] == pytest.approx(20 / 50)
