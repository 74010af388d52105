"""Forward hooks inside a decoder: code that can change KV, and that no hash sees."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules import module as _module

from kvkeep.errors import UnsupportedRequestError

_KNOWN = frozenset({"accelerate", "kvkeep", "peft", "torch", "transformers"})
"""Packages whose hooks place, cast, gather or record tensors, and compute nothing of their own."""


class HookWatch:
    """Remembers the forward hooks of a decoder's inner modules, and tells in microseconds whether they have changed.

    Hooks on the whole model, its head and its embeddings are left alone: people count tokens and time calls there. One
    of these that changes something is for the guard to notice.

    Args:
        model: an unwrapped model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(name, weakref.ref(module)) for name, module in _inner_modules(model)]
        self._keys = self._now()

    def changed(self) -> bool:
        """Whether a hook was added or removed since."""
        return self._now() != self._keys

    def refuse_unknown(self) -> None:
        """Raise UnsupportedRequestError for a hook that is not of a library known to leave KV as it is."""
        for name, hooks in self._tables():
            for registered in hooks.values():
                hook = registered.func if isinstance(registered, partial) else registered
                module = str(getattr(hook, "__module__", None) or type(hook).__module__)
                if module.partition(".")[0] not in _KNOWN:
                    called = getattr(hook, "__qualname__", type(hook).__qualname__)
                    raise UnsupportedRequestError(
                        f"a forward hook on {name} ({module}.{called}) may change KV, and hashing cannot see how: "
                        "remove it, or bind(..., salt='a name for what it does')"
                    )

    def _now(self) -> list[tuple[int, ...]]:
        return [tuple(hooks) for _, hooks in self._tables()]

    def _tables(self) -> Iterator[tuple[str, Mapping[int, Any]]]:
        """Every table that has hooks in it, with the name of what they are on."""
        for hooks in _EVERYWHERE:
            if hooks:
                yield "every module", hooks
        for name, known in self._modules:
            module = known()
            if module is not None and (module._forward_hooks or module._forward_pre_hooks):
                yield name, module._forward_hooks
                yield name, module._forward_pre_hooks


_EVERYWHERE: tuple[Mapping[int, Any], ...] = (_module._global_forward_hooks, _module._global_forward_pre_hooks)


def _inner_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module that a decoder computes KV in, with its name."""
    whole: Any = model
    decoder = whole.get_decoder() if hasattr(model, "get_decoder") else model
    embeddings = whole.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    for name, module in (decoder if isinstance(decoder, nn.Module) else model).named_modules():
        if name and module is not embeddings:
            yield name, module
