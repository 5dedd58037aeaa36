"""`wherry run` with ranks that are processes: forks, except where the launcher's own start and end are tested."""

import re
import signal

import pytest
from tests.cli.programs import WHERRY, WRITE_PID, gone, launched, pids_in, script, start, start_fork, wait_for, wherry

pytestmark = pytest.mark.usefixtures("launched")
BLOCK = "while len(list(HERE.glob('pid.*'))) < 2: time.sleep(0.01)\n"
# Waits until the failure of another rank is written down.
RECORDED = """
def wait_for_record_of(rank):
    mine = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    while not (mine.parents[1] / str(rank) / mine.name).exists(): time.sleep(0.01)
"""
# Rank 1 fails inside its forward; rank 0 waits for it in a collective, and fails of a PeerError before rank 1 ends.
FAILS_IN_TRAINING = (
    WRITE_PID
    + BLOCK
    + RECORDED
    + """
import signal, threading, torch, wherry

def unwell(module, inputs):
    raise ValueError("rank one is unwell")

model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
engine, *_ = wherry.initialize(model=model, config={"zero_optimization": zero, "optimizer": {"type": "AdamW"}})
rank = engine.global_rank
if rank == 1:  # leave a thread running that no signal ends
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    threading.Thread(target=time.sleep, args=(600,)).start()
try:
    for step in range(10**6):
        if step == 2 and rank == 1:
            model[1].register_forward_pre_hook(unwell)
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
except Exception as error:
    (HERE / f"raised.{rank}").write_text(f"{type(error).__name__}: {error}")
    if rank == 1: wait_for_record_of(0)
    raise
"""
)


TRAINS_TWICE = """
import torch, wherry

assert __name__ == "__main__" and int(os.environ["OMP_NUM_THREADS"]) >= 1
assert sys.argv[1:] == [f"--local_rank={os.environ['LOCAL_RANK']}", "--flag", "value"], sys.argv
for turn in range(2):
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 3}}
    engine, *_ = wherry.initialize(model=torch.nn.Linear(4, 1), config=config)
    assert os.environ["LOCAL_RANK"] == str(torch.distributed.get_rank())
    total = torch.ones(1) * (torch.distributed.get_rank() + 1)
    torch.distributed.all_reduce(total)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.close()
    assert not torch.distributed.is_initialized()
print(f"rank {os.environ['RANK']} sum {total.item()}\\n", end="", flush=True)
"""


def test_engines_of_two_ranks_one_after_another(tmp_path):
    script(tmp_path, TRAINS_TWICE, "trains.py")
    flags = ("--num_gpus", 2, "--local_rank_arg", "--module", "trains")
    done = wherry("run", *flags, "--flag", "value", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rank 0 sum 3.0" in done.stdout and "rank 1 sum 3.0" in done.stdout


@pytest.mark.smoke
def test_a_dying_rank_ends_all_and_its_traceback_is_last(tmp_path):
    done = launched("run", "--nproc", 2, script(tmp_path, FAILS_IN_TRAINING), timeout=25)  # the agent kills after 30 s
    assert done.returncode == 1, done.stderr
    assert (tmp_path / "raised.0").read_text().startswith("PeerError: rank 1 has failed, while rank 0 waited for ")
    lines = done.stderr.rstrip().splitlines()
    assert lines[-1] == "ValueError: rank one is unwell"
    # The traceback stands once, and that of the peer not at all.
    assert lines[0] == "wherry: rank 1 failed, and all ranks have ended. Its traceback:"
    assert lines[2] == "Traceback (most recent call last):" and lines.count(lines[2]) == 1
    # The user has no use for the frames of the launcher's own code.
    assert "wherry/cli" not in done.stderr
    assert len(pids_in(tmp_path)) == 2 and gone(pids_in(tmp_path))


# Rank 1 ends in the way of the first argument, while rank 0 is in a collective of the backend's own.
ENDS_EARLY = (
    WRITE_PID
    + """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    exec(sys.argv[1])
for _ in range(10**6):
    dist.all_reduce(torch.ones(1))
"""
)
KILLED = "was ended by SIGKILL (SIGKILL often means that the machine ran out of memory: see dmesg)"


@pytest.mark.parametrize(
    ("end", "status", "reported"),
    [("os.kill(os.getpid(), 9)", 128 + 9, KILLED), ("sys.exit(4)", 4, "exited with status 4")],
)
def test_a_rank_that_ends_without_an_error_is_one_line(tmp_path, end, status, reported):
    done = launched("run", "--nproc", 2, script(tmp_path, ENDS_EARLY), end)
    assert (done.returncode, done.stderr) == (status, f"wherry: rank 1 {reported}, and all ranks have ended.\n")
    assert gone(pids_in(tmp_path))


def test_the_transports_error_about_a_dead_peer_is_hidden_and_the_log_of_each_rank_is_whole(tmp_path):
    flags = ("--nproc", 2, "--log-dir", tmp_path / "logs", "--redirects", 3)
    done = launched("run", *flags, script(tmp_path, ENDS_EARLY), "raise ValueError('unwell')")
    assert done.returncode == 1
    assert done.stderr.startswith("wherry: rank 1 failed, and all ranks have ended. Its traceback:\n\nTraceback (most")
    assert done.stderr.endswith("ValueError: unwell\n")
    assert done.stderr.count("Traceback") == 1 and "peer" not in done.stderr
    (log,) = (tmp_path / "logs").glob("*/attempt_0/1/stderr.log")
    assert log.read_text().rstrip().endswith("ValueError: unwell")


LEAVES_EARLY = """
import torch, wherry
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}
engine, *_ = wherry.initialize(model=torch.nn.Linear(8, 1), config=config)
for step in range(3):
    if step == 1 and os.environ["RANK"] == "1":
        exec(sys.argv[1])
    if sys.argv[2] == "save":
        engine.save_checkpoint(HERE / "saved")
    engine.backward(engine(torch.randn(2, 8)).square().mean())
    engine.step()
"""


@pytest.mark.parametrize(
    ("end", "next_call", "error"),
    [
        ("sys.exit()", "backward", "rank 1 has ended, or has closed its engine: every rank must run as many steps"),
        ("os._exit(0)", "save", "in save_checkpoint(), and rank 1 has ended: its process"),
    ],
)
def test_a_rank_that_takes_fewer_steps_is_named_without_the_transports_error(tmp_path, end, next_call, error):
    done = launched("run", "--nproc", 2, script(tmp_path, LEAVES_EARLY), end, next_call)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    who = "wherry: rank 1 ended while rank 0 waited for it, and all ranks have ended. The traceback of rank 0:"
    assert lines[0] == who and error in lines[-1]
    assert sum(line.startswith("  File") for line in lines) == 1 and len(lines) <= 7


REFUSED = """
import torch, wherry
if os.environ["RANK"] == "0": wait_for_record_of(1)
wherry.initialize(model=torch.nn.Linear(1, 1), config={"gradient_cliping": 1})
"""


def test_the_same_error_on_all_ranks_is_shown_once(tmp_path):
    done = launched("run", "--nproc", 2, script(tmp_path, RECORDED + REFUSED))
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0].startswith("wherry: the same error on all 2 ranks, and all ranks have ended. The traceback of rank")
    # The user's line and its mistake: Wherry's own frames add nothing.
    assert lines[-1] == 'wherry.errors.ConfigError: gradient_cliping: unknown key, did you mean "gradient_clipping"?'
    assert sum("gradient_cliping: unknown" in line for line in lines) == 1
    (frame,) = [line for line in lines if line.startswith("  File")]
    assert frame.startswith(f'  File "{tmp_path}/script.py", line ') and frame.endswith(", in <module>")


def test_an_attempt_before_the_last_shows_its_error_at_once(tmp_path):
    end = "raise ValueError('attempt ' + os.environ['TORCHELASTIC_RESTART_COUNT'])"
    done = launched("run", "--nproc", 2, "--max-restarts", 1, script(tmp_path, ENDS_EARLY), end)
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if "attempt " in line and "exec" not in line] == [
        "ValueError: attempt 0",
        "ValueError: attempt 1",
    ]
    first = done.stderr[: done.stderr.index("ValueError: attempt 0")]
    assert "[rank 1] Traceback" in first
    assert done.stderr.count("wherry: a rank failed; all start again (restart 1 of 1)\n") == 1


STOPS = """
import datetime, signal, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1: os.kill(os.getpid(), signal.SIGSTOP)
dist.all_reduce(torch.ones(1))
"""


def test_a_stopped_rank_is_ended_and_reported_as_the_cause(tmp_path):
    done = launched("run", "--nproc", 2, script(tmp_path, WRITE_PID + STOPS), timeout=25)  # the agent kills after 30 s
    assert done.returncode == 1
    cause, empty, waited = done.stderr.splitlines()
    stopped = (
        "wherry: rank 1 was stopped, as SIGSTOP does: it did not answer the others, and the launcher has ended it."
    )
    assert (cause, empty) == (stopped, "")
    assert waited.startswith("rank 0 waited for it: RuntimeError: ") and "Timed out waiting 3000ms for recv" in waited
    assert gone(pids_in(tmp_path))


def test_a_crash_in_native_code_shows_the_python_stack(tmp_path):
    body = (
        WRITE_PID
        + BLOCK
        + "def crash():\n    os.kill(os.getpid(), 11)\nif os.environ['RANK'] == '0': crash()\ntime.sleep(600)\n"
    )
    done = launched("run", "--nproc", 2, script(tmp_path, body))
    assert done.returncode == 128 + 11
    last = done.stderr[done.stderr.index("wherry: rank 0 was ended by SIGSEGV") :]
    assert re.search(r"script\.py\", line \d+ in crash", last)


def test_ctrl_c_ends_all_ranks(tmp_path):
    launcher = start("run", "--nproc", 2, script(tmp_path, WRITE_PID + "time.sleep(600)\n"))
    wait_for(lambda: len(pids_in(tmp_path)) == 2)
    launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert "Traceback" not in output
    assert gone(pids_in(tmp_path))


def test_ranks_do_not_outlive_a_killed_launcher(tmp_path):
    # A killed launcher cannot remove its folder of logs.
    words = ("run", "--nproc", 2, "--log-dir", tmp_path / "logs", script(tmp_path, WRITE_PID + "time.sleep(600)\n"))
    launcher = start_fork(*WHERRY, *words)
    wait_for(lambda: len(pids_in(tmp_path)) == 2)
    launcher.kill()
    wait_for(lambda: gone(pids_in(tmp_path)))


# A thread in native code must not abort a rank at its end.
TRUE_MAIN = """
import atexit, multiprocessing, pickle, threading
from datetime import timedelta
import torch.distributed as dist

class Thing: pass
class Slow:
    def __del__(self, sleep=time.sleep): sleep(2)

def double(x): return 2 * x

def wait(store):
    try: store.wait(["never set"], timedelta(seconds=1))
    except RuntimeError: pass  # the key is never set

if __name__ == "__main__":
    assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
    assert sys.path[0] == str(HERE) and Path(sys.argv[0]).name == "script.py"
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(double, [21]) == [42]
    threading.Thread(target=wait, args=(dist.TCPStore("127.0.0.1", 0, 1, True),), daemon=True).start()
    keep = Slow()
    atexit.register(print, "at exit")
    print("not flushed", end="; ")
    left_open = open(__file__ + ".left", "w")
    left_open.write("written")
    sys.exit(7)
"""


def test_a_script_is_the_true_main_and_ends_as_it_wants(tmp_path):
    done = launched("run", "--nproc", 1, script(tmp_path, TRUE_MAIN))
    assert done.returncode == 7, done.stderr
    assert done.stderr == "wherry: rank 0 exited with status 7, and all ranks have ended.\n"
    assert done.stdout.endswith("not flushed; at exit\n")
    assert [left.read_text() for left in tmp_path.glob("*.left")] == ["written"]
