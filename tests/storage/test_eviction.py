"""Which entries a limit asks to go, and what the policies say that one is worth."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sized_drafts import LEAST, sized

from kvkeep.errors import InvalidRequestError
from kvkeep.eviction import Candidate, CostAware, EvictionPolicy, LeastRecentlyUsed, policy_of
from kvkeep.settings import parse_size
from kvkeep.storage.budget import Limits, choose, plan
from kvkeep.storage.rows import Row


def row(key: str, nbytes: int = 10, *, parent: str | None = None, namespace: str = "a", created: int = 0) -> Row:
    made = Row.from_meta(sized(LEAST).meta, LEAST, b"")
    start = 0 if parent is None else 4
    return replace(
        made, key=key, nbytes=nbytes, parent=parent, namespace=namespace, created=created, start=start, end=start + 4
    )


def by_key(*rows: Row) -> dict[str, Row]:
    return {one.key: one for one in rows}


ORDER = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}


def chosen(rows: dict[str, Row], need: int, keep: set[str] | None = None, **options: str) -> tuple[str, int]:
    victims, short = choose(rows, need, keep=keep or set(), worth=lambda one: ORDER[one.key], **options)
    return "".join(one.key for one in victims), short


def test_the_least_worth_go_and_no_more_than_needed():
    rows = by_key(row("d"), row("b"), row("a"), row("c"))
    assert chosen(rows, 0) == ("", 0)
    assert chosen(rows, -5) == ("", 0)
    assert chosen(rows, 1) == ("a", 0)
    assert chosen(rows, 20) == ("ab", 0)
    assert chosen(rows, 21) == ("abc", 0)
    assert chosen(rows, 20, {"a"}) == ("bc", 0)
    assert chosen(rows, 45, {"d"}) == ("abc", 15)


def test_a_child_goes_before_its_parent_and_what_is_kept_keeps_its_parents():
    rows = by_key(row("a"), row("b", parent="a"), row("c", parent="b"), row("d"))
    assert chosen(rows, 30) == ("cba", 0)
    assert chosen(rows, 40) == ("cbad", 0)
    assert chosen(rows, 10, {"c"}) == ("d", 0)
    assert chosen(rows, 20, {"b"}) == ("cd", 0)
    twins = by_key(row("a"), row("b", parent="a"), row("c", parent="a"))
    assert chosen(twins, 30) == ("bca", 0)
    assert chosen(twins, 30, {"c"}) == ("b", 20)


def test_rows_that_go_round_in_a_circle_end_nothing():
    rows = by_key(row("a", parent="b"), row("b", parent="a"), row("c"))
    assert chosen(rows, 30, {"a"}) == ("c", 20)


def test_among_equals_the_oldest_goes():
    rows = by_key(row("a", created=2), row("b", created=1), row("c", created=3))
    victims, _ = choose(rows, 11, keep=(), worth=lambda one: 0.0)
    assert [one.key for one in victims] == ["b", "a"]


def test_one_namespace_alone_makes_room_for_its_quota():
    rows = by_key(row("a", namespace="x"), row("b", namespace="y"), row("c", namespace="y"), row("d", namespace="y"))
    assert chosen(rows, 10, namespace="y") == ("b", 0)
    assert chosen(rows, 40, namespace="y") == ("bcd", 10)

    def made(limits: Limits, new: str | None = "d", keep: set[str] | None = None) -> tuple[str, str | None, int]:
        found = plan(
            rows,
            limits,
            new=None if new is None else rows[new],
            keep=lambda: keep or set(),
            worth=lambda one: ORDER[one.key],
        )
        return "".join(one.key for one in found.victims), found.limit, found.short

    assert made(Limits()) == ("", None, 0)
    assert made(Limits(max_bytes=40, quota=30)) == ("", None, 0)
    assert made(Limits(max_bytes=39)) == ("a", None, 0)
    assert made(Limits(quota=29)) == ("b", None, 0)
    assert made(Limits(max_bytes=30, quota=20)) == ("b", None, 0), "what goes for the quota counts for the budget"
    assert made(Limits(max_bytes=20, quota=20)) == ("ba", None, 0)
    assert made(Limits(max_bytes=9)) == ("", "max_bytes", 1), "nothing goes if it is not enough"
    assert made(Limits(quota=9)) == ("", "quota", 1)
    assert made(Limits(max_bytes=20), keep={"a", "b"}) == ("", "max_bytes", 10)
    assert made(Limits(quota=9), new="a") == ("", "quota", 1)
    assert made(Limits(quota=5), new=None) == ("abcd", None, 0)
    assert made(Limits(max_bytes=5), new=None, keep={"c"}) == ("abd", "max_bytes", 5), (
        "without a new one all goes that may"
    )


def test_sizes_are_numbers_or_texts():
    texts = {"0": 0, "512": 512, "10GiB": 10 << 30, "500MB": 500_000_000, "1.5 kib": 1536, "2k": 2000, "1TiB": 1 << 40}
    assert {text: parse_size(text, "x") for text in texts} == texts
    assert parse_size(7, "x") == 7
    for wrong in (-1, True, 1.5, None, "", "many", "-1", "1e9", "10 GiB each", "1PiB", "٣"):
        with pytest.raises(InvalidRequestError, match="max_bytes is a number of bytes or a text such as '10GiB'"):
            parse_size(wrong, "max_bytes")


# --- policies ---


def candidate(**known: int) -> Candidate:
    return Candidate(**{"nbytes": 1000, "tokens": 100, "end": 100, "created": 1000, "used": 1000, "hits": 0, **known})


def test_lru_is_the_last_use():
    policy = LeastRecentlyUsed()
    assert [policy.worth(candidate(created=c, used=u), 9e9) for c, u in ((5, 5), (5, 9), (7, 3))] == [5, 9, 7]


def test_cost_aware_weighs_work_hits_bytes_and_age():
    policy = CostAware(half_life=100)
    base = policy.worth(candidate(), 1000)
    assert base == pytest.approx(0.1 * (1 + 50 / 8192))
    assert policy.worth(candidate(), 1100) == pytest.approx(base / 2)
    assert policy.worth(candidate(used=1100), 1100) == pytest.approx(base)
    assert policy.worth(candidate(hits=3), 1000) == pytest.approx(4 * base)
    assert policy.worth(candidate(nbytes=2000), 1000) == pytest.approx(base / 2)
    assert policy.worth(candidate(tokens=1000, end=1000, nbytes=10_000), 1000) > base, "attention makes long ones dear"
    assert policy.worth(candidate(end=10_000), 1000) > base
    with pytest.raises(InvalidRequestError, match="half_life"):
        CostAware(half_life=0)


def test_a_policy_has_a_name_or_is_one():
    assert isinstance(policy_of("lru"), LeastRecentlyUsed)
    assert isinstance(policy_of("cost"), CostAware)
    mine = CostAware()
    assert policy_of(mine) is mine
    assert isinstance(mine, EvictionPolicy)
    with pytest.raises(InvalidRequestError, match="eviction is 'lru', 'cost'"):
        policy_of("mru")  # type: ignore[arg-type]
