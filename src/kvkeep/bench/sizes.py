"""How much is measured, and how often."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of one run.

    Attributes:
        tokens: of the entry that is put and loaded.
        puts: repetitions of putting it, which waits for the disk.
        loads: repetitions of loading it.
        cold_loads: repetitions of the same from the disk itself.
        entries: entries of the large store.
        lookup_tokens: of the prompts that are looked up in it.
        lookups: how often each of the prompts is looked up.
        rebuilds: repetitions of rebuilding the index.
        matrices: tensors of 4 MiB that are hashed.
        hashes: repetitions of hashing them.
        checks: repetitions of the identity check.
        generate_tokens: of the prompts that are generated from.
        generates: repetitions of generating.
        starts: repetitions of starting a process.
    """

    tokens: int
    puts: int
    loads: int
    cold_loads: int
    entries: int
    lookup_tokens: int
    lookups: int
    rebuilds: int
    matrices: int
    hashes: int
    checks: int
    generate_tokens: int
    generates: int
    starts: int


FULL = Sizes(
    tokens=2048,
    puts=11,
    loads=31,
    cold_loads=11,
    entries=10_000,
    lookup_tokens=8192,
    lookups=20,
    rebuilds=3,
    matrices=128,
    hashes=15,
    checks=300,
    generate_tokens=512,
    generates=41,
    starts=21,
)
"""What the bars are meant for."""

QUICK = Sizes(
    tokens=2048,
    puts=7,
    loads=11,
    cold_loads=5,
    entries=1000,
    lookup_tokens=8192,
    lookups=10,
    rebuilds=3,
    matrices=128,
    hashes=9,
    checks=100,
    generate_tokens=512,
    generates=11,
    starts=7,
)
"""For a first impression: fewer repetitions, and a tenth of the entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """How the ways to start from a prefix are compared.

    Attributes:
        lengths: of the prefix, in tokens, for real models.
        shape_lengths: the same for models with random weights.
        starts: repetitions of starting in each way.
        colds: repetitions of computing the prefix anew, as far as it is short.
        decode_lengths: those at which 32 more tokens are generated.
        memory_lengths: those at which memory is measured, in a process of its own.
        real: how many of the real models, SmolLM2 first.
        shapes: how many of the shapes, Qwen2.5 first.
        layers: of models with random weights; the output says so. All of them if they have fewer.
    """

    lengths: tuple[int, ...]
    shape_lengths: tuple[int, ...]
    starts: int
    colds: int
    decode_lengths: tuple[int, ...]
    memory_lengths: tuple[int, ...]
    real: int
    shapes: int
    layers: int


BAR_TOKENS = 2048
"""The length of prefix that the bars are meant for."""

FULL_SWEEP = Sweep(
    lengths=(128, 512, BAR_TOKENS, 8000, 16_000),
    shape_lengths=(128, 512, BAR_TOKENS, 8000, 16_000),
    starts=15,
    colds=3,
    decode_lengths=(512, BAR_TOKENS),
    memory_lengths=(512, BAR_TOKENS, 8000),
    real=2,
    shapes=2,
    layers=4,
)
"""From where a store hardly pays to the longest prefixes that a CPU has patience for."""

QUICK_SWEEP = Sweep(
    lengths=(512, BAR_TOKENS),
    shape_lengths=(512,),
    starts=4,
    colds=1,
    decode_lengths=(BAR_TOKENS,),
    memory_lengths=(BAR_TOKENS,),
    real=1,
    shapes=1,
    layers=2,
)
"""For a first impression: the length of the bars, and a shorter one."""
