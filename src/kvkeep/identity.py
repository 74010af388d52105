"""The identity of a live model and tokenizer, hashed once and checked at every call."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kvkeep.errors import InvalidRequestError, UnsupportedRequestError
from kvkeep.fingerprint import (
    HookWatch,
    LengthRule,
    ModelWatch,
    fingerprint_model,
    fingerprint_tokenizer,
    length_rule,
    unwrap,
)
from kvkeep.forks import renew_after_fork
from kvkeep.keys import digest_fields, model_digest
from kvkeep.ranks import ranks_of
from kvkeep.records import Identity

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class _Known:
    """A model as it was last hashed.

    Attributes:
        own: what this rank has of a model that others run with it, in one digest; ``None`` if there are none.
        stale: whether it has been seen to be otherwise now.
    """

    watch: ModelWatch
    hooks: HookWatch
    identity: Identity
    weights: str
    length_rule: LengthRule | None
    fields: Mapping[str, str]
    answers: dict[Any, Any]  # what it was asked, and said
    own: str | None = None
    stale: bool = False


class LiveIdentity:
    """What entries must have been computed with to be reused by this model. It does not keep the model alive.

    Where other ranks run the model with this one, what this one computes depends on what the others have: all of them
    hash at the same time, first and in :meth:`refresh`, and each has the digests of all in its identity.

    Args:
        model: the live model.
        tokenizer: its tokenizer or processor, or ``None``.
        model_id: the caller's own word for the weights, instead of hashing them.
        salt: anything that decides KV and that hashing cannot see; it vouches for unknown forward hooks.
    """

    def __init__(self, model: Any, tokenizer: Any, *, model_id: str | None, salt: str | None) -> None:
        self._model = weakref.ref(model)
        self._tokenizer = fingerprint_tokenizer(tokenizer)
        self._model_id, self._salt = model_id, salt
        self._known: _Known | None = None
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Make the lock anew."""
        self._mutex = threading.Lock()

    def model(self) -> Any:
        """The live model. Raises InvalidRequestError if it is gone."""
        model = self._model()
        if model is None:
            raise InvalidRequestError("the model of this bind is gone; bind the store to the one you use now")
        return model

    def current(self) -> Identity:
        """The identity as it is now; hashes again if the model has changed since the last call.

        Raises:
            UnsupportedRequestError: if it has, and other ranks run it, too.
        """
        with self._mutex:
            known = self._known
            if known is None or known.stale or known.hooks.changed() or known.watch.changed():
                known = self._known = self._hash() if known is None else self._again(known, known)
            return known.identity

    def state(self) -> object:
        """What the model is now, by object identity: another one after each change, after one undone, too."""
        self.current()
        return self._known

    def length_rule(self) -> LengthRule | None:
        """How the frequencies of the model, as it was last hashed, depend on the length."""
        return None if self._known is None else self._known.length_rule

    def asked(self, question: Callable[[Any], _Answer]) -> _Answer:
        """What ``question`` says of the model, asked once for each state of it."""
        self.current()
        known = self._known
        if known is None:
            return question(self.model())
        if question not in known.answers:
            known.answers[question] = question(self.model())
        answer: _Answer = known.answers[question]
        return answer

    def fields(self) -> Mapping[str, str]:
        """What the configuration of the model, as it was last hashed, is made of, by name."""
        return {} if self._known is None else self._known.fields

    def refresh(self) -> Identity:
        """Hash again, after an update that no check can see."""
        with self._mutex:
            self._known = self._hash()
            return self._known.identity

    def recheck(self) -> Identity:
        """Hash again because an entry and the model disagree, without a word to other ranks.

        Raises:
            UnsupportedRequestError: if the model has changed, and other ranks run it, too.
        """
        with self._mutex:
            known = self._known
            known = self._known = self._hash() if known is None else self._again(known)
            return known.identity

    def _again(self, known: _Known, trusted: _Known | None = None) -> _Known:
        """Hash again without a word to other ranks: where there are such, this one must still have the same."""
        if known.own is None and ranks_of(self.model(), None) is None:
            return self._hash_own(trusted)
        fresh = None if known.stale else self._hash(together=False)
        if fresh is None or fresh.own != known.own:
            self._known = replace(known, stale=True)
            raise UnsupportedRequestError(
                "the model has changed, and other ranks run it, too: call kv.refresh() on every one of them"
            )
        return replace(fresh, identity=known.identity, answers=known.answers)

    def _hash(self, *, together: bool = True) -> _Known:
        """Hash the model, and, where other ranks run it, too, with what they have, if they are asked ``together``."""
        ranks, fresh = ranks_of(self.model(), None), None
        if ranks is None:
            return self._hash_own()
        digests: list[bytes] = []
        try:
            fresh = self._hash_own()
        finally:  # the others wait for it, whatever it is
            if together:
                digests = ranks.digests(bytes(16) if fresh is None else bytes.fromhex(fresh.identity.model))
        if bytes(16) in digests:
            raise UnsupportedRequestError("another rank that runs this model cannot hash it: see what it raised")
        own = fresh.identity
        told = [bytes.fromhex(own.weights), ranks.place.to_bytes(4, "little"), *digests]
        weights = digest_fields("kvkeep/ranks/1", *told).hex()
        model = model_digest(weights, own.config, own.adapters, own.dtypes)
        return replace(fresh, identity=replace(own, weights=weights, model=model), own=own.model)

    def _hash_own(self, known: _Known | None = None) -> _Known:
        """Hash what is here; with what was known before, the weights only if they differ from then."""
        model = self.model()
        hooks = HookWatch(unwrap(model))
        if self._salt is None:
            hooks.refuse_unknown()
        # Watched before it is hashed: a change meanwhile is then seen at the next call.
        salted = self._salt is not None
        watch = ModelWatch(model, weights=self._model_id is None, salted=salted)
        # Adapters are switched often. Asked after the new watch was made: what changes meanwhile, that one sees.
        same = known is not None and not known.watch.weights_changed()
        bare = known.weights if known is not None and same else None
        parts = fingerprint_model(model, model_id=self._model_id, salted=salted, weights=bare)
        weights = parts.weights
        if self._salt is not None:
            weights = digest_fields("kvkeep/salt/1", bytes.fromhex(weights), self._salt.encode()).hex()
        identity = Identity(
            weights=weights,
            config=parts.config,
            adapters=parts.adapters,
            dtypes=parts.dtypes,
            tokenizer=self._tokenizer,
            model=model_digest(weights, parts.config, parts.adapters, parts.dtypes),
        )
        return _Known(watch, hooks, identity, parts.weights, length_rule(model), parts.fields, {})
