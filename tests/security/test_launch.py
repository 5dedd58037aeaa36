"""Sockets and command lines of running ranks."""

import json

from tests.cli.programs import fleet, script

# The second attempt trains, and each rank records the addresses on which it and its launcher listen.
LISTENS = """
import json, psutil, torch, wherry
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
engine, *_ = wherry.initialize(model=torch.nn.Linear(4, 1), config=config)
engine.backward(engine(torch.ones(2, 4)).sum())
engine.step()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(1)
mine = psutil.Process()
seen = [
    place.laddr.ip
    for process in (mine, mine.parent())
    for place in process.net_connections("inet")
    if place.status == psutil.CONN_LISTEN
]
(HERE / f"{engine.global_rank}.seen").write_text(json.dumps(seen))
torch.distributed.barrier()
"""


def test_a_job_of_one_machine_listens_on_the_loopback_alone(tmp_path, launched):
    done = launched.launched("run", "--nproc", 2, "--max-restarts", 1, script(tmp_path, LISTENS))
    assert done.returncode == 0, done.stderr
    seen = [json.loads(path.read_text()) for path in tmp_path.glob("*.seen")]
    # The store is the launcher's, and gloo's sockets are the ranks'.
    assert [set(addresses) for addresses in seen] == [{"127.0.0.1"}] * 2


PROCESSES = """
import json
lines = []
for path in Path("/proc").glob("[0-9]*/cmdline"):
    try:
        lines.append(path.read_bytes())
    except OSError:
        pass
assert any(b"wherry" in line for line in lines)
shown = [name for name in ("hidden-setting", "hidden-secret") if any(name.encode() in line for line in lines)]
told = [os.environ.get(name) for name in ("NCCL_TEST", "MY_TOKEN", "HF_TOKEN", "WHERRY_KEY")]
print(json.dumps([shown, told]))
"""


def test_no_setting_stands_on_a_command_line_and_secrets_go_only_where_asked(tmp_path, launched):
    setting = "hidden-setting\n'$(x)'"
    # What stands in for ssh hands nothing of this environment on.
    flags = fleet(tmp_path)
    (tmp_path / "ssh").write_text('#!/bin/sh\nshift\nexec env -i PATH="$PATH" sh -c "$*"\n')
    secrets = dict.fromkeys(("MY_TOKEN", "HF_TOKEN", "WHERRY_KEY"), "hidden-secret")
    words = ("run", *flags, "--forward", "MY_TOKEN", script(tmp_path, PROCESSES))
    done = launched.wherry(*words, cwd=tmp_path, NCCL_TEST=setting, **secrets)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.dumps([[], [setting, "hidden-secret", None, None]])
    assert sorted(done.stdout.splitlines()) == [f"[alpha] {seen}", f"[beta] {seen}"]
    assert done.stderr.splitlines() == [
        f"wherry: {name} stays on this machine; `--forward {name}` hands it to the others"
        for name in ("HF_TOKEN", "WHERRY_KEY")
    ]
