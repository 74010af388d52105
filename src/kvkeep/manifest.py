"""The manifest ``warm.toml``: which prefixes to keep warm, and for which model. Read without torch.

::

    version = 1
    model = "HuggingFaceTB/SmolLM2-135M-Instruct"   # a hub id, or a path that starts with /, ./, ../ or ~
    dtype = "float32"                               # optional; as the checkpoint says if left out

    [[prefix]]
    name = "support"
    pin = true                                      # optional: keep it whatever the budget
    ttl = 604800                                    # optional: seconds after which the name counts no more
    messages = [{ role = "system", content = "You are ..." }]   # or text = "...", file = "notes.md", ids = [1, 2]

Unknown keys are errors, so that a slip of the pen is not a setting that nobody reads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from kvkeep.errors import InvalidRequestError
from kvkeep.storage.refs import check_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VERSION = 1

DTYPES = ("float32", "float16", "bfloat16")

SOURCES = ("text", "file", "messages", "ids")
"""The keys that say what a prefix is; each prefix has exactly one of them."""

_LIMIT = 64 << 20
_MAX_ID = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """One ``[[prefix]]`` table.

    Attributes:
        name: the name that its entry gets.
        kind: how the prompt is given.
        prompt: a text, a list of chat messages or a list of token ids, as ``BoundStore.warm`` takes them.
        pin: keep the entry whatever the budget.
        ttl: seconds after which the name counts no more, or ``None``.
    """

    name: str
    kind: Literal["text", "messages", "ids"]
    prompt: Any
    pin: bool = False
    ttl: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checked manifest.

    Attributes:
        path: the file it was read from.
        model: a hub id or a path, ready for ``from_pretrained``.
        dtype: the name of the number format to load the model in, or ``None`` for the checkpoint's own.
        prefixes: in the order of the file; at least one, with names that differ.
    """

    path: Path
    model: str
    dtype: str | None
    prefixes: tuple[Prefix, ...]


def load_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read and check a manifest, and the files that it names.

    Raises:
        InvalidRequestError: naming the file and, as far as they are known, the line, the table and the key.
    """
    where = Path(path)
    try:
        source = tomllib.loads(_read_text(where))
    except tomllib.TOMLDecodeError as error:  # its message ends in the line and the column
        raise InvalidRequestError(f"{where} is not valid TOML: {error}") from None
    top = _Table(where, "", source)
    version = top.take("version", int)
    if version != VERSION:
        top.refuse("version", f"{version!r} is not a version that this kvkeep reads; write version = {VERSION}")
    model = top.take("model", str)
    if not model:
        top.refuse("model", "is empty; write a hub id or a path")
    dtype = top.take_optional("dtype", str)
    if dtype is not None and dtype not in DTYPES:
        top.refuse("dtype", f"{dtype!r} is none of {', '.join(DTYPES)}")
    tables = top.take("prefix", list)
    top.nothing_left(("version", "model", "dtype", "prefix"))
    if not tables:
        top.refuse("prefix", "is empty; write at least one [[prefix]] table")
    prefixes = tuple(_prefix(where, number, table) for number, table in enumerate(tables, 1))
    _check_names(where, prefixes)
    return Manifest(path=where, model=_model_source(where, model), dtype=dtype, prefixes=prefixes)


def _prefix(where: Path, number: int, source: object) -> Prefix:
    name = source.get("name") if isinstance(source, dict) else None
    label = f"[[prefix]] {number}" + (f" ({name})" if isinstance(name, str) else "")
    if not isinstance(source, dict):
        raise InvalidRequestError(f"{where}: {label} is not a table")
    table = _Table(where, label, source)
    name = table.take("name", str)
    try:
        check_name(name)
    except InvalidRequestError as error:
        table.refuse("name", str(error))
    pin = table.take_optional("pin", bool) or False
    ttl = table.take_optional("ttl", int)
    if ttl is not None and ttl <= 0:
        table.refuse("ttl", f"{ttl} is not a positive number of seconds")
    given = [key for key in SOURCES if key in table.source]
    if len(given) != 1:
        found = "none" if not given else " and ".join(given)
        table.refuse(given[-1] if given else "text", f"a prefix has exactly one of {', '.join(SOURCES)}; here: {found}")
    kind, prompt = _prompt(table, given[0])
    table.nothing_left(("name", "pin", "ttl", *SOURCES))
    return Prefix(name=name, kind=kind, prompt=prompt, pin=pin, ttl=ttl)


def _prompt(table: _Table, key: str) -> tuple[Literal["text", "messages", "ids"], Any]:
    if key == "ids":
        ids = table.take(key, list)
        if not ids or not all(type(i) is int and 0 <= i < _MAX_ID for i in ids):
            table.refuse(key, "must be a list of token ids, whole numbers in [0, 2**31), and not be empty")
        return "ids", ids
    if key == "messages":
        messages = table.take(key, list)
        if not messages or not all(_is_message(message) for message in messages):
            table.refuse(key, "must be a list of tables with role = a text and content = a text or a list, not empty")
        return "messages", messages
    text = table.take(key, str)
    if key == "file":
        try:
            text = _read_text(table.where.parent / Path(text).expanduser())
        except InvalidRequestError as error:
            table.refuse(key, str(error))
    if not text:
        table.refuse(key, "is empty")
    return "text", text


def _is_message(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str) or not value["role"]:
        return False
    return isinstance(value.get("content", ""), (str, list))  # a message of tool calls alone has no content


def _check_names(where: Path, prefixes: tuple[Prefix, ...]) -> None:
    first: dict[str, int] = {}
    for number, prefix in enumerate(prefixes, 1):
        if prefix.name in first:
            raise InvalidRequestError(
                f"{where}: [[prefix]] {number}: key 'name': {prefix.name!r} is the name of [[prefix]] "
                f"{first[prefix.name]} as well; a name points at one entry"
            )
        first[prefix.name] = number


def _model_source(where: Path, model: str) -> str:
    if model.startswith(("/", "./", "../", "~")) or model in (".", ".."):
        return str((where.parent / Path(model).expanduser()).resolve())
    return model


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_LIMIT + 1)
        if len(data) > _LIMIT:
            raise InvalidRequestError(f"{path} has more than {_LIMIT >> 20} MiB")
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise InvalidRequestError(f"{path}, line {line}: not UTF-8 text") from None


_T = TypeVar("_T")
_WORDS: Mapping[type, str] = {str: "a text", int: "a whole number", bool: "true or false", list: "a list"}


class _Table:
    """One table of the file. Values are taken out of it key by key; what is left was not asked for."""

    def __init__(self, where: Path, label: str, source: dict[str, Any]) -> None:
        self.where = where
        self.label = label
        self.source = dict(source)

    def take(self, key: str, kind: type[_T]) -> _T:
        """The value of a key that must be there."""
        value = self.take_optional(key, kind)
        if value is None:
            self.refuse(key, f"is missing; it is {_WORDS[kind]}")
        return value

    def take_optional(self, key: str, kind: type[_T]) -> _T | None:
        """The value of a key, or ``None`` if it is not there."""
        value = self.source.pop(key, None)
        if value is not None and type(value) is not kind:  # a bool is no whole number here
            self.refuse(key, f"must be {_WORDS[kind]}, not {value!r:.60}")
        return value

    def nothing_left(self, known: tuple[str, ...]) -> None:
        """Refuse the first key that nobody took."""
        for key in self.source:
            self.refuse(key, f"is not known here; known are {', '.join(known)}")

    def refuse(self, key: str, problem: str) -> NoReturn:
        """Raise the error that names file, table and key."""
        table = f"{self.label}: " if self.label else ""
        raise InvalidRequestError(f"{self.where}: {table}key {key!r}: {problem}")
