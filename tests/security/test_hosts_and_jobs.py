"""Refuse hostile selections, counts, words of job files and values of a store in a line; listen on few addresses."""

import base64
import hmac
import json
import os
import pickle
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import yaml
from tests.cli.programs import fleet, script
from tests.security.hostile import Runs
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousStateError,
    rendezvous_handler_registry,
)

from wherry.cli import rendezvous
from wherry.cli.run import main
from wherry.cli.supervise import passed_on
from wherry.errors import WherryError
from wherry.parallel.hostfile import read_hostfile, select

HUGE = 10**24
# Lines of hostfiles are in test_refusals.


def test_hosts_that_ssh_takes_are_read_and_selected(tmp_path):
    names = ["a", "node-1.example.org", "me@node_2", "10.0.0.1", "fe80::1%eth0", "[::1]", "::1", "a" * 255]
    (tmp_path / "hosts").write_text("".join(f"{name} slots=2\r\n" for name in names))
    hosts = read_hostfile(str(tmp_path / "hosts"))
    assert [host.name for host in hosts] == names and {len(host.slots) for host in hosts} == {2}
    for flag, text, words in (
        ("include", "a:\u00b2", "expected host:0,1 with numbers of slots"),
        ("exclude", "a:-1", "expected host:0,1 with numbers of slots"),
        ("include", "a:999999999", "a has no slot 999999999"),
        ("exclude", "x\x1b[2J" * 100_000, r"unknown host 'x\x1b[2J"),
    ):
        with pytest.raises(WherryError, match=f"--{flag} .*{re.escape(words)}") as told:
            select(hosts, **{"include": "", "exclude": "", flag: text})
        assert len(str(told.value)) < 1000


NUMBERS = [
    ("--num_gpus", HUGE, "--num_gpus: expected a number from 1 to 1024"),
    ("--nproc-per-node", "9" * 5000, "--nproc-per-node: expected a number from 1 to 1024"),
    ("--nproc-per-node", "many", "Unsupported nproc_per_node value: many"),
    ("--nnodes", "1:", "--nnodes: expected a number of machines up to 65,536"),
    ("--node_rank", HUGE, "--node_rank: expected 0 to 0 of --num_nodes 1"),
    ("--ssh_port", 0, "--ssh_port: expected a port from 1 to 65535, got 0"),
    ("--master_port", HUGE, "--master_port: expected a port from 0 to 65535"),
    ("--rdzv_endpoint", "localhost:99999", "run: The port number of the rendezvous endpoint"),
    ("--rdzv_endpoint", "$(x):1", "run: The hostname of the rendezvous endpoint"),
]


def test_counts_and_ports_that_cannot_be_are_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "WHERRY_LAUNCHER_PID"):
        monkeypatch.setenv(name, "1")  # restored afterwards
    (tmp_path / "hosts").write_text("a slots=1\n")
    (tmp_path / "train.py").touch()
    for flag, value, words in NUMBERS:
        with pytest.raises(WherryError, match=re.escape(words)):
            main([flag, str(value), "train.py"])
    with pytest.raises(WherryError, match="--forward NOT_SET_HERE: there is no such variable"):
        main(["--hostfile", "hosts", "--forward", "NOT_SET_HERE", "train.py"])


# Job files.

WORDS = [
    "two words", "a\n\n#SBATCH --wrap=reboot\n", "\n", "a\r\nb", "'", "a\\'\nb\\", '"; reboot; "', "$(reboot)", "`x`",
    "${IFS}", "a\nEOF\n", "$$(HOME)", "$$$(HOME)", "$", "$(a$(b))", "- a\n- b", "a: b", "--- \n", "&a *a", "# comment",
    "!!python/object/apply:os.system [x]", "1e3", "0o7", "yes", "null", "~", "2024-01-01", "1_000", "", " a ", "\t",
    "\x1b]0;title\x07", "\x01\x7f\x85", "\u2028a\u2029", "\ufeffa", "é漢😀", "%j%x", "x" * 5000,
]  # fmt: skip


def _in_a_shell(text):
    """The words of a shell's command line, once it has read it."""
    lines = ["show() { printf '%s\\0' \"$@\"; }", f"show {text}", ""]
    said = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"})
    return said.stdout.decode().split("\0")[:-1]


def _by_kubernetes(word):
    """Replace what Kubernetes does in a word of a command: $$ by a $, and $(NAME) by a variable."""
    return re.sub(r"\$\$|\$\(([^)]*)\)", lambda found: "$" if found[0] == "$$" else f"<value of {found[1]}>", word)


def _emitted(capsys, scheduler, *flags, words=("train.py", *WORDS)):
    assert main(["--emit", scheduler, *flags, *words]) == 0
    return capsys.readouterr().out


def test_words_of_a_slurm_job_are_one_line_and_arrive_as_they_are(capsys, launched):
    text = _emitted(capsys, "slurm")
    options = [line.split("=")[0] for line in text.splitlines() if line.startswith("#SBATCH")]
    assert options == [f"#SBATCH --{name}" for name in ("job-name", "nodes", "ntasks-per-node", "exclusive", "output")]
    assert "".join(text.split("\n")).isprintable()
    for whole in (text, yaml.safe_load(_emitted(capsys, "sky", "--install", "https://example.org/w.whl"))["run"]):
        last = whole.split("--master-port=29500 \\\n")[1]
        assert last.count("\n") == 1
        assert _in_a_shell(last) == ["train.py", *WORDS]


def test_a_word_of_a_kubernetes_job_arrives_as_it_is(capsys):
    for word in WORDS:
        text = _emitted(capsys, "k8s", words=("train.py", word))
        assert [line for line in text.splitlines() if not line.isprintable()] == []
        trainer = yaml.safe_load(text)["spec"]["trainer"]
        assert [_by_kubernetes(each) for each in trainer["command"]] == ["torchrun", "train.py", word]
        # Readers differ in what they take for text when it stands without quotes.
        assert all(line.strip()[2] == '"' for line in text.splitlines() if line.strip().startswith("- "))


def test_names_of_jobs_are_plain_and_words_are_text(capsys):
    for path, name in (
        ("a\n#SBATCH --wrap=reboot.py", "a-sbatch---wrap-reboot"),
        ('a"; image: evil.py', "a-image-evil"),
        ("x" * 62 + "-y.py", "x" * 62),
        ("-.py", "wherry"),
    ):
        words = ["--", path] if path.startswith("-") else [path]
        assert f"#SBATCH --job-name={name}\n" in _emitted(capsys, "slurm", words=words)
        job = yaml.safe_load(_emitted(capsys, "k8s", words=words))
        assert job["metadata"]["name"] == name
    for scheduler in ("slurm", "k8s", "sky"):
        with pytest.raises(WherryError, match=r"'a\\udcff' is not text in UTF-8"):
            main(["--emit", scheduler, "--install", "https://example.org/w.whl", "train.py", "a\udcff"])


def test_where_a_job_installs_from_is_one_word(capsys, launched):
    where = "https://example.org/$(reboot)\nreboot"
    (line,) = [line for line in _emitted(capsys, "slurm", "--install", where).splitlines() if "pip install" in line]
    job = yaml.safe_load(_emitted(capsys, "k8s", "--install", where))
    for command in (line, _by_kubernetes(job["spec"]["trainer"]["command"][2]).partition(" && ")[0]):
        assert _in_a_shell(command)[-1] == where


SECRETS = "HF_TOKEN WHERRY_RUN_SECRET WHERRY_API_KEY HF_PASSWORD PYTHON_PASSWD HOME AWS_SECRET_ACCESS_KEY SSH_AUTH_SOCK"
SETTINGS = "NCCL_IB_PKEY HF_HOME PYTHONPATH WHERRY_X GLOO_X OMP_NUM_THREADS"


def test_what_is_named_like_a_secret_stays_unless_asked_for(monkeypatch, capsys):
    for names, is_handed_on in ((SECRETS, False), (SETTINGS, True)):
        for name in names.split():
            monkeypatch.setenv(name, "hidden")
            assert (passed_on([]).get(name) == "hidden") is is_handed_on, name
            assert passed_on([name])[name] == "hidden"
            monkeypatch.undo()
    assert "hidden" not in capsys.readouterr().err


# Where launchers meet.

SECRET = "of this run's own launchers"


def _signed(state, secret):
    return hmac.digest(secret.encode(), state, "sha256") + state


STATES = {
    "as torch writes it": lambda state: state,
    "signed with another secret": lambda state: _signed(state, "another's"),
    "with the signature of something else": lambda state: _signed(b"else", SECRET)[:32] + state,
    "with a signature of half the length": lambda state: _signed(state, SECRET)[:16] + state,
    "nothing": lambda state: b"",
}


def _meeting(port, machines=2, address="127.0.0.1", **given):
    rendezvous.register()
    parameters = RendezvousParameters("wherry", f"{address}:{port}", "run", machines, machines, **given)
    return rendezvous_handler_registry.create_handler(parameters)


def _port_of(handler):
    return handler._store.port


@pytest.fixture
def _secret(monkeypatch):
    monkeypatch.setenv(rendezvous.SECRET, SECRET)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0")


def test_a_state_that_is_not_signed_is_never_unpickled(tmp_path, monkeypatch, _secret):
    monkeypatch.chdir(tmp_path)
    handler = _meeting(0, read_timeout=5)
    other = TCPStore("127.0.0.1", _port_of(handler), is_master=False, timeout=timedelta(seconds=5))
    for kind, forged in STATES.items():
        other.set("torch.rendezvous.run", base64.b64encode(forged(pickle.dumps(Runs()))).decode())
        for ask in (handler.is_closed, *([handler.next_rendezvous] if kind == "as torch writes it" else [])):
            with pytest.raises(RendezvousStateError, match=f"not signed with this machine's {rendezvous.SECRET}"):
                ask()
        assert not os.path.exists("ran"), kind
    assert not handler.shutdown()


def test_machines_that_share_a_secret_number_themselves(_secret):
    first = _meeting(0, last_call_timeout=1)
    second = _meeting(_port_of(first), last_call_timeout=1)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda handler: handler.next_rendezvous(), (first, second)))
    assert {(each.rank, each.world_size) for each in found} == {(0, 2), (1, 2)}
    places = {(each.bootstrap_store_info.master_addr, each.bootstrap_store_info.master_port) for each in found}
    assert [address for address, _ in places] == ["127.0.0.1"]
    assert first.shutdown()


def test_machines_that_number_themselves_need_a_secret(monkeypatch):
    for secret in ("", "x" * 15):
        monkeypatch.setenv(rendezvous.SECRET, secret)
        told = f"at least 16 characters, and {rendezvous.SECRET} (is not set|has .* chara)"
        with pytest.raises(WherryError, match=told):
            _meeting(0)


def _listeners():
    return {place.laddr for place in psutil.Process().net_connections("inet") if place.status == psutil.CONN_LISTEN}


def test_a_store_listens_on_the_address_that_was_given():
    before = _listeners()
    handler = _meeting(0, machines=1, rank=0)
    attempts = [handler.next_rendezvous() for _ in range(3)]
    opened = _listeners() - before
    assert {place.ip for place in opened} == {"127.0.0.1"}
    ports = [attempt.bootstrap_store_info.master_port for attempt in attempts]
    assert len(set(ports)) == 3 and {place.port for place in opened} >= {ports[0], ports[2]}
    with pytest.raises(RendezvousConnectionError, match=r"port \d+ is taken"):
        _meeting(ports[0], rank=0).next_rendezvous()


def test_an_address_that_others_cannot_reach_is_reported(capsys):
    _meeting(0, machines=1, address="127.1", rank=0).next_rendezvous()
    assert "127.1 is no address of this machine that others can reach" in capsys.readouterr().err


def test_a_value_that_is_no_address_of_the_ranks_is_refused():
    first = _meeting(0, rank=0).next_rendezvous()
    for value in (b"one two", b"a \xff"):
        first.store.set("ranks", value)
        second = _meeting(first.bootstrap_store_info.master_port, rank=1, timeout=5)
        with pytest.raises(RendezvousStateError, match="expected an address and a port"):
            second.next_rendezvous()


# Sockets and command lines of running ranks.

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
