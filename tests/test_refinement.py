"""Refinement: what was answered approximately and comes again is exact the next time, and no request waits for it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cachecraft_rag import CacheCraftEngine, EngineConfig
from cachecraft_rag.refinement import Refinement
from tests.conftest import EngineMaker, passage, prefill_logits, rag_prompt
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level

THREAD = "cachecraft-refine"
SECONDS = 60.0  # more than any wait takes


def refining(make_engine: EngineMaker, name: str = "llama", **options: Any) -> CacheCraftEngine:
    """An engine that refines, with the ratio 0 unless told otherwise."""
    recompute = {"ratio": options.pop("ratio", 0.0), **{k: options.pop(k) for k in ("policy",) if k in options}}
    return make_engine(name, **recompute, refine={"enabled": True, **options})


def ask(engine: CacheCraftEngine, *numbers: int, **options: Any) -> Any:
    return engine.generate(rag_prompt(*numbers), max_new_tokens=2, **options).stats


def done(engine: CacheCraftEngine) -> Refinement:
    assert engine.refinement is not None
    assert engine.refinement.wait(SECONDS)
    return engine.refinement


class Forwards:
    """Records which thread runs each forward pass over rows, and calls back before it."""

    def __init__(self, engine: CacheCraftEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[tuple[str, int]] = []
        self.before: Callable[[], object] = lambda: None
        self.on_own: Callable[[], object] = lambda: None
        adapter = engine._adapter
        forward = adapter.forward_rows

        def recording(token_ids: torch.Tensor, *args: Any) -> torch.Tensor:
            name = threading.current_thread().name
            (self.before if name == THREAD else self.on_own)()
            self.rows.append((name, token_ids.numel()))
            return forward(token_ids, *args)

        monkeypatch.setattr(adapter, "forward_rows", recording)

    @property
    def refining(self) -> list[int]:
        """Rows of the refinement's passes."""
        return [rows for name, rows in self.rows if name == THREAD]


def test_it_is_off_unless_asked_for(make_engine: EngineMaker) -> None:
    engine = make_engine(ratio=0.0)
    assert engine.refinement is None
    for _ in range(4):
        stats = ask(engine, 1, 2, 3)
    assert stats.prefilled_tokens > 0
    assert not any(thread.name == THREAD for thread in threading.enumerate())
    assert [key for number in (1, 2, 3) for key in contexts(engine, number)] == [engine.library._encoder.context] * 3


def contexts(engine: CacheCraftEngine, number: int) -> list[str]:
    """What the stored entries of a passage were computed behind."""
    chunk = engine.library._chunks([passage(number)], "default")[0]
    return [key.context for key in engine.store.variants(chunk)]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("piece_tokens", [50, 10_000])
def test_a_sequence_that_comes_again_equals_full_prefill_without_recompute(
    make_engine: EngineMaker, name: str, piece_tokens: int
) -> None:
    engine = refining(make_engine, name, after=1, piece_tokens=piece_tokens)
    ask(engine, 1, 2, 3)
    approximate, _ = prefill_logits(engine, rag_prompt(1, 2, 3))
    figures = done(engine).stats()
    question = rag_prompt(1, 2, 3, question="How long is the warranty?")
    logits, request = prefill_logits(engine, question)
    expected, _ = prefill_logits(engine, question, reuse=False)
    same_question, _ = prefill_logits(engine, rag_prompt(1, 2, 3), reuse=False)
    assert torch.allclose(logits, expected, atol=2e-4)
    assert not torch.allclose(approximate, same_question, atol=2e-2)
    assert request.stats().recomputed_tokens == 0
    assert request.stats().chunk_hits == 3
    assert (figures.refined, figures.errors, figures.waiting) == (1, 0, 0)
    lengths = [span.num_tokens for span in request.encoded.spans]
    assert figures.stored_tokens in (sum(lengths), sum(lengths[1:]))  # the first chunk may have been exact already
    assert figures.forwards == -(-figures.computed_tokens // piece_tokens)


def test_a_longer_sequence_starts_from_what_is_exact_already(make_engine: EngineMaker) -> None:
    engine = refining(make_engine, after=1)
    ask(engine, 1, 2)
    before = done(engine).stats()
    ask(engine, 1, 2, 3)
    figures = done(engine).stats()
    _, request = prefill_logits(engine, rag_prompt(1, 2, 3))
    third = request.encoded.spans[2]
    assert figures.stored_tokens - before.stored_tokens == third.num_tokens
    stored = sum(span.num_tokens for span in request.encoded.spans[:2])
    assert figures.computed_tokens - before.computed_tokens == third.end - stored  # with the text around the chunks
    expected, _ = prefill_logits(engine, rag_prompt(1, 2, 3), reuse=False)
    assert torch.allclose(request.logits, expected, atol=2e-4)  # type: ignore[arg-type]


def test_the_common_beginning_of_different_sequences_is_refined(make_engine: EngineMaker) -> None:
    engine = refining(make_engine, after=2)
    for last in (3, 4):
        ask(engine, 1, 2, last)
    done(engine)
    _, request = prefill_logits(engine, rag_prompt(1, 2, 5))
    assert [chunk.is_exact for chunk in request.chunks] == [True, True, False]


def test_a_sequence_is_left_alone_until_it_came_often_enough(make_engine: EngineMaker) -> None:
    engine = refining(make_engine, after=3)
    for _ in range(2):
        ask(engine, 1, 2, 3)
        assert done(engine).stats().forwards == 0
    ask(engine, 2, 1, 3)
    assert done(engine).stats().forwards == 0  # in another order it is another sequence
    ask(engine, 1, 2, 3)
    assert done(engine).stats().refined == 1


def test_what_was_exact_or_prefilled_in_full_is_not_refined(make_engine: EngineMaker) -> None:
    engine = refining(make_engine, after=1, ratio=1.0)
    ask(engine, 1, 2, 3)
    ask(engine, 4, 5, reuse=False)
    ask(engine)
    assert done(engine).stats().sequences == 0
    assert engine.refinement is not None
    assert engine.refinement.stats().forwards == 0


def test_it_serves_the_planner_of_variants_too(make_engine: EngineMaker) -> None:
    engine = refining(make_engine, after=1, policy="inter_attention")
    engine.warm([passage(number) for number in (1, 2, 3)])
    ask(engine, 1, 2, 3)
    done(engine)
    logits, request = prefill_logits(engine, rag_prompt(1, 2, 3))
    expected, _ = prefill_logits(engine, rag_prompt(1, 2, 3), reuse=False)
    assert request.stats().recomputed_tokens == 0
    assert torch.allclose(logits, expected, atol=2e-4)


def held_at_its_first_piece(
    engine: CacheCraftEngine, forwards: Forwards, *numbers: int
) -> tuple[threading.Event, threading.Event]:
    """Have a sequence refined up to the start of a piece; the events that say so, and that let it go on."""
    reached, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        assert go_on.wait(SECONDS)

    forwards.before = hold
    ask(engine, *numbers)
    assert reached.wait(SECONDS)
    return reached, go_on


def test_a_request_waits_for_one_piece_at_most(make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = refining(make_engine, after=1, piece_tokens=40)
    engine.warm([passage(9)])
    forwards = Forwards(engine, monkeypatch)
    _, go_on = held_at_its_first_piece(engine, forwards, 1, 2, 3)
    forwards.rows.clear()
    forwards.on_own = go_on.set  # the piece begins together with the request's first pass
    ask(engine, 9)
    names = [name for name, _ in forwards.rows]
    last = max(place for place, name in enumerate(names) if name != THREAD)
    assert names[: last + 1].count(THREAD) <= 1
    figures = done(engine).stats()
    assert len(forwards.refining) == figures.forwards > 3  # it went on where it was
    assert figures.refined == 2  # what the request asked is refined too
    _, request = prefill_logits(engine, rag_prompt(1, 2, 3))
    assert all(chunk.is_exact for chunk in request.chunks)


def test_a_request_of_another_engine_with_the_same_model_is_not_held_up_either(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = refining(make_engine, after=1, piece_tokens=40)
    forwards = Forwards(engine, monkeypatch)
    with CacheCraftEngine(engine.model, byte_level()) as other:
        _, go_on = held_at_its_first_piece(engine, forwards, 1, 2)
        Forwards(other, monkeypatch).on_own = go_on.set
        deltas = other.stream(rag_prompt(9), max_new_tokens=4)
        next(deltas)
        assert go_on.is_set()
        assert len(forwards.refining) <= 1
        for _ in deltas:
            continue
    assert done(engine).stats().refined == 1


def test_closing_ends_the_thread_within_a_piece(make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = refining(make_engine, after=1, piece_tokens=10)
    forwards = Forwards(engine, monkeypatch)
    _, go_on = held_at_its_first_piece(engine, forwards, 1, 2, 3)
    closing = threading.Thread(target=engine.close)
    closing.start()
    refinement = engine.refinement
    assert refinement is not None
    with refinement._changed:
        assert refinement._changed.wait_for(lambda: refinement._is_closed, SECONDS)
    go_on.set()
    closing.join(SECONDS)
    assert not closing.is_alive()
    assert len(forwards.refining) == 1
    assert not any(thread.name == THREAD for thread in threading.enumerate())
    refinement.close()
    assert refinement.wait(0)


def test_nothing_of_an_invalidated_namespace_is_stored(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = refining(make_engine, after=1, piece_tokens=10)
    forwards = Forwards(engine, monkeypatch)
    _, go_on = held_at_its_first_piece(engine, forwards, 1, 2)
    engine.invalidate([passage(1)])
    go_on.set()
    figures = done(engine).stats()
    assert (figures.refined, figures.sequences) == (0, 0)
    assert contexts(engine, 1) == []
    assert contexts(engine, 2) == [engine.library._encoder.context]


def test_other_namespaces_keep_what_is_under_way(make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = refining(make_engine, after=1)
    forwards = Forwards(engine, monkeypatch)
    _, go_on = held_at_its_first_piece(engine, forwards, 1, 2)
    engine.invalidate(namespace="other")
    go_on.set()
    assert done(engine).stats().refined == 1


def test_weights_that_change_meanwhile_leave_nothing_stored(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = refining(make_engine, after=1)
    forwards = Forwards(engine, monkeypatch)
    _, go_on = held_at_its_first_piece(engine, forwards, 1, 2)
    with torch.no_grad():
        engine.model.get_input_embeddings().weight.mul_(1.5)
    go_on.set()
    figures = done(engine).stats()
    assert figures.forwards > 0
    assert (figures.refined, figures.errors) == (0, 0)


def test_an_error_never_reaches_a_request_and_is_warned_of_once(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = refining(make_engine, after=1)
    forwards = Forwards(engine, monkeypatch)

    def fail() -> None:
        raise MemoryError("no room for 7 bytes")

    forwards.before = fail

    def ask_twice() -> None:
        for numbers in ((1, 2), (3, 4)):
            ask(engine, *numbers)
            done(engine)

    with pytest.warns(UserWarning, match="MemoryError: no room for 7 bytes") as warned:
        ask_twice()
    assert len([w for w in warned if "refined" in str(w.message)]) == 1
    assert done(engine).stats().errors == 2
    forwards.before = lambda: None
    ask(engine, 1, 2)
    assert done(engine).stats().refined == 1


def test_counts_and_waiting_sequences_are_bounded(make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = refining(make_engine, after=1, max_sequences=3, max_waiting=2)
    forwards = Forwards(engine, monkeypatch)
    _, go_on = held_at_its_first_piece(engine, forwards, 1, 2)
    for number in range(3, 9):
        ask(engine, number, number + 10)
    refinement = engine.refinement
    assert refinement is not None
    assert refinement.stats().sequences == 3
    assert refinement.stats().waiting == 3  # the one that is held, and two
    go_on.set()
    figures = done(engine).stats()
    assert figures.refined == 3
    for number, is_exact in ((3, False), (7, True), (8, True)):
        _, request = prefill_logits(engine, rag_prompt(number, number + 10))
        assert all(chunk.is_exact for chunk in request.chunks) == is_exact


def test_the_thread_and_the_engine_go_when_nothing_is_left(make_engine: EngineMaker) -> None:
    engine = CacheCraftEngine(
        make("llama"), byte_level(), EngineConfig.model_validate({"refine": {"enabled": True, "after": 1}})
    )
    ask(engine, 1, 2)
    done(engine)
    assert not any(thread.name == THREAD for thread in threading.enumerate())
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
