"""A prefix: the token ids at the start of a prompt, and what else decides their KV."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from kvkeep.entry_format import Media, canonical_json
from kvkeep.keys import BLOCK, TokenIds, digest_fields, prefix_chain


@dataclass(frozen=True, slots=True)
class Prefix:
    """Token ids with the media among them.

    Attributes:
        ids: the ids.
        media: pictures, films and sounds, each with its content and its place among the ids, in their order.

    >>> picture = Media(kind="image", content="00" * 16, start=2, end=5)
    >>> prefix = Prefix(TokenIds.of(range(8)), (picture,))
    >>> len(prefix[:2].media), len(prefix[:6].media)
    (0, 1)
    """

    ids: TokenIds
    media: tuple[Media, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, item: slice) -> Prefix:
        if item.start:
            raise ValueError("a prefix begins at token 0")
        stop = item.indices(len(self))[1]
        return Prefix(self.ids[:stop], media_before(self.media, stop))

    @property
    def before(self) -> tuple[Media, ...]:
        """What lies before token 0."""
        return before_tokens(self.media)

    def chain(self, namespace: bytes) -> list[bytes]:
        """The :func:`~kvkeep.keys.prefix_chain` of the ids."""
        return prefix_chain(self.ids, namespace)


def before_tokens(media: tuple[Media, ...]) -> tuple[Media, ...]:
    """Those that lie before token 0, and so belong to whatever is used of a prefix: what an encoder is fed."""
    return tuple(one for one in media if one.end == 0) if media else media


def media_before(media: tuple[Media, ...], stop: int) -> tuple[Media, ...]:
    """Those that begin before token ``stop``."""
    return tuple(one for one in media if one.start < stop) if media else media


def with_media(chain: Sequence[bytes], media: tuple[Media, ...], first: int = 0) -> list[bytes]:
    """Chained digests that tell media apart, too: those behind the start of any are taken together with it.

    Args:
        chain: digests at the block boundaries ``first``, ``first + 1``, ... of a prefix.
        media: its media.
        first: the number of the first boundary.
    """
    if not media:
        return list(chain)
    told, taken, mixed = b"", 0, []
    for number, digest in enumerate(chain, start=first):
        while taken < len(media) and media[taken].start < number * BLOCK:
            one = media[taken]
            item = canonical_json([one.kind, one.content, one.start, one.end]).encode()
            told, taken = digest_fields("kvkeep/media-chain/1", told, item), taken + 1
        mixed.append(digest_fields("kvkeep/media-chain/1", digest, told) if taken else digest)
    return mixed


def shared_with_media(stored: tuple[Media, ...], wanted: tuple[Media, ...], tokens: int) -> tuple[int, Media | None]:
    """How many of so many tokens with equal ids two prefixes share, in view of their media.

    The place of a picture is one whole: what is shared ends before it, or at least one token behind it, so that there
    is always a token of text to compute again.

    Returns:
        The tokens, and the first of the wanted (or stored) media that is not the same in both, if it is why.
    """
    other: Media | None = None
    for one, two in zip_longest(stored, wanted):
        if one != two:
            start = min(m.start for m in (one, two) if m is not None)
            if start < tokens:
                tokens, other = start, two or one
            break
    return uncut(wanted, tokens), other


def uncut(media: Iterable[Media], tokens: int) -> int:
    """The most tokens, at most so many, that end before each of the media or at least one token behind it."""
    for one in sorted(media, key=lambda one: one.end, reverse=True):
        if one.start < tokens <= one.end:
            tokens = one.start
    return tokens
