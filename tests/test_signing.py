"""Keys: where they come from, which one signs, and that nothing ever shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvkeep.errors import InvalidRequestError
from kvkeep.signing import Keyring, SigningKey, keyring

ONE, TWO = bytes(range(32)), bytes(range(64))


def test_a_keys_id_is_a_digest_of_it() -> None:
    assert SigningKey.of(ONE).id == "af4c9274d8268552"
    assert SigningKey.of(ONE).id != SigningKey.of(TWO).id
    assert SigningKey.of(ONE).sign(b"ab", b"c") == SigningKey.of(ONE).sign(b"a", b"bc")
    assert SigningKey.of(ONE).sign(b"abc") != SigningKey.of(TWO).sign(b"abc")


def test_the_first_key_signs_and_all_count(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"# the new one\n{TWO.hex()}\n\n{ONE.hex().upper()}\n")
    ring = keyring(tmp_path / "keys")
    assert ring == keyring(str(tmp_path / "keys")) == keyring(TWO, [ONE]) == keyring(TWO, [tmp_path / "keys"])
    assert ring is not None
    assert ring.signer == SigningKey.of(TWO)
    assert ring.get(SigningKey.of(ONE).id) == SigningKey.of(ONE)
    assert ring.get("unknown") is None


def test_without_a_key_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVKEEP_KEY_FILE", raising=False)
    assert keyring(None) is None
    with pytest.raises(InvalidRequestError, match="beside key="):
        keyring(None, [ONE])
    monkeypatch.setenv("KVKEEP_KEY_FILE", "")
    assert keyring(None) is None
    (tmp_path / "keys").write_text(ONE.hex())
    monkeypatch.setenv("KVKEEP_KEY_FILE", str(tmp_path / "keys"))
    assert keyring(None) == Keyring((SigningKey.of(ONE),))
    assert keyring(None, [TWO]) == keyring(ONE, [TWO])


@pytest.mark.parametrize("secret", [b"", b"short", bytes(31), bytes(65)], ids=len)
def test_a_key_of_a_wrong_length_is_refused(secret: bytes) -> None:
    with pytest.raises(InvalidRequestError, match=f"32 to 64 bytes, not {len(secret)}"):
        keyring(secret)


SECRET = "5ec4e7" * 11
FILES = {
    "nothing": b"",
    "a comment": b"# none\n",
    "half a byte": SECRET.encode()[:65],
    "too short": SECRET.encode()[:62],
    "too long": 3 * SECRET.encode(),
    "no digits": b"secret " + SECRET.encode(),
    "no text": bytes.fromhex(SECRET),
    "one good, one bad": SECRET.encode() + b"\nxyz",
}


@pytest.mark.parametrize("what", FILES)
def test_a_file_of_something_else_is_refused_without_being_shown(tmp_path: Path, what: str) -> None:
    (tmp_path / "keys").write_bytes(FILES[what])
    with pytest.raises(InvalidRequestError) as raised:
        keyring(tmp_path / "keys")
    assert SECRET[:12] not in str(raised.value)


@pytest.mark.parametrize("source", [SECRET, 7, ["x"]], ids=["text", "a number", "a list"])
def test_a_secret_in_the_place_of_a_path_is_not_shown(source: object) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        keyring(source)  # type: ignore[arg-type]
    assert SECRET[:12] not in str(raised.value)


def test_nothing_shows_a_key() -> None:
    ring = keyring(ONE, [TWO])
    assert ring is not None
    for text in (repr(ring), str(ring), repr(ring.signer), f"{ring.signer}"):
        assert ONE.hex()[:12] not in text
        assert repr(ONE)[2:12] not in text
