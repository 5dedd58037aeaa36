"""Checkpoints: folders of safetensors files and a manifest. In order: slices, manifest, files, folder, save, load.

`wherry.checkpoint` is also a function, which recomputes activations. Importing a package makes it an attribute of its
parent, in the function's place; so this package can be called, and does what the function does.
"""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `fn`, and let the backward compute again what it would have saved."""
        from wherry.activations.recompute import checkpoint

        return checkpoint(fn, *args, **kwargs)


sys.modules[__name__].__class__ = _Callable
