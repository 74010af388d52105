"""What it costs to know that KV is right: hashing the model, checking it at each call, and the guard."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from pathlib import Path

import torch
import xxhash

from kvkeep.bench.models import VOCABULARY, cache_model, call_model
from kvkeep.bench.rows import Row
from kvkeep.bench.sizes import Sizes
from kvkeep.bench.timing import Progress, medians
from kvkeep.fingerprint import tensor_digests
from kvkeep.store import CacheStore

_MATRIX = 4 << 20


def measure_identity(directory: Path, sizes: Sizes, progress: Progress) -> Iterator[Row]:
    """Measure the fingerprint's rate, the check at each call and the guard, with a store in an empty directory."""
    yield _fingerprint(sizes, progress)
    model = call_model()
    tensors = len(list(model.parameters()))
    kv = CacheStore(directory / "checked").bind(model)
    (seconds,) = medians("identity check", kv.identity, times=sizes.checks, progress=progress)
    yield Row(
        name="identity check",
        figure=seconds * 1e3,
        unit="ms",
        bar=2.0,
        at="most",
        compared=f"median of kv.identity() of a bound model of {tensors} tensors, none of them changed",
    )
    yield _guard(directory / "guarded", sizes, progress)


def _fingerprint(sizes: Sizes, progress: Progress) -> Row:
    """Hash matrices as a fingerprint does, and their bytes in one stretch a core."""
    cores = cpu_count() or 1
    matrices = {number: torch.full((_MATRIX // 4,), float(number)) for number in range(sizes.matrices)}
    everything = torch.cat(list(matrices.values())).view(torch.uint8)
    shares = [share.numpy().data for share in everything.chunk(cores)]
    with ThreadPoolExecutor(cores) as pool:
        ours, raw = medians(
            "fingerprint",
            lambda: tensor_digests(matrices),
            lambda: list(pool.map(xxhash.xxh3_128_digest, shares)),
            times=sizes.hashes,
            progress=progress,
        )
    return Row(
        name="fingerprint",
        figure=raw / ours,
        unit="ratio",
        bar=0.8,
        at="least",
        compared=f"rate of hashing {sizes.matrices} tensors of 4 MiB ({ours * 1e3:.1f} ms) to that of xxh3 over the "
        f"same bytes in {cores} stretches, one a core ({raw * 1e3:.1f} ms)",
    )


def _guard(directory: Path, sizes: Sizes, progress: Progress) -> Row:
    model = cache_model()
    kv = CacheStore(directory).bind(model)
    ids = torch.arange(sizes.generate_tokens + 8).remainder(VOCABULARY).unsqueeze(0)
    kv.warm(ids[:, :-8])
    guarded, plain = medians(
        "guard",
        lambda: kv.generate(ids, max_new_tokens=1, do_sample=False),
        lambda: kv.generate(ids, max_new_tokens=1, do_sample=False, guard=False),
        times=sizes.generates,
        progress=progress,
    )
    return Row(
        name="guard",
        figure=(guarded - plain) * 1e3,
        unit="ms",
        bar=5.0,
        at="most",
        compared=f"kv.generate of 1 token after {sizes.generate_tokens} stored ones, 30 layers, narrow model: "
        f"{guarded * 1e3:.1f} ms with the guard, {plain * 1e3:.1f} ms without",
    )
