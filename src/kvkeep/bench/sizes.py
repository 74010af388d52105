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
    loads=21,
    entries=1000,
    lookup_tokens=8192,
    lookups=10,
    rebuilds=3,
    matrices=128,
    hashes=9,
    checks=100,
    generate_tokens=512,
    generates=21,
    starts=9,
)
"""For a first impression: fewer repetitions, and a tenth of the entries."""
