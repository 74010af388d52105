"""The parent's end of the demo: it starts worker processes and asks them, over pipes, one JSON object a line.

The first line to a worker is its :class:`Settings`, each later one ``{"do": METHOD, ...arguments}`` for a method of
:class:`~kvkeep.demo.subject.Subject`. What comes back is any number of ``{"progress": [name, done, total]}``, then
``{"result": ...}``, or ``{"error": {"type": ..., "message": ...}}`` for an error of kvkeep.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast

from kvkeep import errors
from kvkeep.errors import KvkeepError

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a worker works with.

    Attributes:
        model: hub id or folder.
        dtype: the number format to load the model in, or ``None`` for the checkpoint's own.
        manifest: path of the manifest with the prefixes.
        store: path of the store; ``None`` for the control, which has none.
        label: appended to the names of entries, so that two models can keep the same prefixes in one store.
        threads: threads that torch uses.
    """

    model: str
    dtype: str | None
    manifest: str
    store: str | None
    label: str = ""
    threads: int = 2


class WorkerProcess:
    """A Python process of its own that holds a model; :func:`start_worker` makes it.

    Attributes:
        seconds: what starting took: ``import``, ``model`` and ``bind``.
    """

    def __init__(self, settings: Settings, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._requests, self._answers = cast("IO[str]", process.stdin), cast("IO[str]", process.stdout)
        self.seconds: dict[str, float] = self._exchange(asdict(settings), None)

    def ask(self, do: str, *, progress: Progress | None = None, **arguments: Any) -> Any:
        """Have the worker call one of its methods, and return what that returned.

        Raises:
            KvkeepError: the worker raised it, or it ended.
        """
        return self._exchange({"do": do, **arguments}, progress)

    def _exchange(self, message: dict[str, Any], progress: Progress | None) -> Any:
        with suppress(BrokenPipeError):  # it ended; what it said last tells why
            self._requests.write(json.dumps(message) + "\n")
            self._requests.flush()
        for line in self._answers:
            answer = json.loads(line)
            if "result" in answer:
                return answer["result"]
            if "error" in answer:
                raise _error(answer["error"])
            if progress is not None:
                progress(*answer["progress"])
        raise KvkeepError(f"a process of the demo ended with exit code {self._process.wait()}; its words are above")


@contextmanager
def start_worker(settings: Settings) -> Iterator[WorkerProcess]:
    """Start a fresh process that loads the model, and end it when the block ends."""
    command = [sys.executable, "-m", "kvkeep.demo.worker"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(  # noqa: S603  # this very interpreter and a module of ours
        command, stdin=pipe, stdout=pipe, text=True, encoding="utf-8", env=_environment(settings)
    )
    try:
        yield WorkerProcess(settings, process)
    except BaseException:
        process.kill()
        raise
    finally:
        with suppress(BrokenPipeError):  # it ended before it read all: the error that says so is on its way
            cast("IO[str]", process.stdin).close()  # tells it to end
        process.wait()
        cast("IO[str]", process.stdout).close()


def _environment(settings: Settings) -> dict[str, str]:
    """The environment of a worker: alike for those with a store and without."""
    changed = {
        # glibc gives freed memory back by default, and the next forward pass pays a fault a page for it: a noise of 2x.
        "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
        "TRANSFORMERS_VERBOSITY": "error",
    }
    if Path(settings.model).is_dir():  # otherwise a bar shows how far the download is
        changed["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    return {**os.environ, **changed}


def _error(source: dict[str, str]) -> KvkeepError:
    kind = getattr(errors, source["type"], KvkeepError)
    error: KvkeepError = kind(source["message"])
    return error
