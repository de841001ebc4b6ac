"""Similar questions: an earlier one's scores choose the tokens of a later one, in its namespace and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cachecraft_rag import CacheCraftEngine, EngineConfig, SamplingConfig, prefiller
from cachecraft_rag.config import SimilarConfig
from cachecraft_rag.selection.base import top_candidates
from cachecraft_rag.similar import AskedQuestion, SimilarQuestions
from tests.conftest import passage, rag_prompt
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level

LEASE, SAME_LEASE, GARDEN = "When does the lease end?", "When will the lease end?", "Who waters the garden?"
VECTORS = {LEASE: (1.0, 0.1, 0.0), SAME_LEASE: (2.0, 0.3, 0.1), GARDEN: (0.1, 1.0, 0.0)}


def embed(texts: list[str]) -> list[tuple[float, ...]]:
    return [VECTORS[text] for text in texts]


def questions(max_bytes: int = 10**6, **options: Any) -> SimilarQuestions:
    return SimilarQuestions(embed, SimilarConfig(**options), max_bytes)


def ask(
    known: SimilarQuestions, question: str, *chunks: str, namespace: str = "a", policy: str = "p", length: int = 2
) -> AskedQuestion:
    asked = known.ask(question, namespace, policy, chunks, [length] * len(chunks))
    assert asked is not None
    return asked


def remember(known: SimilarQuestions, question: str, *chunks: str, namespace: str = "a") -> None:
    asked = ask(known, question, *chunks, namespace=namespace)
    asked.scores = {chunk: torch.tensor([0.5, 0.25]) for chunk in chunks}
    known.add(asked)


class TestKeeping:
    def test_a_similar_question_tells_what_it_found_out_about_the_same_chunks(self) -> None:
        known = questions()
        assert ask(known, LEASE, "x", "y").hint is None
        remember(known, LEASE, "x", "y")
        hint = ask(known, SAME_LEASE, "z", "y").hint
        assert hint is not None
        assert 0.99 < hint.similarity < 1.0
        assert hint.scores[0] is None
        assert torch.equal(hint.scores[1], torch.tensor([0.5, 0.25]))  # type: ignore[arg-type]
        scores, has_score = hint.over(torch.tensor([0, 1, 1]), torch.tensor([1, 0, 1]))
        assert scores.tolist() == [0.0, 0.5, 0.25]
        assert has_score.tolist() == [False, True, True]

    def test_one_that_another_policy_scored_tells_nothing(self) -> None:
        known = questions()
        remember(known, LEASE, "x", "y")
        assert ask(known, SAME_LEASE, "x", "y", policy="another").hint is None
        assert known.chunks_of(SAME_LEASE, "a") == ["x", "y"]  # its chunks are worth loading all the same

    def test_one_about_something_else_tells_nothing(self) -> None:
        known = questions()
        remember(known, LEASE, "x")
        assert ask(known, GARDEN, "x").hint is None
        assert ask(known, SAME_LEASE, "z").hint is None
        assert ask(known, SAME_LEASE, "x", length=3).hint is None

    def test_how_similar_it_must_be_is_a_setting(self) -> None:
        known = questions(threshold=0.999)
        remember(known, LEASE, "x")
        assert ask(known, SAME_LEASE, "x").hint is None
        assert ask(known, LEASE, "x").hint is not None

    def test_one_with_more_of_the_chunks_goes_before_one_that_is_more_similar(self) -> None:
        known = questions()
        remember(known, SAME_LEASE, "x", "y")
        remember(known, LEASE, "x")
        hint = ask(known, LEASE, "x", "y").hint
        assert hint is not None
        assert hint.similarity < 0.9999
        assert None not in hint.scores

    def test_the_most_similar_one_is_taken(self) -> None:
        known = questions(threshold=-1.0)
        remember(known, LEASE, "x")
        remember(known, GARDEN, "x")
        hint = ask(known, SAME_LEASE, "x").hint
        assert hint is not None
        assert hint.similarity > 0.9

    def test_namespaces_share_nothing(self) -> None:
        known = questions()
        remember(known, LEASE, "x")
        assert ask(known, LEASE, "x", namespace="b").hint is None
        assert known.chunks_of(LEASE, "b") == []
        assert known.chunks_of(SAME_LEASE, "a") == ["x"]

    def test_the_number_of_questions_is_bounded_and_those_that_helped_stay(self) -> None:
        known = questions(max_questions=2)
        remember(known, LEASE, "x")
        remember(known, GARDEN, "x")
        assert ask(known, SAME_LEASE, "x").hint is not None
        remember(known, GARDEN, "y")
        assert len(known) == 2
        assert ask(known, LEASE, "x").hint is not None
        assert ask(known, GARDEN, "x").hint is None
        assert ask(known, GARDEN, "y").hint is not None

    def test_their_bytes_are_bounded_too(self) -> None:
        known = questions(max_bytes=50)
        for chunk in ("x", "y", "z"):
            remember(known, LEASE, chunk)
        assert (len(known), known.nbytes) == (2, 2 * (3 * 4 + 2 * 4))

    def test_what_is_forgotten_leaves_no_bytes(self) -> None:
        known = questions()
        remember(known, LEASE, "x", "y")
        remember(known, GARDEN, "z")
        remember(known, GARDEN, "y", namespace="b")
        known.forget("a", ["y"])
        assert len(known) == 2
        known.forget("a")
        known.forget("b")
        assert (len(known), known.nbytes) == (0, 0)

    @pytest.mark.parametrize(
        ("broken", "says"),
        [
            (lambda texts: 1 / 0, "ZeroDivisionError"),
            (lambda texts: [[float("nan"), 1.0]], "finite"),
            (lambda texts: [[0.0, 0.0]], "not all 0"),
            (lambda texts: [0.5, 0.5], r"\[1, dim\]"),
        ],
    )
    def test_an_embedding_that_fails_is_warned_of_once_and_never_raised(
        self, broken: Callable[[list[str]], Any], says: str
    ) -> None:
        known = SimilarQuestions(broken, SimilarConfig())
        with pytest.warns(UserWarning, match=says) as warned:
            found = [known.ask(LEASE, "a", "p", ["x"], [2]) for _ in range(3)]
        assert found == [None] * 3
        assert (len(warned), known.errors) == (1, 3)

    def test_vectors_of_another_length_are_never_compared(self) -> None:
        known = SimilarQuestions(lambda texts: np.ones((1, len(texts[0]))), SimilarConfig())
        remember(known, "four", "x")
        assert ask(known, "three", "x").hint is None
        assert ask(known, "five", "x").hint is not None


class Engine:
    """An engine that looks for similar questions, and counts what it runs for that."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: Any = None, ratio: float = 0.2, **similar: Any) -> None:
        self.passes = 0
        self.embedded: list[str] = []
        options = {"recompute": {"ratio": ratio}, "similar_questions": {"enabled": True, **similar}}
        config = EngineConfig.model_validate(options | ({} if store is None else {"store": store}))
        self.engine = CacheCraftEngine(make("llama"), byte_level(), config, embed=self._embed)
        self.engine.warm([passage(number) for number in range(1, 6)])
        adapter = self.engine._adapter
        record = adapter.forward_rows_recording

        def counting(*args: Any) -> torch.Tensor:
            self.passes += 1
            return record(*args)

        monkeypatch.setattr(adapter, "forward_rows_recording", counting)

    def _embed(self, texts: list[str]) -> list[tuple[float, ...]]:
        self.embedded += texts
        return embed(texts)

    def ask(self, question: str, *numbers: int, **options: Any) -> Any:
        return self.engine.generate(rag_prompt(*numbers, question=question), max_new_tokens=2, **options).stats


@pytest.fixture
def make_asked(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: list[Engine] = []

    def maker(**options: Any) -> Engine:
        made.append(Engine(monkeypatch, **options))
        return made[-1]

    yield maker
    for one in made:
        one.engine.close()


def test_it_is_off_unless_asked_for() -> None:
    with CacheCraftEngine(make("llama"), byte_level(), embed=embed) as engine:
        assert engine.library.questions is None
        assert engine.generate(rag_prompt(1, 2, question=LEASE), max_new_tokens=1).stats.similarity is None
        assert engine.prefetch_similar(LEASE) == 0


def test_it_needs_an_embedding() -> None:
    config = EngineConfig.model_validate({"similar_questions": {"enabled": True}})
    with pytest.raises(ValueError, match="embed: None, but similar_questions is enabled"):
        CacheCraftEngine(make("llama"), byte_level(), config)


def test_the_question_pass_of_a_similar_question_is_saved_and_not_charged(make_asked: Any) -> None:
    asked = make_asked()
    first = asked.ask(LEASE, 1, 2, 3)
    assert (first.similarity, asked.passes) == (None, 1)
    second = asked.ask(SAME_LEASE, 3, 1, 2)
    assert second.similarity > 0.99
    assert asked.passes == 1
    assert second.recomputed_tokens == first.recomputed_tokens
    computed = second.recomputed_tokens + second.prefilled_tokens
    assert second.charged_ratio == pytest.approx(computed / second.prompt_tokens)
    assert second.charged_ratio < first.charged_ratio
    assert len(asked.engine.library.questions) == 1  # what was taken over is not kept twice


def test_a_question_asked_again_is_answered_as_it_was(make_asked: Any) -> None:
    asked = make_asked()
    prompt = rag_prompt(1, 2, 3, question=LEASE)
    first = asked.engine.generate(prompt, max_new_tokens=8)
    again = asked.engine.generate(prompt, max_new_tokens=8)
    assert again.stats.similarity == pytest.approx(1.0)
    assert again.token_ids == first.token_ids


def test_another_question_is_scored_itself(make_asked: Any) -> None:
    asked = make_asked()
    asked.ask(LEASE, 1, 2, 3)
    assert asked.ask(GARDEN, 1, 2, 3).similarity is None
    assert asked.passes == 2
    assert len(asked.engine.library.questions) == 2


def test_with_a_new_chunk_the_question_is_scored_and_the_shared_chunks_get_added_weight(
    make_asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = make_asked(weight=1e9)
    asked.ask(LEASE, 1, 2, 3)
    earlier = next(iter(asked.engine.library.questions._questions.values())).scores
    results: list[Any] = []
    prefill = prefiller.selective_prefill
    monkeypatch.setattr(prefiller, "selective_prefill", lambda *args: results.append(prefill(*args)) or results[-1])
    prompt = rag_prompt(1, 4, 2, question=SAME_LEASE)
    request = asked.engine.intake.take(prompt, SamplingConfig(max_new_tokens=2))
    asked.engine.prefill(request, reuse=True)
    assert asked.passes == 2
    assert request.stats().similarity > 0.99
    names = [chunk.exact_key.chunk for chunk in request.chunks]
    own = request.asked.scores  # what it found itself is kept
    assert set(own) == set(names)
    assert not torch.equal(own[names[0]], earlier[names[0]])
    # With so much weight the earlier scores decide, but for the chunk that has none.
    spans = request.encoded.spans
    positions = torch.cat([torch.arange(span.start, span.end) for span in spans])
    scores = torch.cat([earlier.get(name, own[name]) for name in names])
    expected = positions[top_candidates(scores, results[0].selected.numel())]
    assert set(expected.tolist()) == set(results[0].selected.tolist())


def test_the_pass_can_be_kept(make_asked: Any) -> None:
    asked = make_asked(skip_pass=False)
    asked.ask(LEASE, 1, 2, 3)
    assert asked.ask(SAME_LEASE, 1, 2, 3).similarity > 0.99
    assert asked.passes == 2
    assert len(asked.engine.library.questions) == 2


@pytest.mark.parametrize("options", [{"ratio": 0.0}, {"ratio": 1.0}, {"policy": "chunk_start"}])
def test_nothing_is_embedded_where_there_is_nothing_to_score(make_asked: Any, options: dict[str, Any]) -> None:
    asked = make_asked()
    recompute = asked.engine.config.recompute.changed(**options)
    asked.ask(LEASE, 1, 2, 3, recompute=recompute)
    asked.ask(LEASE, 1, 2, 3, reuse=False)
    assert asked.engine.generate(rag_prompt(1, 2, question=""), max_new_tokens=1).stats.similarity is None
    assert asked.embedded == []


def test_other_tenants_questions_are_not_used(make_asked: Any) -> None:
    asked = make_asked()
    asked.ask(LEASE, 1, 2, 3)
    assert asked.ask(LEASE, 1, 2, 3, namespace="other").similarity is None


@pytest.mark.parametrize("what", [{"texts": [passage(2)]}, {}])
def test_invalidated_chunks_take_their_questions_with_them(make_asked: Any, what: dict[str, Any]) -> None:
    asked = make_asked()
    asked.ask(LEASE, 1, 2, 3)
    asked.engine.invalidate(**what)
    assert len(asked.engine.library.questions) == 0
    assert asked.ask(SAME_LEASE, 1, 2, 3).similarity is None


def test_the_chunks_of_a_similar_question_are_loaded_ahead(make_asked: Any, tmp_path: Path) -> None:
    asked = make_asked(store={"disk": {"path": str(tmp_path), "size": "64MiB"}})
    engine = asked.engine
    asked.ask(LEASE, 1, 2, 3)
    engine.store.flush()
    assert engine.prefetch_similar(SAME_LEASE) == 0  # they are in memory
    engine.store.tiers[0].clear()
    assert engine.prefetch_similar(GARDEN) == 0
    assert engine.prefetch_similar(SAME_LEASE, namespace="other") == 0
    assert engine.prefetch_similar(SAME_LEASE) == 3
