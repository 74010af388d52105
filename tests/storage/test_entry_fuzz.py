"""Whatever the bytes of an entry are, it is refused or consistent, soon and without memory."""

from __future__ import annotations

import random
import re
import resource
import shutil
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
import xxhash
from entry_drafts import everything, full, sample
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.entry_format import decode_header, decode_listing, encode_header
from kvkeep.errors import EntryDamagedError
from kvkeep.signing import SigningKey
from kvkeep.storage import entry_writer

HERE = Path(__file__).parent
SEAL = re.compile(rb'\\"seal\\":\\"([0-9a-f]{32})\\"')
SAMPLES = (everything(room=3), everything(start=250), sample([full()], end=9))
PLANS = [entry_writer.plan(one.draft, key) for one in SAMPLES for key in (None, SigningKey.of(bytes(32)))]
HEADERS = [(encode_header(plan.meta, plan.tensors)[8:].rstrip(), plan.size - plan.data) for plan in PLANS]
PIECES = [
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b"\\",
    b'\\"',
    b"0",
    b"9" * 30,
    b"-1",
    b"null",
    b"true",
    b"1e999",
    b"NaN",
    b",",
    b":",
    b"rows",
    b"snapshot",
    b"=keys",
    b"../x",
    b"\xff",
    b"\\u0000",
    b'"ids"',
    b"[" * 500,
    b'\\"auth\\":null',
    b"F64",
]


def sealed(header: bytes) -> bytes:
    found = SEAL.search(header)
    if found is None:
        return header
    begin, end = found.span(1)
    seal = xxhash.xxh3_128_hexdigest(header[:begin] + b"0" * 32 + header[end:]).encode()
    return header[:begin] + seal + header[end:]


def mutated(dice: random.Random) -> tuple[bytes, int]:
    """A header of an entry with a few changes and a seal that agrees, and the bytes that follow it."""
    header, data = dice.choice(HEADERS)
    for _ in range(dice.randrange(1, 5)):
        at, length = dice.randrange(len(header)), dice.choice((0, 1, 1, 2, 8, 40))
        kind = dice.randrange(4)
        if kind == 0:
            new = dice.choice(PIECES)
        elif kind == 1:
            new = dice.randbytes(length)
        elif kind == 2:
            other = dice.randrange(len(header))
            new = header[other : other + length]
        else:
            numbers = [found.span() for found in re.finditer(rb"[0-9]+", header)] or [(at, at)]
            begin, end = dice.choice(numbers)
            at, length, new = begin, end - begin, str(dice.choice((0, 1, 255, 1 << 31, 1 << 62, 10**20))).encode()
        header = header[:at] + new + header[at + length :]
    return sealed(header), data


def read(header: bytes, data: int) -> bool:
    """Whether a header is accepted; anything but the one error goes through."""
    accepted = True
    for work in (lambda: decode_header(header, 8 + len(header) + data), lambda: decode_listing(header)):
        try:
            work()
        except EntryDamagedError:
            accepted = False
    return accepted


@pytest.mark.requirement("R30")
@given(st.binary(max_size=300), st.integers(0, len(HEADERS) - 1), st.integers(0, 3000), st.integers(0, 300))
def test_any_bytes_in_a_header(new: bytes, which: int, at: int, length: int) -> None:
    header, data = HEADERS[which]
    read(sealed(header[:at] + new + header[at + length :]), data)
    read(new, data)


def fuzz(seconds: float, wanted: int, seed: int) -> tuple[int, int, float]:
    dice, began, count, accepted, slowest = random.Random(seed), time.monotonic(), 0, 0, 0.0
    while count < wanted and time.monotonic() - began < seconds:
        header, data = mutated(dice)
        start = time.process_time()
        accepted += read(header, data)
        slowest = max(slowest, time.process_time() - start)
        count += 1
    return count, accepted, slowest


@pytest.mark.requirement("R30")
def test_changed_headers_are_refused_soon_and_without_memory(figures: list[str]) -> None:
    tracemalloc.start()
    for seed in range(300):
        header, data = mutated(random.Random(seed))
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        read(header, data)
        assert tracemalloc.get_traced_memory()[1] - before < (1 << 20) + 2 * (len(header) + data)
    tracemalloc.stop()
    count, accepted, slowest = fuzz(2, 10_000, 1)
    figures.append(f"changed headers: {count} read, {accepted} consistent, the slowest took {1e3 * slowest:.1f} ms")
    assert count > 100
    assert slowest < 0.05


@pytest.mark.slow
@pytest.mark.requirement("R30", part=True)
def test_a_fuzzer_finds_nothing(tmp_path: Path, figures: list[str]) -> None:
    """atheris, for a minute, from a corpus of headers; where it is not to be had, changes made by chance."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        import atheris  # noqa: F401
    except ImportError:
        count, accepted, slowest = fuzz(50, 1_000_000, 2)
        figures.append(f"without atheris: {count} headers, {accepted} consistent, {1e3 * slowest:.1f} ms at most")
        assert slowest < 0.05
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
        return
    corpus = tmp_path / "corpus"
    shutil.copytree(HERE / "entry_corpus", corpus)
    for number, (header, data) in enumerate(HEADERS):
        (corpus / f"header-{number}").write_bytes(data.to_bytes(2, "little") + header if data < 1 << 16 else header)
    # Behind a shell: a process begins with the peak memory of the one that starts it, and the fuzzer looks at that.
    shell = ["/bin/sh", "-c", '"$@"; exit $?', "sh"]
    done = subprocess.run(
        [*shell, sys.executable, "-W", "ignore", HERE / "fuzz_entries.py", str(corpus), "50"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=150,
    )
    told = dict(re.findall(r"stat::(\w+):\s+(\d+)", done.stderr))
    assert done.returncode == 0, done.stderr[-3000:]
    figures.append(f"atheris: {told['number_of_executed_units']} inputs, {told['peak_rss_mb']} MB at most")


def test_the_kept_corpus_is_refused_or_consistent() -> None:
    files = sorted((HERE / "entry_corpus").iterdir())
    assert files
    for path in files:
        content = path.read_bytes()
        read(sealed(content[2:]), int.from_bytes(content[:2], "little"))
