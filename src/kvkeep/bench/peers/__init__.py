"""Other programs that keep a prefix's state, each run by an interpreter of its own that the user names.

What a peer runs is a script of this package that imports nothing of kvkeep. It gets a job as one JSON line:
``model`` (a folder or a file), ``ids`` of the whole prompt, ``prefix`` (tokens), ``directory`` (an empty one),
``starts``, ``colds`` and ``answer`` (tokens). It answers with ``{"result": ...}``: ``version``, ``way`` (in words),
``cold`` and ``seconds`` (of each repetition, taken around the whole call), ``tokens_per_second``, ``disk_bytes``,
``tokens`` and ``cold_tokens``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvkeep.bench.children import STEADY, ask
from kvkeep.bench.results import Result
from kvkeep.bench.sizes import Sweep
from kvkeep.bench.subjects import ANSWER, QUESTION, Subject
from kvkeep.bench.timing import Progress
from kvkeep.errors import InvalidRequestError, KvkeepError


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A program to compare with.

    Attributes:
        name: what it is called, here and by its makers.
        script: the file beside this one that runs it.
        takes: whether it reads the converted ``"folder"`` of a model, or the ``"gguf"`` file.
        longest: the longest prefix that it is asked for, in tokens; some are very slow on a CPU.
        python: the interpreter that has it, if one was named.
    """

    name: str
    script: str
    takes: str
    longest: int
    python: str | None = None


PEERS = (
    Peer(name="llama-cpp", script="llama_cpp_script.py", takes="gguf", longest=1 << 20),
    Peer(name="kvboost", script="kvboost_script.py", takes="folder", longest=1 << 20),
    Peer(name="mlx-lm", script="mlx_lm_script.py", takes="folder", longest=512),
)


def peers_named(pythons: Mapping[str, str]) -> list[Peer]:
    """All peers, those with an interpreter that were named.

    Raises:
        InvalidRequestError: there is no peer of this name.
    """
    known = {peer.name for peer in PEERS}
    for name in pythons:
        if name not in known:
            raise InvalidRequestError(f"there is no peer {name!r}: name one of {', '.join(sorted(known))}")
    return [replace(peer, python=pythons.get(peer.name)) for peer in PEERS]


def not_measured(peer: Peer, subject: Subject, why: str, tokens: int = 0) -> Result:
    """The result that says that there is none."""
    return Result(
        model=subject.name,
        weights=subject.weights,
        way=peer.name,
        prefix_tokens=tokens,
        prompt_tokens=tokens + QUESTION if tokens else 0,
        note=why,
    )


def measure_peer(
    peer: Peer,
    python: str,
    subject: Subject,
    prompts: Mapping[int, list[int]],
    sweep: Sweep,
    directory: Path,
    progress: Progress,
) -> Iterator[Result]:
    """Run a peer on the same prompts: one result a length, or one that says why there is none.

    Args:
        peer: the program.
        python: its interpreter.
        subject: the model, which must be a real one: peers read files.
        prompts: the ids of each prefix with its question, by the prefix's length.
        sweep: how often.
        directory: where its files may lie.
        progress: called before and after each length.
    """
    model = subject.gguf if peer.takes == "gguf" else subject.folder
    if model is None:
        yield not_measured(peer, subject, "it reads models from files, and there is none of this one")
        return
    script = Path(__file__).with_name(peer.script)
    for done, (tokens, ids) in enumerate(prompts.items()):
        progress(f"{subject.name}: {peer.name}", done, len(prompts))
        if tokens > peer.longest:
            yield not_measured(peer, subject, "too slow here at this length", tokens)
            continue
        place = directory / f"{peer.name}-{tokens}"
        place.mkdir()
        job = {
            "model": model,
            "ids": ids,
            "prefix": tokens,
            "directory": str(place),
            "starts": sweep.starts,
            "colds": sweep.colds,
            "answer": ANSWER,
        }
        try:
            found = ask([python, str(script)], job, environment=STEADY, progress=progress)
        except KvkeepError as error:
            yield not_measured(peer, subject, str(error), tokens)
            continue
        yield Result(
            model=subject.name,
            weights=subject.weights,
            way=f"{peer.name} {found['version']}",
            prefix_tokens=tokens,
            prompt_tokens=len(ids),
            seconds=found["seconds"],
            tokens_per_second=found["tokens_per_second"],
            disk_bytes=found["disk_bytes"],
            same_tokens=found["tokens"] == found["cold_tokens"],
            note=f"{found['way']}; cold {min(found['cold']):.2f} s; tokens compared with its own cold run's",
        )
    progress(f"{subject.name}: {peer.name}", len(prompts), len(prompts))
