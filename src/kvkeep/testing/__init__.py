"""Helpers for your own tests of what you add to kvkeep. Nothing in kvkeep imports them, and they need no test runner.

- :class:`LayerCodecContract`: subclass it, and it proves that a layer codec of yours does what kvkeep relies on. What
  fails raises ``AssertionError``.
- :class:`TierContract`: the same for a tier of yours.
- :mod:`kvkeep.testing.syscalls`: kill a process at any system call, or let any one fail (Linux, strace).
- :mod:`kvkeep.testing.power`: a disk whose power can be cut (Linux, root).
- :mod:`kvkeep.testing.faults`: let any one of Python's own calls to the system fail (anywhere).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvkeep.testing.layer_codec import LayerCodecContract, token_rows
    from kvkeep.testing.tier import TierContract

__all__ = ["LayerCodecContract", "TierContract", "token_rows"]


def __getattr__(name: str) -> Any:  # torch is for those who test layers
    if name == "TierContract":
        from kvkeep.testing.tier import TierContract

        return TierContract
    if name in __all__:
        from kvkeep.testing import layer_codec

        return getattr(layer_codec, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
