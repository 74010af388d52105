"""Weights that are made of other tensors, as quantization libraries make them: equal parts, equal model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, build_tiny
from torch.utils._pytree import tree_map
from typing_extensions import Self

from kvkeep import CacheStore
from kvkeep.errors import UnsupportedRequestError

IDS = torch.randint(3, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(1))


class Int8Rows(torch.Tensor):
    """A matrix as int8 with a scale a row, which computes with what it stands for."""

    codes: torch.Tensor
    scale: torch.Tensor
    settings: Any

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, settings: Any) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, settings: Any) -> None:
        self.codes, self.scale, self.settings = codes, scale, settings

    @classmethod
    def of(cls, matrix: torch.Tensor, settings: Any = "symmetric") -> Int8Rows:
        scale = matrix.abs().amax(dim=1, keepdim=True) / 127
        return cls((matrix / scale).round().to(torch.int8), scale, settings)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], self.settings

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale, args[0].settings)
        plain = lambda one: one.codes * one.scale if isinstance(one, cls) else one  # noqa: E731
        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


def quantized(settings: Any = "symmetric") -> Any:
    model = build_tiny("llama")
    for layer in model.model.layers:
        weight = Int8Rows.of(layer.mlp.up_proj.weight.data, settings)
        layer.mlp.up_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
    return model


def test_a_quantized_model_is_served_and_is_not_the_plain_one(tmp_path: Path) -> None:
    store = CacheStore(tmp_path / "store")
    model, same, plain = quantized(), quantized(), build_tiny("llama")
    kv = store.bind(model)
    assert kv.identity() == store.bind(same).identity()
    assert kv.identity().weights != store.bind(plain).identity().weights
    kv.warm(IDS[:, :30])
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(kv.generate(IDS, **options), model.generate(IDS, attention_mask=torch.ones_like(IDS), **options))
    assert (kv.last_report.reused_tokens, kv.last_report.reason) == (29, None)  # type: ignore[union-attr]


@pytest.mark.parametrize("part", ["codes", "scale"])
def test_each_part_counts_and_a_change_is_seen(tmp_path: Path, part: str) -> None:
    model = quantized()
    kv = CacheStore(tmp_path / "store").bind(model)
    before = kv.identity()
    assert kv.identity() is before
    getattr(model.model.layers[2].mlp.up_proj.weight, part)[0, 0] += 1
    after = kv.identity()
    assert after.weights != before.weights
    assert (after.config, after.dtypes) == (before.config, before.dtypes)


def test_settings_count(tmp_path: Path) -> None:
    store = CacheStore(tmp_path / "store")
    one, other = quantized("symmetric"), quantized({"groups": 4, "dtype": torch.int8})
    assert store.bind(one).identity().weights != store.bind(other).identity().weights


def test_settings_without_a_text_are_refused_by_name(tmp_path: Path) -> None:
    model = quantized(object())
    with pytest.raises(UnsupportedRequestError, match=r"layers\.0\.mlp\.up_proj\.weight\.recipe.* holds a object"):
        CacheStore(tmp_path / "store").bind(model)
