"""Conversations that go on in another process: the messages of each, in a small file of its own.

Unlike names and index, such a file holds what was said: it is as private as the entries are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kvkeep.entry_format import canonical_json
from kvkeep.errors import InvalidRequestError
from kvkeep.keys import digest_fields
from kvkeep.storage.fs import Directory

FOLDER = "chats"

_LIMIT = 64 << 20
_VERSION = 1

Messages = list[dict[str, Any]]


class Chats:
    """The conversations of one namespace of a store."""

    def __init__(self, directory: Directory, namespace: str) -> None:
        self._directory = directory
        self._namespace = namespace

    def get(self, name: str) -> Messages | None:
        """What was said in a conversation so far, or ``None`` if there is none of this name.

        Raises:
            OSError: if it cannot be read.
            InvalidRequestError: if the file is not one that :meth:`put` wrote.
        """
        try:
            found = json.loads(self._directory.read(FOLDER, self._file(name), limit=_LIMIT))
            if (found["format"], found["id"], found["namespace"]) != (_VERSION, name, self._namespace):
                raise ValueError("it is another conversation's, or of a newer format")
            messages = found["messages"]
            if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
                raise TypeError("its messages are not a list of objects")
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InvalidRequestError(
                f"the file of the conversation {name!r} is not as it was written: {error}"
            ) from None
        return messages

    def put(self, name: str, messages: Sequence[dict[str, Any]]) -> None:
        """Store what was said; durable when this returns.

        Raises:
            InvalidRequestError: if a message holds what JSON does not.
            StoreReadOnlyError, OSError: if it cannot be stored.
        """
        record = {"format": _VERSION, "id": name, "namespace": self._namespace, "messages": list(messages)}
        try:
            data = canonical_json(record).encode()
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"a message of the conversation cannot be written as JSON: {error}") from None
        self._directory.write_atomic(FOLDER, self._file(name), data=data)

    def remove(self, name: str) -> bool:
        """Forget what was said, not the entries; ``False`` if there was nothing."""
        return self._directory.remove(FOLDER, self._file(name))

    def owns(self, file: str) -> bool:
        """Whether a file in the folder, by its name there, is a conversation of this namespace.

        Raises:
            OSError: it cannot be read.
            ValueError: it does not say whose it is.
        """
        try:
            found = json.loads(self._directory.read(FOLDER, file, limit=_LIMIT))
            return bool(found["namespace"] == self._namespace)
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ValueError("it does not say whose conversation it is; look at it, and remove it by hand") from None

    def key(self, name: str) -> str:
        """What the lock of a conversation is called, 32 hex digits: hold it from a look at it to what it leads to."""
        return digest_fields("kvkeep/chat/1", self._namespace.encode(), name.encode()).hex()

    def _file(self, name: str) -> str:
        return self.key(name) + ".json"
