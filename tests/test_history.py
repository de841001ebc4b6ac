"""What earlier answers looked at: kept, recorded while answers are made, and used to choose tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from cachecraft_rag import CacheCraftEngine, EngineConfig, RagPrompt, RecomputeConfig, SamplingConfig
from cachecraft_rag.evaluate import answer_and_score
from cachecraft_rag.history import DECAY, MAX_BYTES, AnswerHistory
from tests.conftest import EngineMaker, passage, prefill_logits, rag_prompt
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level

OTHER_QUESTIONS = ("Which garden is excluded?", "Who names the bench 4711?", "How long is the warranty of an apple?")


def shares(*values: float) -> torch.Tensor:
    return torch.tensor(values)


class TestKeeping:
    def test_the_first_answer_is_kept_as_it_is(self) -> None:
        history = AnswerHistory()
        assert history.get("a", "chunk", 2) is None
        history.add("a", "chunk", shares(0.25, 0.5))
        assert torch.equal(history.get("a", "chunk", 2), shares(0.25, 0.5))  # type: ignore[arg-type]

    def test_every_later_answer_makes_the_earlier_ones_count_less(self) -> None:
        history = AnswerHistory()
        answers = [shares(0.1, 0.7), shares(0.5, 0.0), shares(0.2, 0.2)]
        for answer in answers:
            history.add("a", "chunk", answer)
        weights = [DECAY**2, DECAY, 1.0]
        expected = sum(w * answer for w, answer in zip(weights, answers, strict=True)) / sum(weights)
        assert torch.allclose(history.get("a", "chunk", 2), expected)  # type: ignore[arg-type]

    def test_what_was_handed_out_does_not_change(self) -> None:
        history, first = AnswerHistory(), shares(0.25, 0.5)
        history.add("a", "chunk", first)
        before = history.get("a", "chunk", 2)
        history.add("a", "chunk", shares(1.0, 0.0))
        assert torch.equal(before, shares(0.25, 0.5))  # type: ignore[arg-type]
        assert torch.equal(first, shares(0.25, 0.5))

    def test_a_record_of_another_length_is_another_chunks(self) -> None:
        history = AnswerHistory()
        history.add("a", "chunk", shares(0.25, 0.5))
        assert history.get("a", "chunk", 3) is None
        history.add("a", "chunk", shares(0.1, 0.1, 0.1))
        assert torch.equal(history.get("a", "chunk", 3), shares(0.1, 0.1, 0.1))  # type: ignore[arg-type]
        assert history.nbytes == 12

    def test_namespaces_share_nothing(self) -> None:
        history = AnswerHistory()
        history.add("a", "chunk", shares(1.0))
        history.add("b", "chunk", shares(0.5))
        assert history.get("c", "chunk", 1) is None
        history.clear("a")
        assert history.get("a", "chunk", 1) is None
        assert history.get("b", "chunk", 1) is not None

    def test_what_is_forgotten_is_gone_and_the_rest_stays(self) -> None:
        history = AnswerHistory()
        for chunk in ("one", "two", "three"):
            history.add("a", chunk, shares(1.0, 2.0))
        history.forget("a", ["one", "three", "never there"])
        history.forget("b", ["two"])
        found = [history.get("a", chunk, 2) is not None for chunk in ("one", "two", "three")]
        assert found == [False, True, False]
        assert history.nbytes == 8

    def test_the_chunks_asked_for_least_recently_make_room(self) -> None:
        history = AnswerHistory(max_bytes=3 * 8)
        for chunk in ("one", "two", "three"):
            history.add("a", chunk, shares(1.0, 2.0))
        history.get("a", "one", 2)
        history.add("a", "four", shares(1.0, 2.0))
        kept = [chunk for chunk in ("one", "two", "three", "four") if history.get("a", chunk, 2) is not None]
        assert kept == ["one", "three", "four"]

    def test_it_never_takes_more_room_than_it_has(self) -> None:
        history, draw = AnswerHistory(max_bytes=1000), random.Random(5)
        lengths: dict[tuple[str, str], int] = {}
        for _ in range(500):
            name = (draw.choice("ab"), str(draw.randrange(40)))
            lengths[name] = draw.choice([1, 7, 30, 120, 249, 260])
            history.add(*name, torch.rand(lengths[name]))
            assert history.nbytes <= 1000
        kept = [size for name, size in lengths.items() if history.get(*name, size) is not None]
        assert history.nbytes == 4 * sum(kept) > 0


def settings(policy: str = "history", ratio: float = 0.2) -> RecomputeConfig:
    return RecomputeConfig.model_validate({"policy": policy, "ratio": ratio, "offset": 0.0})


def recomputed(engine: CacheCraftEngine, prompt: RagPrompt, recompute: RecomputeConfig, **options: Any) -> set[int]:
    """Positions of chunk tokens whose values differ from those stored; learns nothing."""
    values = []
    for setting in (recompute, settings("none", 0.0)):
        request = engine.intake.take(prompt, SamplingConfig(max_new_tokens=4), setting, **options)
        engine.prefill(request, reuse=True)
        assert request.kv is not None
        values.append(request.kv.values[-1, 0, :, : request.num_tokens])
    changed = (values[0] - values[1]).abs().amax(dim=(0, 2)) > 1e-6
    inside = [n for span in request.encoded.spans for n in range(span.start, span.end)]
    return {position for position in inside if changed[position]}


def answer_other_questions(engine: CacheCraftEngine, *numbers: int, **options: Any) -> None:
    for question in OTHER_QUESTIONS:
        engine.generate(rag_prompt(*numbers, question=question), **options)


class TestChoosing:
    def test_earlier_answers_change_what_the_same_question_recomputes(self, make_engine: EngineMaker) -> None:
        engine, prompt = make_engine(), rag_prompt(1, 2, 3)
        engine.warm(prompt.chunks)
        before = recomputed(engine, prompt, settings())
        assert before == recomputed(engine, prompt, settings("question_sensitivity"))
        answer_other_questions(engine, 1, 2, 3, recompute=settings())
        after = recomputed(engine, prompt, settings())
        assert len(after) == len(before)
        assert after != before
        assert before == recomputed(engine, prompt, settings("question_sensitivity"))

    def test_history_goes_with_the_chunk_into_other_prompts(self, make_engine: EngineMaker) -> None:
        engine, prompt = make_engine(), rag_prompt(4, 2, 5)
        engine.warm([passage(n) for n in range(1, 6)])
        before = recomputed(engine, prompt, settings())
        answer_other_questions(engine, 1, 3, recompute=settings())
        assert recomputed(engine, prompt, settings()) == before
        answer_other_questions(engine, 1, 2, 3, recompute=settings())
        assert recomputed(engine, prompt, settings()) != before

    def test_history_never_crosses_namespaces(self, make_engine: EngineMaker) -> None:
        engine, prompt = make_engine(), rag_prompt(1, 2, 3)
        for namespace in ("ours", "theirs"):
            engine.warm(prompt.chunks, namespace=namespace)
        before = recomputed(engine, prompt, settings(), namespace="theirs")
        answer_other_questions(engine, 1, 2, 3, recompute=settings(), namespace="ours")
        assert recomputed(engine, prompt, settings(), namespace="theirs") == before
        assert recomputed(engine, prompt, settings(), namespace="ours") != before

    def test_everything_recomputed_equals_full_prefill_whatever_the_history(self, make_engine: EngineMaker) -> None:
        engine, prompt = make_engine(keep_exact=False), rag_prompt(1, 2, 3)
        answer_other_questions(engine, 1, 2, 3, recompute=settings())
        logits, request = prefill_logits(engine, prompt, policy="history", ratio=1.0)
        reference, _ = prefill_logits(engine, prompt, reuse=False)
        assert request.figures["chunk_hits"] == 3
        assert torch.allclose(logits, reference, atol=1e-4)


class TestRecording:
    @pytest.mark.parametrize("name", ["llama", "gemma2"])
    def test_it_is_the_models_own_attention_of_the_answer_to_the_chunks(self, name: str) -> None:
        model = make(name)
        with CacheCraftEngine(model, byte_level(), EngineConfig(max_new_tokens=6)) as engine:
            prompt = rag_prompt(1, 2)
            answer = engine.generate(prompt, recompute=settings(ratio=1.0)).token_ids
            encoded = engine.prompts.encode(prompt, engine.library.registry, "default")
            model.set_attn_implementation("eager")
            ids = torch.tensor([[*encoded.token_ids, *answer]])
            with torch.inference_mode():
                attentions = model(input_ids=ids, output_attentions=True).attentions
            rows = slice(len(encoded.token_ids), ids.shape[1] - 1)  # the last token is drawn, and never run
            paid = torch.stack([layer[0, :, rows].sum(dim=(0, 1)) for layer in attentions])
            total = sum(paid[:, span.start : span.end].sum(dim=1, keepdim=True) for span in encoded.spans)
            expected = (paid / total).mean(dim=0)
            (request,) = [engine.intake.take(prompt, SamplingConfig(max_new_tokens=1), settings())]
            engine.prefill(request, reuse=True)
            assert request.earlier is not None
            assert len(answer) > 1
            for span, found in zip(encoded.spans, request.earlier, strict=True):
                assert found is not None
                assert torch.allclose(found, expected[span.start : span.end], atol=1e-5)
            assert sum(float(found.sum()) for found in request.earlier if found is not None) == pytest.approx(1.0)

    def test_a_chunk_that_occurs_twice_gets_the_mean(self, make_engine: EngineMaker) -> None:
        engine = make_engine()
        engine.generate(rag_prompt(1, 2, 1), recompute=settings())
        request = engine.intake.take(rag_prompt(1, 2, 1), SamplingConfig(max_new_tokens=1), settings())
        engine.prefill(request, reuse=True)
        assert request.earlier is not None
        first, second, third = (float(found.sum()) for found in request.earlier if found is not None)
        assert first == third
        assert first + second + third == pytest.approx(1.0)

    @pytest.mark.parametrize("policy", ["none", "question_attention", "question_sensitivity", "inter_attention"])
    def test_other_policies_record_nothing(self, policy: str, make_engine: EngineMaker) -> None:
        engine = make_engine(policy=policy)
        request = engine.intake.take(rag_prompt(1, 2), SamplingConfig(max_new_tokens=4))
        engine.prefill(request, reuse=True)
        assert request.watch is None
        answer_other_questions(engine, 1, 2)
        assert engine.library.history.nbytes == 0

    def test_only_answers_that_were_made_to_the_end_are_learnt_from(self, make_engine: EngineMaker) -> None:
        engine = make_engine(policy="history", max_new_tokens=24)
        stream = engine.stream(rag_prompt(1, 2))
        next(stream)
        stream.close()
        assert engine.library.history.nbytes == 0
        engine.generate(rag_prompt(1, 2), max_new_tokens=1)  # its one token is drawn behind the prompt alone
        assert engine.library.history.nbytes == 0

    def test_an_evaluation_leaves_nothing_behind(self, make_engine: EngineMaker) -> None:
        engine = make_engine(policy="history")
        answer_and_score(engine, rag_prompt(1, 2), max_new_tokens=6)
        assert engine.library.history.nbytes == 0


class TestForgetting:
    def known(self, engine: CacheCraftEngine, *numbers: int) -> list[bool]:
        request = engine.intake.take(rag_prompt(*numbers), SamplingConfig(max_new_tokens=1), settings())
        engine.prefill(request, reuse=True)
        assert request.earlier is not None
        return [shares is not None for shares in request.earlier]

    def test_the_history_of_an_invalidated_chunk_goes_and_that_of_others_stays(self, make_engine: EngineMaker) -> None:
        engine = make_engine()
        answer_other_questions(engine, 1, 2, 3, recompute=settings())
        engine.invalidate([passage(2)])
        assert self.known(engine, 1, 2, 3) == [True, False, True]

    def test_the_chunks_of_an_invalidated_document_lose_theirs_too(self, make_engine: EngineMaker) -> None:
        engine = make_engine()
        engine.register([passage(1), passage(3)], document_id="contract")
        answer_other_questions(engine, 1, 2, 3, recompute=settings())
        engine.invalidate(document_ids=["contract"])
        assert self.known(engine, 1, 2, 3) == [False, True, False]

    def test_a_cleared_namespace_has_no_history(self, make_engine: EngineMaker) -> None:
        engine = make_engine()
        answer_other_questions(engine, 1, 2, recompute=settings())
        assert 0 < engine.library.history.nbytes < MAX_BYTES
        engine.invalidate()
        assert engine.library.history.nbytes == 0
        assert self.known(engine, 1, 2) == [False, False]
