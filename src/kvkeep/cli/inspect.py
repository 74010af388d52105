"""``kvkeep inspect``: what the header of an entry says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvkeep.cli.chains import chain_of
from kvkeep.cli.common import (
    Format,
    count,
    emit_json,
    entry_files,
    format_option,
    human_size,
    human_time,
    open_store,
    store_option,
)

if TYPE_CHECKING:
    from kvkeep.entry_format import Header
    from kvkeep.records import Entry

EDGE = 8
"""How many ids are shown of each end."""


@click.command("inspect")
@click.argument("wanted", metavar="KEY|NAME")
@format_option
@store_option
def command(store: Path | None, wanted: str, format: Format) -> None:
    """Show what an entry says of itself: identity, layers, versions, names, what it continues, and token ids.

    Only numbers and digests are shown, never text; the identity's parts tell why another model does not find it.

    Example: kvkeep inspect handbook --format json
    """
    from kvkeep.errors import EntryNotFoundError

    opened = open_store(store)
    entry = opened.entry(wanted)
    try:
        with entry_files(opened).open(entry.key) as file:
            header, ids = file.header, file.read_ids().tolist()
    except FileNotFoundError:
        raise EntryNotFoundError(f"the file of the entry {entry.key} is gone") from None
    entries = opened.entries()
    links, gone = chain_of({one.key: one for one in entries}, entry)
    data = _to_json(entry, header, ids)
    data["chain"] = [{"key": one.key, "start": one.start, "end": one.end, "bytes": one.nbytes} for one in links]
    data["gone"] = gone
    data["continued_by"] = [one.key for one in entries if one.parent == entry.key]
    if format == "json":
        emit_json(data)
    else:
        _emit_lines(data)


def _to_json(entry: Entry, header: Header, ids: Sequence[int]) -> dict[str, Any]:
    from kvkeep.entry_format import FORMAT_VERSION

    meta = header.meta
    identity = meta.key.identity
    return {
        "key": entry.key,
        "names": list(entry.names),
        "format": FORMAT_VERSION,
        "form": meta.key.form,
        "tokens": meta.end,
        "start": meta.start,
        "end": meta.end,
        "parent": meta.parent,
        "bytes": header.size,
        "created": meta.created,
        "creator": dict(meta.creator),
        "identity": {
            "model": identity.model,
            "weights": identity.weights,
            "config": identity.config,
            "adapters": identity.adapters,
            "dtypes": identity.dtypes,
            "tokenizer": identity.tokenizer,
        },
        "namespace": meta.key.namespace,
        "prefix": meta.key.prefix,
        "media": len(meta.key.media),
        "recorded": dict(meta.recorded),
        "layers": condensed(header),
        "ids": {"count": len(ids), "first": list(ids[:EDGE]), "last": list(ids[-EDGE:])},
    }


def condensed(header: Header) -> list[dict[str, Any]]:
    """The layers, alike ones counted together: kind, how many, their rows and scalars, and each tensor's type."""
    from kvkeep.entry_format import tensor_name

    alike: Counter[tuple[str, int, int, tuple[tuple[str, Any], ...], tuple[tuple[str, str], ...]]] = Counter()
    for stem, number, layer in header.meta.groups():
        types = []
        for role, how in sorted(layer.tensors.items()):
            spec = header.tensors.get(tensor_name(stem, number, role))  # absent where a role shares another's tensor
            shape = "" if spec is None else f" {spec.dtype} {_shape(spec.shape, how)}"
            types.append((role, how + shape))
        kind = layer.kind if stem == "layers" else f"{stem} {layer.kind}"
        alike[kind, layer.first, layer.rows, tuple(sorted(layer.scalars.items())), tuple(types)] += 1
    return [
        {"kind": kind, "count": number, "first": first, "rows": rows, "scalars": dict(scalars), "tensors": dict(types)}
        for (kind, first, rows, scalars, types), number in alike.items()
    ]


def _shape(shape: Sequence[int], how: str) -> str:
    """The shape of a tensor; of rows, the heads and the size of each, since the slots say nothing."""
    return f"{shape[0]}x{shape[-1]}" if how == "rows" else "x".join(map(str, shape))


def _emit_lines(data: Mapping[str, Any]) -> None:
    ids = data["ids"]
    lines = [
        ("key", data["key"]),
        ("names", ", ".join(data["names"]) or "-"),
        ("tokens", f"{data['tokens']:,}" + (f" (this file from {data['start']:,})" if data["start"] else "")),
        ("parent", data["parent"] or "-"),
        *_chain_lines(data),
        ("size", human_size(data["bytes"])),
        ("created", f"{human_time(data['created'])} by {_pairs(data['creator'])}"),
        ("format", f"{data['format']}, {data['form']}"),
        *((part, digest or "-") for part, digest in data["identity"].items()),
        ("namespace", data["namespace"]),
        ("prefix", data["prefix"]),
        *((f"recorded {name}", _one_line(value)) for name, value in data["recorded"].items()),
        *(("layers", _layer_line(layer)) for layer in data["layers"]),
        ("ids", f"{ids['count']:,}: {_numbers(ids['first'])} ... {_numbers(ids['last'])}"),
    ]
    width = max(len(label) for label, _ in lines)
    for label, value in lines:
        click.echo(f"{label.ljust(width)}  {value}")


def _chain_lines(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the entry continues, from token 0 on, and what continues it."""
    lines = [("chain", f"{data['gone']} is gone, so that nothing can use this entry")] if data["gone"] else []
    if len(data["chain"]) > 1:
        lines += [
            ("chain", f"{one['key']} [{one['start']:,}, {one['end']:,}), {human_size(one['bytes'])}")
            for one in data["chain"]
        ]
        whole = sum(one["bytes"] for one in data["chain"])
        lines.append(("", f"{count(len(data['chain']), 'file')}, {human_size(whole)} together"))
    return lines + [("continued by", key) for key in data["continued_by"]]


def _one_line(value: Any) -> str:
    lines = str(value).splitlines()
    return f"{len(lines)} lines, shown with --format json" if len(lines) > 1 else str(value)


def _layer_line(layer: Mapping[str, Any]) -> str:
    scalars = f" ({_pairs(layer['scalars'])})" if layer["scalars"] else ""
    tensors = ", ".join(f"{role} {what}" for role, what in layer["tensors"].items())
    rows = f"rows [{layer['first']}, {layer['first'] + layer['rows']})"
    return f"{layer['count']} x {layer['kind']}{scalars}, {rows}: {tensors}"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _numbers(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))
