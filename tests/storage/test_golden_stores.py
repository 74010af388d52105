"""Stores as earlier versions left them, kept here: they are read, or miss cleanly.

``tests/golden/format-N`` holds the entries of a store in format N under ``KEY.entry``, and its ``store.json``. What a
release wrote stays as it is: a change of the format adds a folder.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from entry_drafts import Layer, Sample, full, read_everything, sample, sliding

from kvkeep import CacheStore
from kvkeep.entry_format import encode, metadata
from kvkeep.errors import EntryUnknownError
from kvkeep.storage.skeleton import STORE_FILE

GOLDEN = Path(__file__).parents[1] / "golden"


def golden_samples() -> list[Sample]:
    """What the entries hold."""
    states = {"conv_states": ("F16", (1, 4, 3)), "recurrent_states": ("F64", (2, 5, 5))}
    layers = [full("F32", heads=1, dim=2, room=5), sliding(10, 8), Layer(kind="linear", snapshots=states)]
    whole = sample(
        layers, end=20, cross=[full("BF16", heads=1, dim=4)], cross_rows=3, state={"rope_deltas": ("I64", (1, 1))}
    )
    return [whole, sample([full("BF16", heads=1, dim=2), full("F8_E4M3", heads=1, dim=2)], end=300, seed=1)]


@pytest.fixture(params=sorted(path.name for path in GOLDEN.iterdir()))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CacheStore:
    root, kept = tmp_path / "store", GOLDEN / request.param
    root.mkdir()
    shutil.copyfile(kept / STORE_FILE, root / STORE_FILE)
    for path in kept.glob("*.entry"):
        place = root / "entries" / path.stem[:2] / f"{path.stem}.safetensors"
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)
    return CacheStore(root)


@pytest.mark.requirement("R8")
def test_a_store_of_an_earlier_release_is_read(store: CacheStore) -> None:
    samples = golden_samples()
    assert {entry.key for entry in store.entries()} == {one.key for one in samples}
    for one in samples:
        assert store.verify(one.key) is None
        with store._files.open(one.key) as file:
            found = read_everything(file, one)
            assert found == {name: data.tobytes() for name, data in one.content.items()}
            assert file.read_ids() == one.draft.ids
        assert not store._files.put(one.draft)[1], "what this version would write has the same key"


@pytest.mark.requirement("R8", part=True)
def test_an_entry_of_a_newer_format_misses_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, store = golden_samples()[0], CacheStore(tmp_path / "store")
    with monkeypatch.context() as patch:
        for module in (encode, metadata):
            patch.setattr(module, "FORMAT_VERSION", 2)
        store._files.put(one.draft)
    (path,) = (tmp_path / "store" / "entries").glob("*/*.safetensors")
    before = path.stat()
    with pytest.raises(EntryUnknownError, match="format 2 is not the format 1"), store._files.open(one.key):
        pass
    assert store.get(one.key) is None
    assert store.entries() == []
    assert store.verify(one.key) is not None
    assert path.stat().st_ino == before.st_ino
    assert CacheStore(tmp_path / "store").entries() == []
    assert path.exists()
    assert not (tmp_path / "store" / "quarantine").exists()
