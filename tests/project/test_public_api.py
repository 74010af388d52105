"""The public API: one screen, pinned; its examples run; and importing it costs nothing."""

from __future__ import annotations

import doctest
import importlib
import inspect
import subprocess
import sys

import pytest

import kvkeep

MODULES_WITH_EXAMPLES = {
    "kvkeep": 5,
    "kvkeep.keys": 3,
    "kvkeep.records": 1,
    "kvkeep.store": 2,
    "kvkeep.fingerprint.model": 4,
}


def public(cls: type) -> list[str]:
    return sorted(name for name, value in vars(cls).items() if name[0] != "_" and inspect.isfunction(value))


def test_the_names() -> None:
    assert kvkeep.__all__ == [
        "BoundStore",
        "CacheStore",
        "Entry",
        "Explanation",
        "GenerateReport",
        "Identity",
        "KvkeepError",
        "Match",
        "__version__",
    ]
    assert all(getattr(kvkeep, name) is not None for name in kvkeep.__all__)
    bound = "attach attached chat detach explain generate identity load lookup preload prepare refresh save"
    store = "bind check_fits check_writable descendants entries entry failed fetch find flush gc get ground header"
    store += " locked name nearby push put read_ids recorded_by_stranger refute remove remove_namespace repair resident"
    assert public(kvkeep.BoundStore) == [*bound.split(), "to_legacy", "warm", "warm_shared"]
    assert public(kvkeep.CacheStore) == [*store.split(), "serve", "supersede", "verify"]
    with pytest.raises(AttributeError, match="nothing_of_ours"):
        kvkeep.nothing_of_ours  # noqa: B018


def test_every_error_is_also_a_builtin_with_an_exit_code() -> None:
    errors = importlib.import_module("kvkeep.errors")
    leaves = [one for one in vars(errors).values() if inspect.isclass(one) and issubclass(one, kvkeep.KvkeepError)]
    assert len(leaves) == 20
    for one in leaves:
        assert one.__name__ in (errors.__doc__ or "")
        assert one.exit_code > 0
        assert one is kvkeep.KvkeepError or issubclass(one, ValueError | TypeError | OSError | ImportError)


@pytest.mark.parametrize("name", sorted(MODULES_WITH_EXAMPLES))
def test_examples_in_docstrings_run(name: str, request: pytest.FixtureRequest) -> None:
    result = doctest.testmod(importlib.import_module(name), extraglobs={"getfixture": request.getfixturevalue})
    assert result == (0, MODULES_WITH_EXAMPLES[name])


def test_importing_brings_neither_torch_nor_numpy() -> None:
    code = "import sys, kvkeep; kvkeep.CacheStore; print({'torch', 'numpy', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
