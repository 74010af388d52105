"""The contract of tiers, on the tiers that need nothing else."""

from __future__ import annotations

import doctest
import importlib
import time
from pathlib import Path

import pytest

from kvkeep.errors import TierError
from kvkeep.testing import TierContract
from kvkeep.tiers import LocalTier, MemoryTier, Tier, open_tier


class TestMemory(TierContract):
    tier = MemoryTier()

    def make_tier(self) -> Tier:
        return self.tier


class TestLocal(TierContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make_tier(self) -> Tier:
        return LocalTier(self.folder / "tier")


def test_what_a_url_or_a_path_opens(tmp_path: Path) -> None:
    tier = MemoryTier()
    assert open_tier(tier) is tier
    for where in (tmp_path / "one", str(tmp_path / "two")):
        assert isinstance(open_tier(where), LocalTier)
        assert Path(where).is_dir()


def test_objects_in_a_directory_cannot_be_changed(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    tier.put_if_absent("a/b", b"1")
    assert (tmp_path / "objects" / "a" / "b").stat().st_mode & 0o777 == 0o400
    assert not list((tmp_path / "tmp").iterdir())


def test_a_directory_that_cannot_be_used_is_a_tier_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(TierError):
        LocalTier(tmp_path / "file" / "below")
    tier = LocalTier(tmp_path / "tier")
    (tmp_path / "tier" / "objects" / "a").mkdir(parents=True)
    part = tier.get("a")
    assert part is not None
    with pytest.raises(TierError):
        part.read()  # it is no file


def test_the_contract_catches_a_tier_that_replaces_objects() -> None:
    class Replacing(MemoryTier):
        def put_if_absent(self, name: str, data: bytes) -> bool:
            self.delete(name)
            return super().put_if_absent(name, data)

    class Contract(TierContract):
        tier = Replacing()

        def make_tier(self) -> Tier:
            return self.tier

    with pytest.raises(AssertionError, match="second object"):
        Contract().test_the_first_one_stays()


def test_the_contract_catches_a_tier_that_shows_what_is_not_whole() -> None:
    class Torn(MemoryTier):
        def put_if_absent(self, name: str, data: bytes) -> bool:
            super().put_if_absent(name, data[: len(data) // 2])
            time.sleep(0.1)
            self.delete(name)
            return super().put_if_absent(name, data)

    class Contract(TierContract):
        tier = Torn()

        def make_tier(self) -> Tier:
            return self.tier

    with pytest.raises(AssertionError, match="a part of an object"):
        Contract().test_nobody_sees_a_part_of_an_object()


def test_the_example_of_the_contract_runs() -> None:
    assert doctest.testmod(importlib.import_module("kvkeep.testing.tier")).failed == 0
