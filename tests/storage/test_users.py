"""Who may read and write a store: tried by other users, as which root can run a process."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from entry_drafts import full, sample

from kvkeep.errors import StoreFormatError
from kvkeep.store import CacheStore

pytestmark = pytest.mark.root

OWNER, MEMBER, STRANGER, GROUP, OTHERS = 20001, 20002, 20003, 20010, 20011
ONE, TWO = (sample([full()], end=300, seed=seed) for seed in (1, 2))

PROGRAM = textwrap.dedent(
    """
    import os, sys
    sys.path.insert(0, sys.argv[5])
    from entry_drafts import full, sample
    from kvkeep.store import CacheStore
    import kvkeep.storage.json_disk, kvkeep.collection
    root, user, group, umask = sys.argv[1], *map(int, sys.argv[2:5])
    os.setgroups([])
    os.setgid(group)
    os.setuid(user)
    os.umask(umask)
    one, two = (sample([full()], end=300, seed=seed) for seed in (1, 2))
    try:
        store = CacheStore(root, min_free=0)
        print("ids" if store.read_ids(one.key) == one.draft.ids else "wrong")
        store.put(two.draft)
        print(len(store.entries()), store.verify(two.key))
        print(CacheStore(root, readonly=True).verify(one.key))
    except Exception as error:
        print(type(error).__name__)
        try:
            print(CacheStore(root, readonly=True).read_ids(one.key) == one.draft.ids)
        except Exception as error:
            print(type(error).__name__)
    """
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder not in (Path("/"), Path("/tmp")):
            folder.chmod(folder.stat().st_mode | 0o055)
    return tmp_path / "store"


def run(root: Path, user: int, group: int, umask: int) -> list[str]:
    here = str(Path(__file__).parents[1])
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(root), str(user), str(group), str(umask), here]
    environment = {**os.environ, "HOME": "/nonexistent"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/", env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def make(root: Path, *, shared: bool, umask: int) -> None:
    root.mkdir()
    before = os.umask(umask)
    try:
        if shared:
            os.chown(root, OWNER, GROUP)
        CacheStore(root, shared=shared, min_free=0).put(ONE.draft)
    finally:
        os.umask(before)
    for path in (root, *root.rglob("*")):
        os.chown(path, OWNER, GROUP)
        if shared and path.is_dir():
            path.chmod(0o2770)


@pytest.mark.requirement("R33")
@pytest.mark.parametrize("umask", [0, 0o022, 0o077], ids=oct)
def test_a_shared_store_is_for_its_group_and_nobody_else(root: Path, umask: int) -> None:
    make(root, shared=True, umask=umask)
    assert run(root, MEMBER, GROUP, umask) == ["ids", "2", "None", "None"]
    assert run(root, OWNER, GROUP, umask)[0] == "ids"
    assert "ids" not in (found := run(root, STRANGER, OTHERS, umask))
    assert "True" not in found
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*")}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o2770}
    assert {mode for path, mode in modes.items() if path.suffix == ".safetensors"} == {0o440}
    assert not [path for path, mode in modes.items() if mode & 0o007]
    assert {path.stat().st_gid for path in root.rglob("*")} == {GROUP}


@pytest.mark.requirement("R33")
@pytest.mark.parametrize("umask", [0, 0o022, 0o077], ids=oct)
def test_a_private_store_is_for_its_owner_alone(root: Path, umask: int) -> None:
    make(root, shared=False, umask=umask)
    assert run(root, OWNER, GROUP, umask) == ["ids", "2", "None", "None"]
    for user, group in ((MEMBER, GROUP), (STRANGER, OTHERS)):
        found = run(root, user, group, umask)
        assert "ids" not in found
        assert "True" not in found
    assert not [path for path in (root, *root.rglob("*")) if path.stat().st_mode & 0o077]


@pytest.mark.requirement("R33")
def test_a_private_store_of_another_user_or_open_to_all_is_refused(root: Path) -> None:
    make(root, shared=False, umask=0o022)
    with pytest.raises(StoreFormatError, match="another user's"):
        CacheStore(root)
    assert CacheStore(root, readonly=True).verify(ONE.key) is None, "whoever may read it can do so without writing"
    os.chown(root, 0, 0)
    root.chmod(0o777)
    for readonly in (False, True):
        with pytest.raises(StoreFormatError, match="anybody may write"):
            CacheStore(root, readonly=readonly)
