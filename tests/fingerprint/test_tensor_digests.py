from __future__ import annotations

import pytest
import torch
import xxhash

from kvkeep.fingerprint import tensors
from kvkeep.fingerprint.tensors import PIECE_BYTES, tensor_digests
from kvkeep.keys import digest_fields


def by_hand(tensor: torch.Tensor) -> bytes:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    pieces = [data[i : i + PIECE_BYTES] for i in range(0, len(data), PIECE_BYTES)]
    shape = b"".join(size.to_bytes(8, "little") for size in tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.").encode()
    return digest_fields("kvkeep/tensor/1", dtype, shape, *(xxhash.xxh3_128_digest(piece) for piece in pieces))


def digest(tensor: torch.Tensor, **options: int) -> bytes:
    return tensor_digests({"t": tensor}, **options)["t"]


@pytest.fixture(scope="module")
def large() -> torch.Tensor:
    return torch.randn(10_007, 1_031, generator=torch.Generator().manual_seed(0))  # 41 MB: three pieces, the last short


def test_the_tree_is_as_documented(large: torch.Tensor) -> None:
    assert PIECE_BYTES == 16 * 1024 * 1024
    assert digest(large) == by_hand(large)
    assert digest(torch.arange(4)) == by_hand(torch.arange(4))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_do_not_count(large: torch.Tensor, threads: int) -> None:
    many = {str(i): torch.full((1_000_000,), float(i)) for i in range(12)} | {"large": large}
    assert tensor_digests(many, threads=threads) == {name: by_hand(tensor) for name, tensor in many.items()}


def test_layout_does_not_count(large: torch.Tensor) -> None:
    transposed = large.t().contiguous().t()
    strided = torch.stack([large, large + 1], dim=1)[:, 0]
    assert not transposed.is_contiguous() and not strided.is_contiguous()
    assert digest(transposed) == digest(strided) == by_hand(large)
    row = torch.arange(3.0)
    assert digest(row.expand(4, 3)) == by_hand(row.repeat(4, 1))


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.int8, torch.bool, torch.complex64],
    ids=str,
)
def test_every_number_format_by_its_bits(dtype: torch.dtype) -> None:
    bits = torch.randint(0, 2, (96,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tensor = bits.view(dtype)
    assert digest(tensor) == by_hand(tensor)
    bits[-1] ^= 1
    assert digest(tensor) == by_hand(tensor) != digest(bits.view(torch.uint8))


def test_empty_and_scalar_tensors_have_their_shape() -> None:
    shapes = [(0,), (0, 3), (), (1,), (1, 1)]
    digests = [digest(torch.ones(shape)) for shape in shapes]
    assert len(set(digests)) == len(shapes)
    assert digests == [by_hand(torch.ones(shape)) for shape in shapes]


def test_a_not_a_number_and_a_negative_zero_keep_their_bits() -> None:
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    assert digest(torch.tensor([float("nan")])) == digest(torch.tensor([float("nan")]))


def test_the_same_memory_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = tensors._row_major

    def counting(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
        read.append((last - first) * tensor.element_size())
        return original(tensor, first, last)

    monkeypatch.setattr(tensors, "_row_major", counting)
    memory = torch.arange(8.0)
    same = tensor_digests({"a": memory, "b": memory.view(8), "half": memory[:4], "table": memory.view(2, 4)})
    assert sum(read) == 32 + 16 + 32
    assert same["a"] == same["b"]
    assert len(set(same.values())) == 3
