"""A program that opens and uses a hundred hostile stores under an audit hook, and prints what they made it do."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import sqlite3
import sys
from contextlib import suppress
from pathlib import Path

from entry_drafts import IDENTITY, full, read_everything, sample

import kvkeep.collection
import kvkeep.storage.json_disk  # what is imported late, before anybody watches
from kvkeep.errors import KvkeepError
from kvkeep.manifest import load_manifest
from kvkeep.prefixes import Prefix
from kvkeep.store import CacheStore

base, secret = Path(sys.argv[1]), Path(sys.argv[2])
one, other = (sample([full()], end=300, seed=seed) for seed in (1, 2))
good = base / "good"
store = CacheStore(good, min_free=0)
for each in (one, other):
    store.put(each.draft)
store.name(store.entry(one.key), "name")
del store


class Payload:
    def __reduce__(self):
        return os.system, (f"touch {secret}/pwned",)


NAMES = [
    "../../secret/file",
    str(secret / "file"),
    "a\0b",
    "a/../../secret/file",
    "\u202egpj",
    "x" * 300,
    "..",
    "~/file",
    "os",
    "os.system",
    "kvkeep.cli",
    "%2e%2e%2fsecret%2ffile",
    "file:///etc/hostname",
    "c\u043e\u0440y",
    "",
    ".",
]


def rows(text, *values):
    def work(root):
        db = sqlite3.connect(root / "index" / "cache.db")
        db.execute(text, values)
        db.commit()
        db.close()

    return work


def file(place, content):
    def work(root):
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.chmod(0o600)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return work


def flip(seed):
    def work(root):
        dice = random.Random(seed)
        for path in [*root.glob("entries/*/*"), root / "index" / "cache.db"]:
            path.chmod(0o600)
            data = bytearray(path.read_bytes())
            for _ in range(8):
                data[dice.randrange(min(len(data), 6000))] = dice.randrange(256)
            path.write_bytes(data)

    return work


ref = {"name": "name", "key": one.key, "pin": True, "expires": None, "created": 1}
hostile = []
for name in NAMES:
    hostile += [
        rows("UPDATE Cache SET mode = 3, value = NULL, filename = ?", name),
        rows("UPDATE Cache SET filename = ?", name),
        rows("UPDATE Cache SET key = ? WHERE rowid = 1", name),
        rows("UPDATE Cache SET value = replace(value, ?, ?)", one.key, name),
        file("refs/name.json", json.dumps({**ref, "key": name})),
        file("refs/name.json", json.dumps({**ref, "name": name})),
    ]
hostile += [
    rows("UPDATE Cache SET mode = 4, value = ?", pickle.dumps(Payload())),
    rows("UPDATE Cache SET raw = 0, key = ? WHERE rowid = 1", pickle.dumps(Payload())),
    rows("INSERT INTO Settings VALUES ('_directory', ?)", str(secret)),
    file("store.json", '{"format": 1, "shared": "os.system"}'),
    *[
        file(place, pickle.dumps(Payload()))
        for place in ("store.json", "refs/name.json", "journal/1.jsonl", f"entries/{one.key[:2]}/{one.key}.safetensors")
    ],
    *map(flip, range(20)),
]

events, inside, root = [], False, None
known = set(sys.modules)


def hook(event, args):
    global inside
    if root is None or inside:
        return
    inside = True
    try:
        if event in (
            "pickle.find_class",
            "exec",
            "compile",
            "os.system",
            "subprocess.Popen",
            "os.exec",
            "os.posix_spawn",
            "marshal.loads",
            "ctypes.dlopen",
        ):
            events.append([number, event, str(args)[:150]])
        elif event == "import" and args[0] not in known and not args[0].startswith("kvkeep"):
            events.append([number, event, args[0]])
        elif event == "sqlite3.connect" and str(root) not in str(args[0]):
            events.append([number, event, str(args[0])])
        elif event in (
            "open",
            "os.listdir",
            "os.remove",
            "os.rename",
            "os.mkdir",
            "os.link",
            "os.symlink",
            "os.truncate",
        ) and isinstance(args[0], (str, bytes)):
            path = os.fsdecode(args[0])
            if Path(path).is_absolute():
                real = os.path.realpath(path)
                if (
                    not (real + "/").startswith(str(root) + "/")
                    and path != "/proc/self/mountinfo"
                    and not real.startswith((sys.prefix, str(SOURCE)))
                ):
                    events.append([number, event, path])
            elif "/" in path or path == "..":
                events.append([number, event, path])
    finally:
        inside = False


SOURCE = Path(kvkeep.__file__).parent
sys.addaudithook(hook)


def use(path, readonly):
    try:
        opened = CacheStore(path, readonly=readonly, min_free=0, durability="none")
    except KvkeepError:
        return 0
    wrong = 0

    def check(file, tokens):
        nonlocal wrong
        wrong += any(data != one.content[name].tobytes() for name, data in read_everything(file, one).items())

    for work in (
        lambda: opened.serve(IDENTITY, Prefix(one.draft.ids), limit=300, use=check),
        opened.entries,
        lambda: opened.entry("name"),
        lambda: opened.verify(one.key),
        lambda: opened.header(other.key),
        lambda: readonly or opened.put(one.draft),
        lambda: readonly or opened.gc(grace=0),
        lambda: opened.gc(dry_run=True),
        *(lambda name=name: opened.entry(name) for name in NAMES[number % 5 :: 5]),
        *(lambda name=name: opened.read_ids(name) for name in NAMES[number % 5 :: 5]),
    ):
        with suppress(KvkeepError, FileNotFoundError):
            work()
    return wrong


root, number = good, -1  # once without harm, so that what is imported late is imported
use(good, False)
use(good, True)
known |= set(sys.modules)
root, events, wrong = None, [], 0
for number, work in enumerate(hostile):
    path = base / str(number)
    shutil.copytree(good, path)
    work(path)
    root = path
    wrong += use(path, number % 3 == 0)
    root = None
    shutil.rmtree(path)
for name in NAMES:
    path = base / "warm.toml"
    path.write_text("version = 1\nmodel = 'm'\n[[prefix]]\nname = " + json.dumps(name) + "\nids = [1]\n")
    with suppress(KvkeepError):
        load_manifest(path)
seen, events, root = events, [], good  # and that the hook sees what it must
pickle.loads(pickle.dumps(os.getcwd))
(secret / "file").read_text()
eval("1")
import colorsys  # noqa: E402, F401

root = None
print(
    json.dumps(
        {
            "control": sorted({event[1] for event in events}),
            "stores": len(hostile),
            "events": seen,
            "wrong": wrong,
            "pwned": (secret / "pwned").exists(),
        }
    )
)
