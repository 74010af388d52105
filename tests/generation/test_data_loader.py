"""Workers of a DataLoader share the store that they were forked with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY
from torch.utils.data import DataLoader, Dataset

from kvkeep import CacheStore
from kvkeep.bound import BoundStore

TOKENS, ITEMS = 40, 8


def prompt(number: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(number))


class Warmed(Dataset[torch.Tensor]):
    """Items that a worker makes with the store: the first layer's keys of each prompt."""

    def __init__(self, kv: BoundStore) -> None:
        self._kv = kv

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, number: int) -> torch.Tensor:
        self._kv.warm(prompt(number))
        cache = self._kv.load(torch.cat([prompt(number), prompt(number)[:1]]))
        return cache.layers[0].keys[0].clone()


@pytest.mark.requirement("R23")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_workers_of_a_data_loader_warm_and_load(tiny_llama: Any, tmp_path: Path) -> None:
    kv = CacheStore(tmp_path / "store").bind(tiny_llama)
    kv.warm(prompt(0))  # with everything open when the workers are forked
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        loader = DataLoader(Warmed(kv), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=120)
        made = list(loader)
    finally:
        torch.set_num_threads(threads)
    assert len(made) == ITEMS
    for number, keys in enumerate(made):
        cache = kv.load(torch.cat([prompt(number), prompt(number)[:1]]))
        assert torch.equal(cache.layers[0].keys[0], keys)
    assert len(kv.store.entries()) == ITEMS
    assert all(kv.store.verify(entry.key) is None for entry in kv.store.entries())
