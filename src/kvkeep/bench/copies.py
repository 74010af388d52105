"""How often the first tokens after a load copy the whole prefix."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvkeep.bench.models import LAYERS, VOCABULARY, cache_model
from kvkeep.bench.rows import Row
from kvkeep.bench.sizes import Sizes
from kvkeep.bench.timing import Progress
from kvkeep.errors import KvkeepError
from kvkeep.store import CacheStore

_QUESTION, _NEW = 8, 4


def measure_copies(directory: Path, sizes: Sizes, progress: Progress) -> Iterator[Row]:
    """Count the concatenations of whole prefixes in a call that hits, with a store in an empty directory."""
    model = cache_model()
    kv = CacheStore(directory).bind(model)
    ids = torch.arange(sizes.generate_tokens + _QUESTION).remainder(VOCABULARY).unsqueeze(0)
    kv.warm(ids[:, :-_QUESTION])
    with _Concatenations(sizes.generate_tokens) as seen:
        kv.generate(ids, max_new_tokens=_NEW, do_sample=False)
    if kv.last_report is None or not kv.last_report.reused_tokens:
        raise KvkeepError(f"the bench did not reuse the {sizes.generate_tokens} tokens that it stored")
    progress("copies", 1, 1)
    yield Row(
        name="copies of the prefix",
        figure=seen.count,
        unit="copies",
        bar=0,
        at="most",
        compared=f"layers' keys or values that are concatenated whole while kv.generate makes {_NEW} tokens after "
        f"{sizes.generate_tokens} loaded ones, of {LAYERS} layers (transformers' own layers do it with each token)",
    )


class _Concatenations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the calls of ``cat`` whose result is as long as a prefix of so many rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self._rows = rows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count and go on."""
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.cat.default and out.dim() == 4 and out.shape[-2] >= self._rows:
            self.count += 1
        return out
