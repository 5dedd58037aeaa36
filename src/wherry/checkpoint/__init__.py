"""Checkpoints: folders of safetensors files and a manifest. In order: slices, manifest, files, folder, save, load."""

import sys
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    """The import system puts this package where `wherry.checkpoint`, the function, was: so it may be called as that."""

    def __call__(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        from wherry.activations.recompute import checkpoint

        return checkpoint(fn, *args, **kwargs)


sys.modules[__name__].__class__ = _Package
