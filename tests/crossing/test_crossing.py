"""An entry written under one version of transformers serves the other, both ways, in the two real environments.

Three processes for everything: the older one builds the models and writes, the newer one reads that and writes its
own, the older one reads those.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from one_side import BEFORE_PICTURE, KEEP_STATE, MODELS, PROMPT, SEEING, STORED

ROOT = Path(__file__).parents[2]
OFF = 1e-3
"""How far logits may be from those without a store, relative to the largest."""

NOT_CROSSING = {
    "deepseek_v3": "config (computed by): the older keeps keys and values, the newer what they are made of",
    "falcon_mamba": "config (backbone.layers.0.mixer.b_c_rms): the newer has modules where the older has buffers",
    "gemma2, default attention": "config (attn_implementation): the older runs sdpa, which leaves out the soft cap",
    "gpt_oss, another limit": "config (swiglu_limit): the older shows the setting, and does not obey it",
    "mamba2": "config (computed by): the older computes otherwise",
}
"""Models whose KV differs between the versions, with the part of identity and the field that says so."""

CROSSING = sorted(MODELS.keys() - NOT_CROSSING.keys())
DIRECTIONS = ("older to newer", "newer to older")


def interpreter(variable: str) -> Path:
    """The Python of one of the environments that the Makefile names."""
    match = re.search(rf"^{variable} := (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert match is not None, f"the Makefile no longer says {variable} := FOLDER"
    return ROOT / match[1] / "bin" / "python"


def run_side(python: Path, folder: Path, *steps: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [str(python), str(Path(__file__).with_name("one_side.py")), str(folder), *steps]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


@pytest.fixture(scope="module")
def crossed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """For each direction what was written and what was read."""
    newer_python, older_python = interpreter("ENV"), interpreter("OLD")
    missing = [str(one.parents[1]) for one in (newer_python, older_python) if not one.exists()]
    if missing:
        message = f"NOT TESTED: files between versions of transformers; {' and '.join(missing)} missing (make setup)"
        if os.environ.get("CI") == "true":
            pytest.fail(message, pytrace=False)
        warnings.warn(message, stacklevel=1)
        pytest.skip(message)
    folder = tmp_path_factory.mktemp("crossing")
    began = time.perf_counter()
    first = run_side(older_python, folder, "build", "write")
    second = run_side(newer_python, folder, "write", f"read {first['version']}")
    third = run_side(older_python, folder, f"read {second['version']}")
    assert (first["version"].split(".")[0], second["version"].split(".")[0]) == ("4", "5")
    assert third["version"] == first["version"]
    versions = f"transformers {first['version']} and {second['version']}"
    return {
        DIRECTIONS[0]: (first["written"], second["read"]),
        DIRECTIONS[1]: (second["written"], third["read"]),
        "figures": f"{len(CROSSING) + len(SEEING)} models, {len(SEEING)} of them with a picture, cross between "
        f"{versions}, {len(NOT_CROSSING)} do not, as they must: {time.perf_counter() - began:.0f} s",
    }


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", CROSSING)
def test_an_entry_of_the_other_version_is_a_hit(crossed: dict[str, Any], name: str, direction: str) -> None:
    written, read = (side[name] for side in crossed[direction])
    assert read["identity"] == written["identity"]
    stored = STORED - (name in KEEP_STATE)
    assert written["tokens"] == stored
    assert (read["tokens"], read["reason"]) == (stored, None)
    # The guard computes the last stored token again; where there is state, that was left out when it was stored.
    assert read["guard"] is True
    assert (read["reused"], read["report"]) == (STORED - 1, None)
    assert read["off"] <= OFF
    assert (read["entries"], read["set aside"]) == (1, [])


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", sorted(SEEING))
def test_an_entry_with_a_picture_is_a_hit_in_the_other_version(
    crossed: dict[str, Any], name: str, direction: str
) -> None:
    """The newer is given ``mm_token_type_ids`` where the older goes by the placeholders alone."""
    written, read = (side[name] for side in crossed[direction])
    assert read["identity"] == written["identity"]
    assert (read["tokens"], read["reason"]) == (written["tokens"], None)
    assert read["guard"] is True
    assert (read["reused"], read["report"]) == (written["tokens"] - 1, None)
    assert read["off"] <= OFF
    assert read["set aside"] == []
    tokens, reason = read["other picture"]
    assert tokens <= BEFORE_PICTURE + 1
    assert reason.startswith(("media: ", "prefix: "))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", sorted(NOT_CROSSING))
def test_what_the_versions_compute_otherwise_is_a_miss(crossed: dict[str, Any], name: str, direction: str) -> None:
    written, read = (side[name] for side in crossed[direction])
    field = NOT_CROSSING[name].partition("(")[2].partition(")")[0]
    differing = {part for part in written["identity"] if written["identity"][part] != read["identity"][part]}
    assert differing == {"config", "model"}
    assert read["tokens"] == 0
    named = str(read["reason"]).partition("another config (")[2]
    assert field in named, read["reason"]
    assert (read["reused"], read["off"], read["entries"], read["set aside"]) == (0, 0.0, 1, [])


def test_the_versions_really_arrange_experts_in_different_modules(crossed: dict[str, Any], figures: list[str]) -> None:
    figures.append(crossed["figures"])
    counts = {name: [crossed[one][0][name]["parameters"] for one in DIRECTIONS] for name in ("mixtral", "qwen3_moe")}
    assert all(older > newer for older, newer in counts.values()), counts


def test_the_table_names_models_that_are_tested() -> None:
    required = {
        "bart",
        "t5",
        "whisper",
        "jamba",
        "mamba",
        "qwen3_next",
        "llama",
        "mistral",
        "qwen2",
        "qwen3_moe",
        "gemma3_text",
        "gpt_oss",
        "phi3",
        "gpt2",
    }
    assert required <= set(CROSSING)
    assert MODELS.keys() >= NOT_CROSSING.keys()
    assert PROMPT > STORED
