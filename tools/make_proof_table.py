"""Writes tests/README.md: which test proves which requirement, from the marks in the tests and requirements.toml."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TESTS = Path(__file__).parents[1] / "tests"
TARGET = TESTS / "README.md"
_ABOUT = """# What the store must survive, and the tests that prove it

Made by `make proofs` from [requirements.toml](requirements.toml) and from `@pytest.mark.requirement` on the tests; edit
those. A full run fails when a requirement has no passing test, or is proved and still listed as incomplete. The figures
that a run reached (kill points, fault points, power cuts, stressed seconds) stand at its end, under
"measured in this run".

"""


def table() -> str:
    """The text of the file."""
    requirements: dict[str, dict[str, str]] = tomllib.loads((TESTS / "requirements.toml").read_text(encoding="utf-8"))
    proofs: dict[str, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for test, name, part in marked(ast.parse(path.read_text(encoding="utf-8"))):
            where = path.relative_to(TESTS).as_posix()
            proofs[name].append(f"[{where}]({where}) `{test}`" + (" (a part)" if part else ""))
    if unknown := proofs.keys() - requirements.keys():
        raise SystemExit(f"requirements.toml lists none of {', '.join(sorted(unknown))}")
    missing = sum("missing" in one for one in requirements.values())
    lines = [f"{len(requirements) - missing} of {len(requirements)} are proved in full.", ""]
    for name, one in requirements.items():
        run = {"slow": " Proved by `make test-all`.", "root": " Proved where the tests run as root."}
        lines += [f"## {name}", "", one["what"] + run.get(one.get("run", ""), ""), ""]
        lines += [f"Not yet: {one['missing']}", ""] if "missing" in one else []
        lines += [f"- {proof}" for proof in proofs[name]] + ([""] if proofs[name] else [])
    return _ABOUT + "\n".join(lines).rstrip() + "\n"


def marked(tree: ast.Module) -> Iterator[tuple[str, str, bool]]:
    """The tests of a module that are marked: (test, requirement, whether it proves a part only)."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(getattr(one, "id", "") == "pytestmark" for one in node.targets):
            marks = node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else [node.value]
            yield from (("(all)", *found) for mark in marks for found in _requirements(mark))
        elif isinstance(node, ast.ClassDef):
            yield from ((node.name, *found) for mark in node.decorator_list for found in _requirements(mark))
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    found = [one for mark in inner.decorator_list for one in _requirements(mark)]
                    yield from ((f"{node.name}.{inner.name}", *one) for one in found)
        elif isinstance(node, ast.FunctionDef):
            yield from ((node.name, *found) for mark in node.decorator_list for found in _requirements(mark))


def _requirements(mark: ast.expr) -> Iterator[tuple[str, bool]]:
    if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Attribute) and mark.func.attr == "requirement":
        part = any(word.arg == "part" and _value(word.value) for word in mark.keywords)
        yield from ((str(_value(name)), part) for name in mark.args)


def _value(node: ast.expr) -> Any:
    return ast.literal_eval(node)


if __name__ == "__main__":
    TARGET.write_text(table(), encoding="utf-8")
