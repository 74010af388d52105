from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvkeep.entry_format import Media
from kvkeep.keys import BLOCK, TokenIds, namespace_digest, prefix_chain
from kvkeep.prefixes import Prefix, media_before, shared_with_media, with_media

NAMESPACE = namespace_digest("")
SIZE = 40


@st.composite
def some_media(draw: st.DrawFn) -> tuple[Media, ...]:
    """Up to four items of two contents, some within or across another."""
    places = draw(st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, 12)), max_size=4))
    kind, content = st.sampled_from("ab"), st.sampled_from(["1" * 32, "2" * 32])
    items = [Media(kind=draw(kind), content=draw(content), start=at, end=at + length) for at, length in places]
    return tuple(sorted(items, key=lambda one: (one.start, one.kind)))


@given(some_media(), some_media(), st.integers(0, SIZE), st.booleans())
def test_what_two_prefixes_share(stored: tuple[Media, ...], wanted: tuple[Media, ...], tokens: int, same: bool) -> None:
    if same:
        stored = wanted

    def serves(count: int) -> bool:
        whole = not any(one.start < count <= one.end for one in wanted)
        return whole and media_before(stored, count) == media_before(wanted, count)

    shared, other = shared_with_media(stored, wanted, tokens)
    assert shared == max(count for count in range(tokens + 1) if serves(count))
    assert (other is None) == (media_before(stored, tokens) == media_before(wanted, tokens))


@given(some_media(), some_media(), st.integers(1, 4))
def test_chains_are_as_equal_as_the_media_before_each_border(
    one: tuple[Media, ...], two: tuple[Media, ...], stretch: int
) -> None:
    """Places are stretched, so that they lie around the borders of blocks."""
    wide = [
        tuple(Media(kind=m.kind, content=m.content, start=m.start * 25, end=m.end * 25) for m in media)
        for media in (one, two)
    ]
    ids = TokenIds.of([7] * (BLOCK * 4 + 9))
    chain = prefix_chain(ids, NAMESPACE)[1:]
    mixed = [with_media(chain, media, 1) for media in wide]
    for number, (first, second) in enumerate(zip(*mixed, strict=True), start=1):
        before = [media_before(media, number * BLOCK) for media in wide]
        assert (first == second) == (before[0] == before[1])
        assert (first == chain[number - 1]) == (not before[0])
    assert with_media(chain[stretch - 1 :], wide[0], stretch) == mixed[0][stretch - 1 :]


def test_a_prefix_is_cut_with_its_media() -> None:
    picture = Media(kind="image", content="0" * 32, start=3, end=5)
    prefix = Prefix(TokenIds.of(range(9)), (picture,))
    assert (len(prefix), prefix[:3].media, prefix[:4].media) == (9, (), (picture,))
    assert prefix[:4].ids == TokenIds.of(range(4))
    assert prefix.chain(NAMESPACE) == prefix_chain(prefix.ids, NAMESPACE)
