"""What kvkeep does with one type of model: saved, loaded in a fresh object, compared bit for bit, and continued.

``python tests/sweep/conform.py`` prints one line a type and the totals; ``--write`` writes the table of exceptions of
this transformers version anew, ``--json`` every record. Nothing that is wrong ever becomes a row of the table.
"""

from __future__ import annotations

import argparse
import copy
import gc
import inspect
import json
import math
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_zoo import FAMILIES, PLAIN_IDS, CannotBuildError, build
from transformers import DynamicCache

from kvkeep import CacheStore, compat
from kvkeep.bound import BoundStore
from kvkeep.errors import KvkeepError, UnsupportedCacheError, UnsupportedRequestError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LENGTH, PREFIX, PROMPT = 48, 40, 44
TOLERANCE = 1e-3
"""How far the first logits of ``generate`` may be from those without a store, relative to the largest."""
EXACT, REFUSED, NOT_BUILT, WRONG = "exact", "refused", "cannot be built", "WRONG"
REASON_WORDS = 9
_CACHE_FIELDS = ("cache", "past_key_values", "cache_params", "state", "mems", "past_buckets_states")
_PASSING = {"shared_layers"}
"""What gemma3n of 4.57 leaves on the cache and writes anew in each pass before it is read."""
_OPTIONS = {
    "max_new_tokens": 1,
    "do_sample": False,
    "num_beams": 1,
    "return_dict_in_generate": True,
    "output_logits": True,
}

Forward = Callable[[torch.Tensor, Any], Any]


@dataclass(frozen=True)
class Record:
    """What became of one type."""

    family: str
    name: str
    outcome: str
    reason: str = ""
    model: str = ""
    cache: str = ""
    layers: tuple[str, ...] = ()
    traits: tuple[str, ...] = ()
    reused: int = 0
    generate_error: float = 0.0
    continuation_error: float = 0.0
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def signature(self) -> tuple[str, ...]:
        """Types with the same one go the same way through kvkeep."""
        refusal = " ".join(self.reason.split(" ")[2:6])
        notes = (note.partition(":")[0].rstrip("0123456789.e-") for note in self.notes)
        return (self.family, self.outcome, refusal, self.cache, *sorted({*self.layers, *self.traits, *notes}))

    def line(self) -> str:
        about = f" ({self.reason})" if self.reason else ""
        extra = f" [{', '.join(self.notes)}]" if self.notes else ""
        kinds = " + ".join(sorted(set(self.layers)))
        return f"{self.family} {self.name}: {self.outcome}{about} {self.cache} {kinds}{extra} {self.seconds:.2f} s"


class WrongError(Exception):
    """kvkeep did something that it must not do; the message says what differs."""


@dataclass
class Subject:
    """One model, and how it is fed."""

    model: Any
    family: str
    argument: str = ""
    encoder: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ids_name(self) -> str:
        return "decoder_input_ids" if self.encoder else "input_ids"

    def prompt(self, ids: torch.Tensor) -> Any:
        """A prompt as kvkeep takes it."""
        return {**self.encoder, self.ids_name: ids} if self.encoder else ids

    def generate(self, ids: torch.Tensor) -> Any:
        return self.model.generate(**{self.ids_name: ids, **self.encoder}, **_OPTIONS)

    def forward(self, ids: torch.Tensor, cache: Any = None, seen: int = 0) -> Any:
        inputs: dict[str, Any] = {self.ids_name: ids, **self.encoder}
        if cache is not None:
            inputs[self.argument] = cache
        if compat.takes(self.model, "cache_position"):
            inputs["cache_position"] = torch.arange(seen, seen + ids.shape[1])
        if compat.takes(self.model, "use_cache"):
            inputs["use_cache"] = True
        torch.manual_seed(0)  # what is drawn at each pass (hashes, jitter) is drawn the same
        with torch.no_grad():
            return self.model(**inputs)


def check(family: str, name: str) -> Record:
    """Build one type and put it through everything."""
    began = time.perf_counter()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # such small products are slower with more
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            record = _check(family, name)
    finally:
        torch.set_num_threads(threads)
    return replace(record, seconds=round(time.perf_counter() - began, 3))


def _check(family: str, name: str) -> Record:
    record = Record(family, name, NOT_BUILT, model=FAMILIES[family][name])
    ids = random_ids(LENGTH)
    try:
        subject = _subject(build(family, name), family)
    except CannotBuildError as error:
        return replace(record, reason=str(error))
    if subject.encoder and subject.model.can_generate():  # as generate begins, and so every prompt of such a model
        ids[0, 0] = subject.model.generation_config.decoder_start_token_id
    with tempfile.TemporaryDirectory(prefix="kvkeep-sweep-") as folder:
        bound = _attempt("bind", lambda: CacheStore(Path(folder, "saved")).bind(subject.model))
        try:
            cache = _prefilled(subject, ids[:, :PREFIX])
        except Exception as error:  # noqa: BLE001
            return replace(record, reason=f"one forward pass: {_said(error)}")
        record = replace(record, cache=type(cache).__name__, layers=_layer_names(cache), traits=_traits(cache))
        record, controls = _control(record, subject, cache, ids)
        try:
            return _conform(record, subject, bound, cache, controls, ids, Path(folder))
        except WrongError as error:
            return replace(record, outcome=WRONG, reason=str(error))


def random_ids(length: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(PLAIN_IDS.start, PLAIN_IDS.stop, (1, length), generator=generator)


def _said(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}"


# --- the model alone ---


def _subject(model: Any, family: str) -> Subject:
    encoder: dict[str, Any] = {}
    if compat.takes(model, "decoder_input_ids"):
        encoder = {"input_ids": random_ids(24, seed=2)}
    return Subject(model, family, encoder=encoder)


def _prefilled(subject: Subject, ids: torch.Tensor) -> Any:
    """The cache as the model itself or its ``generate`` makes it; ``None`` if neither does."""
    out = subject.forward(ids)
    logits = _logits(out)
    if not torch.isfinite(logits).all():
        raise ValueError("the logits of the tiny model are not finite")
    name, own = _cache_of(out)
    parameters = inspect.signature(subject.model.forward).parameters
    subject.argument = name if name in parameters else compat.forward_cache_argument(subject.model)
    if subject.encoder:
        return own
    if type(own).__name__ in ("DynamicCache", "EncoderDecoderCache"):
        # As generate prepares it: with the layers that the configuration names.
        own = DynamicCache(config=compat.text_config(subject.model))
        subject.forward(ids, own)
    if own is None and subject.model.can_generate():
        torch.manual_seed(0)
        try:
            out = subject.model.generate(ids, **_OPTIONS)
        except Exception:  # noqa: BLE001 - one that cannot generate has no cache from there
            return None
        name, own = _cache_of(out)
        subject.argument = name if name in parameters else subject.argument
    return own


def _logits(out: Any) -> torch.Tensor:
    logits = getattr(out, "logits", None)
    if logits is None:
        logits = getattr(out, "prediction_scores", None)
    return out[0] if logits is None else logits


def _cache_of(out: Any) -> tuple[str, Any]:
    for name in _CACHE_FIELDS:
        value = out.get(name) if hasattr(out, "get") else None
        if value is not None:
            return name, value
    return "", None


def _layer_names(cache: Any) -> tuple[str, ...]:
    parts = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    if parts[0] is not None:
        return tuple(f"{side}:{kind}" for side, part in zip("sx", parts, strict=True) for kind in _layer_names(part))
    return tuple(type(layer).__name__ for layer in getattr(cache, "layers", ()))


def _traits(cache: Any) -> tuple[str, ...]:
    """What the shapes of a cache's rows have that others do not."""
    pairs = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in getattr(cache, "layers", ())]
    shapes = [
        (keys.shape, values.shape)
        for keys, values in pairs
        if isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor)
    ]
    found = {
        "keys and values of different shapes": any(keys != values for keys, values in shapes),
        "one head": any(len(keys) == 4 and keys[1] == 1 for keys, _ in shapes),
        "layers of different widths": len({keys[-1] for keys, _ in shapes}) > 1,
        "layers of different heads": len({keys[1] for keys, _ in shapes if len(keys) == 4}) > 1,
        "rows that are not four-dimensional": any(len(keys) != 4 for keys, _ in shapes),
    }
    return tuple(name for name, there in found.items() if there)


def _continue(subject: Subject, cache: Any, ids: torch.Tensor, step: int) -> torch.Tensor:
    """The logits of the tokens behind the prefix, ``step`` of them a pass. The cache is used up."""
    logits = []
    for begin in range(PREFIX, LENGTH, step):
        out = subject.forward(ids[:, begin : begin + step], cache, begin)
        logits.append(_logits(out))
        name, new = _cache_of(out)
        if name and not hasattr(cache, "layers"):
            cache = new  # a model that returns its state anew
    return torch.cat(logits, dim=1)


# --- kvkeep ---


def _control(record: Record, subject: Subject, cache: Any, ids: torch.Tensor) -> tuple[Record, dict[int, torch.Tensor]]:
    """The logits of continuing the cache in memory, by the number of tokens a pass, and what is odd about them."""
    controls: dict[int, torch.Tensor] = {}
    notes: list[str] = []
    for step in (LENGTH - PREFIX, 1) if cache is not None else ():
        try:
            controls[step] = _continue(subject, copy.deepcopy(cache), ids, step)
        except Exception as error:  # noqa: BLE001 - some types take one token at a time, some none
            notes.append(f"the model cannot continue {step} a pass: {_said(error)[:80]}")
    for step, control in controls.items():
        subject.forward(random_ids(24, seed=3))  # what the module itself remembers is gone
        if not same(_continue(subject, copy.deepcopy(cache), ids, step), control):
            notes.append(f"two continuations of one cache in memory differ, {step} a pass")
    error = _continuation_error(subject, ids, controls)
    if error > TOLERANCE:
        notes.append(f"the model alone, continuing, is off by {error:.2g}")
    return replace(record, notes=tuple(notes), continuation_error=error), controls


def _conform(
    record: Record,
    subject: Subject,
    bound: Any,
    cache: Any,
    controls: Mapping[int, torch.Tensor],
    ids: torch.Tensor,
    folder: Path,
) -> Record:
    """What kvkeep makes of it. ``bound`` is the store bound before the first pass, or why it could not be."""
    try:
        if isinstance(bound, Exception):
            raise bound
        _save_and_load(subject, bound, cache, ids, controls, folder)
        record = replace(record, outcome=EXACT)
    except RefusedError as refusal:
        record = replace(record, outcome=REFUSED, reason=str(refusal))
    if not subject.model.can_generate():
        return record
    return _generate(record, subject, ids, folder)


def _continuation_error(subject: Subject, ids: torch.Tensor, controls: Mapping[int, torch.Tensor]) -> float:
    """How far the model's own continuations are from one pass over everything: nothing that kvkeep can change."""
    whole = _logits(subject.forward(ids))[:, PREFIX:]
    return max((_relative(control, whole) for control in controls.values()), default=0.0)


class RefusedError(Exception):
    """kvkeep refused, with an error that says why."""


def _typed(what: str, call: Callable[[], Any]) -> Any:
    """The call's result; a refusal by name is one, and any other error is wrong."""
    try:
        return call()
    except (UnsupportedCacheError, UnsupportedRequestError) as error:
        raise RefusedError(_said(error)) from error
    except KvkeepError as error:
        raise WrongError(f"{what} raised {_said(error)}") from error
    except Exception as error:
        raise WrongError(f"{what} raised an error without a type of kvkeep's: {_said(error)}") from error


def _attempt(what: str, call: Callable[[], Any]) -> Any:
    """The call's result, or what it raised, to be raised later."""
    try:
        return _typed(what, call)
    except (RefusedError, WrongError) as error:
        return error


def _save_and_load(
    subject: Subject,
    kv: BoundStore,
    cache: Any,
    ids: torch.Tensor,
    controls: Mapping[int, torch.Tensor],
    folder: Path,
) -> None:
    if cache is None:
        _typed("warm", lambda: kv.warm(subject.prompt(ids[:, :PREFIX])))
        raise WrongError("warm stored something for a model that makes no cache")
    kept = copy.deepcopy(cache)
    _typed("save", lambda: kv.save(cache, subject.prompt(ids[:, :PREFIX])))
    if not controls:
        raise WrongError("saved a cache that the model itself cannot continue")
    if difference := first_difference(kept, cache):
        raise WrongError(f"save changed the cache: {difference}")
    fresh = _typed("bind", lambda: CacheStore(folder / "saved").bind(subject.model))
    for step, control in controls.items():
        for turn in ("first", "second") if step > 1 else ("first",):
            loaded = _typed("load", lambda: fresh.load(subject.prompt(ids)))
            if loaded is None:
                raise WrongError(f"load missed: {fresh.lookup(subject.prompt(ids)).reason}")
            if difference := first_difference(kept, loaded):
                raise WrongError(f"the loaded cache is not the saved one: {difference}")
            try:
                logits = _continue(subject, loaded, ids, step)
            except Exception as error:
                raise WrongError(f"the {turn} loaded cache cannot be continued: {_said(error)}") from error
            if not same(logits, control):
                raise WrongError(f"the {turn} loaded cache continues otherwise, {step} a pass: {_off(logits, control)}")


def _generate(record: Record, subject: Subject, ids: torch.Tensor, folder: Path) -> Record:
    """The first logits of ``generate`` with and without a store, which must be the same for a refused type, too."""
    try:
        torch.manual_seed(0)
        plain = subject.generate(ids[:, :PROMPT]).logits[0]
    except Exception as error:  # noqa: BLE001
        return replace(record, notes=(*record.notes, f"the model cannot generate: {_said(error)[:80]}"))
    try:
        kv = _typed("bind", lambda: CacheStore(folder / "warmed").bind(subject.model))
    except RefusedError:
        return record
    try:
        _typed("warm", lambda: kv.warm(subject.prompt(ids[:, :PREFIX])))
    except RefusedError as refusal:
        if record.outcome == EXACT and "goes on from a cache" not in str(refusal):
            raise WrongError(f"save takes what warm refuses: {refusal}") from refusal
        return replace(record, notes=(*record.notes, f"warm refuses: {refusal}"[:160]))
    torch.manual_seed(0)
    try:
        ours = _typed("generate", lambda: kv.generate(subject.prompt(ids[:, :PROMPT]), **_OPTIONS)).logits[0]
    except RefusedError as refusal:
        raise WrongError(f"generate refused instead of running without the store: {refusal}") from refusal
    error = _relative(ours, plain)
    report = kv.last_report
    reused = 0 if report is None else report.reused_tokens
    if not error <= TOLERANCE:
        tokens = min(reused, PREFIX - 1)  # what was reused of an encoder is counted, too
        alone = _relative(_continued(subject, ids, tokens), plain) if reused else 0.0
        raise WrongError(
            f"generate's first logits are off by {error:.2g} with {reused} tokens reused; the model alone, continuing "
            f"as many, is off by {alone:.2g}"
        )
    notes = record.notes
    if record.outcome == EXACT and str(getattr(report, "reason", "")).startswith("guard:"):
        alone = _relative(_continued(subject, ids, PREFIX - 1), plain)
        if alone <= TOLERANCE:
            raise WrongError(f"what warm stored is never reused, where it should be refused: {report.reason}")
        notes = (*notes, f"transformers itself goes on from a cache otherwise than generate, by {alone:.2g}")
    if record.outcome == EXACT and not reused:
        notes = (*notes, f"generate reused nothing: {report.reason if report else 'no report'}")
    if record.outcome == REFUSED and reused:
        notes = (*notes, f"save refused, and generate reused {reused} tokens")
    return replace(record, reused=reused, generate_error=error, notes=notes)


def _continued(subject: Subject, ids: torch.Tensor, tokens: int) -> torch.Tensor:
    """The logits behind the prompt when the model alone computes its first ``tokens`` tokens in a pass of their own."""
    cache = DynamicCache(config=compat.text_config(subject.model))
    cache = compat.paired(cache) if subject.encoder else cache
    subject.forward(ids[:, :tokens], cache)
    return _logits(subject.forward(ids[:, tokens:PROMPT], cache, tokens))[:, -1]


# --- comparing ---


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _relative(one: torch.Tensor, other: torch.Tensor) -> float:
    largest = other.abs().max().item()
    return math.inf if one.shape != other.shape else (one - other).abs().max().item() / max(largest, 1e-9)


def _off(one: torch.Tensor, other: torch.Tensor) -> str:
    return f"off by {_relative(one, other):.2g} of the largest logit"


def first_difference(saved: Any, loaded: Any) -> str | None:
    """The first thing in the saved cache that the loaded one holds otherwise: tensors, and the counters beside them."""
    there = dict(_contents(loaded, ""))
    for path, value in _contents(saved, ""):
        other = there.get(path)
        if value is None:
            if isinstance(other, torch.Tensor):
                return f"{path}: nothing was saved, a tensor came back"
            continue
        if path not in there:
            return f"{path} is missing"
        if isinstance(value, torch.Tensor):
            if not isinstance(other, torch.Tensor) or value.dtype != other.dtype or not same(value, other):
                shape = tuple(getattr(other, "shape", ()))
                return f"{path}: {tuple(value.shape)} was saved, {shape} came back with other contents"
        elif value != other:
            return f"{path}: {value!r} was saved, {other!r} came back"
    count = sum(1 for _, value in _contents(saved, "") if isinstance(value, torch.Tensor) and value.numel())
    return None if count else "there is not one tensor in it"


def _contents(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor | int | str) or value is None:
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _contents(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _contents(item, f"{path}[{number}]")
    elif type(value).__module__.partition(".")[0] in ("transformers", "kvkeep") and hasattr(value, "__dict__"):
        names = [name for name in vars(value) if not name.startswith("_") and name not in _PASSING]
        # Tensors may be kept behind a property, as layers with room for more do.
        names += [name for name in ("keys", "values") if hasattr(type(value), name)]
        for name in names:
            yield from _contents(getattr(value, name), f"{path}.{name}" if path else name)


# --- the table ---


def table_path() -> Path:
    """The table of this version of transformers: one for each minor version."""
    major, minor = transformers.__version__.split(".")[:2]
    return Path(__file__).with_name(f"exceptions_{major}_{minor}.toml")


@dataclass(frozen=True)
class Table:
    """The committed expectations: whatever is not named in it must be exact."""

    transformers: str
    counts: Mapping[str, Mapping[str, int]]
    refused: Mapping[str, Mapping[str, str]]
    not_built: Mapping[str, Mapping[str, str]]
    representatives: Mapping[str, Sequence[str]]

    @classmethod
    def read(cls, path: Path) -> Table:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
        families = {name: given[name] for name in FAMILIES}
        return cls(
            given["transformers"],
            {name: one["counts"] for name, one in families.items()},
            {name: one.get("refused", {}) for name, one in families.items()},
            {name: one.get("cannot_be_built", {}) for name, one in families.items()},
            {name: one["representatives"] for name, one in families.items()},
        )

    def objection(self, record: Record) -> str | None:
        """Why a record is not what the table says, or nothing."""
        expected, words = EXACT, ""
        if record.name in self.refused[record.family]:
            expected, words = REFUSED, self.refused[record.family][record.name]
        elif record.name in self.not_built[record.family]:
            expected, words = NOT_BUILT, self.not_built[record.family][record.name]
        if record.outcome != expected or not record.reason.startswith(words):
            return f"{record.line()}, where the table says: {expected}{f' ({words})' if words else ''}"
        return None


def first_words(reason: str) -> str:
    return " ".join(reason.split(" ")[:REASON_WORDS])


def representatives(records: Sequence[Record]) -> list[str]:
    """One type, the quickest, of each way through kvkeep."""
    chosen: dict[tuple[str, ...], Record] = {}
    for record in records:
        if record.outcome in (EXACT, REFUSED):
            best = chosen.get(record.signature)
            if best is None or record.seconds < best.seconds - 0.1:
                chosen[record.signature] = record
    return sorted(record.name for record in chosen.values())


def write_table(records: Sequence[Record], path: Path) -> None:
    lines = [
        "# What the conformance sweep expects of this version; every type that is not named here must be exact.",
        "# Written by `python tests/sweep/conform.py --write`.",
        f"transformers = {_quoted(transformers.__version__)}",
    ]
    for family in FAMILIES:
        of_family = [record for record in records if record.family == family]
        counts = Counter(record.outcome for record in of_family)
        numbers = ", ".join(f"{_quoted(name)} = {counts[name]}" for name in (EXACT, REFUSED, NOT_BUILT))
        names = "".join(f"    {_quoted(name)},\n" for name in representatives(of_family))
        lines += ["", f"[{family}]", f"counts = {{ {numbers} }}", f"representatives = [\n{names}]"]
        for title, outcome in (("refused", REFUSED), ("cannot_be_built", NOT_BUILT)):
            rows = sorted((one.name, one.reason) for one in of_family if one.outcome == outcome)
            texts = [(name, first_words(why)) for name, why in rows]
            lines += ["", f"[{family}.{title}]", *(f"{_quoted(name)} = {_quoted(text)}" for name, text in texts)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# --- the command ---


def sweep(families: Iterable[str], names: Sequence[str] = ()) -> Iterator[Record]:
    for family in families:
        for name in FAMILIES[family]:
            if not names or name in names:
                yield check(family, name)
        gc.collect()  # models have cycles; once for many, as it takes as long as a small type


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="only these types")
    parser.add_argument("--family", choices=list(FAMILIES), help="only this one")
    parser.add_argument("--write", action="store_true", help="write the table of this transformers version anew")
    parser.add_argument("--json", type=Path, help="write every record to this file")
    options = parser.parse_args()
    if options.write and (options.types or options.family):
        parser.error("--write needs the whole sweep")
    transformers.logging.set_verbosity_error()
    records = []
    for record in sweep([options.family] if options.family else FAMILIES, options.types):
        records.append(record)
        print(record.line(), flush=True)
    totals = Counter((record.family, record.outcome) for record in records)
    for (family, outcome), count in sorted(totals.items()):
        print(f"{family}: {count} {outcome}")
    print(f"{sum(record.seconds for record in records):.0f} s with transformers {transformers.__version__}")
    if options.json:
        run = {"transformers": transformers.__version__, "records": [asdict(record) for record in records]}
        options.json.write_text(json.dumps(run, indent=1), encoding="utf-8")
    if options.write:
        write_table(records, table_path())
    return 1 if any(record.outcome == WRONG for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
