"""Kill a process at any system call that it makes, or let any one of them fail, and see what that leaves behind.

strace does it (Linux, Debian's ``strace``). The traced process is forked from this one and waits until it is watched,
so what counts is the action alone, and a point costs hundredths of a second.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

WRITING: tuple[str, ...] = (
    *("open", "openat", "creat", "close", "write", "pwrite64", "pwritev", "writev", "fsync", "fdatasync", "syncfs"),
    *("rename", "renameat", "renameat2", "link", "linkat", "unlink", "unlinkat", "mkdir", "mkdirat", "ftruncate"),
    *("truncate", "fallocate", "fcntl", "flock", "fchmod", "chmod", "fchmodat"),
)
"""The calls by which a process changes files, and those by which it comes to them."""

_CHANGING = frozenset(WRITING) - {"open", "openat", "close", "fcntl", "flock"}
_LINE = re.compile(r"(\w+)\((.*)")
_PR_SET_PTRACER, _ANY = 0x59616D61, 2**64 - 1


@dataclass(frozen=True, slots=True)
class Point:
    """One system call of an action.

    Attributes:
        name: its name.
        number: how many calls of this name came before it, plus 1.
        line: the call as strace wrote it, if this is one that was made.
    """

    name: str
    number: int
    line: str = field(default="", compare=False)

    @property
    def changes(self) -> bool:
        """Whether it may change what is on disk: a kill at any other leaves what a kill at the next change leaves."""
        return self.name in _CHANGING or "O_CREAT" in self.line


@dataclass(frozen=True, slots=True)
class Failure:
    """What an action raised.

    Attributes:
        kinds: the names of its class and the classes above it.
        errno: its number, if it has one.
        text: what it says.
    """

    kinds: tuple[str, ...]
    errno: int | None
    text: str


@dataclass(frozen=True, slots=True)
class Traced:
    """What an action did.

    Attributes:
        lines: its calls as strace writes them, such as ``fsync(5) = 0``.
        finished: whether it came to its end, by an exception too.
        failure: the exception, if that was the end.
    """

    lines: tuple[str, ...]
    finished: bool
    failure: Failure | None = None

    def calls(self) -> list[Point]:
        """Its calls, each with its number among those of its name."""
        counts: Counter[str] = Counter()
        points = []
        for line in self.lines:
            if found := _LINE.match(line):
                counts[found[1]] += 1
                points.append(Point(found[1], counts[found[1]], line))
        return points

    def count(self, *names: str) -> int:
        """How many calls have one of these names."""
        return sum(point.name in names for point in self.calls())


@lru_cache(maxsize=1)
def is_possible() -> bool:
    """Whether strace is there and may trace a process."""
    if shutil.which("strace") is None:
        return False
    try:
        return trace(lambda: None).finished
    except RuntimeError:
        return False


def trace(action: Callable[[], object], *, names: Iterable[str] = WRITING) -> Traced:
    """Run an action in a child process, and tell which calls of these names it made."""
    return _trace(action, names, ())


def kill_at(action: Callable[[], object], point: Point) -> Traced:
    """Run an action in a child process that is killed (``SIGKILL``) when it makes one call."""
    return _trace(action, WRITING, ("-e", f"inject={point.name}:signal=KILL:when={point.number}"))


def fail_at(action: Callable[[], object], point: Point, error: str) -> Traced:
    """Run an action in a child process in which one call is not made, and fails.

    Args:
        action: what to run.
        point: the call.
        error: the name of its error, such as ``"ENOSPC"``.
    """
    return _trace(action, WRITING, ("-e", f"inject={point.name}:error={error}:when={point.number}"))


# --- inside -------------------------------------------------------------------------------------------------------


def _trace(action: Callable[[], object], names: Iterable[str], options: Sequence[str], timeout: float = 60) -> Traced:
    mine, theirs = socket.socketpair()
    with mine, tempfile.TemporaryDirectory(prefix="kvkeep-strace-") as folder:
        with warnings.catch_warnings():  # of threads that the child does not have, and does without
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            _run(action, theirs)
        theirs.close()
        log = Path(folder) / "calls"
        wanted = "trace=" + ",".join(f"?{name}" for name in names)
        command = ["strace", "-p", str(child), "-o", str(log), "-e", wanted, "-e", "signal=none", *options]
        try:
            with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:  # noqa: S603 - a fixed program
                said = strace.stderr.readline() if strace.stderr else ""
                if "attached" not in said:
                    strace.kill()
                    raise RuntimeError(f"strace cannot trace a child process: {said.strip()}")
                mine.settimeout(timeout)
                mine.sendall(b"!")
                with suppress(ConnectionResetError):
                    said = mine.recv(1 << 16).decode()
                os.waitpid(child, 0)
                child = 0
        finally:
            if child:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        return _read(log.read_text(errors="replace"), said)


def _read(log: str, said: str) -> Traced:
    lines = tuple(line for line in log.splitlines() if _LINE.match(line))
    told = json.loads(said) if said.startswith("{") else None
    if told is None:
        return Traced(lines, finished=False)
    failure = Failure(tuple(told["kinds"]), told["errno"], told["text"]) if told["kinds"] else None
    return Traced(lines, finished=True, failure=failure)


def _run(action: Callable[[], object], control: socket.socket) -> NoReturn:
    """In the child: what it does beside the action are calls that nobody counts."""
    try:
        gc.disable()  # or a file of the parent's that becomes garbage is closed amid the action
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(_ANY), 0, 0, 0)
        control.recv(1)
        told: dict[str, object] = {"kinds": (), "errno": None, "text": ""}
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - the parent judges it
            kinds = [kind.__name__ for kind in type(error).__mro__]
            told = {"kinds": kinds, "errno": getattr(error, "errno", None), "text": str(error)[:2000]}
        control.send(json.dumps(told).encode())
    finally:
        os._exit(0)
