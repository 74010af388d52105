"""Feeds the reader of entries whatever a fuzzer makes up: ``python fuzz_entries.py CORPUS SECONDS``, with atheris.

The fuzzer changes header bytes; a seal that agrees is put in, or nothing behind it would ever be reached.
"""

from __future__ import annotations

import re
import sys
import time

import atheris

with atheris.instrument_imports(include=["kvkeep.entry_format"]):
    import xxhash

    from kvkeep.entry_format import decode_header, decode_listing
    from kvkeep.errors import EntryDamagedError

SEAL = re.compile(rb'\\"seal\\":\\"([0-9a-f]{32})\\"')
slowest = 0.0


def sealed(header: bytes) -> bytes:
    """The header with a seal that agrees, if it has the place of one."""
    found = SEAL.search(header)
    if found is None:
        return header
    begin, end = found.span(1)
    zeroed = header[:begin] + b"0" * 32 + header[end:]
    return header[:begin] + xxhash.xxh3_128_hexdigest(zeroed).encode() + header[end:]


def one(data: bytes) -> None:
    """One input: the first two bytes say how much data there are behind the header."""
    global slowest
    size, header = int.from_bytes(data[:2], "little"), sealed(data[2:])
    began = time.process_time()
    for read in (lambda: decode_header(header, 8 + len(header) + size), lambda: decode_listing(header)):
        try:
            read()
        except EntryDamagedError:
            continue
    slowest = max(slowest, time.process_time() - began)
    if slowest > 0.5:  # instrumented code is slow
        raise RuntimeError(f"a header of {len(header)} bytes took {slowest:.2f} s")


if __name__ == "__main__":
    limits = ["-rss_limit_mb=512", "-max_len=16384", "-print_final_stats=1", "-timeout=5"]
    atheris.Setup([sys.argv[0], sys.argv[1], f"-max_total_time={sys.argv[2]}", *limits], one)
    atheris.Fuzz()
