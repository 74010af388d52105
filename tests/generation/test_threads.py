"""Fan-out: one stored prefix and one model, many threads. Each must give what it gives when it runs alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, build_tiny
from transformers import TextIteratorStreamer

from kvkeep import CacheStore, GenerateReport, compat
from kvkeep.bound import BoundStore

THREADS = 8
PREFIX = 40
TOLERANCE = 2e-4
IMPLEMENTATIONS = ["dynamic", "static"]
Outcome = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(params=["llama", "mistral", "gemma3"])
def model(request: pytest.FixtureRequest) -> Any:
    """Full layers, layers whose window has moved on behind the prefix, and both."""
    return build_tiny(request.param)


@pytest.fixture
def kv(model: Any, tmp_path: Path) -> BoundStore:
    kv = CacheStore(tmp_path / "store").bind(model)
    kv.warm(prompts()[0][:, :PREFIX])
    return kv


def prompts() -> list[torch.Tensor]:
    """One prefix with a question of its own for each thread, of 4 to 11 tokens."""
    generator = torch.Generator().manual_seed(1)
    prefix = torch.randint(3, VOCABULARY, (1, PREFIX), generator=generator)
    return [
        torch.cat([prefix, torch.randint(3, VOCABULARY, (1, 4 + number), generator=generator)], dim=1)
        for number in range(THREADS)
    ]


def masked(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def outcome(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Outcome:
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    out = generate(*args, **{**options, **kwargs})
    return out.sequences, torch.stack(out.logits, dim=1)


def attributes(model: Any) -> dict[str, Any]:
    """All of the model's own attributes but those in which transformers itself keeps a static cache and its length."""
    kept = {"_cache", "_previous_max_cache_length"}
    return {name: value for name, value in model.__dict__.items() if name not in kept}


def at_once(work: Callable[[int], Any]) -> list[Any]:
    """What all threads return, which begin together; their errors are the test's."""
    start = threading.Barrier(THREADS)

    def begin(number: int) -> Any:
        start.wait(60)
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return [future.result(240) for future in [pool.submit(begin, number) for number in range(THREADS)]]


def assert_same(ours: Outcome, control: Outcome) -> None:
    assert torch.equal(ours[0], control[0])
    assert (ours[1] - control[1]).abs().max() < TOLERANCE


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_eight_threads_generate_what_eight_runs_give(model: Any, kv: BoundStore, implementation: str) -> None:
    options = {"cache_implementation": implementation}
    before = attributes(model)
    controls = [outcome(model.generate, **masked(ids), **options) for ids in prompts()]
    alone = [outcome(kv.generate, ids, **options) for ids in prompts()]

    # transformers 4 keeps one static cache on the model for all calls: without kvkeep, too, threads must take turns.
    turn = threading.Lock() if hasattr(model, "_cache") else nullcontext()

    def work(number: int) -> tuple[list[Outcome], list[GenerateReport]]:
        reports: list[GenerateReport] = []
        given = []
        for _ in range(3):
            with turn:
                given.append(outcome(kv.generate, prompts()[number], on_report=reports.append, **options))
        return given, reports

    for number, (given, reports) in enumerate(at_once(work)):
        for one in given:
            assert_same(one, controls[number])
            assert torch.equal(one[1], alone[number][1])  # bit for bit what the same call gives by itself
        told = [(report.prompt_tokens, report.reused_tokens, report.reason) for report in reports]
        assert told == [(PREFIX + 4 + number, PREFIX - 1, None)] * 3  # on_report hears of this thread's calls alone
    assert kv.last_report is not None
    assert kv.last_report.prompt_tokens in {PREFIX + 4 + number for number in range(THREADS)}  # of any thread
    assert attributes(model) == before


def loaded(kv: BoundStore, ids: torch.Tensor, implementation: str) -> Any:
    if implementation == "dynamic":
        return kv.load(ids)
    return kv.load(ids, cache_implementation=implementation, max_cache_len=PREFIX + 24)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_caches_loaded_in_eight_threads_are_each_ones_own(model: Any, kv: BoundStore, implementation: str) -> None:
    controls = [outcome(model.generate, **masked(ids)) for ids in prompts()]
    pristine = loaded(kv, prompts()[0], implementation)

    def work(number: int) -> Outcome:
        ids = prompts()[number]
        cache = loaded(kv, ids, implementation)
        return outcome(model.generate, **masked(ids), **{compat.GENERATE_CACHE_ARGUMENT: cache})

    for ours, control in zip(at_once(work), controls, strict=True):
        assert_same(ours, control)
    again = loaded(kv, prompts()[0], implementation)
    for one, other in zip(pristine.layers, again.layers, strict=True):
        assert torch.equal(one.keys, other.keys)  # what was generated from the others left no trace, here or stored
        assert torch.equal(one.values, other.values)
        assert one.keys.data_ptr() != other.keys.data_ptr()


def test_attaching_and_detaching_beside_threads_that_generate(model: Any, kv: BoundStore, tmp_path: Path) -> None:
    """While some are attached, some come and go, and some call kv.generate, every call gives the control's tokens."""
    other = CacheStore(tmp_path / "other").bind(model)
    before = dict(model.__dict__)
    controls = [outcome(model.generate, **masked(ids)) for ids in prompts()]

    def work(number: int) -> list[tuple[Outcome, int | None]]:
        ids, found = prompts()[number], []
        for round_ in range(3):
            reports: list[GenerateReport] = []
            if number % 4 == 0:
                ours = outcome(kv.generate, ids, on_report=reports.append)
            elif number % 4 == 1:
                with kv.attached(), other.attached(), kv.attached():
                    ours = outcome(model.generate, **masked(ids))
            elif number % 4 == 2:
                kv.attach()
                ours = outcome(model.generate, **masked(ids))
                kv.detach()
            else:
                if round_ == 1:
                    other.attach()
                    other.detach()
                ours = outcome(model.generate, **masked(ids))
            found.append((ours, reports[0].reused_tokens if reports else None))
        return found

    for number, found in enumerate(at_once(work)):
        for ours, reused in found:
            assert_same(ours, controls[number])
            assert reused in (PREFIX - 1, None)
            assert (reused is None) == (number % 4 != 0)
    assert model.__dict__ == before


def test_a_detach_in_the_middle_of_a_call_does_not_disturb_it(model: Any, kv: BoundStore) -> None:
    ids = prompts()[3]
    before = dict(model.__dict__)
    control = outcome(model.generate, **masked(ids))
    inside, gone = threading.Event(), threading.Event()

    def stop(*_: Any, **__: Any) -> torch.Tensor:
        inside.set()
        assert gone.wait(60)
        return torch.zeros(1, dtype=torch.bool)

    with ThreadPoolExecutor(1) as pool:
        kv.attach()
        running = pool.submit(outcome, model.generate, **masked(ids), stopping_criteria=[stop])
        assert inside.wait(60)
        kv.detach()
        assert model.__dict__ == before  # at once, not when the call has ended
        assert_same(outcome(model.generate, **masked(ids)), control)
        with kv.attached():  # and again, beside the call that still runs
            assert_same(outcome(model.generate, **masked(ids)), control)
        gone.set()
        assert_same(running.result(120), control)
    assert kv.last_report is not None
    assert kv.last_report.reused_tokens == PREFIX - 1
    assert model.__dict__ == before


@pytest.mark.parametrize("attached", [False, True])
def test_streamers_in_threads_hear_each_their_own_text(tmp_path: Path, toy_tokenizer: Any, attached: bool) -> None:
    model = build_tiny("gemma3")
    kv = CacheStore(tmp_path / "store").bind(model, toy_tokenizer)
    kv.warm(prompts()[0][:, :PREFIX])
    before = dict(model.__dict__)
    options = {"max_new_tokens": 8, "do_sample": False}
    controls = [toy_tokenizer.decode(model.generate(**masked(ids), **options)[0, ids.shape[1] :]) for ids in prompts()]

    def work(number: int) -> str:
        streamer = TextIteratorStreamer(toy_tokenizer, skip_prompt=True, timeout=120)
        generate = model.generate if attached else kv.generate
        arguments = {**masked(prompts()[number]), **options, "streamer": streamer}
        thread = threading.Thread(target=generate, kwargs=arguments)
        thread.start()
        text = "".join(streamer)
        thread.join()
        return text

    if attached:
        with kv.attached():
            assert at_once(work) == controls
    else:
        assert at_once(work) == controls
    assert kv.last_report is not None
    assert (kv.last_report.reused_tokens, kv.last_report.reason) == (PREFIX - 1, None)
    assert model.__dict__ == before
