"""What comes from the Hugging Face hub, and a plan of what is here, of which nothing that a file names is fetched."""

from __future__ import annotations

import functools
import importlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from wherry.errors import WherryError, one_line

_NO = object()
_ONE_AT_A_TIME = threading.RLock()


class OfflineError(FileNotFoundError):
    """Of what would have to be fetched. As a missing file, kernels have a substitute for it."""


def files_on_hub(name: str, *patterns: str, fetch: bool, told: str) -> Path | None:
    """The folder in the hub's cache here of a model's files of these names, and of no others.

    What is not there yet is fetched, if `fetch`; else there is None where nothing is. An error begins as `told`.
    """
    try:
        import huggingface_hub
    except ImportError:
        if fetch:
            raise WherryError(f"{told} is fetched by huggingface_hub: pip install huggingface_hub") from None
        return None
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(patterns), local_files_only=not fetch))
    except Exception as error:  # of the network, of the cache's disk, or of a name that the hub does not allow
        if not fetch:
            return None
        raise WherryError(f"{told} cannot be fetched from the hub: {why_not(error, name) or words(error)}") from None


def why_not(error: BaseException, name: str) -> str | None:
    """What to do where the hub does not give a thing; None of any other error."""
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    chain = list(_chain(error))
    if any(isinstance(each, GatedRepoError) for each in chain):
        return f"its owner asks for consent: give it at https://huggingface.co/{name}, and run `hf auth login`"
    if any(isinstance(each, RepositoryNotFoundError) for each in chain):
        return "there is none of this name, or it is private: `hf auth login` tells the hub who asks"
    if isinstance(error, LocalEntryNotFoundError):
        return "it cannot be reached, and its cache on this machine does not have it"
    return None


def words(error: BaseException) -> str:
    """An error's own, on one line."""
    return one_line(" ".join(str(error).split())) or type(error).__name__


@contextmanager
def off_the_network(what: str) -> Iterator[None]:
    """This thread reaches no other machine, and the hub's client, which every thread shares, asks none.

    What the hub's cache holds is found. What needs more ends in an error, which says how it is had.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    def refused(*_: Any, **__: Any) -> Any:
        raise OfflineError("kernels are code from a hub")

    with _ONE_AT_A_TIME, ExitStack() as undo:
        undo.enter_context(_in_place(constants, "HF_HUB_OFFLINE", True))
        for holder, name in ((socket.socket, "connect"), (socket.socket, "connect_ex"), (socket, "getaddrinfo")):
            undo.enter_context(_in_place(holder, name, _not_from_here(getattr(holder, name))))
        kernels = _imported("transformers.integrations.hub_kernels")
        if kernels is not None:
            undo.enter_context(_in_place(kernels, "get_kernel", refused))
        try:
            yield
        except Exception as error:
            offline = (OfflineError, OfflineModeIsEnabled, LocalEntryNotFoundError)
            why = next((each for each in _chain(error) if isinstance(each, offline)), None)
            if why is None:
                raise
            told = " ".join(str(why).partition(": offline mode")[0].split())
            raise WherryError(
                f"MODEL: {what} names what is not on this machine, and nothing is fetched ({told}); --online lets "
                "transformers fetch it, and run the kernels among it"
            ) from None


def _not_from_here(function: Callable[..., Any]) -> Callable[..., Any]:
    thread = threading.get_ident()

    @functools.wraps(function)
    def guarded(*arguments: Any, **options: Any) -> Any:
        to_this_machine = isinstance(arguments[0], socket.socket) and arguments[0].family == socket.AF_UNIX
        if threading.get_ident() == thread and not to_this_machine:
            raise OfflineError("no other machine is asked")
        return function(*arguments, **options)

    return guarded


@contextmanager
def _in_place(holder: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(holder).get(name, _NO)
    setattr(holder, name, value)
    try:
        yield
    finally:
        if before is _NO:
            delattr(holder, name)
        else:
            setattr(holder, name, before)


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:  # of a release that has none, or of no transformers at all, which is told elsewhere
        return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
