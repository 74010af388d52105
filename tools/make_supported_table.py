#!/usr/bin/env python3
"""Writes SUPPORTED.md: what kvkeep does with every model type of the transformers versions it supports.

It takes the records of the conformance sweep, one file a version:

    .venv/bin/python tests/sweep/conform.py --json new.json
    .venv-4.57/bin/python tests/sweep/conform.py --json old.json
    tools/make_supported_table.py new.json old.json
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[1]
TITLES = {"causal": "Causal language models", "seq2seq": "Sequence-to-sequence models"}
OUTCOMES = ("exact", "refused", "cannot be built")
INTRODUCTION = """\
# Model types and their caches

What the conformance sweep (`tests/sweep`) found for every model type that transformers lists: a tiny model with
random weights is built of each, a prefix is saved and loaded, compared bit for bit with what was saved, continued
twice, and compared with continuing the cache that stayed in memory.

- **exact**: the loaded cache is the saved one bit for bit, and continues like it, bit for bit.
- **refused**: kvkeep says by a typed error that it does not keep this cache, and why; `generate` runs without the
  store.
- **cannot be built**: no tiny model of this type runs on its own here, with or without kvkeep.

This file is written by `tools/make_supported_table.py`.
"""


@dataclass(frozen=True, slots=True)
class Run:
    """One sweep: the version of transformers, and its records by family and type."""

    version: str
    records: Mapping[tuple[str, str], Mapping[str, Any]]


def read_run(path: Path) -> Run:
    """Read what ``conform.py --json`` wrote."""
    given = json.loads(path.read_text(encoding="utf-8"))
    return Run(given["transformers"], {(one["family"], one["name"]): one for one in given["records"]})


def document(runs: Sequence[Run]) -> str:
    """The whole page."""
    parts = [INTRODUCTION, *_totals(runs)]
    for family, title in TITLES.items():
        parts += ["", f"## {title}", "", *_table(runs, family)]
    parts += _reasons(runs)
    return "\n".join(parts) + "\n"


def _totals(runs: Sequence[Run]) -> list[str]:
    lines = ["| transformers | family | types | exact | refused | cannot be built |", "|---|---|--:|--:|--:|--:|"]
    for run in runs:
        for family, title in TITLES.items():
            counts = Counter(one["outcome"] for one in run.records.values() if one["family"] == family)
            numbers = " | ".join(str(counts[outcome]) for outcome in OUTCOMES)
            lines.append(f"| {run.version} | {title.lower()} | {sum(counts.values())} | {numbers} |")
    return lines


def _table(runs: Sequence[Run], family: str) -> list[str]:
    names = sorted({name for run in runs for of_family, name in run.records if of_family == family})
    heads = " | ".join(f"with {run.version}" for run in runs)
    lines = [f"| type | {heads} | cache layers |", "|---|" + "---|" * (len(runs) + 1)]
    for name in names:
        found = [run.records.get((family, name)) for run in runs]
        outcomes = " | ".join("not a type of it" if one is None else str(one["outcome"]) for one in found)
        newest = next(one for one in found if one is not None)
        lines.append(f"| {name} | {outcomes} | {_layers(newest)} |")
    return lines


def _layers(record: Mapping[str, Any]) -> str:
    kinds = sorted(set(record["layers"]))
    return ", ".join(f"`{kind}`" for kind in kinds) or (f"`{record['cache']}`" if record["cache"] else "")


def _reasons(runs: Sequence[Run]) -> list[str]:
    lines = ["", "## Reasons", ""]
    for run in runs:
        for outcome in OUTCOMES[1:]:
            rows = [one for one in run.records.values() if one["outcome"] == outcome]
            if rows:
                lines += [f"### {outcome.capitalize()} with {run.version}", ""]
                lines += [f"- {one['name']} ({one['family']}): {one['reason']}" for one in rows] + [""]
    return lines[:-1]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "records", nargs="+", type=Path, help="what `conform.py --json` wrote, the newest version first"
    )
    parser.add_argument("--out", type=Path, default=TOP / "SUPPORTED.md", help="the page (default: SUPPORTED.md)")
    options = parser.parse_args()
    runs = [read_run(path) for path in options.records]
    wrong = [one["name"] for run in runs for one in run.records.values() if one["outcome"] not in OUTCOMES]
    if wrong:
        parser.error(f"kvkeep is wrong about {', '.join(wrong)}: no page is written of such a run")
    options.out.write_text(document(runs), encoding="utf-8")


if __name__ == "__main__":
    main()
