"""Network file systems: recognised, and served without a database and without locks."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from sized_drafts import LEAST, seeds, sized

from kvkeep import CacheStore
from kvkeep.storage import index, listing, network
from kvkeep.storage.locks import KeyLocks
from kvkeep.storage.network import network_kind

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:25 / /home/me/remote rw shared:9 - nfs4 server:/export rw
31 22 0:26 / /home/me/with\\040space rw - cifs //server/share rw
32 30 8:2 / /home/me/remote/local rw - xfs /dev/sdb rw
33 22 0:27 / /ssh rw master:3 propagate_from:2 - fuse.sshfs me@host: rw
34 22 0:28 / /over rw - ext4 /dev/sdc rw
35 22 0:29 / /over rw - lustre mgs:/scratch rw
36 22 0:30 / /root rw - fuse-overlayfs overlay rw
37 22 8:3 / /ntfs rw - fuseblk /dev/sdd rw
38 22 0:31 / /nine rw - 9p tag rw
39 22 0:32 / /ceph rw - ceph mon:/ rw
short
"""


@pytest.mark.requirement("R25", part=True)
@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/me", None),
        ("/home/me/remote", "nfs4"),
        ("/home/me/remote/store", "nfs4"),
        ("/home/me/remoter", None),
        ("/home/me/remote/local/store", None),
        ("/home/me/with space/store", "cifs"),
        ("/ssh/store", "fuse.sshfs"),
        ("/over/store", "lustre"),
        ("/root/store", None),
        ("/ntfs/store", None),
        ("/nine/store", "9p"),
        ("/ceph/store", "ceph"),
    ],
)
def test_a_network_file_system_is_known_by_its_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, kind: str | None
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    monkeypatch.setattr(network, "_MOUNTS", mounts)
    assert network_kind(Path(path)) == kind
    monkeypatch.setattr(network, "_MOUNTS", tmp_path / "nothing")
    assert network_kind(Path(path)) is None


@pytest.mark.requirement("R25")
def test_two_hosts_share_a_store_without_database_and_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(index, "network_kind", lambda path: "nfs4")
    monkeypatch.setattr(KeyLocks, "_acquire", lambda *_: (None, True))
    monkeypatch.setattr(listing, "_POLL", 0.0)
    with caplog.at_level(logging.WARNING):
        here, there = CacheStore(tmp_path / "store"), CacheStore(tmp_path / "store", max_bytes=4 * LEAST)
    assert [r.message for r in caplog.records] == [
        f"{tmp_path / 'store'} is on a network file system (nfs4): each process reads the headers of its entries"
    ]
    entries = {seed: here.put(sized(LEAST, seed=seed)) for seed in range(3)}
    assert seeds(there, entries) == [0, 1, 2]
    entries |= {seed: there.put(sized(LEAST, seed=seed)) for seed in (3, 4, 5)}
    left = seeds(there, entries)
    assert len(left) == 4 and 5 in left, "the budget holds by what one host knows"
    assert seeds(here, entries) == left
    assert here.put(sized(LEAST, seed=5)).key == entries[5].key, "the first one stays"
    assert here.remove(entries[5].key)
    assert 5 not in seeds(there, entries)
    assert all(there.verify(entry.key) is None for entry in there.entries())
    assert not (tmp_path / "store" / "index").exists()
