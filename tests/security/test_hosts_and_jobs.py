"""Hostfiles, counts, words of job files and values of a store: each is refused in a line, or does no harm."""

import base64
import hmac
import os
import pickle
import re
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import yaml
from torch.distributed import PrefixStore, TCPStore
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

# Hostfiles. Other kinds of lines are in test_refusals.

LINES = [
    *[(line, "expected a host's name or address") for line in (
        b"-lroot", b"--help", b"`reboot`", b"a|b", b"a&b", b"a>b", b"a'b", b'a"b', b"a\\b", b"a/b", b"../a", b"a\x00b",
        b"a\x1b[2Jb", b"a\x7f", "\u202ealpha".encode(), b"@a", b"." * 300, b"a" * 256, b"$(x)",
        "\u0430lpha".encode(), b"-oProxyCommand=x", b"a;reboot",
    )],
    *[(b"a slots=" + count, "slots: expected a number from 1 to 1024") for count in (
        b"0", b"00", b"1025", b"1_0", b"-1", b"+1", b"1" + b"0" * 24, b"1e3", b"0x10", b"1.5", b"nan",
        "\u00b2".encode(), b"9" * 5000,
    )],
    *[(line, "expected `name slots=N`") for line in (b"slots=2", b"a slots", b"a b slots=2", b"{json: true}")],
    (b"a gpus=2", "expected `name slots=N`"),
    (b"x" * 100_000, "expected `name slots=N`"),
    (b"good slots=3", "good stands in the file twice"),
    (b"\xff\xfea slots=1", "expected text in UTF-8, got the byte 0xff"),
]  # fmt: skip


def test_a_line_that_names_no_host_is_told_with_its_place(tmp_path):
    path = tmp_path / "hosts"
    for line, words in LINES:
        line += b" slots=1" * ("name or" in words)
        path.write_bytes(b"# comment\ngood slots=2\n" + line + b"\nlast slots=1\n")
        with pytest.raises(WherryError, match=re.escape(f"{path}:3: ") + ".*" + re.escape(words)) as told:
            read_hostfile(str(path))
        assert len(str(told.value)) < 400 and "\n" not in str(told.value)


def test_what_ssh_takes_for_a_host_is_one(tmp_path):
    names = ["a", "node-1.example.org", "me@node_2", "10.0.0.1", "fe80::1%eth0", "[::1]", "::1", "a" * 255]
    (tmp_path / "hosts").write_text("".join(f"{name} slots=1024\r\n" for name in names))
    hosts = read_hostfile(str(tmp_path / "hosts"))
    assert [host.name for host in hosts] == names and {len(host.slots) for host in hosts} == {1024}
    assert hosts[0].slots is hosts[-1].slots  # the longest file takes little memory


SELECTIONS = [
    ("a:\u00b2", "expected host:0,1 with numbers of slots"),
    ("a:" + "9" * 5000, "expected host:0,1 with numbers of slots"),
    ("a:0,", "expected host:0,1 with numbers of slots"),
    ("a:-1", "expected host:0,1 with numbers of slots"),
    ("a:999999999", "a has no slot 999999999"),
    ("-oProxyCommand=x", "unknown host '-oProxyCommand=x'"),
    ("a\x1b[2J", r"unknown host 'a\x1b[2J'"),
    ("a@@a", "unknown host ''"),
    ("x" * 100_000, "unknown host 'xxx"),
]


@pytest.mark.parametrize("flag", ["include", "exclude"])
def test_a_selection_of_what_is_not_there_is_told(tmp_path, flag):
    (tmp_path / "hosts").write_text("a slots=2\n")
    hosts = read_hostfile(str(tmp_path / "hosts"))
    for text, words in SELECTIONS:
        with pytest.raises(WherryError, match=f"--{flag} .*{re.escape(words)}") as told:
            select(hosts, **{"include": "", "exclude": "", flag: text})
        assert len(str(told.value)) < 400


# Counts and ports.

PER_NODE = "--nproc-per-node: expected a number from 1 to 1024"
MACHINES = "--nnodes: expected a number of machines up to 65,536"
NUMBERS = [
    (("--num_gpus", HUGE), "--num_gpus: expected a number from 1 to 1024"),
    (("--nproc", 1025), "--nproc: expected a number from 1 to 1024"),
    (("--nproc", -HUGE), "--nproc: expected a number from 1 to 1024"),
    (("--nproc-per-node", HUGE), PER_NODE),
    (("--nproc-per-node", "9" * 5000), PER_NODE),
    (("--nproc-per-node", ""), PER_NODE),
    (("--nproc-per-node", "many"), "Unsupported nproc_per_node value: many"),
    (("--nnodes", HUGE), MACHINES),
    (("--nnodes", f"1:{HUGE}"), MACHINES),
    (("--nnodes", "1:"), MACHINES),
    (("--nnodes", "2:1", "--master_addr", "localhost"), "min_nodes"),
    (
        ("--num_nodes", 2, "--master_addr", "x", "--node_rank", 2),
        "--node_rank: expected 0 to 1 of --num_nodes 2, got",
    ),
    (("--num_nodes", 2, "--master_addr", "x", "--node_rank", -1), "--node_rank: expected 0 to 1"),
    (("--node_rank", HUGE), "--node_rank: expected 0 to 0 of --num_nodes 1"),
    (("--ssh_port", 0), "--ssh_port: expected a port from 1 to 65535, got 0"),
    (("--ssh_port", 65536), "--ssh_port: expected a port from 1 to 65535"),
    (("--master_port", -1), "--master_port: expected a port from 0 to 65535"),
    (("--master_port", HUGE), "--master_port: expected a port from 0 to 65535"),
    (("--include", "localhost:0", "--nproc", 10**9), "--nproc: expected a number from 1 to 1024"),
    (("--hostfile", "hosts", "--forward", "NOT_SET_HERE"), "--forward NOT_SET_HERE: there is no such variable"),
    (("--rdzv_endpoint", "localhost:99999"), "run: The port number of the rendezvous endpoint"),
    (("--rdzv_endpoint", "$(x):1"), "run: The hostname of the rendezvous endpoint"),
]


def test_counts_and_ports_that_cannot_be_are_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "WHERRY_LAUNCHER_PID"):
        monkeypatch.setenv(name, "1")
    (tmp_path / "hosts").write_text("a slots=1\n")
    (tmp_path / "train.py").touch()
    for flags, words in NUMBERS:
        with pytest.raises(WherryError, match=re.escape(words)):
            main([*map(str, flags), "train.py"])


# Job files.

WORDS = [
    "two words", "a\n#SBATCH --wrap=reboot", "a\n\n#SBATCH --wrap=reboot\n", "\n", "a\r\nb", "a\rb", "'", "a'\n'b",
    "a\\'\nb\\", '"; reboot; "', "$(reboot)", "`reboot`", "${IFS}", "a\nEOF\n", "$(HOME)", "$$(HOME)", "$$$(HOME)",
    "$$", "$", "a$", "$(", "$(a$(b))", "$$$$", "- a\n- b", "a: b", "a\n  image: evil", "--- \n", "&a *a", "{a: b}",
    "# comment", "!!python/object/apply:os.system [reboot]", "%YAML 2.0", "1e3", "0x10", "0o7", "yes", "off", "null",
    "~", "=", "<<", "2024-01-01", "1_000", ".inf", "", " a ", "\t", "\x1b]0;title\x07", "\x1b[2J", "\x01\x7f\x85",
    "\u2028a\u2029", "\ufeffa", "\u202ea", "é漢😀", "%j%x", "x" * 5000,
]  # fmt: skip


def _in_a_shell(text):
    """The words of a shell's command line, once it has read it."""
    lines = ["show() { printf '%s\\0' \"$@\"; }", f"show {text}", ""]
    said = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"})
    return said.stdout.decode().split("\0")[:-1]


def _by_kubernetes(word):
    """As Kubernetes reads a word of a command: $$ is a $, and $(NAME) a variable."""
    return re.sub(r"\$\$|\$\(([^)]*)\)", lambda found: "$" if found[0] == "$$" else f"<value of {found[1]}>", word)


def _emitted(capsys, scheduler, *flags, script="train.py", words=WORDS):
    assert main(["--emit", scheduler, *flags, script, *words]) == 0
    return capsys.readouterr().out


def test_words_of_a_slurm_job_are_one_line_and_arrive_as_they_are(capsys, launched):
    text = _emitted(capsys, "slurm")
    assert [line for line in text.splitlines() if line.startswith("#SBATCH")] == [
        "#SBATCH --job-name=train",
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --exclusive",
        "#SBATCH --output=%x-%j.log",
    ]
    last = text.split("--master-port=29500 \\\n")[1]
    assert last.count("\n") == 1 and "".join(last.split("\n")).isprintable()
    assert _in_a_shell(last) == ["train.py", *WORDS]


def test_a_word_of_a_kubernetes_job_arrives_as_it_is(capsys):
    for word in WORDS:
        text = _emitted(capsys, "k8s", words=[word])
        assert [line for line in text.splitlines() if not line.isprintable()] == []
        trainer = yaml.safe_load(text)["spec"]["trainer"]
        assert [_by_kubernetes(each) for each in trainer["command"]] == ["torchrun", "train.py", word]
        assert (trainer["image"], trainer["numNodes"]) == ("IMAGE", 1)
        # Readers differ in what they take for text when it stands without quotes.
        assert all(line.strip()[2] == '"' for line in text.splitlines() if line.strip().startswith("- "))


def test_words_of_a_sky_job_arrive_as_they_are(capsys, launched):
    job = yaml.safe_load(_emitted(capsys, "sky", "--install", "https://example.org/w.whl"))
    assert set(job) == {"name", "num_nodes", "workdir", "resources", "setup", "run"}
    last = job["run"].split("--master-port=29500 \\\n")[1]
    assert last.count("\n") == 1
    assert _in_a_shell(last) == ["train.py", *WORDS]


NAMES = [
    ("a\n#SBATCH --wrap=reboot.py", "a-sbatch---wrap-reboot"),
    ("$(reboot).py", "reboot"),
    ('a"; image: evil.py', "a-image-evil"),
    ("-.py", "wherry"),
    ("\x1b[2J.py", "2j"),
    ("x" * 500 + ".py", "x" * 63),
    ("x" * 62 + "-y.py", "x" * 62),
]


def test_the_name_of_a_job_is_plain(capsys):
    for script, name in NAMES:
        words = ["--", script] if script.startswith("-") else [script]
        assert main(["--emit", "slurm", *words]) == 0
        assert f"#SBATCH --job-name={name}\n" in capsys.readouterr().out
        assert main(["--emit", "k8s", *words]) == 0
        assert yaml.safe_load(capsys.readouterr().out)["metadata"]["name"] == name


@pytest.mark.parametrize("scheduler", ["slurm", "k8s", "sky"])
def test_a_word_that_is_no_text_is_refused(scheduler):
    with pytest.raises(WherryError, match=r"'a\\udcff' is not text in UTF-8"):
        main(["--emit", scheduler, "--install", "https://example.org/w.whl", "train.py", "a\udcff"])


@pytest.mark.parametrize("where", ["https://example.org/w.whl\nreboot", "https://example.org/$(reboot)"])
def test_where_a_job_installs_from_is_one_word(capsys, where, launched):
    for scheduler in ("slurm", "sky"):
        text = _emitted(capsys, scheduler, "--install", where, words=[])
        text = yaml.safe_load(text)["setup"] if scheduler == "sky" else text
        (line,) = [line for line in text.splitlines() if "pip install" in line]
        assert _in_a_shell(line)[-1] == where
    command = yaml.safe_load(_emitted(capsys, "k8s", "--install", where, words=[]))["spec"]["trainer"]["command"]
    assert _in_a_shell(_by_kubernetes(command[2]).partition(" && ")[0])[-1] == where


# What is handed on to other machines.

SECRETS = """HF_TOKEN HF_HUB_TOKEN WHERRY_RUN_SECRET WHERRY_API_KEY HF_PASSWORD PYTHON_PASSWD TORCH_CREDENTIALS wherry
    HOME AWS_SECRET_ACCESS_KEY HUGGING_FACE_HUB_TOKEN WANDB_API_KEY SSH_AUTH_SOCK NCCL_my_secret"""
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


class Runs:
    """Unpickling it leaves a trace."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (f"{self.folder}/ran",)


def _signed(state, secret):
    return hmac.digest(secret.encode(), state, "sha256") + state


STATES = {
    "as torch writes it": lambda state: state,
    "signed with another secret": lambda state: _signed(state, "another's"),
    "with the signature of something else": lambda state: _signed(b"else", SECRET)[:32] + state,
    "with something behind what is signed": lambda state: _signed(b"else", SECRET) + state,
    "with a signature of half the length": lambda state: _signed(state, SECRET)[:16] + state,
    "nothing": lambda state: b"",
}


def _parameters(port, **given):
    machines = given.pop("machines", 2)
    return RendezvousParameters("wherry", f"127.0.0.1:{port}", "run", machines, machines, **given)


def _meeting(*given, **more):
    rendezvous.register()
    return rendezvous_handler_registry.create_handler(_parameters(*given, **more))


def _port_of(handler):
    return handler._store.port


@pytest.fixture
def _secret(monkeypatch):
    monkeypatch.setenv(rendezvous.SECRET, SECRET)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0")


def test_a_state_that_is_not_signed_is_never_unpickled(tmp_path, _secret):
    handler = _meeting(0, read_timeout=5)
    other = TCPStore("127.0.0.1", _port_of(handler), is_master=False, timeout=timedelta(seconds=5))
    for kind, forged in STATES.items():
        other.set("torch.rendezvous.run", base64.b64encode(forged(pickle.dumps(Runs(tmp_path)))).decode())
        for ask in (handler.is_closed, *([handler.next_rendezvous] if kind == "as torch writes it" else [])):
            with pytest.raises(RendezvousStateError, match=f"not signed with this machine's {rendezvous.SECRET}"):
                ask()
        assert not (tmp_path / "ran").exists(), kind
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


@pytest.mark.parametrize("secret", [None, "", "short", "x" * 15])
def test_machines_that_number_themselves_need_a_secret(monkeypatch, secret):
    monkeypatch.setenv(rendezvous.SECRET, secret or "")
    with pytest.raises(WherryError, match=f"at least 16 characters, and {rendezvous.SECRET} (is not set|has .* chara)"):
        _meeting(0)


@pytest.mark.parametrize("place", [b"", b"one two", b"a 1 2", b"a \xff", pickle.dumps(0)])
def test_a_place_that_is_none_is_refused(place):
    first = _meeting(0, rank=0, timeout=5)
    first.next_rendezvous()
    PrefixStore("run/1", first._store).set("ranks", place)
    with pytest.raises(RendezvousStateError, match="expected an address and a port"):
        _meeting(_port_of(first), rank=1, timeout=5).next_rendezvous()


def _listeners():
    return {place.laddr for place in psutil.Process().net_connections("inet") if place.status == psutil.CONN_LISTEN}


def test_a_store_listens_on_the_address_that_was_given():
    before = _listeners()
    handler = _meeting(0, rank=0, machines=1)
    attempts = [handler.next_rendezvous() for _ in range(3)]
    opened = {place for place in _listeners() - before}
    assert {place.ip for place in opened} == {"127.0.0.1"}
    ports = [attempt.bootstrap_store_info.master_port for attempt in attempts]
    assert len(set(ports)) == 3 and {place.port for place in opened} >= {ports[0], ports[2]}


def test_an_address_that_others_cannot_reach_is_told(monkeypatch, capsys):
    place = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [place])
    with rendezvous._listener("head", 0, False) as listener:
        assert listener.getsockname()[0] in ("0.0.0.0", "::")
    assert "head is no address of this machine that others can reach" in capsys.readouterr().err
    assert rendezvous._address_towards("head", 1) == "head"


def test_a_port_that_is_taken_is_told():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        handler = _meeting(taken.getsockname()[1], rank=0)
        with pytest.raises(RendezvousConnectionError, match=r"port \d+ is taken"):
            handler.next_rendezvous()
