"""An engine's checkpoints: the calls that a training program makes, one save in flight at most."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from wherry.checkpoint.errors import on_first, together
from wherry.checkpoint.session import Session
from wherry.errors import WherryError

if TYPE_CHECKING:  # imported with the first save or load
    from wherry.checkpoint.load import Loaded, LoadOptions
    from wherry.checkpoint.save import Saved


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
        from wherry.checkpoint.folder import step_tag
        from wherry.checkpoint.save import SaveOptions, save

        self.wait()
        session = self._session()
        own = self._config.wherry.checkpoint
        options = SaveOptions(
            client_state={} if client_state is None else client_state,
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
        from wherry.checkpoint.load import load

        self.wait()
        with torch.inference_mode(False):  # what a load makes is trained on
            return load(self._session(), Path(folder), None if tag is None else str(tag), options)

    def save_model(self, folder: Path, file: str, *, exclude_frozen: bool) -> None:
        from wherry.checkpoint import export

        if file == "model.safetensors":
            export.write_model(self._session(), folder, exclude_frozen=exclude_frozen)
            return
        if not file.endswith((".bin", ".pt", ".pth")) or "/" in file:
            raise WherryError(
                f"save_16bit_model: expected model.safetensors, or a name that ends in .bin, .pt or .pth, got {file!r}"
            )
        weights = self.consolidated(None, exclude_frozen=exclude_frozen)
        on_first(self._session().comm, f"writing {folder / file}", lambda: export.write_torch(weights, folder / file))

    def consolidated(self, dtype: torch.dtype | None, *, exclude_frozen: bool) -> dict[str, torch.Tensor] | None:
        from wherry.checkpoint import export

        return export.consolidated(self._session(), dtype=dtype, exclude_frozen=exclude_frozen)

    @property
    def behind(self) -> bool:
        """Whether a save was left to be written behind training, and nobody has waited for it."""
        return self.last is not None and self.last.behind

    def wait(self) -> None:
        """Return when no save is under way any more; raises what went wrong with the last one, on every rank."""
        last = self.last
        if last is None or not last.behind:
            return
        self.last = None
        together(self._session().comm, f"saving {last.path}", last.wait)
        self.last = last

    def close(self) -> None:
        """Wait for what this rank still writes. Other ranks are not asked: they may be gone."""
        if self.last is not None:
            self.last.wait()
