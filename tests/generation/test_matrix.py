"""Every way of generating with every layout, whatever part of the prompt is stored: the control's logits and tokens.

The control is ``model.generate`` of the same model without a store. How much each call need not feed is worked out
beforehand; the ids that pass the embeddings must be those of the control from there on, one for one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from matrix_layouts import LAYOUTS, STEP_COST, build
from tiny_models import PAD, VOCABULARY, WINDOW
from transformers.generation.utils import GenerateDecoderOnlyOutput

from kvkeep import BoundStore, CacheStore, KvkeepError, compat
from kvkeep.errors import UnsupportedCacheError, UnsupportedRequestError

PROMPT, SECOND, NEW = 24, 21, 5
"""Tokens of the prompt, of the second line of a batch, and of what is generated."""

TOLERANCE = 5e-5
CHUNK = {"prefill_chunk_size": 7}
SAMPLING = {"do_sample": True, "temperature": 0.9, "top_k": 40}
TITLE = f"generate with a store against the control, transformers {transformers.__version__}"

COVERED: dict[str, Callable[[int], int]] = {
    "nothing": lambda tokens: 0,
    "one token": lambda tokens: 1,
    "half": lambda tokens: tokens // 2,
    "all but one": lambda tokens: tokens - 1,
    "all": lambda tokens: tokens,
    "a little beyond": lambda tokens: tokens + 2,
    "far beyond": lambda tokens: tokens + 9,
}
"""How much is stored of a prompt of so many tokens."""


def by_hand(model: Any, input_ids: torch.Tensor, *, generation_config: Any, **given: Any) -> Any:
    """A loop of one's own, as ``custom_generate`` takes it: it feeds the whole prompt to the cache that it is given.

    With ``penalty_alpha`` it takes the one of the likeliest tokens that is least like what was there before.
    """
    cache = given.get(compat.GENERATE_CACHE_ARGUMENT)
    held = {} if cache is None else {compat.forward_cache_argument(model): cache, "use_cache": True}
    unseen, logits = input_ids, []
    for _ in range(NEW):
        step = model(unseen if held else input_ids, **held).logits[:, -1].float()
        logits.append(step)
        chosen = step.argmax(-1, keepdim=True)
        if alpha := generation_config.penalty_alpha:
            likely = step.topk(generation_config.top_k).indices[0]
            table = torch.nn.functional.normalize(model.get_input_embeddings().weight, dim=-1)
            alike = (table[likely] @ table[input_ids[0]].T).max(dim=-1).values
            chosen = likely[((1 - alpha) * step.softmax(-1)[0, likely] - alpha * alike).argmax()][None, None]
        input_ids, unseen = torch.cat([input_ids, chosen], dim=1), chosen
    return GenerateDecoderOnlyOutput(sequences=input_ids, logits=tuple(logits))


class Written(list[int]):
    """A streamer that keeps what it is given."""

    def put(self, value: torch.Tensor) -> None:
        self.extend(value.flatten().tolist())

    def end(self) -> None:
        self.append(-1)


@dataclass(frozen=True)
class Mode:
    """One way of generating.

    Attributes:
        options: arguments of ``generate``; those that are ``True`` stand for an object that each call gets anew.
        copies: how many sequences come of each line.
        lines: lines of the prompt; the second is shorter, with padding at its left.
        alike: whether the second is as long as the first instead, and has another last token alone.
        attached: whether ``model.generate`` is called, with the store attached to the model.
        aside: the reason why no store serves this mode, if none does.
        drafts: whether tokens are drafted and checked.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    copies: int = 1
    lines: int = 1
    alike: bool = False
    attached: bool = False
    aside: str | None = None
    drafts: bool = False

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each line."""
        return ((PROMPT, PROMPT) if self.alike else LENGTHS)[: self.lines]

    @property
    def padding(self) -> tuple[int, ...]:
        """Slots of padding before each line."""
        return tuple(PROMPT - length for length in self.lengths)


MODES = {
    "greedy": Mode(),
    "scores": Mode({"output_scores": True}),
    "sampling": Mode(SAMPLING),
    "beams": Mode({"num_beams": 3}, copies=3),
    "several sequences": Mode({**SAMPLING, "num_return_sequences": 3}, copies=3),
    "sampled beams": Mode({**SAMPLING, "num_beams": 3}, copies=3),
    "beams, several sequences": Mode({"num_beams": 3, "num_return_sequences": 2}, copies=3),
    "assistant": Mode({"assistant_model": True}, drafts=True),
    "prompt lookup": Mode({"prompt_lookup_num_tokens": 3}, drafts=True),
    "chunked prefill": Mode(CHUNK, aside=None if compat.CHUNKS else "mode: prefill_chunk_size is not served yet"),
    "guidance": Mode({"guidance_scale": 1.7, "negative_prompt_ids": torch.tensor([[5, 9, 11, 4, 8]])}),
    "static cache": Mode({"cache_implementation": "static", "disable_compile": True}),
    "padded batch": Mode(lines=2),
    "padded batch, beams": Mode({"num_beams": 2}, copies=2, lines=2),
    "batch of one prefix": Mode(lines=2, alike=True),
    "batch of one prefix, beams": Mode({"num_beams": 2}, copies=2, lines=2, alike=True),
    "attached": Mode(attached=True),
    "streamer": Mode({"streamer": True}),
    "a loop of one's own": Mode({"custom_generate": by_hand}, aside="mode: custom_generate is not served yet"),
    "contrastive, by hand": Mode(
        {"custom_generate": by_hand, "penalty_alpha": 0.6, "top_k": 4},
        aside="mode: contrastive_search is not served yet",
    ),
}
GONE: dict[str, dict[str, Any]] = {
    "contrastive search": {"penalty_alpha": 0.6, "top_k": 4},
    "DoLa": {"dola_layers": "low"},
    "groups of beams": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "constrained beams": {"num_beams": 2, "force_words_ids": [[5]]},
}
"""Modes that neither version has any more: they want code from the hub."""

REFUSED: dict[str, dict[str, Any]] = {
    "without a cache": {"use_cache": False},
    "embeddings": {"inputs_embeds": torch.zeros(1, PROMPT, 64)},
    "a cache of one's own": {compat.GENERATE_CACHE_ARGUMENT: object()},
}
"""What a store cannot serve, where the caller asks for one."""

ROWS = {name: (number, name) for number, name in enumerate([*MODES, *REFUSED, *GONE])}
COLUMNS = {name: (number, name) for number, name in enumerate(LAYOUTS)}

OLD_DRAFTS = not compat.DRAFTS_WHOLE
"""Whether drafts are made with every row of sliding layers kept, as no entry has them: 4.57."""

_STATES = [name for name, kind in LAYOUTS.items() if kind.states]
_UNABLE: list[tuple[list[str], list[str], str]] = [
    (["assistant", "prompt lookup"], _STATES, "assisted generation is not supported with stateful models"),
]
if compat.CHUNKS:
    _UNABLE += [
        (["chunked prefill"], ["recurrent"], "`get_seq_length` can only be called on Attention layers"),
        (["chunked prefill"], ["in no cache"], "Cannot use prefill chunking without a cache"),
        ([name for name in MODES if "beams" in name], ["in no cache"], "cannot use beam search with a cache"),
    ]
else:
    _UNABLE += [
        (["chunked prefill"], _STATES, "Cannot use prefill chunking without a cache"),
        (["guidance"], ["full, recurrent, singly"], "The expanded size of the tensor"),
    ]
UNABLE = {case: said for modes, layouts, said in _UNABLE for case in itertools.product(modes, layouts)}
"""What transformers itself says of modes and layouts that it does not put together."""


def random_ids(length: int, seed: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


FIRST_LINE = random_ids(9, seed=1).repeat(1, 4)  # so that prompt lookup finds something
LINES = (FIRST_LINE, random_ids(36, seed=2))
LENGTHS = (PROMPT, SECOND)


def prompt_of(how: Mode) -> dict[str, torch.Tensor]:
    lines = LINES
    if how.alike:
        first = LINES[0][:, :PROMPT]
        lines = (first, torch.cat([first[:, :-1], first[:, -1:] + 1], dim=1))
    rows = [
        torch.nn.functional.pad(line[:, :length], (padding, 0), value=PAD)
        for line, length, padding in zip(lines, how.lengths, how.padding, strict=False)
    ]
    slots = torch.arange(PROMPT)
    return {
        "input_ids": torch.cat(rows),
        "attention_mask": torch.stack([slots >= padding for padding in how.padding]).long(),
    }


@dataclass
class Outcome:
    """What came of one call.

    Attributes:
        out: what ``generate`` returned.
        fed: the ids that passed the embeddings, pass by pass, [lines, tokens] each.
        written: what the streamer was given.
        error: what ``generate`` raised instead.
    """

    out: Any
    fed: list[torch.Tensor]
    written: list[int]
    error: Exception | None = None

    @property
    def stream(self) -> torch.Tensor:
        return torch.cat(self.fed, dim=1)


class Bench:
    """The models, a store for each layout and part that is stored, and the control of each mode: all made once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._models: dict[str, Any] = {}
        self._bound: dict[tuple[str, str], BoundStore] = {}
        self._controls: dict[tuple[str, str], Outcome] = {}

    def model(self, layout: str) -> Any:
        if layout not in self._models:
            self._models[layout] = build(layout)
        return self._models[layout]

    def kv(self, layout: str, covered: str) -> BoundStore:
        """A store that holds so much of both lines; nothing of a model that keeps its state in no cache."""
        if (layout, covered) not in self._bound:
            kv = CacheStore(self.path / f"{layout} {covered}").bind(self.model(layout))
            for line, tokens in zip(LINES, LENGTHS, strict=True):
                if COVERED[covered](tokens) and LAYOUTS[layout].kept:
                    kv.warm(line[:, : COVERED[covered](tokens)])
            kv.generate(
                **prompt_of(Mode(lines=2)), max_new_tokens=1
            )  # a model is asked once how it places what is padded
            self._bound[layout, covered] = kv
        return self._bound[layout, covered]

    def control(self, mode: str, layout: str) -> Outcome:
        if (mode, layout) not in self._controls:
            self._controls[mode, layout] = self.run(MODES[mode], layout, self.model(layout).generate)
        return self._controls[mode, layout]

    def run(self, how: Mode, layout: str, generate: Callable[..., Any]) -> Outcome:
        model, fed, written = self.model(layout), list[torch.Tensor](), Written()
        options = {"max_new_tokens": NEW, "do_sample": False, **how.options, **prompt_of(how)}
        if "streamer" in options:
            options["streamer"] = written
        if "assistant_model" in options:
            options["assistant_model"] = self.model("full, windowed" if layout == "full" else "full")
        hook = model.get_input_embeddings().register_forward_hook(lambda _m, ids, _out: fed.append(ids[0].clone()))
        torch.manual_seed(3)
        try:
            return Outcome(generate(**options, return_dict_in_generate=True, output_logits=True), fed, written)
        except Exception as error:  # noqa: BLE001 - it is compared
            return Outcome(None, fed, written, error)
        finally:
            hook.remove()


WORDS = {
    "hit": "what is stored is not fed, but for the guard's token",
    "empty": "nothing is stored",
    "trim": "the entry goes on beyond what can be used, and cannot be cut there",
    "guard": "a single token is stored, and the guard feeds one",
    "mode": "this way of generating is not served: the call runs without the store",
    "batch": "several lines or sequences of this layout are not served, or not where their lengths differ",
    "layout": "no stored state would help here: the call runs without the store",
    "refused": "a typed error that says what to do",
    "unable": "transformers does not put the two together, with or without a store",
    "gone": "transformers has this mode no more",
}
"""The words of the table: the first word of the reason, as the README has them, or what else comes of a call."""


@dataclass(frozen=True)
class Expected:
    """What a call must do.

    Attributes:
        held: slots of each line that are not fed.
        reused: tokens of the prompt that these are, over all its lines.
        word: one of ``WORDS``.
    """

    held: int
    reused: int
    word: str = "hit"


def expected(mode: str, layout: str, covered: str) -> Expected:
    """What comes of a mode, a layout and how much is stored."""
    how, kind = MODES[mode], LAYOUTS[layout]
    stored = [kind.stored(COVERED[covered](tokens)) for tokens in how.lengths]
    usable = [kind.usable(end, tokens - 1) for end, tokens in zip(stored, how.lengths, strict=True)]
    cut = min(pad + tokens for pad, tokens in zip(how.padding, usable, strict=True))
    tokens = [cut - pad for pad in how.padding]
    obstacles = [
        ("mode", how.aside is not None),
        ("layout", not kind.kept),
        ("batch", kind.states and (any(how.padding) or (not compat.LINEAR_LAYERS and how.lines * how.copies > 1))),
        ("empty", not stored[0]),
        ("trim", not usable[0]),
        ("guard", not kind.states and min(tokens) < 2),
        ("layout", kind.singly and (PROMPT - 1 - cut) * STEP_COST > cut),
        ("layout", kind.singly and "prefill_chunk_size" in how.options),
        ("layout", OLD_DRAFTS and how.drafts and kind.slides and stored[0] >= WINDOW),
    ]
    for word, applies in obstacles:
        if applies:
            return Expected(0, 0, word)
    guards = 0 if kind.states else 1  # a token that is fed again: of a state nothing can be compared
    return Expected(cut - guards, sum(tokens) - guards * how.lines)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("matrix"))


def assert_close(ours: tuple[torch.Tensor, ...], control: tuple[torch.Tensor, ...]) -> None:
    """The same finite numbers but for rounding, and the same others."""
    assert len(ours) == len(control)
    for mine, other in zip(ours, control, strict=True):
        finite = other.isfinite()
        assert torch.equal(mine[~finite], other[~finite])
        assert (mine[finite] - other[finite]).abs().max() < TOLERANCE * other[finite].abs().max()


@pytest.mark.parametrize("covered", COVERED)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_a_hit_is_the_control_and_feeds_only_what_is_not_stored(
    bench: Bench, cell: Any, mode: str, layout: str, covered: str
) -> None:
    how, control, kv = MODES[mode], bench.control(mode, layout), bench.kv(layout, covered)
    kv.last_report = None
    with kv.attached() if how.attached else nullcontext():
        ours = bench.run(how, layout, bench.model(layout).generate if how.attached else kv.generate)
    if (mode, layout) in UNABLE:
        for one in (control, ours):
            assert UNABLE[mode, layout] in str(one.error)
        assert type(ours.error) is type(control.error)
        cell(TITLE, ROWS[mode], COLUMNS[layout], "unable")
        return
    assert control.error is None and ours.error is None, (control.error, ours.error)

    # The same tokens, logits and scores
    assert torch.equal(ours.out.sequences, control.out.sequences)
    assert ours.written == control.written
    for name in ("logits", "scores"):
        if control.out.get(name) is not None:
            assert_close(ours.out[name], control.out[name])
    if control.out.get("sequences_scores") is not None:
        assert_close((ours.out.sequences_scores,), (control.out.sequences_scores,))

    # Fed: what the control feeds, without what is held; the guard's token once
    want = expected(mode, layout, covered)
    prompt = prompt_of(how)["input_ids"].repeat_interleave(how.copies, dim=0)
    assert torch.equal(control.stream[:, :PROMPT], prompt)
    assert torch.equal(ours.stream, control.stream[:, want.held :])

    # And so it says
    report = kv.last_report
    assert report is not None
    assert (report.prompt_tokens, report.reused_tokens) == (sum(how.lengths), want.reused)
    assert str(report.reason).partition(":")[0] == ("None" if want.word == "hit" else want.word)
    assert how.aside in (None, report.reason)
    cell(TITLE, ROWS[mode], COLUMNS[layout], want.word)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_in_no_cache_is_refused_by_a_typed_error(bench: Bench, layout: str) -> None:
    kv = CacheStore(bench.path / "tried").bind(bench.model(layout))
    if LAYOUTS[layout].kept:
        assert kv.warm(LINES[0]).tokens == LAYOUTS[layout].stored(LINES[0].shape[1])
    else:
        with pytest.raises(UnsupportedCacheError, match="keeps its state in no cache that it is given"):
            kv.warm(LINES[0])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", REFUSED)
def test_what_no_store_can_serve_is_refused_before_anything_is_fed(
    bench: Bench, cell: Any, mode: str, layout: str
) -> None:
    outcome = bench.run(Mode(REFUSED[mode]), layout, bench.kv(layout, "all but one").generate)
    assert type(outcome.error) is UnsupportedRequestError
    assert isinstance(outcome.error, KvkeepError)
    assert outcome.fed == []
    cell(TITLE, ROWS[mode], COLUMNS[layout], "refused")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", GONE)
def test_a_mode_that_transformers_gave_away_is_refused_as_without_a_store(
    bench: Bench, cell: Any, mode: str, layout: str
) -> None:
    kv, how = bench.kv(layout, "all but one"), Mode(GONE[mode])
    for generate in (bench.model(layout).generate, kv.generate):
        outcome = bench.run(how, layout, generate)
        assert isinstance(outcome.error, ValueError)
        assert "requires `trust_remote_code=True` in your `generate` call, since it loads" in str(outcome.error)
        assert outcome.fed == []
    cell(TITLE, ROWS[mode], COLUMNS[layout], "gone")


def test_the_words_of_the_table_are_explained(figures: list[str]) -> None:
    words = {expected(*case).word for case in itertools.product(MODES, LAYOUTS, COVERED)}
    assert words | {"refused", "unable", "gone"} == set(WORDS)
    figures += [f"{word:8} {meaning}" for word, meaning in WORDS.items()]
