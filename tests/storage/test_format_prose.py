"""A reader written from FORMAT.md alone, with nothing of kvkeep in it, agrees with kvkeep on real entries."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from entry_drafts import everything, full, sample, sliding
from xxhash import xxh3_128_digest as H  # noqa: N812

from kvkeep.storage.entries import EntryFiles
from kvkeep.storage.fs import Directory

SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}


def F(domain: str, *fields: bytes | None) -> bytes:  # noqa: N802
    framed = [len(f).to_bytes(8, "little") + f if f is not None else b"\xff" * 8 for f in (domain.encode(), *fields)]
    return H(b"".join(framed))


def digits(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text)


def canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


class Stranger:
    """Reads a file of the format, checking everything that the text says."""

    def __init__(self, path: Path) -> None:
        content = path.read_bytes()
        n = int.from_bytes(content[:8], "little")
        assert 2 <= n <= 2**20
        assert (8 + n) % 4096 == 0
        header = content[8 : 8 + n]
        (seal,) = re.findall(rb'\\"seal\\":\\"([0-9a-f]{32})\\"', header)
        assert H(header.replace(seal, b"0" * 32)).hex().encode() == seal
        assert header.count(b"{") + header.count(b"[") <= 2**15
        self.tensors = json.loads(header)
        (text,) = self.tensors.pop("__metadata__").values()
        self.meta = json.loads(text)
        assert canonical(self.meta) == text.encode()
        assert (self.meta["format"], self.meta["block"]) == (1, 256)
        assert (self.meta["codec"], self.meta["auth"]) == (None, None)
        self.data = content[8 + n :]
        assert len(self.data) == max(t["data_offsets"][1] for t in self.tensors.values())
        self.check_key(path.stem)
        self.check_digests()

    def bytes_of(self, name: str) -> bytes:
        begin, end = self.tensors[name]["data_offsets"]
        return self.data[begin:end]

    def check_key(self, name: str) -> None:
        key = self.meta["key"]
        parts = [digits(key[part]) for part in ("weights", "config", "adapters", "dtypes")]
        assert F("kvkeep/model/1", *parts).hex() == key["model"]
        media = [[m["kind"], m["content"], m["start"], m["end"]] for m in key["media"]]
        found = F(
            "kvkeep/key/1",
            digits(key["model"]),
            digits(key["tokenizer"]),
            digits(key["namespace"]),
            canonical(media) if media else None,
            key["form"].encode(),
            None if key["tp"] is None else canonical([key["tp"]["size"], key["tp"]["rank"]]),
            digits(key["prefix"]),
        )
        assert found.hex() == key["hash"] == name

    def ids(self) -> list[int]:
        raw = self.bytes_of("ids")
        return [int.from_bytes(raw[at : at + 4], "little") for at in range(0, len(raw), 4)]

    def check_digests(self) -> None:
        table = self.bytes_of("digests")
        assert H(table).hex() == self.meta["digests"]
        units = [self.bytes_of("ids") + self.bytes_of("chain")]
        for group in ("layers", "cross"):
            for number, layer in enumerate(self.meta[group] or []):
                for begin in range(0, layer["rows"], 256):
                    end = min(begin + 256, layer["rows"])
                    roles = sorted(role for role, how in layer["tensors"].items() if how == "rows")
                    units.append(b"".join(self.rows(f"{group}.{number}.{role}", begin, end) for role in roles))
                snapshots = sorted(role for role, how in layer["tensors"].items() if how == "snapshot")
                if snapshots:
                    units.append(b"".join(self.bytes_of(f"{group}.{number}.{role}") for role in snapshots))
        if self.meta["state"]:
            units.append(b"".join(self.bytes_of(f"state.{role}") for role in sorted(self.meta["state"])))
        assert table == b"".join(map(H, units))

    def rows(self, name: str, begin: int, end: int) -> bytes:
        heads, slots, dim = self.tensors[name]["shape"]
        width = dim * SIZES.get(self.tensors[name]["dtype"], 1)
        raw = self.bytes_of(name)
        return b"".join(raw[(h * slots + begin) * width : (h * slots + end) * width] for h in range(heads))


@pytest.mark.parametrize(
    "one",
    [
        everything(),
        everything(start=250, room=40),
        sample([full("BF16", room=1), sliding(first=1, window=512)], end=512),
        sample([], end=1),
    ],
    ids=["everything", "a later stretch", "two blocks", "one token"],
)
def test_a_stranger_reads_what_kvkeep_wrote(tmp_path: Path, one) -> None:  # type: ignore[no-untyped-def]
    EntryFiles(Directory(tmp_path)).put(one.draft)
    file = Stranger(tmp_path / "entries" / one.key[:2] / f"{one.key}.safetensors")
    meta, ids = file.meta, file.ids()
    assert ids == one.draft.ids.tolist()
    if meta["start"] == 0:
        chain = [F("kvkeep/prefix/1", F("kvkeep/namespace/1", b""))]
        assert meta["key"]["namespace"] == F("kvkeep/namespace/1", b"").hex()
        raw = b"".join(i.to_bytes(8, "little") for i in ids)
        for begin in range(0, len(ids) // 256 * 256, 256):
            chain.append(H(chain[-1] + raw[8 * begin : 8 * begin + 2048]))
        assert file.bytes_of("chain") == b"".join(chain[1:])
        rest = raw[len(ids) // 256 * 2048 :]
        assert meta["key"]["prefix"] == (H(chain[-1] + rest) if rest else chain[-1]).hex()
    for number, layer in enumerate(meta["layers"]):
        for role in (role for role, how in layer["tensors"].items() if how == "rows"):
            name = f"layers.{number}.{role}"
            assert file.rows(name, 0, layer["rows"]) == one.content[name].tobytes()
            assert layer["first"] + layer["rows"] == meta["end"]
