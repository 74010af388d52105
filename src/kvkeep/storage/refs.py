"""Names that point at entries, with pins and expiry: one small JSON file each, ``refs/NAME.json``."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from dataclasses import dataclass

from kvkeep.entry_format import canonical_json
from kvkeep.errors import InvalidRequestError
from kvkeep.storage.fs import TMP, Directory

_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
_KEY = re.compile(r"[0-9a-f]{32}")
_SUFFIX = ".json"
_LIMIT = 4096

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """A name for an entry.

    Attributes:
        name: 1 to 100 of the characters A-Z, a-z, 0-9, dot, hyphen and underscore.
        key: the entry's key, 32 hex digits.
        pin: keep the entry whatever the budget.
        expires: Unix time in seconds from which the name counts no more, or ``None``.
        created: Unix time in seconds.
    """

    name: str
    key: str
    pin: bool = False
    expires: int | None = None
    created: int

    def counts(self, now: float) -> bool:
        """Whether it is still a name at a Unix time."""
        return self.expires is None or now < self.expires

    def to_json(self) -> str:
        """The content of the name's file."""
        return canonical_json(
            {"name": self.name, "key": self.key, "pin": self.pin, "expires": self.expires, "created": self.created}
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Ref:
        """Read a name's file.

        Raises:
            ValueError: it is not what :meth:`to_json` writes.
        """
        try:
            source = json.loads(text)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        if not isinstance(source, dict) or set(source) != {"name", "key", "pin", "expires", "created"}:
            raise ValueError("it is not an object with the members of a name")
        name, key, pin, expires, created = (source[k] for k in ("name", "key", "pin", "expires", "created"))
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError("its name is not valid")
        if not isinstance(key, str) or not _KEY.fullmatch(key) or not isinstance(pin, bool):
            raise ValueError("its key or pin is not valid")
        if type(created) is not int or not (expires is None or type(expires) is int):
            raise ValueError("its times are not whole seconds")
        return cls(name=name, key=key, pin=pin, expires=expires, created=created)


class Refs:
    """The names of one store. A file that is damaged counts as absent, with a line in the log."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def get(self, name: str) -> Ref | None:
        """The name's record, or ``None`` if there is none."""
        check_name(name)
        try:
            ref = Ref.from_json(self._directory.read("refs", name + _SUFFIX, limit=_LIMIT))
            if ref.name != name:
                raise ValueError("it belongs to another name")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _log.warning("refs/%s%s is ignored: %s", name, _SUFFIX, error)
            return None
        return ref

    def put(self, ref: Ref) -> None:
        """Store a name, replacing the one it was; durable when this returns."""
        check_name(ref.name)
        self._directory.write_atomic("refs", ref.name + _SUFFIX, data=ref.to_json().encode())

    def remove(self, name: str) -> bool:
        """Forget a name, not its entry; ``False`` if there was none."""
        check_name(name)
        return self._directory.remove("refs", name + _SUFFIX)

    def pinned(self) -> set[str]:
        """The keys of entries that must stay: those with a pinned name that has not expired."""
        now = time.time()
        return {ref.key for ref in self.all() if ref.pin and ref.counts(now)}

    def expire(self, ref: Ref) -> bool:
        """Remove a name that has expired; ``False`` if it is another by now, which stays.

        It is moved away first: what is looked at and removed then is what nobody can be replacing.
        """
        name, away = ref.name + _SUFFIX, (TMP, f"{os.getpid()}-{os.urandom(8).hex()}{_SUFFIX}")
        if not self._directory.move(("refs", name), away):
            return False
        try:
            if Ref.from_json(self._directory.read(*away, limit=_LIMIT)) != ref and not self._directory.exists(
                "refs", name
            ):
                self._directory.move(away, ("refs", name))
                return False
        except (OSError, ValueError) as error:
            _log.warning("refs/%s is removed: %s", name, error)
        self._directory.remove(*away)
        return True

    def all(self) -> list[Ref]:
        """Every name, sorted."""
        names = [file[: -len(_SUFFIX)] for file in self._directory.names("refs") if file.endswith(_SUFFIX)]
        found = [self.get(name) for name in sorted(names) if _NAME.fullmatch(name)]
        return [ref for ref in found if ref is not None]


def check_name(name: str) -> None:
    """Raise :class:`InvalidRequestError` unless this may name an entry."""
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{name[:120]!r} cannot name an entry: use 1 to 100 of A-Z, a-z, 0-9, dot, hyphen and underscore"
        )
