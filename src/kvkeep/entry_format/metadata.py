"""The metadata of an entry out of JSON, each member checked."""

from __future__ import annotations

import marshal
import re
from typing import Any

from kvkeep.entry_format.fields import damaged, nothing_left, object_of, require, take, take_hex, take_optional_hex
from kvkeep.entry_format.records import FORMAT_VERSION, Auth, EntryKey, EntryMeta, LayerRecord, Media
from kvkeep.errors import EntryUnknownError
from kvkeep.keys import BLOCK, model_digest
from kvkeep.records import Identity

_KEY_ID = re.compile(r"[\x21-\x7e]{1,64}")
_MAC = re.compile(r"[0-9a-f]{64}")


def meta_from_json(top: dict[str, Any]) -> EntryMeta:
    """Take the metadata out of its JSON object, which is used up."""
    version = top.pop("format", None)
    if version != FORMAT_VERSION or top.pop("block", None) != BLOCK:
        raise EntryUnknownError(f"format {version!r} is not the format {FORMAT_VERSION} that this version reads")
    require(top, "codec", "auth", "parent", "cross", "state")
    if top.pop("codec", None) is not None:
        raise EntryUnknownError("this version does not read entries with 'codec'")
    auth = _auth_from_json(top.pop("auth", None))
    key, key_hash = _key_from_json(take(top, "key", dict))
    cross, state = top.pop("cross", None), top.pop("state", None)
    meta = EntryMeta(
        key=key,
        start=take(top, "start", int),
        end=take(top, "end", int),
        parent=take_optional_hex(top, "parent"),
        layers=_layers_from_json(take(top, "layers", list)),
        cross=None if cross is None else _layers_from_json(cross),
        state=None if state is None else dict(object_of(state)),
        created=take(top, "created", int),
        creator=take(top, "creator", dict),
        recorded=take(top, "recorded", dict),
        digests=take_hex(top, "digests"),
        auth=auth,
    )
    take_hex(top, "seal")
    nothing_left(top, "metadata")
    if key.hash != key_hash:
        damaged("the header's key is not the hash of its parts")
    if not all(isinstance(version, str) for version in meta.creator.values()):
        damaged("the header's creator holds a version that is no text")
    if not meta.start < meta.end or (meta.parent is None) != (meta.start == 0):
        damaged(f"tokens [{meta.start}, {meta.end}) with parent {meta.parent} are not a stretch of a prefix")
    places = [(one.start, one.end) for one in key.media]
    if places != sorted(places) or not all(0 <= start <= end and start < meta.end for start, end in places):
        damaged("the header's media are not in their order among its tokens")
    return meta


def _auth_from_json(source: object) -> Auth | None:
    if source is None:
        return None
    members = source if isinstance(source, dict) else {}
    key_id, mac = members.get("key_id"), members.get("mac")
    if members.keys() != {"key_id", "mac"} or not isinstance(key_id, str) or not isinstance(mac, str):
        raise EntryUnknownError("this version does not read entries that are signed in this way")
    if not _KEY_ID.fullmatch(key_id) or not _MAC.fullmatch(mac):
        damaged("the header's signature is not one")
    return Auth(key_id, mac)


def _key_from_json(source: dict[str, Any]) -> tuple[EntryKey, str]:
    require(source, "adapters", "tp")
    key_hash = take_hex(source, "hash")
    weights, config = take_hex(source, "weights"), take_hex(source, "config")
    adapters, dtypes = take_optional_hex(source, "adapters"), take_hex(source, "dtypes")
    model = take_hex(source, "model")
    if model != model_digest(weights, config, adapters, dtypes):
        damaged("the header's model is not the digest of its parts")
    media = []
    for item in take(source, "media", list):
        one = object_of(item)
        media.append(
            Media(
                kind=take(one, "kind", str),
                content=take_hex(one, "content"),
                start=take(one, "start", int),
                end=take(one, "end", int),
            )
        )
        nothing_left(one, "media")
    tp = source.pop("tp", None)
    if tp is not None:
        shard = object_of(tp)
        tp = (take(shard, "size", int), take(shard, "rank", int))
        nothing_left(shard, "tp")
    key = EntryKey(
        identity=Identity(
            weights=weights,
            config=config,
            adapters=adapters,
            dtypes=dtypes,
            tokenizer=take_hex(source, "tokenizer"),
            model=model,
        ),
        namespace=take_hex(source, "namespace"),
        prefix=take_hex(source, "prefix"),
        media=tuple(media),
        form=take(source, "form", str),
        tp=tp,
    )
    nothing_left(source, "key")
    return key, key_hash


def _layers_from_json(source: object) -> tuple[LayerRecord, ...]:
    if not isinstance(source, list):
        damaged("the header's layers are not a list")
    seen: dict[bytes, LayerRecord] = {}  # layers are mostly alike, and each kind need be checked only once
    layers: list[LayerRecord] = []
    for item in source:
        spelled = marshal.dumps(item, 2)  # not ``item`` itself, for which true is 1
        if spelled not in seen:
            seen[spelled] = _layer_from_json(object_of(item))
        layers.append(seen[spelled])
    return tuple(layers)


def _layer_from_json(source: dict[str, Any]) -> LayerRecord:
    tensors, scalars = take(source, "tensors", dict), take(source, "scalars", dict)
    if not all(value is None or isinstance(value, bool | int | str) for value in scalars.values()):
        damaged("a layer's scalars hold something that is no scalar")
    record = LayerRecord(
        kind=take(source, "kind", str),
        first=take(source, "first", int),
        rows=take(source, "rows", int),
        tensors=tensors,
        scalars=scalars,
    )
    nothing_left(source, "layer")
    return record
