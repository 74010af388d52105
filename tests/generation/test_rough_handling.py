"""What a stranger tried to break the hand-over with, and now holds."""

from __future__ import annotations

import copy
import io
import os
import pickle
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, build_tiny
from transformers import GenerationConfig

from kvkeep import CacheStore, compat
from kvkeep.bound import BoundStore
from kvkeep.errors import CacheMismatchError, InvalidPromptError, UnsupportedCacheError


@pytest.fixture
def llama() -> Any:
    return build_tiny("llama")


@pytest.fixture
def kv(llama: Any, tmp_path: Path) -> BoundStore:
    return CacheStore(tmp_path / "store").bind(llama)


def random_ids(length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


def masked(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_cache_positions_of_the_callers_own_are_not_served(kv: BoundStore, llama: Any) -> None:
    if not compat.takes(llama, "cache_position"):
        return  # newer versions have no such argument
    ids = random_ids(40)
    kv.warm(ids[:, :30])
    control = llama.generate(**masked(ids), max_new_tokens=3, do_sample=False)
    ours = kv.generate(ids, cache_position=torch.arange(40), max_new_tokens=3, do_sample=False)
    assert torch.equal(ours, control)
    assert kv.last_report is not None
    assert kv.last_report.reason == "inputs: cache_position are not served"


class Wrapper(torch.nn.Module):
    """A model around a model, in the manner of adapter libraries: generate by delegation."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.generate(*args, **kwargs)


@pytest.mark.parametrize(
    "settings", [{"num_beams": 2}, {"cache_implementation": "static"}, {"use_cache": False}, {}], ids=str
)
def test_a_config_by_position_is_respected_behind_a_wrapper(
    llama: Any, tmp_path: Path, settings: dict[str, Any]
) -> None:
    wrapper = Wrapper(llama).eval()
    kv = CacheStore(tmp_path / "store").bind(wrapper)
    ids = random_ids(40)
    kv.warm(ids[:, :30])
    config = GenerationConfig(max_new_tokens=4, eos_token_id=2, pad_token_id=0, do_sample=False, **settings)
    control = llama.generate(ids, config, attention_mask=torch.ones_like(ids))
    with kv.attached():
        assert torch.equal(wrapper.generate(ids, config, attention_mask=torch.ones_like(ids)), control)
    assert kv.last_report is not None
    assert (kv.last_report.reused_tokens, kv.last_report.reason) == (
        0,
        "inputs: arguments by position are not looked at here",
    )
    if "use_cache" not in settings:
        with kv.attached():
            named = wrapper.generate(**masked(ids), generation_config=config, stopping_criteria=[])
        assert torch.equal(named, control)
        assert kv.last_report.reused_tokens == (0 if "num_beams" in settings else 29)


def test_a_copy_made_while_attached_generates_with_its_own_weights(kv: BoundStore, llama: Any) -> None:
    ids = random_ids(40)
    kv.warm(ids[:, :30])
    with kv.attached():
        copied = copy.deepcopy(llama)
        pickled = pickle.loads(pickle.dumps(llama))
        torch.save(llama, io.BytesIO())
    for other in (copied, pickled):
        control = build_tiny("llama")
        with torch.no_grad():
            for model in (other, control):
                for parameter in model.parameters():
                    parameter.mul_(-0.7).add_(0.01)
        expected = control.generate(**masked(ids), max_new_tokens=4, do_sample=False)
        assert torch.equal(other.generate(**masked(ids), max_new_tokens=4, do_sample=False), expected)
        assert other.generate.__self__ is other


def test_a_model_that_goes_while_attached_takes_nothing_down(tmp_path: Path) -> None:
    model = build_tiny("llama")
    kv = CacheStore(tmp_path / "store").bind(model)
    with kv.attached():
        del model


def test_ids_that_are_none_step_aside_when_attached(kv: BoundStore, llama: Any) -> None:
    ids = random_ids(20)
    kv.warm(ids[:, :10])
    real = llama.get_input_embeddings().forward
    llama.get_input_embeddings().forward = lambda given: real(given.clamp(min=0))  # as models that mark pictures do
    ids[0, 3] = -200
    with kv.attached():
        llama.generate(**masked(ids), max_new_tokens=1, do_sample=False)
    assert kv.last_report is not None
    assert kv.last_report.reason is not None
    assert kv.last_report.reason.startswith("inputs: ")


def test_tuples_that_hold_more_or_cannot_tell_are_refused(tmp_path: Path) -> None:
    for name in ("llama", "gemma3"):
        model = build_tiny(name)
        kv = CacheStore(tmp_path / name).bind(model)
        layers = model.config.num_hidden_layers
        pair = (torch.zeros(1, 2, 20, 16), torch.zeros(1, 2, 20, 16))
        with pytest.raises(CacheMismatchError, match="20 rows, more than the 19 tokens"):
            kv.save((pair,) * layers, random_ids(19))
    mistral = build_tiny("mistral")
    kv = CacheStore(tmp_path / "mistral").bind(mistral)
    window = (torch.zeros(1, 2, 7, 16), torch.zeros(1, 2, 7, 16))
    with pytest.raises(CacheMismatchError, match="how many tokens it has seen"):
        kv.save((window,) * 3, random_ids(19))
    assert kv.save((window,) * 3, random_ids(7), guard=False).tokens == 7


def test_a_window_of_one_token_is_refused(tmp_path: Path) -> None:
    model = build_tiny("mistral", sliding_window=1)
    kv = CacheStore(tmp_path / "store").bind(model)
    ids = random_ids(30)
    with pytest.raises(UnsupportedCacheError, match="DynamicSlidingWindowLayer"):
        kv.warm(ids[:, :20])
    control = model.generate(**masked(ids), max_new_tokens=3, do_sample=False)
    assert torch.equal(kv.generate(ids, max_new_tokens=3, do_sample=False), control)


def test_one_generate_within_another_is_not_the_others(kv: BoundStore, llama: Any) -> None:
    ids = random_ids(40)
    kv.warm(ids[:, :30])
    inner: list[torch.Tensor] = []

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            if not inner:
                inner.append(llama.generate(**masked(random_ids(12, seed=5)), max_new_tokens=2, do_sample=False))

        def end(self) -> None:
            pass

    control = llama.generate(**masked(ids), max_new_tokens=4, do_sample=False)
    assert torch.equal(kv.generate(ids, max_new_tokens=4, do_sample=False, streamer=Streamer()), control)
    assert kv.last_report is not None
    assert (kv.last_report.prompt_tokens, kv.last_report.reused_tokens) == (40, 29)


def test_a_wrapper_that_somebody_puts_in_front_meanwhile_stays(kv: BoundStore, llama: Any) -> None:
    kv.attach()
    mine = llama.__dict__["generate"] = lambda **kwargs: "mine"
    kv.detach()
    assert llama.__dict__["generate"] is mine


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_forked_amid_lookups_of_another_thread_goes_on(kv: BoundStore) -> None:
    ids = random_ids(40).tolist()[0]
    kv.warm(ids[:30])
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            kv.lookup(ids)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(10):
            child = os.fork()
            if child == 0:
                os._exit(0 if kv.lookup(ids).tokens == 30 else 3)
            deadline = time.monotonic() + 20
            while (status := os.waitpid(child, os.WNOHANG))[0] == 0:
                if time.monotonic() > deadline:
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    pytest.fail("the child hangs")
                time.sleep(0.01)
            assert os.waitstatus_to_exitcode(status[1]) == 0
    finally:
        stop.set()
        thread.join()


def test_an_id_that_the_model_does_not_know_is_refused(kv: BoundStore) -> None:
    with pytest.raises(InvalidPromptError, match=f"the id {VOCABULARY}, and the model knows ids below {VOCABULARY}"):
        kv.warm([5, VOCABULARY, 6])


def test_a_prompt_of_one_token_says_why(kv: BoundStore) -> None:
    kv.warm([5, 6, 7])
    assert kv.lookup([5]).reason == "short: a prompt of one token has nothing to reuse"
