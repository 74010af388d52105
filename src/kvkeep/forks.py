"""What must be made anew in a forked child: locks that another thread of the parent may have held."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Forked(Protocol):
    """Something that holds locks."""

    def after_fork(self) -> None:
        """Called in the child, which has one thread: make the locks anew, and what they may have left half done."""


_owners: WeakSet[Forked] = WeakSet()


def renew_after_fork(owner: Forked) -> None:
    """Have ``owner.after_fork()`` called in every child that is forked while it lives."""
    _owners.add(owner)


def _renew() -> None:
    for owner in list(_owners):
        owner.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
