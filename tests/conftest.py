"""What every test may use: the real models, tiny models, a toy tokenizer; and no path of the user's own."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from requirement_gate import RequirementGate, kinds_of_run, read_requirements
from skip_gate import SkipGate, read_allowed

if TYPE_CHECKING:  # torch and transformers load when a test first needs them
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else "2")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait must not take the core of those that work


def pytest_configure(config: pytest.Config) -> None:
    # A shell that runs this in the background has it ignored, and the commands that tests start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from kvkeep.demo.models import MODELS_VARIABLE, models_directory

    # The models stay where `make` put them; all else that would lie in the user's cache directory goes elsewhere.
    os.environ[MODELS_VARIABLE] = str(models_directory())
    caches = tempfile.TemporaryDirectory(prefix="kvkeep-tests-")
    config.add_cleanup(caches.cleanup)
    os.environ["XDG_CACHE_HOME"] = caches.name
    os.environ.pop("KVKEEP_STORE", None)
    if os.environ.get("KVKEEP_TESTS_WITHOUT_LOCKS"):
        from kvkeep.storage.locks import KeyLocks

        KeyLocks._acquire = lambda *_: (None, True)  # type: ignore[method-assign]  # as where a volume has none
    config.pluginmanager.register(RequirementGate(read_requirements(), kinds_of_run(config)))
    in_ci = os.environ.get("CI") == "true"
    # A busy machine is no failure; in CI the same examples every time, elsewhere new ones.
    settings.register_profile("kvkeep", deadline=None, derandomize=in_ci)
    settings.load_profile("kvkeep")
    if in_ci:
        config.pluginmanager.register(SkipGate(read_allowed(Path(__file__).with_name("allowed_skips.txt"))))


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


# --- figures ---

_figures: list[str] = []


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Lines that the run prints at its end: what was measured, for whoever reads the log."""
    lines: list[str] = []
    yield lines
    request.node.user_properties += [("figure", line) for line in lines]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":  # with several processes this is the one that prints
        _figures.extend(str(value) for name, value in report.user_properties if name == "figure")
        for title, row, column, word in (value for name, value in report.user_properties if name == "cell"):
            _tables.setdefault(title, {}).setdefault((tuple(row), tuple(column)), Counter())[word] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for title, cells in _tables.items():
        terminalreporter.section(title)
        for line in lines_of_table(cells):
            terminalreporter.write_line(line)
    if lines := _figures:
        terminalreporter.section("measured in this run")
        for line in lines:
            terminalreporter.write_line(line)


# --- tables ---

Place = tuple[int, str]  # a row or a column: where it goes, and its name

_tables: dict[str, dict[tuple[Place, Place], Counter[str]]] = {}


@pytest.fixture
def cell(request: pytest.FixtureRequest) -> Callable[[str, Place, Place, str], None]:
    """Puts a word into a cell of a table that the run prints at its end; there a cell is the words of all tests."""

    def put(title: str, row: Place, column: Place, word: str) -> None:
        request.node.user_properties.append(("cell", (title, row, column, word)))

    return put


def lines_of_table(cells: dict[tuple[Place, Place], Counter[str]]) -> list[str]:
    """A table with a cell for each row and column: how often each word was put there."""
    rows, columns = (sorted({place[axis] for place in cells}) for axis in (0, 1))
    texts = [["", *(name for _, name in columns)]]
    for row in rows:
        counts = (cells.get((row, column), Counter()) for column in columns)
        words = (sorted((-count, word) for word, count in one.items()) for one in counts)
        texts.append([row[1], *(", ".join(f"{-count} {word}" for count, word in one) for one in words)])
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in texts]


# --- real models ---


def _converted(name: str) -> Path:
    from kvkeep.demo.models import is_converted, model_folder

    folder = model_folder(name)
    if not is_converted(folder):
        pytest.fail(f"{folder} is missing: run `make models` first (`make test` does)", pytrace=False)
    return folder


def _load_model(folder: Path) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    return _converted("smollm2")


@pytest.fixture(scope="session")
def smollm2(smollm2_folder: Path) -> PreTrainedModel:
    return _load_model(smollm2_folder)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_folder: Path) -> PreTrainedTokenizerFast:
    return _load_tokenizer(smollm2_folder)


@pytest.fixture(scope="session")
def gemma_folder() -> Path:
    return _converted("gemma")


@pytest.fixture(scope="session")
def gemma(gemma_folder: Path) -> PreTrainedModel:
    return _load_model(gemma_folder)


@pytest.fixture(scope="session")
def gemma_tokenizer(gemma_folder: Path) -> PreTrainedTokenizerFast:
    return _load_tokenizer(gemma_folder)


# --- tiny models: shared, so a test that changes a weight or a setting builds its own with build_tiny ---


@pytest.fixture(scope="session")
def build_tiny() -> Callable[..., PreTrainedModel]:
    from tiny_models import build_tiny

    return build_tiny


@pytest.fixture(scope="session")
def tiny_llama(build_tiny: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return build_tiny("llama")


@pytest.fixture(scope="session")
def tiny_mistral(build_tiny: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return build_tiny("mistral")


@pytest.fixture(scope="session")
def tiny_gemma3(build_tiny: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return build_tiny("gemma3")


@pytest.fixture(scope="session")
def tiny_gpt_oss(build_tiny: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return build_tiny("gpt_oss")


@pytest.fixture(scope="session")
def toy_tokenizer() -> PreTrainedTokenizerFast:
    from tiny_models import build_toy_tokenizer

    return build_toy_tokenizer()
