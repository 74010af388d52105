"""The contract of a tier, as tests that run on a tier of your own."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from kvkeep.errors import InvalidRequestError, KvkeepError, TierError
from kvkeep.tiers import Part, Tier

WRITERS = 8

_BAD_NAMES = ("", "/a", "a/", "a//b", "../a", "a/../b", "a/./b", ".a", "a b", "ä", "a\0b", "a" * 129, "/".join("a" * 9))


class TierContract:
    """Proves that a tier keeps objects whole, and that the first one of a name stays.

    Subclass it in a test module of yours, give ``make_tier``, and pytest runs its tests.

    ::

        >>> from kvkeep.tiers import MemoryTier
        >>> class TestMyTier(TierContract):
        ...     tier = MemoryTier()
        ...     def make_tier(self):
        ...         return self.tier
        >>> TestMyTier().test_what_is_put_comes_back()

    Attributes:
        large: bytes of the largest object that is put.
    """

    large: int = 20 << 20

    def make_tier(self) -> Tier:
        """A tier whose objects are there for every one that this gives during a test. What it holds does not matter."""
        raise NotImplementedError

    # --- whole or absent ---

    def test_what_is_not_there_is_none(self) -> None:
        """Fails where an absent object is an error, or something else than absent."""
        tier, name = self.make_tier(), _fresh()
        _check(tier.get(name) is None and tier.get(name, 5, 9, bulk=True) is None, "there is a part of nothing")
        _check(tier.stat(name) is None, "something is known of nothing")
        tier.delete(name)
        _check(list(tier.list(name)) == [], "something lies below nothing")

    def test_what_is_put_comes_back(self) -> None:
        """Fails where another tier, or the same, gives other bytes, another size, or no object."""
        for size in (0, 1, 4097, self.large):
            name, data = _fresh(), os.urandom(size)
            _check(self.make_tier().put_if_absent(name, data), f"a new object of {size} bytes is said to be there")
            for tier in (self.make_tier(), self.make_tier()):
                for bulk in (False, True):
                    _check(_there(tier.get(name, bulk=bulk)).read() == data, f"{size} bytes came back as others")
                known = tier.stat(name)
                _check(known is not None and known.size == size, f"an object of {size} bytes is said to be {known}")

    def test_any_buffer_can_be_put(self) -> None:
        """Fails where a part of a larger buffer, or one that can be written, is not taken."""
        tier, data = self.make_tier(), bytearray(os.urandom(1000))
        for buffer in (memoryview(data)[100:900], data, memoryview(bytes(data)).toreadonly()):
            name = _fresh()
            tier.put_if_absent(name, buffer)
            _check(_there(tier.get(name)).read() == bytes(buffer), "a buffer came back as other bytes")

    def test_parts_are_those_of_the_whole(self) -> None:
        """Fails where a range gives other bytes, or more; a tier without ranges must say so and give all."""
        tier, name, data = self.make_tier(), _fresh(), os.urandom(10_000)
        tier.put_if_absent(name, data)
        for begin, end in ((0, 1), (0, 10_000), (17, 4096), (9_999, 10_000), (9_000, 20_000), (5_000, None)):
            part = _there(tier.get(name, begin, end, bulk=True))
            found = part.read()
            wanted = data[begin:end] if tier.capabilities.ranges else data[part.begin :]
            _check(part.begin in ((begin,) if tier.capabilities.ranges else (0,)), f"a part begins at {part.begin}")
            _check(found == wanted, f"bytes [{begin}, {end}) are others")
            _check(part.stat.size == len(data), "a part does not tell the size of the whole")

    def test_a_part_behind_the_end_is_an_error(self) -> None:
        """Fails where bytes are given, or no object, when a range begins behind its end."""
        tier, name = self.make_tier(), _fresh()
        tier.put_if_absent(name, b"123")
        try:
            part = tier.get(name, 5, 9)
            found = None if part is None else part.read()
        except TierError:
            return
        _check(not tier.capabilities.ranges and found == b"123", f"behind 3 bytes there is {found!r}")

    def test_another_version_is_not_there(self) -> None:
        """Fails where a version is asked for and another one is given."""
        tier, name = self.make_tier(), _fresh()
        tier.put_if_absent(name, b"first")
        first = _there(tier.get(name))
        _check(first.read() == b"first", "other bytes")
        if (version := first.stat.version) is None:
            return
        known = tier.stat(name)
        _check(known is not None and known.version == version, "an object has two versions at once")
        _check(_there(tier.get(name, version=version)).read() == b"first", "a version is given as another")
        tier.delete(name)
        tier.put_if_absent(name, b"other")
        _check(tier.get(name, version=version) is None, "a version is there that was replaced")

    # --- the first one stays ---

    def test_the_first_one_stays(self) -> None:
        """Fails where a second put replaces an object, or is told that it is stored."""
        for size in (3, 300_000):  # some servers are only known after a small one
            tier, name = self.make_tier(), _fresh()
            data = os.urandom(size)
            _check(tier.put_if_absent(name, data), "a new object is said to be there")
            _check(not tier.put_if_absent(name, os.urandom(size)), "a second object of a name is said to be stored")
            _check(not tier.put_if_absent(name, data), "the same object is stored twice")
            _check(_there(tier.get(name)).read() == data, "the first object was replaced")

    def test_one_of_many_writers_stays_whole(self) -> None:
        """Fails where writers of one name leave something else than the whole object of one that was told so."""
        tiers = [self.make_tier() for _ in range(WRITERS)]
        tiers[0].put_if_absent(_fresh(), b"what a server can do is known after this")
        name, barrier = _fresh(), Barrier(WRITERS)
        contents = [bytes([number]) * 300_000 for number in range(WRITERS)]

        def put(number: int) -> bool:
            barrier.wait()
            return tiers[number].put_if_absent(name, contents[number])

        with ThreadPoolExecutor(WRITERS) as pool:
            stored = list(pool.map(put, range(WRITERS)))
        left = _there(self.make_tier().get(name)).read()
        _check(left in [content for content, one in zip(contents, stored, strict=True) if one], "what is left is torn")
        if tiers[0].capabilities.exclusive:
            _check(sum(stored) == 1, f"{sum(stored)} writers of one name are told that theirs is stored")

    def test_nobody_sees_a_part_of_an_object(self) -> None:
        """Fails where a reader gets an object that is not whole while it is put."""
        reader, writer, name = self.make_tier(), self.make_tier(), _fresh()
        data = os.urandom(self.large)
        with ThreadPoolExecutor(1) as pool:
            putting = pool.submit(writer.put_if_absent, name, data)
            while not putting.done():
                part = reader.get(name, bulk=True)
                _check(part is None or part.read() == data, "a part of an object was there before the rest")
        _check(putting.result(), "a new object is said to be there")
        _check(_there(reader.get(name, bulk=True)).read() == data, "an object is not there when its put has returned")

    def test_what_is_deleted_is_gone(self) -> None:
        """Fails where a deleted object is there, cannot be put again, or took others along."""
        tier, name = self.make_tier(), _fresh()
        tier.put_if_absent(name, b"1")
        tier.put_if_absent(f"{name}-other", b"2")
        tier.delete(name)
        _check(tier.get(name) is None and tier.stat(name) is None, "a deleted object is there")
        _check(tier.get(f"{name}-other") is not None, "another object was deleted, too")
        _check(tier.put_if_absent(name, b"3"), "a deleted object is said to be there")
        _check(_there(tier.get(name)).read() == b"3", "a deleted object came back")

    # --- names ---

    def test_names_are_listed_by_whole_components(self) -> None:
        """Fails where a listing lacks a name, or holds one that only begins alike."""
        tier, folder = self.make_tier(), _fresh()
        names = {f"{folder}/{name}" for name in ("a", "b/c.json", "b/d/e", "b/d-e")}
        for name in (*names, f"{folder}-b"):
            tier.put_if_absent(name, b"")
        _check(sorted(tier.list(folder)) == sorted(names), "not all below a prefix are listed, or others are")
        _check(sorted(tier.list(f"{folder}/b")) == sorted(n for n in names if "/b/" in n), "a listing is not by prefix")

    def test_names_that_are_none_are_refused(self) -> None:
        """Fails where a name that could lead elsewhere reaches the tier."""
        tier = self.make_tier()
        calls: list[Callable[[str], object]] = [
            tier.get,
            tier.stat,
            tier.delete,
            lambda name: list(tier.list(name)),
            lambda name: tier.put_if_absent(name, b""),
        ]
        for name in _BAD_NAMES:
            for call in calls:
                try:
                    call(name)
                except InvalidRequestError:
                    continue
                except KvkeepError as error:
                    raise AssertionError(f"the name {name!r} reached the tier: {error}") from error
                raise AssertionError(f"the name {name!r} is taken")


def _fresh() -> str:
    """A name that nobody has used."""
    return f"contract/{os.urandom(8).hex()}"


def _there(part: Part | None) -> Part:
    if part is None:
        raise AssertionError("an object is not there")
    return part


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)
