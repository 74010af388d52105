"""Which entries a command is about, and in what order: by model, name, size, tokens, age and use."""

from __future__ import annotations

import functools
import operator
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from kvkeep.errors import InvalidRequestError

if TYPE_CHECKING:
    from kvkeep.records import Entry
    from kvkeep.storage.journal import Use
    from kvkeep.store import CacheStore

F = TypeVar("F", bound=Callable[..., Any])

_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "=": operator.eq,
}
_CONDITION = re.compile(r"\s*(size|tokens|hits|created|accessed)\s*(>=|<=|>|<|=)\s*(.*?)\s*", re.DOTALL)
_AGE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)\s*([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_DESCENDING = {"created": False, "accessed": True, "size": True, "tokens": True, "hits": True, "name": False}
"""What can be sorted by, and whether the largest comes first."""


@dataclass(frozen=True, slots=True)
class Known:
    """An entry with its use: how often it was hit, and when it was last used (Unix time; stored, if it never was)."""

    entry: Entry
    hits: int
    accessed: int

    def value(self, field: str, now: float) -> float:
        """What a condition compares: bytes, tokens, hits, or the age in seconds."""
        if field in ("created", "accessed"):
            return now - (self.entry.created if field == "created" else self.accessed)
        return {"size": self.entry.nbytes, "tokens": self.entry.tokens, "hits": self.hits}[field]


@dataclass(frozen=True, slots=True)
class Condition:
    """One ``--filter``, such as ``accessed>7d``."""

    field: str
    compare: Callable[[float, float], bool]
    value: float

    def holds(self, known: Known, now: float) -> bool:
        """Whether an entry is meant."""
        return self.compare(known.value(self.field, now), self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was asked for; true if it leaves anything out.

    Attributes:
        models: starts of models' fingerprints, one of which must fit.
        names: patterns, one of which must fit a name.
        conditions: all of which must hold.
        order: a field, and whether the largest comes first; ``None`` for the order of the store.
    """

    models: Sequence[str] = ()
    names: Sequence[str] = ()
    conditions: Sequence[Condition] = ()
    order: tuple[str, bool] | None = None

    def __bool__(self) -> bool:
        return bool(self.models or self.names or self.conditions)

    @property
    def asks_for_use(self) -> bool:
        """Whether hits or the last use matter."""
        fields = {one.field for one in self.conditions} | ({self.order[0]} if self.order is not None else set())
        return bool(fields & {"hits", "accessed"})

    def of(self, entries: Sequence[Entry], store: CacheStore) -> list[Known]:
        """Those of some entries of a store that are meant, in order."""
        uses, now = store.journal.uses(), time.time()
        found = [_known(entry, uses.get(entry.key)) for entry in entries]
        found = [known for known in found if self._fits(known.entry)]
        found = [known for known in found if all(one.holds(known, now) for one in self.conditions)]
        if self.order is None:
            return found
        field, descending = self.order
        if field == "name":  # those without one are the last, either way
            named = [known for known in found if known.entry.names]
            named.sort(key=lambda known: known.entry.names, reverse=descending)
            return named + [known for known in found if not known.entry.names]
        reverse = descending if field not in ("created", "accessed") else not descending
        return sorted(found, key=lambda known: known.value(field, now), reverse=reverse)

    def _fits(self, entry: Entry) -> bool:
        model = not self.models or any(entry.identity.model.startswith(start) for start in self.models)
        return model and (not self.names or any(fnmatchcase(n, p) for n in entry.names for p in self.names))


def _known(entry: Entry, use: Use | None) -> Known:
    return Known(entry, 0, entry.created) if use is None else Known(entry, use.hits, max(use.last, entry.created))


def choosing_options(function: F) -> F:
    """``--model``, ``--name``, ``--filter`` and ``--sort``, which become the argument ``choice``."""

    @functools.wraps(function)
    def command(*args: Any, models: Any, names: Any, conditions: Any, order: Any, **kwargs: Any) -> Any:
        choice = Choice(models=models, names=names, conditions=conditions, order=order)
        return function(*args, choice=choice, **kwargs)

    for option in (
        click.option("--sort", "order", metavar="FIELD", callback=_read_order, help=_SORT_HELP),
        click.option(
            "--filter", "conditions", metavar="CONDITION", multiple=True, callback=_read_conditions, help=_FILTER_HELP
        ),
        click.option(
            "--name", "names", metavar="PATTERN", multiple=True, help="Only those with such a name: 'support-*'."
        ),
        click.option(
            "--model", "models", metavar="DIGITS", multiple=True, help="Only those of this model, as `ls` shows it."
        ),
    ):
        command = option(command)
    return cast(F, command)


_FILTER_HELP = "Only those with 'size>1GB', 'tokens<500', 'hits=0', 'created<1h', 'accessed>7d'; all of several."
_SORT_HELP = f"By {', '.join(_DESCENDING)}; FIELD:asc or FIELD:desc for the other way round."


def _read_conditions(_context: click.Context, _parameter: click.Parameter, given: Sequence[str]) -> Sequence[Condition]:
    return [_read_condition(text) for text in given]


def _read_condition(text: str) -> Condition:
    from kvkeep.settings import parse_size

    found = _CONDITION.fullmatch(text)
    if found is None:
        raise click.BadParameter(f"{text!r} is no condition such as 'size>1GB' or 'accessed>7d'")
    field, compare, value = found.groups()
    if field in ("created", "accessed"):
        age = _AGE.fullmatch(value)
        if age is None:
            raise click.BadParameter(f"{text!r}: an age is a number with s, m, h, d or w, such as 7d")
        return Condition(field, _COMPARE[compare], float(age[1]) * _SECONDS[age[2]])
    if field == "size":
        try:
            return Condition(field, _COMPARE[compare], parse_size(value, "a size"))
        except InvalidRequestError as error:
            raise click.BadParameter(f"{text!r}: {error}") from None
    if not value.isdecimal():
        raise click.BadParameter(f"{text!r}: {field} are a whole number")
    return Condition(field, _COMPARE[compare], int(value))


def _read_order(_context: click.Context, _parameter: click.Parameter, given: str | None) -> tuple[str, bool] | None:
    if given is None:
        return None
    field, _, way = given.partition(":")
    if field not in _DESCENDING or way not in ("", "asc", "desc"):
        raise click.BadParameter(f"{given!r} is none of {', '.join(_DESCENDING)}, with :asc or :desc if you like")
    return field, way == "desc" if way else _DESCENDING[field]
