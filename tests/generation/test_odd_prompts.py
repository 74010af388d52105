"""Ids that are none: each way in refuses them by a typed error that says what is wrong, before anything is fed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, build_tiny

from kvkeep import BoundStore, CacheStore
from kvkeep.errors import InvalidPromptError, InvalidRequestError

STORED = torch.arange(3, 20)[None]

ODD: dict[str, Any] = {
    "no token, two rows": torch.zeros(2, 0),
    "no token": torch.zeros(1, 0, dtype=torch.int64),
    "no row": torch.zeros(0, 3, dtype=torch.int64),
    "three dimensions": torch.ones(1, 2, 3, dtype=torch.int64),
    "floats": torch.ones(1, 5),
    "floats, two rows": torch.ones(2, 5),
    "truth values": torch.ones(2, 5, dtype=torch.bool),
    "complex": torch.ones(1, 5, dtype=torch.complex64),
    "negative": torch.tensor([[3, -1, 4]]),
    "negative, two rows": torch.tensor([[3, -1, 4]] * 2),
    "beyond the vocabulary": torch.tensor([[3, VOCABULARY, 4]]),
    "beyond the vocabulary, two rows": torch.tensor([[3, VOCABULARY, 4]] * 2),
    "beyond any vocabulary": torch.tensor([[2**40]]),
    "without values": torch.ones(1, 5, dtype=torch.int64, device="meta"),
    "sparse": torch.ones(1, 5, dtype=torch.int64).to_sparse(),
    "an empty list": [],
    "empty rows": [[], []],
    "rows of other lengths": [[1, 2], [3]],
    "a set": {1, 2},
    "one number": 5,
}


@pytest.fixture(scope="module")
def llama() -> Any:
    return build_tiny("llama")


@pytest.fixture(scope="module")
def kv(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> BoundStore:
    kv = CacheStore(tmp_path_factory.mktemp("odd") / "store").bind(llama)
    kv.warm(STORED)
    return kv


def batch_mask(prompt: Any) -> torch.Tensor:
    return torch.ones(getattr(prompt, "shape", (2, 5))[:2])


WAYS: dict[str, Callable[[BoundStore, Any], Any]] = {
    "generate": lambda kv, prompt: kv.generate(prompt, max_new_tokens=2),
    "generate(input_ids=)": lambda kv, prompt: kv.generate(input_ids=prompt, max_new_tokens=2),
    "generate(inputs=)": lambda kv, prompt: kv.generate(inputs=prompt, max_new_tokens=2),
    "generate(mapping)": lambda kv, prompt: kv.generate({"input_ids": prompt}, max_new_tokens=2),
    "lookup": lambda kv, prompt: kv.lookup(prompt),
    "load": lambda kv, prompt: kv.load(prompt),
    "prepare": lambda kv, prompt: kv.prepare(prompt),
    "warm": lambda kv, prompt: kv.warm(prompt),
    "save": lambda kv, prompt: kv.save(kv.load(torch.arange(3, 22)[None]), prompt),
}


@pytest.mark.parametrize("way", WAYS)
def test_ids_that_are_none_are_refused_wherever_they_come(llama: Any, kv: BoundStore, way: str) -> None:
    fed: list[Any] = []
    hook = llama.get_input_embeddings().register_forward_hook(lambda *_: fed.append(0))
    try:
        for odd in ODD.values():
            with pytest.raises(InvalidRequestError) as refused:
                WAYS[way](kv, odd)
            assert len(str(refused.value)) > 20
    finally:
        hook.remove()
    assert fed == []


@pytest.mark.parametrize("odd", ["no token, two rows", "floats, two rows", "three dimensions", "a set", "one number"])
def test_batches_that_are_none_are_refused(kv: BoundStore, odd: str) -> None:
    cache = kv.load(torch.arange(3, 22)[None])
    for batch in (
        lambda: kv.load(ODD[odd], attention_mask=batch_mask(ODD[odd])),
        lambda: kv.save(cache, ODD[odd], attention_mask=batch_mask(ODD[odd])),
    ):
        with pytest.raises(InvalidPromptError):
            batch()


@pytest.mark.parametrize("rows", [1, 2])
def test_a_mask_of_fewer_tokens_is_refused(kv: BoundStore, rows: int) -> None:
    ids = torch.arange(3, 24)[None].repeat(rows, 1)
    with pytest.raises(InvalidPromptError, match="for 4 tokens a row, and the prompt has 21"):
        kv.generate(input_ids=ids, attention_mask=torch.ones(rows, 4, dtype=torch.int64), max_new_tokens=2)


def test_lists_of_rows_say_what_a_batch_is(kv: BoundStore) -> None:
    with pytest.raises(InvalidRequestError, match="return_tensors='pt'"):
        kv.generate([[3, 4], [5, 6]], max_new_tokens=2)
    with pytest.raises(InvalidPromptError, match="return_tensors='pt'"):
        kv.generate({"input_ids": [[3, 4], [5, 6]]}, max_new_tokens=2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_either_width_are_ids(kv: BoundStore, dtype: torch.dtype) -> None:
    ids = torch.arange(3, 24)[None].to(dtype)
    out = kv.generate(input_ids=ids, max_new_tokens=2, do_sample=False)
    assert kv.last_report is not None
    assert kv.last_report.reused_tokens == STORED.shape[1] - 1
    assert out.shape[1] >= ids.shape[1]


def test_attached_leaves_them_to_transformers(llama: Any, kv: BoundStore) -> None:
    with kv.attached(), pytest.raises(IndexError) as raised:
        llama.generate(torch.zeros(2, 0, dtype=torch.int64), max_new_tokens=2)
    assert not isinstance(raised.value, InvalidRequestError)
