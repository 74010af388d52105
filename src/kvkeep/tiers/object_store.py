"""A tier in an object store: S3 and what speaks as it does, Google Cloud Storage, Azure, through obstore."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvkeep.errors import InvalidRequestError, KvkeepError, MissingDependencyError, TierError
from kvkeep.forks import renew_after_fork
from kvkeep.tiers.base import Buffer, Capabilities, Part, Stat, check_name, check_range

_QUICK = {"timeout": "250ms", "connect_timeout": "250ms"}
_BULK = {"timeout": "1h", "connect_timeout": "250ms", "read_timeout": "2s"}
_PUT = {"timeout": "5m", "connect_timeout": "2s"}  # a read timeout would count from the first byte that is sent
_TRIED_WITH = 1 << 16
"""Bytes of the largest object that is put twice to see whether the second put is refused."""
_CHUNK = 8 << 20

_first_user: int | None = None
"""The process that used obstore first: its threads are not there in a forked child, where calls would never return."""


class ObjectTier:
    """A :class:`~kvkeep.tiers.Tier` below a URL, such as ``s3://bucket/prefix``.

    Credentials come from where obstore looks for them (environment, instance, ``credential_provider=``). They must
    allow to list, though lookups list nothing: S3 tells others that access is denied where an object is not there.

    An object is put with the condition that there is none. A server that does not know of such conditions replaces
    it all the same, by the whole other object: whoever put it looks before, so this takes two who put one name at once.

    Args:
        url: ``s3://``, ``gs://``, ``az://``, ``https://``, ``file://`` or ``memory://``.
        options: what ``obstore.store.from_url`` takes beside: ``config``, ``client_options``, ``retry_config``,
            ``credential_provider`` and the settings of the store by name. Unless ``client_options`` say otherwise, a
            lookup waits at most 250 ms for an answer, and a transfer 2 s for its next bytes. Nothing is tried
            twice unless ``retry_config`` says so.

    Raises:
        MissingDependencyError: obstore is not installed.
        InvalidRequestError: obstore does not take this URL or these options.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        try:
            import obstore
            from obstore.store import from_url
        except ImportError:
            raise MissingDependencyError(f"{url} needs the package obstore: pip install 'kvkeep[remote]'") from None
        self._obstore: Any = obstore
        self._url = url
        plain = url.startswith(("file:", "memory:"))
        given = {**({"mkdir": True} if url.startswith("file:") else {}), **(options or {})}
        try:
            self._bulk = from_url(url, **(given if plain else _with(given, _BULK)))
            self._quick = self._bulk if plain else from_url(url, **_with(given, _QUICK))
            self._putting = self._bulk if plain else from_url(url, **_with(given, _PUT))
        except (obstore.exceptions.BaseError, TypeError, ValueError) as error:
            raise InvalidRequestError(f"obstore does not take the remote {url}: {_brief(error)}") from None
        self._ranges = True
        self._exclusive: bool | None = True if plain else None
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Make the lock anew."""
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"ObjectTier({self._url!r})"

    @property
    def capabilities(self) -> Capabilities:
        """What the server has shown by now: until then ranges, and no exclusive puts."""
        return Capabilities(ranges=self._ranges, exclusive=bool(self._exclusive))

    def get(
        self, name: str, begin: int = 0, end: int | None = None, *, version: str | None = None, bulk: bool = False
    ) -> Part | None:
        """See :meth:`Tier.get`."""
        check_range(begin, end)
        options: dict[str, Any] = {} if version is None else {"if_match": version}
        if self._ranges and (begin or end is not None):
            options["range"] = {"offset": begin} if end is None else (begin, end)
        try:
            found = self._get(name, options, bulk=bulk)
        except TierError as error:
            if "range" not in options or "non-partial response" not in str(error):
                raise
            self._ranges = False
            del options["range"]
            found = self._get(name, options, bulk=bulk)
        if found is None:
            return None
        meta = found.meta
        return Part(found.range[0], Stat(meta["size"], meta["e_tag"]), self._chunks(found))

    def _get(self, name: str, options: dict[str, Any], *, bulk: bool) -> Any:
        with self._calling():
            try:
                return self._obstore.get(self._bulk if bulk else self._quick, check_name(name), options=options)
            except (FileNotFoundError, self._obstore.exceptions.PreconditionError):
                return None

    def _chunks(self, found: Any) -> Iterator[Buffer]:
        with self._calling():
            for chunk in found.stream(min_chunk_size=_CHUNK):
                yield memoryview(chunk)

    def put_if_absent(self, name: str, data: Buffer) -> bool:
        """See :meth:`Tier.put_if_absent`."""
        if not self._exclusive and self.stat(name) is not None:
            return False
        if not self._create(name, data):
            return False
        if self._exclusive is None and len(data) <= _TRIED_WITH:
            self._exclusive = not self._create(name, data)  # the same bytes: nothing changes for anybody
        return True

    def _create(self, name: str, data: Buffer) -> bool:
        with self._calling():
            try:
                self._obstore.put(self._putting, check_name(name), memoryview(data), mode="create", use_multipart=False)
            except self._obstore.exceptions.AlreadyExistsError:
                return False
        return True

    def stat(self, name: str) -> Stat | None:
        """See :meth:`Tier.stat`."""
        with self._calling():
            try:
                meta = self._obstore.head(self._quick, check_name(name))
            except FileNotFoundError:
                return None
        return Stat(meta["size"], meta["e_tag"])

    def delete(self, name: str) -> None:
        """See :meth:`Tier.delete`."""
        with self._calling():
            try:
                self._obstore.delete(self._quick, check_name(name))
            except FileNotFoundError:
                return

    def list(self, prefix: str) -> Iterator[str]:
        """See :meth:`Tier.list`."""
        with self._calling():
            for batch in self._obstore.list(self._bulk, check_name(prefix)):
                yield from (item["path"] for item in batch)

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Turn what obstore raises into a TierError; refuse where its threads are not."""
        global _first_user
        if _first_user is None:
            _first_user = os.getpid()
        if _first_user != os.getpid():
            raise TierError(
                f"{self._url} was used before this process was forked: use it from a process that is started by itself "
                '(with multiprocessing: the start method "spawn" or "forkserver")'
            )
        try:
            yield
        except KvkeepError:
            raise
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            raise TierError(f"{self._url}: {_brief(error)}") from None


def _with(given: Mapping[str, Any], waiting: Mapping[str, str]) -> dict[str, Any]:
    """The options, with how long to wait unless they say so."""
    client = {**waiting, **(given.get("client_options") or {})}
    return {"retry_config": {"max_retries": 0}, **given, "client_options": client}


def _brief(error: Exception) -> str:
    """The first line of what obstore says: what follows it are its internals."""
    lines = str(error).splitlines()
    return lines[0][:300] if lines else type(error).__name__
