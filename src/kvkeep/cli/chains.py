"""Entries that continue others, put in order for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvkeep.records import Entry


def as_tree(entries: Sequence[Entry]) -> list[tuple[int, Entry]]:
    """All entries, each below what it continues, with how many it continues; otherwise in the order given.

    One that continues what is not here stands by itself, with 0.
    """
    keys = {entry.key for entry in entries}
    children: dict[str | None, list[Entry]] = {}
    for entry in entries:
        children.setdefault(entry.parent if entry.parent in keys else None, []).append(entry)
    found: list[tuple[int, Entry]] = []
    seen = set[str]()
    waiting = [(0, entry) for entry in reversed(children.get(None, []))]
    while waiting:
        depth, entry = waiting.pop()
        seen.add(entry.key)
        found.append((depth, entry))
        waiting += [(depth + 1, child) for child in reversed(children.get(entry.key, []))]
    return found + [(0, entry) for entry in entries if entry.key not in seen]  # these continue one another in a ring


def branches(entries: Sequence[Entry]) -> list[tuple[str, Entry]]:
    """The same as :func:`as_tree`, with the lines that a drawn tree has before each entry instead of the depths."""
    tree = as_tree(entries)
    drawn: list[tuple[str, Entry]] = []
    open_levels: set[int] = set()  # those on which another entry follows further below
    for depth, entry in reversed(tree):
        lead = "".join("│ " if level in open_levels else "  " for level in range(1, depth))
        corner = "" if not depth else "├─" if depth in open_levels else "└─"
        drawn.append((lead + corner, entry))
        open_levels = {level for level in open_levels if level < depth} | {depth}
    return drawn[::-1]


def shared_tokens(entries: Sequence[Entry]) -> int:
    """How many tokens more the entries would hold if each held the whole of its prefix."""
    keys = {entry.key for entry in entries}
    return sum(entry.start for entry in entries if entry.parent in keys)


def chain_of(entries: Mapping[str, Entry], entry: Entry) -> tuple[list[Entry], str | None]:
    """What an entry continues, from token 0 on, with itself at the end; and the key of what of it is gone, if any."""
    links = [entry]
    while (parent := links[0].parent) is not None:
        if parent not in entries or any(link.key == parent for link in links):
            return links, parent
        links.insert(0, entries[parent])
    return links, None
