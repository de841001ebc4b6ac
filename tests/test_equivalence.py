"""The argument of this project, for every architecture: reuse where it is exact equals the plain model."""

from __future__ import annotations

import pytest
import torch

from cachecraft_rag import CacheCraftEngine, EngineConfig, RagPrompt, RecomputeConfig
from cachecraft_rag.decode import end_of_sequence_ids
from tests.conftest import EngineMaker, passage, prefill_logits, rag_prompt
from tests.tiny_models import REUSED, WINDOW, make
from tests.tiny_tokenizers import byte_level

ATOL = 1e-4  # float32 logits

architectures = pytest.mark.parametrize("name", sorted(REUSED))


@architectures
def test_recomputing_every_token_equals_full_prefill(name: str, make_engine: EngineMaker) -> None:
    engine = make_engine(name)
    assert engine.fallback_reason is None
    prompt = rag_prompt(1, 2, 3)
    engine.warm(prompt.chunks)
    reference, plain = prefill_logits(engine, prompt, reuse=False)
    _, untouched = prefill_logits(engine, prompt, policy="none", ratio=0.0)
    recomputed, request = prefill_logits(engine, prompt, ratio=1.0)

    assert request.stats().chunk_hits == 3
    assert (recomputed - reference).abs().max() < ATOL
    found, expected, stale = (one.kv.slice(0, one.num_tokens)[1] for one in (request, plain, untouched))
    assert (found - expected).abs().max() < ATOL
    # The test can fail: without recompute the values of the same chunks are far off.
    assert (stale - expected).abs().max() > 100 * ATOL


@architectures
def test_recomputing_every_token_gives_the_same_greedy_tokens(name: str, make_engine: EngineMaker) -> None:
    engine = make_engine(name, ratio=1.0)
    prompt = rag_prompt(1, 2, 3)
    engine.warm(prompt.chunks)
    reference = engine.generate(prompt, reuse=False, max_new_tokens=16)
    assert engine.generate(prompt, max_new_tokens=16).token_ids == reference.token_ids


@architectures
def test_full_prefill_equals_transformers_generate(name: str, make_engine: EngineMaker) -> None:
    engine = make_engine(name)
    prompt = rag_prompt(4, 5)
    ids = torch.tensor([engine.prompts.encode(prompt).token_ids])
    with torch.inference_mode():
        expected = engine.model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :].tolist()
    found = list(engine.generate(prompt, reuse=False, max_new_tokens=16).token_ids)
    assert found == [token for token in expected if token not in end_of_sequence_ids(engine.model, engine.tokenizer)]


@architectures
def test_chunks_in_the_order_and_place_they_were_computed_are_reused_exactly(
    name: str, make_engine: EngineMaker
) -> None:
    engine = make_engine(name)
    prompt = rag_prompt(1, 2, 3)
    reference, _ = prefill_logits(engine, prompt, reuse=False)
    engine.generate(prompt, recompute=RecomputeConfig(ratio=1.0))
    found, request = prefill_logits(engine, prompt, policy="none", ratio=0.0)
    stats = request.stats()
    chunk_tokens = sum(span.num_tokens for span in request.encoded.spans)
    assert (stats.chunk_hits, stats.reused_tokens, stats.recomputed_tokens) == (3, chunk_tokens, 0)
    assert (found - reference).abs().max() < ATOL


@architectures
def test_the_first_chunk_behind_the_canonical_prefix_is_exact(name: str, make_engine: EngineMaker) -> None:
    engine = make_engine(name, encode={"behind": "prefix"})
    instruction = engine.config.encode.instruction
    chunk, question = passage(1), "\n\nWhat ends first?"
    prompt = RagPrompt.from_messages([{"role": "user", "content": instruction + chunk + question}], chunks=[chunk])
    reference, _ = prefill_logits(engine, prompt, reuse=False)
    engine.warm([chunk])
    found, request = prefill_logits(engine, prompt, ratio=0.0)
    assert request.stats().reused_tokens == request.encoded.spans[0].num_tokens
    assert (found - reference).abs().max() < ATOL


@pytest.mark.parametrize("name", ["mistral-window", "gemma2", "gemma3"])
@pytest.mark.parametrize("num_sentences", [1, 12])
def test_sliding_windows_are_exact_for_chunks_shorter_and_longer_than_the_window(
    name: str, num_sentences: int, make_engine: EngineMaker
) -> None:
    engine = make_engine(name)
    chunks = tuple(passage(n, num_sentences) for n in (1, 2, 3))
    prompt = RagPrompt(chunks=chunks, question="What ends first?")
    sizes = [span.num_tokens for span in engine.prompts.encode(prompt).spans]
    assert all((size < WINDOW) == (num_sentences == 1) for size in sizes)
    engine.warm(chunks)
    reference, _ = prefill_logits(engine, prompt, reuse=False)
    recomputed, _ = prefill_logits(engine, prompt, ratio=1.0)
    engine.generate(prompt, recompute=RecomputeConfig(ratio=1.0))
    reused, request = prefill_logits(engine, prompt, ratio=0.0)
    assert request.stats().recomputed_tokens == 0
    assert (recomputed - reference).abs().max() < ATOL
    assert (reused - reference).abs().max() < ATOL


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_models_own_attention_implementation_is_followed_and_left_set(attention: str) -> None:
    model = make("llama")
    model.set_attn_implementation(attention)
    with CacheCraftEngine(model, byte_level(), EngineConfig()) as engine:
        prompt = rag_prompt(1, 2)
        engine.warm(prompt.chunks)
        reference, _ = prefill_logits(engine, prompt, reuse=False)
        recomputed, _ = prefill_logits(engine, prompt, ratio=1.0)
        assert model.config._attn_implementation == attention
        assert (recomputed - reference).abs().max() < ATOL


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_within_its_rounding(dtype: torch.dtype, make_engine: EngineMaker) -> None:
    engine = make_engine("llama", dtype)
    prompt = rag_prompt(1, 2, 3)
    engine.warm(prompt.chunks)
    reference, _ = prefill_logits(engine, prompt, reuse=False)
    recomputed, _ = prefill_logits(engine, prompt, ratio=1.0)
    assert (recomputed - reference).norm() / reference.norm() < 0.05


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", sorted(REUSED))
def test_recomputing_every_token_equals_full_prefill_on_a_gpu(name: str) -> None:
    with CacheCraftEngine(make(name).cuda(), byte_level(), EngineConfig()) as engine:
        prompt = rag_prompt(1, 2, 3)
        engine.warm(prompt.chunks)
        reference, _ = prefill_logits(engine, prompt, reuse=False)
        recomputed, _ = prefill_logits(engine, prompt, ratio=1.0)
        assert (recomputed - reference).abs().max() < 1e-3
        assert engine.generate(prompt, max_new_tokens=8).stats.chunk_hits == 3
