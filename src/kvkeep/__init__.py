"""A persistent on-disk store for the prefilled KV caches of Hugging Face models.

>>> from kvkeep import CacheStore
>>> store = CacheStore(getfixture("tmp_path") / "cache_store")
>>> kv = store.bind(getfixture("tiny_llama"))
>>> entry = kv.warm(list(range(3, 90)))
>>> kv.lookup(list(range(3, 100))).tokens
87

Importing this package imports neither torch nor transformers; binding a store does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvkeep._version import __version__

if TYPE_CHECKING:
    from kvkeep.bound import BoundStore
    from kvkeep.errors import KvkeepError
    from kvkeep.records import Entry, Explanation, GenerateReport, Identity, Match
    from kvkeep.store import CacheStore

__all__ = [
    "BoundStore",
    "CacheStore",
    "Entry",
    "Explanation",
    "GenerateReport",
    "Identity",
    "KvkeepError",
    "Match",
    "__version__",
]

_HOMES = {
    "BoundStore": "kvkeep.bound",
    "CacheStore": "kvkeep.store",
    "Entry": "kvkeep.records",
    "Explanation": "kvkeep.records",
    "GenerateReport": "kvkeep.records",
    "Identity": "kvkeep.records",
    "KvkeepError": "kvkeep.errors",
    "Match": "kvkeep.records",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kvkeep' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
