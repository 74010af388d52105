"""Processes that measure: they get a job as one JSON line, and answer with JSON, one object a line.

What comes back is any number of ``{"progress": [name, done, total]}``, then ``{"result": ...}``. A process that says
nothing of the kind has failed, and the last line on its stderr says why.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from kvkeep.bench.timing import Progress
from kvkeep.errors import KvkeepError

STEADY = {
    # glibc gives freed memory back by default, and the next forward pass pays a fault a page for it: a noise of 2x.
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
}
"""The environment in which times can be compared."""

_QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def ask(command: Sequence[str], job: Mapping[str, Any], *, environment: Mapping[str, str], progress: Progress) -> Any:
    """Have a process do a job, and return its result.

    Args:
        command: the program and its arguments.
        job: what it is to do.
        environment: what to change of this process's environment.
        progress: called with what the process says of how far it is.

    Raises:
        KvkeepError: the process could not be started, or failed.
    """
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(  # noqa: S603  # our own module, or an interpreter that the user named
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **_QUIET, **environment},
            )
        except OSError as error:
            raise KvkeepError(f"{command[0]} cannot be run: {error.strerror}") from error
        with process:
            try:
                result = _listen(process, json.dumps(job), progress)
            except BaseException:
                process.kill()
                raise
        if result is None:
            errors.seek(0)
            words = errors.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
            raise KvkeepError(f"a process of the bench ended with exit code {process.returncode}: {words[-1]}")
    return result


def _listen(process: subprocess.Popen[bytes], job: str, progress: Progress) -> Any:
    """What the process answers; ``None`` if it ends before."""
    if process.stdin is None or process.stdout is None:
        return None
    try:
        process.stdin.write(job.encode() + b"\n")
        process.stdin.close()
    except BrokenPipeError:  # it ended before it read: what it said on stderr tells why
        return None
    result = None
    for line in process.stdout:
        answer = json.loads(line)
        if "progress" in answer:
            progress(*answer["progress"])
        else:
            result = answer["result"]
    return result
