"""What kvkeep adds to a call that finds nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kvkeep.bench.models import VOCABULARY, call_model
from kvkeep.bench.rows import Row
from kvkeep.bench.sizes import Sizes
from kvkeep.bench.timing import Progress, medians
from kvkeep.bound import BoundStore
from kvkeep.errors import KvkeepError
from kvkeep.store import CacheStore


def measure_calls(directory: Path, sizes: Sizes, progress: Progress) -> Iterator[Row]:
    """Measure a miss of ``generate``, with a store in an empty directory."""
    model = call_model()
    kv = CacheStore(directory).bind(model)
    with _one_thread():
        yield _miss(kv, model, len(list(model.parameters())), sizes, progress)


def _miss(kv: BoundStore, model: Any, tensors: int, sizes: Sizes, progress: Progress) -> Row:
    ids = torch.arange(sizes.generate_tokens).remainder(VOCABULARY).unsqueeze(0)
    mask = torch.ones_like(ids)

    def plain() -> Any:
        return model.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False)

    without, missed, again = medians(
        "miss",
        plain,
        lambda: kv.generate(ids, max_new_tokens=1, do_sample=False),
        plain,
        times=sizes.generates,
        progress=progress,
    )
    if kv.last_report is None or kv.last_report.reused_tokens:
        raise KvkeepError("the bench generated from an empty store, and that was no miss")
    return Row(
        name="miss",
        figure=missed / without,
        unit="ratio",
        bar=1 + max(0.01, 0.002 / without),
        at="most",
        compared=f"time of kv.generate on an empty store ({missed * 1e3:.1f} ms) to model.generate "
        f"({without * 1e3:.1f} ms, and {again * 1e3:.1f} ms when measured again); the bar is 1 % or 2 ms more: "
        f"{sizes.generate_tokens} tokens and 1 new one, narrow model of {tensors} tensors, one thread",
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread: threads that wait for each other on a busy machine hide milliseconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
