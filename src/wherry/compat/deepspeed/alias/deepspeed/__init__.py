"""Wherry, under the names that scripts written for DeepSpeed import. This is not DeepSpeed."""

from wherry.compat.deepspeed import VERSION as __version__
from wherry.compat.deepspeed import become_alias as _become_alias

version = __version__
__version_major__, __version_minor__, __version_patch__ = 0, 19, 6
__git_hash__ = __git_branch__ = "unknown"

_become_alias(__name__)
