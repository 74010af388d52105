"""Other processes: forked from one interpreter that has torch and transformers imported already, and its own hash seed.

Importing the two takes seconds, each time that a process is started for a test that only needs *another* process.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import multiprocessing.forkserver
import os
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest

HASH_SEED = "77"
PRELOADED = ["elsewhere", "tiny_models", "kvkeep.bound", "transformers.models.llama.modeling_llama"]


def forking() -> Any:
    """A multiprocessing context whose processes have torch imported, and their hash seed from ``HASH_SEED``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", HASH_SEED)
        multiprocessing.forkserver.ensure_running()
    return context


def _run(program: str, arguments: Sequence[str], sink: Connection) -> None:
    sys.argv = ["-c", *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program, {"__name__": "__main__"})
    sink.send((os.getpid(), hash("kvkeep"), printed.getvalue()))


def run_elsewhere(program: str, *argument_lists: Sequence[object]) -> list[str]:
    """Run a program once for each list of arguments, at the same time, each in a process of its own; what each printed.

    Strings have other hashes there than here.
    """
    context = forking()
    running = []
    for arguments in argument_lists:
        source, sink = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(program, [str(one) for one in arguments], sink))
        process.start()
        sink.close()
        running.append((process, source))
    told = []
    for process, source in running:
        assert source.poll(240), "the process hangs"
        told.append(source.recv())  # EOFError: it failed, and its words are above
        process.join(60)
        assert process.exitcode == 0
    assert len({os.getpid(), *(pid for pid, _, _ in told)}) == 1 + len(told)
    assert hash("kvkeep") not in {number for _, number, _ in told} or os.environ.get("PYTHONHASHSEED") == HASH_SEED
    return [printed for _, _, printed in told]
