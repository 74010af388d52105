"""The contract of tiers, on object stores: in memory, in files, and behind HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest
from s3_server import BUCKET, S3Server

from kvkeep.testing import TierContract
from kvkeep.tiers import Tier, open_tier

pytest.importorskip("obstore")


class TestObjectStoreInMemory(TierContract):
    @pytest.fixture(autouse=True)
    def _tier(self) -> None:
        self.tier = open_tier("memory:///")

    def make_tier(self) -> Tier:
        return self.tier


class TestObjectStoreInFiles(TierContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make_tier(self) -> Tier:
        return open_tier(f"file://{self.folder}/tier")


class TestS3(TierContract):
    @pytest.fixture(autouse=True)
    def _server(self, s3: S3Server) -> None:
        self.server = s3

    def make_tier(self) -> Tier:
        return open_tier(f"s3://{BUCKET}/some/prefix", self.server.options)


class TestS3WithoutConditions(TestS3):
    @pytest.fixture(autouse=True)
    def _without(self, s3: S3Server) -> None:
        s3.conditions = False
        self.server = s3

    def test_another_version_is_not_there(self) -> None:
        """A server that knows no conditions gives what is there; digests tell."""
