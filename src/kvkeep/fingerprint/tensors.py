"""The digest of a tensor's content, and how many tensors are hashed at the speed of the memory.

The digest is a fixed tree, so that it depends on neither the number of threads nor the machine: the row-major bytes
of a tensor are cut into pieces of 16 MiB, each piece has its xxh3-128, and the tensor's digest covers its dtype, its
shape and the digests of its pieces. Where a tensor lies (device, strides, a shared storage) is not in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import xxhash

from kvkeep.errors import UnsupportedRequestError
from kvkeep.fingerprint.encoding import dtype_name
from kvkeep.keys import digest_fields

Key = TypeVar("Key")

PIECE_BYTES = 1 << 24
"""Bytes of one leaf of the tree; part of the definition of the digest."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements [first, last) of a tensor in row-major order."""

    tensor: torch.Tensor
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        return (self.last - self.first) * self.tensor.element_size()

    def digest(self) -> bytes:
        content = _row_major(self.tensor, self.first, self.last).view(torch.uint8)
        return xxhash.xxh3_128_digest(content.numpy().data)


def tensor_digests(tensors: Mapping[Key, torch.Tensor], *, threads: int | None = None) -> dict[Key, bytes]:
    """Hash the content of every tensor, by its key.

    Tensors that are the same memory (tied weights) are read once. A tensor on an accelerator is copied to the host
    piece by piece, never whole.

    Args:
        tensors: the tensors; each must be real (see :func:`check_hashable`).
        threads: how many threads hash; all cores by default.
    """
    owners: dict[Any, Key] = {}  # memory -> the first key that has it
    owner_of = {key: owners.setdefault(_memory(tensor), key) for key, tensor in tensors.items()}
    pieces = {key: list(_pieces(_detached(tensors[key]))) for key in owners.values()}
    digests = iter(_hash([piece for group in pieces.values() for piece in group], threads))
    trees = {key: _tree(tensors[key], [next(digests) for _ in group]) for key, group in pieces.items()}
    return {key: trees[owner] for key, owner in owner_of.items()}


def check_hashable(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose content is not its own memory.

    Raises:
        UnsupportedRequestError: for meta tensors, sparse layouts and tensor subclasses that wrap other tensors.
    """
    if tensor.is_meta:
        problem = "is on the meta device: it has no content (offloaded weights live elsewhere); load it to a device"
    elif tensor.layout is not torch.strided or tensor.is_quantized:
        problem = f"has the layout {tensor.layout} and dtype {tensor.dtype}, which are not fingerprinted"
    elif hasattr(tensor, "__tensor_flatten__"):
        problem = f"is a {type(tensor).__qualname__}, a tensor made of other tensors, which is not fingerprinted"
    else:
        return
    raise UnsupportedRequestError(f"{name} {problem}; or give bind(model_id=...) your own name for these weights")


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_subclass(torch.Tensor)  # type: ignore[arg-type, unused-ignore]


def _memory(tensor: torch.Tensor) -> Any:
    storage = tensor.untyped_storage()
    return (tensor.device, storage.data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


def _pieces(tensor: torch.Tensor) -> Iterator[_Piece]:
    step = PIECE_BYTES // tensor.element_size()
    for first in range(0, tensor.numel(), step):
        yield _Piece(tensor, first, min(first + step, tensor.numel()))


def _row_major(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Elements [first, last) of a tensor, contiguous and on the host; copies no more than it must."""
    if tensor.is_contiguous():
        return tensor.view(-1)[first:last].cpu()
    row = tensor[0].numel()
    top, bottom = first // row, -(-last // row)
    return tensor[top:bottom].cpu().reshape(-1)[first - top * row : last - top * row].contiguous()


def _hash(pieces: list[_Piece], threads: int | None) -> list[bytes]:
    jobs = list(_jobs(pieces))
    workers = min(threads or _cores(), len(jobs))
    if workers <= 1:
        return [piece.digest() for piece in pieces]
    with ThreadPoolExecutor(workers, thread_name_prefix="kvkeep-hash") as pool:
        return [digest for digests in pool.map(_run, jobs) for digest in digests]


def _jobs(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Runs of pieces of 16 to 32 MiB: large enough to hide the cost of a job, small enough to balance."""
    job: list[_Piece] = []
    size = 0
    for piece in pieces:
        job.append(piece)
        size += piece.nbytes
        if size >= PIECE_BYTES:
            yield job
            job, size = [], 0
    if job:
        yield job


def _run(job: list[_Piece]) -> list[bytes]:
    return [piece.digest() for piece in job]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _tree(tensor: torch.Tensor, digests: list[bytes]) -> bytes:
    shape = b"".join(size.to_bytes(8, "little") for size in tensor.shape)
    return digest_fields("kvkeep/tensor/1", dtype_name(tensor.dtype).encode(), shape, *digests)
