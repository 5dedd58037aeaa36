"""The GPU's benchmarks, run on the CPU at toy size: rows, reasons, the deadline, the bound, the trace."""

import gzip
import json
import multiprocessing
import os
import sys
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import psutil
import pytest
import torch

from benchmarks import (
    bounds,
    fragments,
    gpu,
    gpu_offload,
    gpu_session,
    gpu_worker,
    peers,
    report,
    summary,
    systems,
    trace,
)
from benchmarks.bounds import Rates, Work
from benchmarks.gpu_worker import GIB, GpuWorker
from benchmarks.rooms import RoomFailed
from wherry.observe import bench, machine
from wherry.train.model import MLP

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


def test_the_states_of_a_rank_by_the_tier_where_they_rest():
    of = bounds.states_by_tier
    assert of("wherry-2-cpu", 10, "bf16") == {"device": 20, "host": 140, "disk": 0}
    assert of("wherry-3-cpu", 10, "bf16") == {"device": 0, "host": 160, "disk": 0}
    assert of("wherry-3-nvme", 10, "bf16") == {"device": 0, "host": 20, "disk": 140}
    assert of("deepspeed-2", 10, "bf16") == {"device": 160, "host": 0, "disk": 0}
    assert of("fsdp2-cpu", 10, "bf16") == {"device": 0, "host": 160, "disk": 0}
    assert of("compute", 10, "bf16") == {"device": 40, "host": 0, "disk": 0}


def test_policies_and_peers_side_by_side(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "POLICIES", {1.0: ("at_step", "no such policy")})
    path = tmp_path / "gpu.json"
    others = "fsdp2-cpu,deepspeed-3-reflow"
    assert gpu.main([*SMALLEST, "--stages", "policies,peers", "--peers", others, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    rows = [row for row in found["rows"] if row["case"].get("measure") == "beside others"]
    beside = {row["system"]: row for row in rows if row["case"]["tokens"] == 64}
    ours = beside["wherry-2-cpu at_step"]
    # With weights on the host too, as FSDP2 has them.
    whole = "wherry-3-cpu at_step"
    assert list(beside) == ["compute", "wherry-2-cpu at_step", whole, "fsdp2-cpu", "deepspeed-3-reflow"]
    assert set(ours["ratio"]) == {"compute", whole, "fsdp2-cpu"} and beside["fsdp2-cpu"]["value"] > 0
    assert summary.times(beside["fsdp2-cpu"], rows) == beside[whole]["ratio"]["fsdp2-cpu"]
    # All of them train the same model from the same start.
    assert ours["loss_difference"] == 0
    assert beside["compute"]["loss_difference"] == 0 <= beside["fsdp2-cpu"]["loss_difference"] < systems.SAME_BF16_LOSS
    assert beside["deepspeed-3-reflow"]["reason"].endswith(("has no reflow", "(pip install '.[bench]')"))
    # The same engines take other numbers of tokens.
    assert [(row["case"]["tokens"], row["system"]) for row in rows if row["case"]["tokens"] != 64] == [
        (count, system) for count in (32, 128) for system in ("compute", "wherry-2-cpu at_step", whole, "fsdp2-cpu")
    ]
    assert ours["formula_host_bytes"] == 14 * ours["parameters"] and ours["formula_device_bytes"] is None
    # The same measure of all; what an engine says of its states is another.
    for row in (ours, beside["fsdp2-cpu"]):
        assert row["host_bytes_per_parameter"] == pytest.approx(row["host_bytes"] / row["parameters"])
    # Where the host is the device, its states are none of the host's tier.
    assert list(ours["state_bytes_by_tier"]) == ["device"] and ours["own_host_bytes_per_parameter"] == 0
    assert beside["fsdp2-cpu"]["own_host_bytes_per_parameter"] is None
    alone = beside["compute"]
    assert alone["bound_by"] == "compute" and alone["bound_s"] < ours["bound_s"]
    assert alone["host_bytes"] >= alone["resident_bytes"]
    by_name = {row["system"]: row for row in found["rows"] if row["case"].get("measure") == "policies"}
    ours = by_name["wherry-2-cpu at_step"]
    assert ours["value"] > 0 and ours["of_limit"] == pytest.approx(ours["bound_s"] / ours["value"])
    assert set(ours["ratio"]) == {"wherry-3-cpu", "wherry-2"} and ours["resident_bytes"] >= 0
    # The one that cannot be built says why, and costs nobody else anything.
    assert "no such policy" in by_name["wherry-2-cpu no such policy"]["reason"]
    rates = {row["case"].get("rate") for row in found["rows"]}
    assert found["complete"] and {"matrix", "host_update", "host_stream"} <= rates
    assert "of bound" in capsys.readouterr().out


def test_sizes_fragments_and_the_largest_model(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "CAPS", (8, 32))
    monkeypatch.setattr(gpu_session, "TOY", {"1b": gpu_session.TOY["1b"]})
    path = tmp_path / "gpu.json"
    assert gpu.main([*SMALLEST, "--stages", "fragments,small,largest", "--json", str(path)]) == 0
    rows = [row for row in json.loads(path.read_text())["rows"] if "measure" in row["case"]]
    unused = [row for row in rows if row["case"]["measure"] == "fragments"]
    assert [row["system"] for row in unused] == list(gpu.UNUSED) == list(fragments.SYSTEMS)
    assert all(row["case"]["allocator"] == "simulated" and row["excess_bytes"] > 0 for row in unused)
    rows = [row for row in rows if row not in unused]
    capped = [row["case"]["cap_gib"] for row in rows if row["case"]["measure"] == "published sizes"]
    assert capped == [32, None]
    largest = [row for row in rows if row["case"]["measure"] == "largest model"]
    assert [row["case"]["cap_gib"] for row in largest] == list(gpu.CAPS)
    assert all(row["layers"] > 0 and row["predicted_by"] == "dry run" for row in largest)
    assert {row["limited_by"] for row in largest} <= {"device", "host"}
    assert all(row["reason"] is None and row["loss"] > 0 for row in rows)
    page, plots = report.page([json.loads(path.read_text()) | {"file": "gpu-x.json"}])
    columns = "| TFLOPS | bound by | host | host by formula | host B/param | by its own account | layers | limited by |"
    assert columns in page
    assert "part of the bound of offloaded steps of 8k tokens and more on a GPU | 0.85 | not measured" in page  # fewer
    assert "gpu-x.svg" in plots
    assert "fragments of the allocator (simulated)" in capsys.readouterr().out


class Answers:
    """A room that answers as it is told, or fails."""

    def __init__(self, **answers):
        self.answers, self.asked, self.closed = answers, [], False

    def ask(self, timeout, do, request=None):
        if do == "ready":
            return [True]
        self.timeout = timeout
        self.asked.append((request["do"], request.get("name"), request.get("gib")))
        answer = self.answers.get(f"{request['do']}_{request.get('name')}", self.answers[request["do"]])
        if isinstance(answer, BaseException):
            raise answer
        return [answer if "failed" in answer else {"found": answer}]

    def close(self):
        self.closed = True


TIMED = {"seconds": 0.1, "losses": [1.0], "memory": []}
TIMED |= {"peak_device_bytes": 1, "peak_reserved_bytes": 1, "resident_bytes": 1, "taken_bytes": 2}
BUILT = TIMED | {"step_s": 0.1, "batch": 1, "built_s": 1.0}


def session(tmp_path, monkeypatch, deadline=100, **answers):
    arguments = ["--quick", "--json", str(tmp_path / "gpu.json")]
    options = bench.parse(bench.parser("gpu", ""), arguments)
    vars(options).update(deadline=deadline, toy=True, rounds=2, steps=1, path=None, peers=["fsdp2-cpu"])
    answers = {"close": {"left_bytes": 0}, "cap": {}, **answers}
    monkeypatch.setattr(gpu_session, "Room", lambda *_, **__: Answers(**answers))
    return gpu_session.Session(options, bench.Results("gpu", options, {}))


def rows_of(found):
    return {row["system"]: row for row in found.results.rows}


SUBJECTS = {name: ("wherry-2", gpu_session.TOY["1b"]) for name in ("one", "two", "three")}


def test_a_system_that_fails_while_it_is_timed_costs_the_others_nothing(tmp_path, monkeypatch):
    found = session(tmp_path, monkeypatch, build=BUILT, time=TIMED, time_two={"failed": "OutOfMemoryError: no"})
    gpu._in_turns(found, {}, SUBJECTS)
    rows = rows_of(found)
    assert rows["two"]["reason"] == "OutOfMemoryError: no"
    assert rows["one"]["rounds"] == rows["three"]["rounds"] == 2
    assert [name for do, name, _ in found._room.asked if do == "close"] == ["one", "two", "three"]


def test_a_system_that_trains_another_model_is_told_of(tmp_path, monkeypatch, capsys):
    others = {"build_two": BUILT | {"losses": [9.0, 7.7]}, "build_three": BUILT | {"losses": [9.0, 8.001]}}
    others["build_four delayed"] = BUILT | {"losses": [9.0, 8.9]}
    found = session(tmp_path, monkeypatch, build=BUILT | {"losses": [9.0, 8.0]}, time=TIMED, **others)
    case = {"measure": "policies"}
    more = {systems.COMPUTE: (systems.COMPUTE, gpu_session.TOY["1b"]), "four delayed": SUBJECTS["one"]}
    gpu._in_turns(found, case, SUBJECTS | more)
    off = {name: row["loss_difference"] for name, row in rows_of(found).items()}
    expected = {"one": 0, "two": pytest.approx(0.3 / 8), "three": pytest.approx(0.001 / 8)}
    assert off == expected | {systems.COMPUTE: 0, "four delayed": 0}  # a late update has the first loss alone
    gpu.table(found.results.rows)
    assert capsys.readouterr().out.count("NOT THE LOSSES OF THE OTHERS") == 1


def test_a_process_that_ends_is_named_with_who_was_in_it(tmp_path, monkeypatch):
    found = session(tmp_path, monkeypatch, build=BUILT, time=TIMED, time_two=RoomFailed("ended by signal 11"))
    gpu._in_turns(found, {}, SUBJECTS)
    rows = rows_of(found)
    assert rows["three"]["reason"] == "ended with two: ended by signal 11"
    assert rows["two"]["reason"] == "ended by signal 11" and rows["one"]["rounds"] == 1


def test_a_run_that_is_ended_keeps_every_measure(tmp_path, monkeypatch):
    found = session(tmp_path, monkeypatch, build=BUILT, time=TIMED, time_three=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        gpu._in_turns(found, {}, SUBJECTS)
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert [(row["system"], row["rounds"], set(row["ratio"])) for row in rows] == [
        ("one", 1, {"two"}),
        ("two", 1, {"one"}),
    ]
    assert rows[0]["host_bytes"] == 2


def test_ours_is_built_before_the_peers_and_is_timed_whatever_its_share(tmp_path, monkeypatch):
    found = session(tmp_path, monkeypatch, build=BUILT, time=TIMED)
    built = []

    def slow(self, name, *_):
        built.append(name)
        self.share_out(0.0)
        return BUILT

    monkeypatch.setattr(gpu_session.Session, "build", slow)
    ours = [f"{system} in_backward" for system in ("wherry-2-cpu", "wherry-3-cpu")]  # for peers in either place
    found._pace = dict.fromkeys(("compute", *ours, "fsdp2-cpu"), 0.1)
    gpu.unclipped(found)
    assert built == list(found._pace)
    assert [(row["case"]["clip"], row["rounds"]) for row in found.results.rows] == [(0.0, 1)] * 4


def test_what_cannot_be_compiled_is_told_once_and_not_waited_for(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(gpu_session.systems, "cannot_run", lambda system: None)
    monkeypatch.setattr(gpu_session.builders, "built", lambda operator: tmp_path / "absent.so")
    monkeypatch.setattr(gpu_session.builders, "build", lambda name, timeout: asked.append(name) or "no compiler")
    found = session(tmp_path, monkeypatch, build=BUILT, time=TIMED)
    found.options.peers = ["deepspeed-2-cpu", "deepspeed-3-super"]
    for _ in range(2):
        gpu.unclipped(found)
    rows = rows_of(found)
    assert asked == ["CPUAdamBuilder"] and rows["compute"]["value"] > 0
    assert {rows[peer]["reason"] for peer in found.options.peers} == {"its host optimizer is not built: no compiler"}
    assert not any(name in found.options.peers for _, name, _ in found._room.asked)


def test_a_compiler_that_fails_or_does_not_end_is_told_of(monkeypatch):
    monkeypatch.setattr(peers, "_BUILD", "raise SystemExit('no {name}')")
    assert peers.build("Builder") == "no Builder"
    monkeypatch.setattr(peers, "_BUILD", "import time; time.sleep(600)")
    assert peers.build("Builder", timeout=0.1) == "it was not compiled within 0 s"


def test_a_compiler_that_was_interrupted_holds_nobody_up(tmp_path, monkeypatch):
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (0, 0))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(psutil, "process_iter", lambda names: iter(()))
    monkeypatch.setattr(peers, "_BUILD", f"import os; assert not os.path.exists({str(lock)!r}), '{{name}} waits'")
    assert peers.build("Builder") is None


def test_a_peer_that_ends_the_process_while_it_is_built_is_not_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_session.systems, "cannot_run", lambda system: None)
    dies = {"build_deepspeed-2": RoomFailed("ended by signal 11")}
    found = session(tmp_path, monkeypatch, build=BUILT, time=TIMED, **dies)
    subjects = {name: (name, gpu_session.TOY["1b"]) for name in ("fsdp2", "deepspeed-2", "wherry-2")}
    for _ in range(2):
        gpu._in_turns(found, {}, subjects)
        rows = rows_of(found)
        # What it took along is built again.
        assert rows["fsdp2"]["rounds"] == rows["wherry-2"]["rounds"] == 2
        assert rows["deepspeed-2"]["reason"] == "ended by signal 11"
        built = [name for do, name, _ in found._room.asked if do == "build"]
        assert "deepspeed-2" not in built and set(built) == {"fsdp2", "wherry-2"}


def test_steps_that_time_has_no_room_for_are_not_begun(tmp_path, monkeypatch):
    found = session(tmp_path, monkeypatch, deadline=1000, build=BUILT, build_two=BUILT | {"step_s": 5000.0}, time=TIMED)
    gpu._in_turns(found, {}, SUBJECTS)
    rows = rows_of(found)
    assert rows["two"]["reason"].startswith("left out") and rows["one"]["rounds"] == rows["three"]["rounds"] == 2
    assert not any(ask[:2] == ("time", "two") for ask in found._room.asked)


def test_stages_share_the_time_and_pass_on_what_they_leave(tmp_path, monkeypatch):
    found = session(tmp_path, monkeypatch, deadline=10_000 + gpu_session.RESERVE)
    seen = []
    for name in ("peers", "small", "largest"):
        monkeypatch.setitem(gpu.STAGES, name, lambda session: seen.append(session.left()))
    gpu.run(found, ["peers", "small", "largest"])
    shares = [gpu.SHARES[name] for name in ("peers", "small", "largest")]
    expected = [10_000 * share / sum(shares[index:]) for index, share in enumerate(shares)]
    assert seen == pytest.approx(expected, abs=100)  # they took next to nothing


def test_what_a_stage_has_built_is_closed_when_its_time_is_over(tmp_path, monkeypatch):
    found = session(tmp_path, monkeypatch)
    found.ask(do="cap", gib=32)
    found.share_out(0.0)
    with pytest.raises(gpu_session.NoTime, match="left out"):
        found.ask(do="cap", gib=8)
    gpu_session.let_go(found, "it")
    gpu_session.uncap(found)
    assert found._room.asked == [("cap", None, 32), ("close", "it", None), ("cap", None, None)]


def test_what_has_begun_is_not_given_up_with_the_share_of_its_stage(tmp_path, monkeypatch):
    found = session(tmp_path, monkeypatch, deadline=1000)
    found.share_out(0.0)
    found._ends += 20.0
    found.ask(do="cap", gib=8)
    assert found._room.timeout == gpu_session.PATIENCE
    found.share_out(0.5)
    found.ask(do="cap", gib=8)
    assert 400 < found._room.timeout < 500


def test_a_fault_costs_its_stage_and_not_the_run(tmp_path, monkeypatch, capsys):
    found = session(tmp_path, monkeypatch)
    found.ask(do="cap", gib=32)
    seen = []
    monkeypatch.setitem(gpu.STAGES, "peers", lambda session: {}["nothing"])
    monkeypatch.setitem(gpu.STAGES, "small", lambda session: seen.append(session.ended))
    gpu.run(found, ["peers", "small"])
    (row,) = found.results.rows
    assert row["case"] == {"measure": "peers"} and row["reason"] == "KeyError: 'nothing'"
    assert seen == [True] and "Traceback" in capsys.readouterr().err


def test_a_batch_beyond_the_cap_is_told_and_taken_whole_without_it(tmp_path, monkeypatch):
    found = session(tmp_path, monkeypatch, build=BUILT, time=TIMED)
    gpu.sizes(found, ["1b"])
    capped, uncapped = found.results.rows
    assert capped["case"]["cap_gib"] == 32 and capped["case"]["tokens"] == 32 and capped["batch_of_table"] == 2
    assert uncapped["case"]["cap_gib"] is None and uncapped["case"]["tokens"] == 64
    assert found._room.asked[-1] == ("cap", None, None)


def test_a_size_that_ends_its_process_is_not_asked_for_in_the_next(tmp_path, monkeypatch):
    found, rooms = session(tmp_path, monkeypatch), []
    killed = RoomFailed("ended by signal 9")

    def room(*_, **__):
        rooms.append(Answers(build=BUILT, time=killed, cap={}))
        return rooms[-1]

    monkeypatch.setattr(gpu_session, "Room", room)
    gpu.sizes(found, ["1b"])
    assert [row["reason"] for row in found.results.rows] == ["ended by signal 9"] * 2 and len(rooms) == 1


@pytest.mark.parametrize(
    ("close", "ended"),
    [({"left_bytes": gpu.LEFT}, False), ({"left_bytes": gpu.LEFT + 1}, True), ({"failed": "it cannot"}, True)],
)
def test_what_is_left_on_the_device_ends_with_its_process(tmp_path, monkeypatch, close, ended):
    found = session(tmp_path, monkeypatch, build=BUILT, time=TIMED, close=close)
    gpu._in_turns(found, {}, SUBJECTS)
    assert found.ended is ended and all(row["rounds"] == 2 for row in found.results.rows)


def test_a_batch_is_halved_until_it_fits(monkeypatch):
    """What is out of memory in a backward leaves an engine that can go on."""
    inner = MLP.forward

    def fail(gradient):
        raise torch.OutOfMemoryError("no")

    def forward(self, x):
        if len(x) > 1 and x.requires_grad:
            x.register_hook(fail)
        return inner(self, x)

    monkeypatch.setattr(MLP, "forward", forward)
    worker = GpuWorker()
    asked = {"name": "it", "system": "wherry-3-cpu", "recipe": asdict(replace(gpu_session.TOY["1b"], batch=4))}
    found = worker.answer({"do": "build", "shrink": True, **asked})["found"]
    assert found["batch"] == 1 and len(found["losses"]) == 2 and worker.recipes["it"].batch == 1
    assert worker.answer({"do": "close", "name": "it"}) == {"found": {"left_bytes": 0}}
    assert "OutOfMemoryError" in worker.answer({"do": "build", **asked})["failed"]


def test_what_fails_in_the_worker_is_an_answer_and_leaves_nothing():
    worker = GpuWorker()
    recipe = asdict(replace(gpu_session.TOY["1b"], policy="none such"))
    asked = {"do": "build", "name": "it", "system": "wherry-2", "recipe": recipe}
    assert "none such" in worker.answer(asked)["failed"]
    assert worker.answer({"do": "time", "name": "it", "steps": 1})["failed"].startswith("KeyError")
    assert not worker.trainees


def test_layers_are_those_that_every_tier_has_room_for():
    base = gpu_session.gpt2(1, 4096, 1)
    few, more = {"device": 4 * GIB, "host": 24 * GIB}, {"device": 5 * GIB, "host": 48 * GIB}
    assert gpu._layers_within(few, more, (8, 16), {"device": 6 * GIB, "host": 1000 * GIB}, base) == (24, "device")
    assert gpu._layers_within(few, more, (8, 16), {"device": 6 * GIB, "host": 60 * GIB}, base) == (20, "host")


def test_a_bound_is_that_of_offloaded_steps_of_many_tokens():
    aim = summary.AIMS[-1]

    def figure(system, tokens):
        row = bench.row({"measure": "policies", "tokens": tokens}, system, "s", [1.0]) | {"of_limit": 0.9}
        return aim.figure(row, [row])

    assert figure("wherry-2-cpu in_backward", 8192) == figure("wherry-3-cpu", 65536) == 0.9
    assert figure("wherry-2-cpu", 4096) is figure("wherry-2", 8192) is figure("fsdp2-cpu", 8192) is None
    assert figure("wherry-2-cpu delayed", 8192) is None
    # Those of the model of 10B count as well.
    row = bench.row({"measure": "offload", "tokens": 10240}, "wherry-3-cpu", "s", [1.0]) | {"of_limit": 0.9}
    offload = {"benchmark": "gpu_offload", "file": "gpu_offload-x.json", "load": {"idle": True}, "rows": [row]}
    assert "on a GPU | 0.85 | 0.90 | 1 of 1 | [gpu_offload-x]" in summary._aims([offload])


def test_a_system_keeps_the_cores_that_it_has_chosen_to_itself(monkeypatch):
    """DeepSpeed's super_offload gives most of them to a process of its own, which lives on after its engine."""
    every, seen = os.sched_getaffinity(0), []
    children = []
    monkeypatch.setenv("OMP_NUM_THREADS", "2")

    class Greedy:
        def __init__(self, recipe, ranks):
            assert "OMP_NUM_THREADS" not in os.environ  # as many threads as cores, in what it starts
            os.sched_setaffinity(0, {min(every)})
            children.append(multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True))
            children[0].start()

        def step(self, ids, labels):
            seen.append(os.sched_getaffinity(0))
            return torch.tensor(1.0)

    monkeypatch.setitem(gpu_worker.SYSTEMS, "greedy", Greedy)
    worker = GpuWorker()
    recipe = asdict(gpu_session.TOY["1b"])
    assert "found" in worker.answer({"do": "build", "name": "it", "system": "greedy", "recipe": recipe})
    assert os.sched_getaffinity(0) == every and os.environ["OMP_NUM_THREADS"] == "2"
    assert "found" in worker.answer({"do": "time", "name": "it", "steps": 1})
    assert seen == [{min(every)}] * 4 and os.sched_getaffinity(0) == every
    assert children[0].is_alive()
    assert worker.answer({"do": "close", "name": "it"}) == {"found": {"left_bytes": 0}}
    assert not children[0].is_alive()


def test_what_a_system_has_started_ends_though_its_engine_cannot_close(monkeypatch):
    class Fails:
        def __init__(self, recipe, ranks):
            self.engine = self
            self.child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
            self.child.start()

        def step(self, ids, labels):
            return torch.tensor(1.0)

        def close(self):
            raise RuntimeError("it cannot")

        def memory(self):
            return []

    monkeypatch.setitem(gpu_worker.SYSTEMS, "fails", Fails)
    worker = GpuWorker()
    asked = {"do": "build", "name": "it", "system": "fails", "recipe": asdict(gpu_session.TOY["1b"])}
    assert "found" in worker.answer(asked)
    child = worker.trainees["it"].child
    assert worker.answer({"do": "close", "name": "it"})["failed"] == "RuntimeError: it cannot"
    assert not child.is_alive()


def test_deepspeed_is_told_to_work_beside_the_backward_on_a_gpu(monkeypatch):
    configs = []
    deepspeed = SimpleNamespace(
        init_distributed=lambda **_: None, initialize=lambda *, config, **_: configs.append(config) or [None]
    )
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)

    def told(place, device):
        monkeypatch.setattr(systems, "device_type", lambda: device)
        systems.SYSTEMS[f"deepspeed-{place}"](replace(gpu_session.TOY["1b"], built_there=False), 1)
        return configs[-1]["zero_optimization"]

    size = gpu_session.SIZES["1b"]
    for place in ("2-cpu", "3-cpu", "3-super"):
        zero = told(place, "cuda")
        # By default nothing overlaps at stage 2, and this whole model is one bucket or two, and updated as one.
        assert zero["overlap_comm"] is True
        for elements in (zero["reduce_bucket_size"], zero["sub_group_size"]):
            assert size.vocabulary * size.hidden < elements < size.parameters / 8
        assert "sub_group_size" not in told(place, "cpu")
    assert zero["offload_optimizer"]["super_offload"] is True
    assert "sub_group_size" not in told("2", "cuda")


def test_computing_alone_trains_nothing():
    computing = systems.SYSTEMS[systems.COMPUTE](gpu_session.TOY["1b"], 1)
    batch = gpu_session.TOY["1b"].batch_of(0, 0, 1)
    assert float(computing.step(*batch)) == float(computing.step(*batch)) > 0
    assert {p.dtype for p in computing.model.parameters()} == {torch.bfloat16}
    assert all(p.grad is None for p in computing.model.parameters())


def test_what_is_out_of_host_memory_is_tried_smaller(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu.bounds, "free_host_memory", lambda: 100 * GIB)
    fits = {"device": GIB, "host": 26 * GIB}
    found = session(tmp_path, monkeypatch, deadline=1000, fits=fits, build=RoomFailed("ended by signal 9"))
    found.options.toy, found.sizes = False, gpu_session.SIZES
    gpu.largest(found)
    layers = [row["layers"] for row in found.results.rows]
    assert layers[1:] == [int(gpu.FEWER * before) for before in layers[:-1]]
    assert {row["reason"] for row in found.results.rows} == {"ended by signal 9"}


def test_a_part_of_the_stages_has_a_file_of_its_own():
    assert gpu._part(["rates", "small", "largest"]) == "small-largest" and gpu._part(["rates"]) == "rates"
    assert gpu._part(["rates", *gpu.STAGES]) == "" and list(gpu.SHARES) == list(gpu.STAGES)


def test_what_the_deadline_leaves_out_is_named(tmp_path):
    path = tmp_path / "gpu.json"
    chosen = ["--stages", "peers,small", "--peers", "fsdp2-cpu"]
    assert gpu.main([*SMALLEST[:-1], "1", *chosen, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    measures = dict.fromkeys(row["case"]["measure"] for row in rows)
    assert list(measures) == ["rates", "beside others", "published sizes"]
    assert all("left out" in row["reason"] for row in rows)


def test_the_size_of_the_published_run(tmp_path, capsys):
    path = tmp_path / "offload.json"
    assert gpu_offload.main([*SMALLEST, "--json", str(path)]) == 0
    (row,) = [row for row in json.loads(path.read_text())["rows"] if "measure" in row["case"]]
    assert row["case"]["cap_gib"] == 32 and row["tokens_per_s"] > 0 and row["trace"]["steps"] == gpu_offload.STEPS
    assert gpu_session.SIZES["10b"].parameters == pytest.approx(10.3e9, rel=0.01)


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
    (tmp_path / "trace.json.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert trace.overlap(tmp_path / "trace.json.gz") == found
    assert found["kernel_s"] == pytest.approx(120e-6) and found["up_s"] == found["down_s"] == pytest.approx(40e-6)
    assert found["copies_beside_kernels_s"] == pytest.approx(20e-6) and found["hidden"] == pytest.approx(20 / 50)
