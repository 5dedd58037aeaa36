"""Where the launchers of a run meet, and then its ranks: a store that listens on the address it was given.

torch's own rendezvous listen on all addresses of a machine, and the one in which machines number themselves unpickles
what it finds in the store.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import os
import socket
import sys
import time
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT, C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from wherry.errors import WherryError

BACKEND = "wherry"
SECRET = "WHERRY_RUN_SECRET"
_SHORTEST_SECRET = 16
_SECONDS_TO_LEAVE = 10.0


def register() -> None:
    """Make `BACKEND` known to torch's launcher."""
    rendezvous_handler_registry.register(BACKEND, _meeting)


def leave() -> None:
    """End the meeting of this process, whose ranks have all ended well."""
    while _met:
        _met.pop().leave()


_met: list[_Meeting] = []


def _meeting(parameters: RendezvousParameters) -> RendezvousHandler:
    try:
        address, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=DEFAULT_PORT)
    except ValueError as error:
        raise WherryError(f"run: {error}") from error
    numbered = parameters.get("rank") is not None
    kind = NumberedMachines if numbered else UnnumberedMachines
    _met.append(kind(parameters, address, port))
    return _met[-1]


class _Meeting(RendezvousHandler):
    """What both ways of meeting have in common: the ranks find a store that is open, and empty."""

    # The ranks connect to it: none of them opens one.
    use_agent_store = True

    def __init__(self, parameters: RendezvousParameters, address: str, port: int) -> None:
        self._run, self._address, self._port = parameters.run_id, address, port
        self._ranks_store: TCPStore | None = None
        # Whether the launchers' store is in this process, and where it stands among them.
        self._hosts = False
        self._last: RendezvousInfo | None = None

    def leave(self) -> None:
        """The store's own machine goes last: others may be asking it still whether all have ended."""
        if self._last is None:
            return
        store, machines = self._last.store, self._last.world_size
        with contextlib.suppress(DistError):  # one that has gone without a word has no questions either
            store.set(f"left/{self._last.rank}", "")
            everybody, deadline = [f"left/{number}" for number in range(machines)], time.monotonic() + _SECONDS_TO_LEAVE
            while self._hosts and not store.check(everybody) and time.monotonic() < deadline:
                time.sleep(0.02)

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run

    def _of_the_ranks(
        self, store: Store, number: int, address: str, known: TCPStore | None = None
    ) -> RendezvousStoreInfo:
        """Where the ranks of this attempt find their store, which the first machine has: a new one, or one `known`."""
        if number == 0:
            self._ranks_store = known or _open(address, 0)
            store.set("ranks", f"{address} {self._ranks_store.port}")
        said = store.get("ranks")
        try:
            address, port = said.decode().split()
            return RendezvousStoreInfo(address, int(port))
        except ValueError:
            raise RendezvousStateError(
                f"expected an address and a port of the ranks there, got {said[:80]!r}"
            ) from None


class NumberedMachines(_Meeting):
    """Each machine knows its number. Nothing is unpickled."""

    def __init__(self, parameters: RendezvousParameters, address: str, port: int) -> None:
        super().__init__(parameters, address, port)
        self._number, self._machines = int(parameters.get("rank")), parameters.max_nodes
        self._timeout = timedelta(seconds=int(parameters.get("timeout", 900)))
        self._store: TCPStore | None = None
        self._attempt = 0

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None and self._number == 0:
            self._store, self._hosts = _open(self._address, self._port, self._timeout), True
        elif self._store is None:
            self._store = TCPStore(self._address, self._port, is_master=False, timeout=self._timeout)
        self._attempt += 1
        store = PrefixStore(f"{self._run}/{self._attempt}", self._store)
        # The first ranks meet at the port that was given; those after them must not find what these have left.
        ranks = self._of_the_ranks(store, self._number, self._address, self._store if self._attempt == 1 else None)
        self._last = RendezvousInfo(store, self._number, self._machines, ranks)
        return self._last

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


class UnnumberedMachines(_Meeting):
    """Machines are numbered as they come, and may come later: torch's rendezvous, over a state that is signed."""

    def __init__(self, parameters: RendezvousParameters, address: str, port: int) -> None:
        super().__init__(parameters, address, port)
        secret = os.environ.get(SECRET, "")
        if len(secret) < _SHORTEST_SECRET:
            given = f"{SECRET} has {len(secret)} characters" if secret else f"{SECRET} is not set"
            raise WherryError(
                f"run: machines that number themselves need a secret that they share, of at least {_SHORTEST_SECRET} "
                f"characters, and {given}; set it to the same on each of them (`openssl rand -hex 16` makes one), or "
                "give each --node_rank"
            )
        # The ranks' store is ours. The one that torch would open for them listens on all addresses.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        timeout = timedelta(seconds=int(parameters.get("read_timeout", 60)))
        store: TCPStore | None = None
        given_host = parameters.get_as_bool("is_host")
        if given_host is not False:
            store = _open_if_here(address, port, timeout, surely=bool(given_host))
        self._hosts = store is not None
        self._store = store or TCPStore(address, port, is_master=False, timeout=timeout)
        # As the others see this machine.
        self._own_address = parameters.local_addr or _address_towards(address, port)
        backend = SignedState(C10dRendezvousBackend(self._store, self._run), secret)
        self._torchs = create_handler(self._store, backend, parameters)

    def next_rendezvous(self) -> RendezvousInfo:
        found = self._torchs.next_rendezvous()
        ranks = self._of_the_ranks(found.store, found.rank, self._own_address)
        self._last = RendezvousInfo(found.store, found.rank, found.world_size, ranks)
        return self._last

    def is_closed(self) -> bool:
        return self._torchs.is_closed()

    def set_closed(self) -> None:
        self._torchs.set_closed()

    def num_nodes_waiting(self) -> int:
        return self._torchs.num_nodes_waiting()

    def shutdown(self) -> bool:
        return self._torchs.shutdown()


class SignedState(RendezvousBackend):
    """A state that only who knows the secret can write: torch unpickles it, which runs whatever code it names."""

    name = BACKEND

    def __init__(self, backend: RendezvousBackend, secret: str) -> None:
        self._backend, self._secret = backend, secret.encode()

    def get_state(self) -> tuple[bytes, Any] | None:
        found = self._backend.get_state()
        return found and (self._checked(found[0]), found[1])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        found = self._backend.set_state(self._signature(state) + state, token)
        return found and (self._checked(found[0]), found[1], found[2])

    def _signature(self, state: bytes) -> bytes:
        return hmac.digest(self._secret, state, hashlib.sha256)

    def _checked(self, signed: bytes) -> bytes:
        length = hashlib.sha256().digest_size
        signature, state = signed[:length], signed[length:]
        if not hmac.compare_digest(signature, self._signature(state)):
            raise RendezvousStateError(
                f"what is written there is not signed with this machine's {SECRET}: the secret differs, or somebody "
                "else writes there"
            )
        return state


def _open(address: str, port: int, timeout: timedelta = timedelta(minutes=5)) -> TCPStore:
    store = _open_if_here(address, port, timeout, surely=True)
    if store is None:
        raise RendezvousConnectionError(f"port {port} is taken")
    return store


def _open_if_here(address: str, port: int, timeout: timedelta, *, surely: bool) -> TCPStore | None:
    """A store that listens on `address`, where that is this machine's, or `surely` is, and nobody listens there yet."""
    try:
        listener = _listener(address, port, surely)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise RendezvousConnectionError(error.strerror or str(error)) from error
    if listener is None:
        return None
    port = listener.getsockname()[1]
    # The store owns the descriptor from here on.
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def _listener(address: str, port: int, surely: bool) -> socket.socket | None:
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    # Of a name that has both, the others may reach the older kind of address only.
    for family, _, _, _, place in sorted(found, key=lambda each: each[0] != socket.AF_INET):
        if _only_here(address, str(place[0])):
            surely = True
            continue
        try:
            return socket.create_server(place, family=family)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    if not surely:
        return None
    print(
        f"wherry: {address} is no address of this machine that others can reach, so the store listens on all of its "
        "addresses; give one of them as --master_addr, to listen on that alone",
        file=sys.stderr,
        flush=True,
    )
    both = socket.has_dualstack_ipv6()
    return socket.create_server(("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both)


def _only_here(address: str, found: str) -> bool:
    """Whether a name stands for the loopback, as Debian has it of a machine's own: others reach nobody there."""
    named = address != "localhost" and not _is_loopback(address)
    return named and _is_loopback(found)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:  # a name
        return False


def _address_towards(address: str, port: int) -> str:
    """By which of its addresses this machine reaches another, or itself by a name of its own. Nothing is sent."""
    for family, kind, _, _, place in socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM):
        if _only_here(address, str(place[0])):
            continue
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    return address
