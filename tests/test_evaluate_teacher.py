"""Teacher forcing and the divergences computed from it."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from cachecraft_rag import CacheCraftEngine, EngineConfig, PromptTooLongError, RecomputeConfig
from cachecraft_rag.evaluate import kl_divergence, score, top1_agreement
from tests.conftest import EngineMaker, rag_prompt
from tests.tiny_models import FULL_PREFILL, REUSED, make
from tests.tiny_tokenizers import byte_level

ANSWER = [40, 41, 300, 7, 7, 99]


@torch.inference_mode()
def own_forward(engine: CacheCraftEngine, prompt_ids: tuple[int, ...], answer: list[int]) -> torch.Tensor:
    """The model's logits at every token of an answer, in one pass over prompt and answer."""
    logits: torch.Tensor = engine.model(input_ids=torch.tensor([[*prompt_ids, *answer]])).logits[0]
    return logits[len(prompt_ids) - 1 : -1].float()


@pytest.mark.parametrize("name", [*REUSED, *FULL_PREFILL])
def test_full_prefill_scores_an_answer_as_the_model_itself_does(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of the models that can't reuse chunks
        engine = CacheCraftEngine(make(name), byte_level())
    prompt = rag_prompt(1, 2)
    found = score(engine, prompt, ANSWER, reuse=False)
    expected = own_forward(engine, engine.prompts.encode(prompt).token_ids, ANSWER)
    torch.testing.assert_close(found.logits, expected, atol=1e-4, rtol=1e-4)
    assert found.logits.dtype == torch.float32
    assert found.stats.prefilled_tokens == found.stats.prompt_tokens
    engine.close()


def test_recomputing_everything_has_no_divergence_and_reusing_all_has_some(make_engine: EngineMaker) -> None:
    engine = make_engine(keep_exact=False)
    prompt = rag_prompt(1, 2, 3)
    engine.warm(prompt.chunks)
    reference = score(engine, prompt, ANSWER, reuse=False).logits
    results = {ratio: score(engine, prompt, ANSWER, recompute=RecomputeConfig(ratio=ratio)) for ratio in (0.0, 1.0)}
    for ratio, result in results.items():
        assert result.stats.chunk_hits == 3
        assert result.stats.ratio == ratio
    assert kl_divergence(reference, results[1.0].logits).max() < 1e-6
    assert top1_agreement(reference, results[1.0].logits) == 1.0
    assert kl_divergence(reference, results[0.0].logits).min() > 1e-3


def test_scored_logits_are_those_that_the_answer_was_drawn_from(make_engine: EngineMaker) -> None:
    engine = make_engine(ratio=0.2)
    prompt = rag_prompt(1, 2)
    engine.warm(prompt.chunks)
    answer = engine.generate(prompt).token_ids
    assert len(answer) > 1
    assert tuple(score(engine, prompt, answer).logits.argmax(-1).tolist()) == answer


def test_a_namespace_of_its_own_is_scored_with_its_own_chunks(make_engine: EngineMaker) -> None:
    engine = make_engine()
    prompt = rag_prompt(1, 2)
    assert [score(engine, prompt, ANSWER, namespace=name).stats.chunk_hits for name in ("a", "a", "b")] == [0, 2, 0]


def test_an_answer_without_tokens_is_refused(make_engine: EngineMaker) -> None:
    with pytest.raises(ValueError, match="token_ids"):
        score(make_engine(), rag_prompt(1), [])


def test_an_answer_over_the_context_window_is_refused_and_one_that_fills_it_is_not(make_engine: EngineMaker) -> None:
    prompt = rag_prompt(1)
    engine = make_engine()
    num_tokens = len(engine.prompts.encode(prompt).token_ids)
    tight = CacheCraftEngine(engine.model, engine.tokenizer, EngineConfig(context_window=num_tokens + 2))
    assert score(tight, prompt, ANSWER[:2]).logits.shape[0] == 2
    with pytest.raises(PromptTooLongError, match=str(num_tokens + 3)):
        score(tight, prompt, ANSWER[:3])


def test_a_closed_engine_says_so(make_engine: EngineMaker) -> None:
    engine = make_engine()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        score(engine, rag_prompt(1), ANSWER)


def test_divergence_is_computed_per_token_from_the_reference_to_the_other() -> None:
    reference = torch.tensor([[0.5, 0.5], [0.75, 0.25], [0.5, 0.5]]).log()
    other = torch.tensor([[0.25, 0.75], [0.75, 0.25], [0.5, 0.5]]).log() + torch.tensor([[0.0], [5.0], [-3.0]])
    # 0.5 ln 2 + 0.5 ln(2/3); a constant added to all logits changes nothing.
    expected = torch.tensor([0.5 * math.log(2) + 0.5 * math.log(2 / 3), 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(kl_divergence(reference, other), expected, atol=1e-7, rtol=0)
    backwards = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert float(kl_divergence(other, reference)[0]) == pytest.approx(backwards, abs=1e-7)


def test_a_token_that_the_reference_rules_out_counts_nothing() -> None:
    reference = torch.tensor([[0.0, -math.inf]])
    assert float(kl_divergence(reference, reference)[0]) == 0.0
    assert float(kl_divergence(reference, torch.tensor([[0.0, 0.0]]))[0]) == pytest.approx(math.log(2))
    assert float(kl_divergence(torch.tensor([[0.0, 0.0]]), reference)[0]) == math.inf


def test_agreement_is_the_share_of_tokens_with_the_same_most_likely_value() -> None:
    reference = torch.tensor([[1.0, 2.0, 0.0], [3.0, 2.0, 0.0], [0.0, 0.0, 1.0], [0.0, 9.0, 1.0]])
    other = torch.tensor([[0.0, 0.1, 0.0], [1.0, 2.0, 0.0], [0.0, 0.0, 9.0], [0.0, 2.0, 1.0]])
    assert top1_agreement(reference, other) == 0.75


@pytest.mark.parametrize("shape", [(2, 4), (1, 3), (0, 3), (3,)])
def test_logits_of_different_shapes_are_refused(shape: tuple[int, ...]) -> None:
    for function in (kl_divergence, top1_agreement):
        with pytest.raises(ValueError, match="logits"):
            function(torch.zeros(2, 3), torch.zeros(shape))
