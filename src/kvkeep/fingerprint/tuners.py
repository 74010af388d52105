"""The classes of the ``peft`` library: what they are laid around, which of their adapters act, and which are refused.

An adapter layer keeps the layer that it changes as a child, and of every adapter that is loaded some tensors and
settings in mappings by the adapter's name. ``peft`` itself is never imported: its classes are known by their names.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from kvkeep.errors import UnsupportedRequestError

_WRAPPERS = {"PeftModel": "base_model", "PeftMixedModel": "base_model", "BaseTuner": "model"}
_LAYERS = {
    "BaseTunerLayer": "base_layer",
    "TrainableTokensWrapper": "token_adapter",
    "ModulesToSaveWrapper": "original_module",
}
"""Classes of peft, and under which name each keeps what it is laid around."""

_KNOWN_TUNERS = frozenset(
    {
        *("adalora", "boft", "c3a", "fourierft", "hra", "ia3", "ln_tuning", "loha", "lokr", "lora", "miss", "oft"),
        *("randlora", "shira", "trainable_tokens", "vblora", "vera"),
    }
)
"""Packages under ``peft.tuners`` whose layers compute with what they hold, and nothing else."""

_KNOWN_VARIANTS = frozenset({"DoraConv2dVariant", "DoraEmbeddingVariant", "DoraLinearVariant"})

_PAST_TOKENS = "Rows of a token then depend on tokens behind it, so no prefix of a prompt can be reused"


def wrapped(module: nn.Module) -> str | None:
    """Under which name a whole-model wrapper of peft keeps the model; ``None`` for other modules.

    Raises:
        UnsupportedRequestError: for the kinds that put rows of their own into the cache, or look at the whole prompt.
    """
    bases = peft_bases(module)
    if "XLoraModel" in bases:
        raise UnsupportedRequestError(
            f"{type(module).__qualname__} weighs its adapters by the whole prompt. {_PAST_TOKENS}; use the bare model, "
            "or one of its adapters"
        )
    configs = getattr(module, "peft_config", {}) if "PeftModel" in bases else {}
    kind = next((one.peft_type.value for one in configs.values() if one.is_prompt_learning), None)
    if kind is not None:
        raise UnsupportedRequestError(
            f"the model has a {kind} adapter, which puts rows of its own in front of every prompt and moves all "
            "positions; such prompts cannot be stored: give bind() the bare model, get_base_model()"
        )
    return next((bare for name, bare in _WRAPPERS.items() if name in bases), None)


def is_whole_model(module: nn.Module) -> bool:
    """Whether a module is one of peft's that stand around a whole model, and compute nothing themselves."""
    return not peft_bases(module).isdisjoint(_WRAPPERS)


def bare_child(path: str, module: nn.Module, *, salted: bool) -> str | None:
    """Under which name a module of peft keeps what it is laid around; ``None`` for modules of the bare model.

    With ``salted``, what is not known counts as the bare model's.

    Raises:
        UnsupportedRequestError: for a module of peft of another kind.
    """
    bases = peft_bases(module)
    if not bases:
        duck = "base_layer" in module._modules and isinstance(getattr(module, "disable_adapters", None), bool)
        return "base_layer" if duck else None
    bare = wrapped(module) or next((bare for name, bare in _LAYERS.items() if name in bases), None)
    if salted and bare is None:
        return None
    if bare is None or bare not in module._modules:
        raise unknown(path, module, "is a module of peft that kvkeep does not know")
    return bare


def peft_bases(module: nn.Module) -> frozenset[str]:
    """The names of the classes of peft that a module's class descends from; none for modules of other packages."""
    kind: Any = type(module)
    return _peft_bases(kind)


@functools.lru_cache(maxsize=1024)
def _peft_bases(kind: Any) -> frozenset[str]:
    return frozenset(base.__name__ for base in kind.__mro__ if base.__module__.partition(".")[0] == "peft")


def acting_adapters(module: nn.Module) -> tuple[tuple[str, ...], bool]:
    """The names of the adapters that act in a layer, and whether it takes them out of the bare weights first.

    A layer with merged adapters computes with the bare layer alone, which then holds them. Disabled while merged, it
    unmerges at the next call; what comes of that is decided by the weights as they are and by those adapters.
    """
    layer: Any = module
    bases = peft_bases(module)
    if is_whole_model(module) or "TrainableTokensWrapper" in bases:
        return (), False
    active = [] if layer.disable_adapters else list(layer.active_adapters)
    if "ModulesToSaveWrapper" in bases:
        present = set(layer.modules_to_save.keys())
        return tuple(active[:1]) if present.issuperset(active) else (), False
    if layer.merged_adapters:
        return ((), False) if active else (tuple(layer.merged_adapters), True)
    present = adapter_names(module)
    return tuple(name for name in active if name in present), False


def adapter_names(module: nn.Module) -> set[str]:
    """The names of all adapters that a layer holds, acting or not."""
    containers: list[Any] = [child for child in module._modules.values() if by_adapter(child)]
    names = {name for one in containers for name in (*one._modules, *one._parameters, *one._buffers)}
    return names or {name for value in vars(module).values() if isinstance(value, dict) for name in value}


def by_adapter(child: Any) -> bool:
    """Whether a child of a layer is a container whose keys are the names of adapters."""
    return isinstance(child, nn.ModuleDict | nn.ParameterDict) or type(child).__name__ == "BufferDict"


def check_known(path: str, module: nn.Module) -> None:
    """Refuse a layer whose adapters act in a way that is not known to be decided by what the layer holds.

    Raises:
        UnsupportedRequestError: naming it.
    """
    package = type(module).__module__.split(".")
    if package[0] != "peft" or (package[1] == "tuners" and package[2] not in _KNOWN_TUNERS):
        raise unknown(path, module, "is an adapter layer that kvkeep does not know")


def check_same_for_all_requests(path: str, module: nn.Module) -> None:
    """Refuse a layer that is told by each request which adapters act.

    Raises:
        UnsupportedRequestError: naming it.
    """
    for hook in module._forward_pre_hooks.values():
        if getattr(getattr(hook, "func", hook), "__module__", "").partition(".")[0] == "peft":
            raise UnsupportedRequestError(
                f"the adapters of {path} ({type(module).__qualname__}) are chosen by the request (adapter_names=); "
                "choose them with set_adapter() instead"
            )


def variant_name(path: str, value: Any) -> str | None:
    """The name of a known variant of LoRA; ``None`` for objects of other kinds.

    Raises:
        UnsupportedRequestError: for activated LoRA.
    """
    name = type(value).__name__
    if name.startswith("ALora"):
        raise UnsupportedRequestError(
            f"{path} has an activated LoRA, which begins to act where the prompt says so. {_PAST_TOKENS}; "
            "use a LoRA without alora_invocation_tokens, or the bare model"
        )
    return name if name in _KNOWN_VARIANTS else None


def unknown(path: str, module: nn.Module, problem: str) -> UnsupportedRequestError:
    """The error for an adapter of a kind that is not known."""
    return UnsupportedRequestError(
        f"{path or 'the model'} ({type(module).__qualname__}) {problem}; merge it (merge_and_unload()), or give "
        "bind(salt=...) a name of your own for the adapter, another one for each state of it"
    )
