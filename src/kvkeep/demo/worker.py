"""A worker process of the demo: ``python -m kvkeep.demo.worker``, started by :mod:`kvkeep.demo.process`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import IO, Any

from kvkeep.demo.process import Progress, Settings
from kvkeep.errors import KvkeepError


def serve(source: IO[str], sink: IO[str]) -> None:
    """Do what the lines of ``source`` ask, in order, until it ends or an error of kvkeep has been reported."""

    def send(message: dict[str, Any]) -> None:
        sink.write(json.dumps(message) + "\n")
        sink.flush()

    try:
        for result in _results(source, lambda name, done, total: send({"progress": [name, done, total]})):
            send({"result": result})
    except KvkeepError as error:
        send({"error": {"type": type(error).__name__, "message": str(error)}})


def _results(source: IO[str], progress: Progress) -> Iterator[Any]:
    settings = Settings(**json.loads(source.readline()))
    began = time.perf_counter()
    from kvkeep.demo.subject import Subject  # imports torch and transformers: timed

    imported = time.perf_counter()
    subject = Subject(settings, progress)
    yield {"import": imported - began, **subject.seconds}
    for line in source:
        request = json.loads(line)
        yield getattr(subject, request.pop("do"))(**request)


def main() -> None:
    """Serve the parent at the other end of stdin and stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent as well, and it ends its workers
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as pipe:
        os.dup2(2, 1)  # whatever else this process prints is no answer
        serve(sys.stdin, pipe)


if __name__ == "__main__":
    main()
