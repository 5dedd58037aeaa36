"""An engine's checkpoints: the calls that a training program makes, one save in flight at most."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wherry.checkpoint.folder import step_tag
from wherry.checkpoint.load import Loaded, LoadOptions, load
from wherry.checkpoint.save import Saved, SaveOptions, save
from wherry.checkpoint.session import Session
from wherry.errors import WherryError


class Checkpoints:
    """Saves and loads one engine. `session` gives its parts as they are at the moment."""

    def __init__(self, session: Callable[[], Session], config: Any) -> None:
        self._session = session
        self._config = config
        # The last save: where it went, and how long training stood still for it.
        self.last: Saved | None = None

    def save(
        self, folder: str | os.PathLike[str], tag: Any, client_state: dict[str, Any] | None, latest: bool, frozen: bool
    ) -> Saved:
        self.wait()
        session = self._session()
        own = self._config.wherry.checkpoint
        options = SaveOptions(
            client_state=_checked(client_state),
            save_latest=latest,
            exclude_frozen=not frozen,
            keep_last=own.keep_last,
            tag_validation=self._config.checkpoint.tag_validation,
            background=own.async_save,
            timeout_s=self._config.wherry.timeout_s,
        )
        tag = step_tag(session.counts.global_steps) if tag is None else tag
        self.last = save(session, Path(folder), str(tag), options)
        return self.last

    def load(self, folder: str | os.PathLike[str], tag: Any, options: LoadOptions) -> Loaded | None:
        self.wait()
        return load(self._session(), Path(folder), None if tag is None else str(tag), options)

    def wait(self) -> None:
        """Return when no save is under way any more; raises what went wrong with the last one, on every rank."""
        last, self.last = self.last, None
        if last is None or not last.behind:
            self.last = last
            return
        from wherry.checkpoint.errors import together

        together(self._session().comm, f"saving {last.path}", last.wait)
        self.last = last

    def close(self) -> None:
        """Wait for what this rank still writes. Other ranks are not asked: they may be gone."""
        if self.last is not None:
            self.last.wait()


def _checked(client_state: dict[str, Any] | None) -> dict[str, Any]:
    if client_state is None:
        return {}
    if not isinstance(client_state, dict):
        raise WherryError(f"save_checkpoint: client_state is a {type(client_state).__name__}, expected a dict")
    return client_state


