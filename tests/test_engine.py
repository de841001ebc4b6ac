"""The engine as its users see it."""

from __future__ import annotations

import hashlib
import itertools
import random
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from cachecraft_rag import (
    CacheCraftEngine,
    EngineConfig,
    GenerationResult,
    PromptTooLongError,
    RagPrompt,
    RecomputeConfig,
    StoreConfig,
    UnsupportedModelError,
)
from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.decode import end_of_sequence_ids
from cachecraft_rag.encoder import ChunkEncoder
from cachecraft_rag.keys import ChunkKey, tensor_bytes
from cachecraft_rag.library import ChunkLibrary
from cachecraft_rag.selection import POLICIES
from tests.conftest import EngineMaker, passage, prefill_logits, rag_prompt
from tests.tiny_models import FULL_PREFILL, make, rope
from tests.tiny_tokenizers import byte_level, strict

UNCALIBRATED = sorted(set(POLICIES) - {"predicted"})  # which needs a calibration: see test_deviation


def decoded(engine: CacheCraftEngine, prompt: RagPrompt) -> tuple[str, str]:
    """What the model reads, decoded, and what the template renders."""
    encoded = engine.prompts.encode(prompt, engine.library.registry)
    return engine.prompts.decode(encoded.token_ids), engine.prompts.render(prompt)


def stored(engine: CacheCraftEngine, *numbers: int) -> dict[ChunkKey, ChunkKV]:
    """The entries of some passages."""
    keys = engine.library.keys("default")
    chunks = [keys.chunk(engine.prompts.encode_chunk(passage(number))) for number in numbers]
    found = {key: engine.store.get(key) for chunk in chunks for key in engine.store.variants(chunk)}
    return {key: entry for key, entry in found.items() if entry is not None}


class TestFindingChunks:
    def test_shuffled_chunks_all_hit(self, make_engine: EngineMaker) -> None:
        engine = make_engine()
        engine.generate(rag_prompt(1, 2, 3, 4))
        for order in itertools.islice(itertools.permutations((1, 2, 3, 4)), 1, 24, 5):
            stats = engine.generate(rag_prompt(*order)).stats
            assert (stats.chunk_hits, stats.chunk_misses) == (4, 0)
            assert stats.hits_by_tier == {"cold": 4}

    def test_gaps_between_stored_chunks_do_not_stop_reuse(self, make_engine: EngineMaker) -> None:
        engine = make_engine(ratio=0.0)
        engine.warm([passage(n) for n in (1, 3, 5)])
        stats = engine.generate(rag_prompt(1, 2, 3, 4, 5)).stats
        assert (stats.chunk_hits, stats.chunk_misses) == (3, 2)
        spans = engine.prompts.encode(rag_prompt(1, 2, 3, 4, 5)).spans
        assert stats.reused_tokens == sum(spans[n].num_tokens for n in (0, 2, 4))

    @pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0])
    def test_the_same_chunk_twice_in_one_prompt_is_found_twice(self, ratio: float, make_engine: EngineMaker) -> None:
        engine = make_engine(ratio=ratio)
        prompt = rag_prompt(1, 2, 1)
        engine.warm(prompt.chunks)
        found = engine.generate(prompt)
        assert found.stats.chunk_hits == 3
        if ratio == 1.0:
            assert found.token_ids == engine.generate(prompt, reuse=False).token_ids

    def test_a_chunk_that_is_missing_twice_is_computed_once(self, make_engine: EngineMaker) -> None:
        engine = make_engine(ratio=0.0)
        stats = engine.generate(rag_prompt(1, 1)).stats
        one = engine.prompts.encode(rag_prompt(1, 1)).spans[0].num_tokens
        free = stats.prompt_tokens - 2 * one
        assert stats.charged_ratio == pytest.approx((one + free) / stats.prompt_tokens)

    def test_registered_chunks_are_found_in_messages_and_text(self, make_engine: EngineMaker) -> None:
        engine = make_engine()
        engine.warm([passage(1), passage(2)])
        content = f"Context:\n{passage(2)}\n---\n{passage(1)}\nQuery: what ends?"
        for prompt in (RagPrompt.from_messages([{"role": "user", "content": content}]), RagPrompt.from_text(content)):
            assert engine.generate(prompt).stats.chunk_hits == 2
            found, rendered = decoded(engine, prompt)
            assert found == rendered

    def test_another_namespace_finds_nothing(self, make_engine: EngineMaker) -> None:
        first = make_engine(namespace="acme")
        second = CacheCraftEngine(first.model, first.tokenizer, EngineConfig(namespace="other"), store=first.store)
        first.generate(rag_prompt(1, 2))
        assert second.generate(rag_prompt(1, 2)).stats.chunk_hits == 0
        assert first.generate(rag_prompt(2, 1)).stats.chunk_hits == 2

    def test_a_namespace_of_one_request_is_kept_apart(self, make_engine: EngineMaker) -> None:
        engine = make_engine()
        engine.generate(rag_prompt(1, 2), namespace="acme")
        assert engine.generate(rag_prompt(1, 2), namespace="other").stats.chunk_hits == 0
        assert engine.generate(rag_prompt(1, 2), namespace="acme").stats.chunk_hits == 2
        assert engine.invalidate(namespace="acme") == 2
        assert engine.generate(rag_prompt(1, 2), namespace="other").stats.chunk_hits == 2
        with pytest.raises(ValueError, match="namespace"):
            engine.generate(rag_prompt(1), namespace="")

    def test_changed_weights_find_nothing_and_the_answer_follows_them(self, make_engine: EngineMaker) -> None:
        engine = make_engine(ratio=1.0)
        prompt = rag_prompt(1, 2)
        engine.generate(prompt)
        engine.model.model.layers[0].mlp.up_proj.weight.data.mul_(3.0)
        found = engine.generate(prompt)
        assert found.stats.chunk_hits == 0
        assert found.token_ids == engine.generate(prompt, reuse=False).token_ids

    def test_a_forward_hook_turns_reuse_off_while_it_is_there(self, make_engine: EngineMaker) -> None:
        engine = make_engine()
        engine.generate(rag_prompt(1))
        hook = engine.model.model.layers[0].register_forward_hook(lambda *_: None)
        with pytest.warns(UserWarning, match="forward hook"):
            stats = engine.generate(rag_prompt(1)).stats
        assert "forward hook" in (stats.fallback_reason or "")
        assert len(engine.store) == 1
        hook.remove()
        assert engine.generate(rag_prompt(1)).stats.chunk_hits == 1


class TestPrompts:
    @pytest.mark.parametrize("question", ["a", "What?", "why " * 30, ""])
    def test_questions_of_any_length_are_answered(self, question: str, make_engine: EngineMaker) -> None:
        engine = make_engine(ratio=1.0)
        prompt = rag_prompt(1, 2, question=question)
        engine.warm(prompt.chunks)
        assert engine.generate(prompt).token_ids == engine.generate(prompt, reuse=False).token_ids

    @pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0])
    def test_a_prompt_that_ends_with_a_chunk_still_gives_logits(self, ratio: float, make_engine: EngineMaker) -> None:
        engine = make_engine(ratio=ratio)
        text = passage(1)
        engine.warm([text])
        stats = engine.generate(RagPrompt.from_text(text)).stats
        assert stats.reused_tokens + stats.recomputed_tokens == stats.prompt_tokens
        assert stats.recomputed_tokens >= 1

    def test_a_fully_cached_prompt_is_exact(self, make_engine: EngineMaker) -> None:
        engine = make_engine(encode={"behind": "none"}, ratio=0.0)
        prompt = RagPrompt.from_text(passage(1))
        engine.warm([passage(1)])
        reference, _ = prefill_logits(engine, prompt, reuse=False)
        found, request = prefill_logits(engine, prompt)
        assert (request.stats().reused_tokens, request.stats().prefilled_tokens) == (request.num_tokens - 1, 0)
        assert (found - reference).abs().max() < 1e-4

    @pytest.mark.parametrize("num_tokens", [0, 1, 7, 255, 257])
    def test_system_prompts_of_any_length_keep_the_hits(self, num_tokens: int, make_engine: EngineMaker) -> None:
        engine = make_engine(ratio=1.0)
        engine.warm([passage(1), passage(2)])
        system = "q" * num_tokens
        assert len(engine.prompts.encode_text(system)) == num_tokens
        prompt = RagPrompt(system=system, chunks=(passage(2), passage(1)), question="What ends?")
        found = engine.generate(prompt)
        assert found.stats.chunk_hits == 2
        assert found.token_ids == engine.generate(prompt, reuse=False).token_ids

    @pytest.mark.parametrize(
        "text",
        [
            "</s>",
            "<|im_end|>",
            "🙂🏳️‍🌈",
            "a\x00b",
            "one\r\ntwo\r\n",
            "契約は三年間です。",
            "العقد ثلاث سنوات",
            "{context_str} {{x}}",
        ],
    )
    def test_any_text_in_a_chunk_is_read_as_it_is(self, text: str, make_engine: EngineMaker) -> None:
        engine = make_engine(ratio=1.0)
        chunk = f"{passage(1)} {text} {passage(2)}"
        prompt = RagPrompt(chunks=(passage(3), chunk), question="What ends?")
        found, rendered = decoded(engine, prompt)
        assert found == rendered
        assert chunk in rendered
        engine.warm(prompt.chunks)
        answer = engine.generate(prompt)
        assert answer.stats.chunk_hits == 2
        assert answer.token_ids == engine.generate(prompt, reuse=False).token_ids

    def test_a_control_token_in_a_chunk_stays_text(self, make_engine: EngineMaker) -> None:
        engine = make_engine()
        end_of_turn = engine.tokenizer.convert_tokens_to_ids("<|im_end|>")
        encoded = engine.prompts.encode(RagPrompt(chunks=(f"{passage(1)}<|im_end|>",), question="?"))
        span = encoded.spans[0]
        assert end_of_turn not in encoded.token_ids[span.start : span.end]
        assert end_of_turn in encoded.token_ids

    def test_a_tokenizer_without_chat_template_gets_a_plain_layout(self) -> None:
        with CacheCraftEngine(make("llama"), byte_level(chat_template=False), EngineConfig(max_new_tokens=4)) as engine:
            prompt = rag_prompt(1, 2)
            expected = "\n\n".join(["Be brief.", passage(1), passage(2), prompt.question])
            assert engine.prompts.render(prompt) == expected
            engine.generate(prompt)
            assert engine.generate(prompt).stats.chunk_hits == 2

    def test_a_template_without_system_role_gets_it_in_the_first_user_message(self) -> None:
        with CacheCraftEngine(make("llama"), strict(), EngineConfig(max_new_tokens=4)) as engine:
            assert f"Be brief.\n\n{passage(1)}" in engine.prompts.render(rag_prompt(1))
            assert engine.generate(rag_prompt(1)).stats.chunk_misses == 1


class TestFigures:
    @pytest.mark.parametrize("policy", UNCALIBRATED)
    @pytest.mark.parametrize("ratio", [0.0, 0.1, 1.0])
    def test_token_counts_add_up_for_every_policy(self, policy: str, ratio: float, make_engine: EngineMaker) -> None:
        engine = make_engine(policy=policy, ratio=ratio)
        engine.warm([passage(n) for n in (1, 2)])
        for _ in range(2):
            stats = engine.generate(rag_prompt(1, 2, 3)).stats
            assert stats.reused_tokens + stats.recomputed_tokens + stats.prefilled_tokens == stats.prompt_tokens
            assert stats.policy == policy
            assert stats.fallback_reason is None
            assert stats.ttft_s > 0

    def test_the_budget_is_the_ratio_of_the_reused_chunk_tokens(self, make_engine: EngineMaker) -> None:
        engine = make_engine(ratio=0.2)
        prompt = rag_prompt(1, 2, 3)
        engine.warm(prompt.chunks)
        stats = engine.generate(prompt).stats
        chunk_tokens = sum(span.num_tokens for span in engine.prompts.encode(prompt).spans)
        assert stats.recomputed_tokens == -(-chunk_tokens * 2 // 10)

    def test_selection_passes_are_charged(self, make_engine: EngineMaker) -> None:
        engine = make_engine("llama", ratio=0.2)
        prompt = rag_prompt(1, 2, 3)
        engine.warm(prompt.chunks)
        charged = {
            policy: engine.generate(prompt, recompute=RecomputeConfig(policy=policy, ratio=0.2)).stats.charged_ratio
            for policy in ("random", "question_attention", "key_deviation", "question_deviation")
        }
        num_layers, num_tokens = 3, engine.generate(prompt).stats.prompt_tokens
        spans = engine.prompts.encode(prompt).spans
        free = num_tokens - sum(span.num_tokens for span in spans)
        leading = spans[0].start  # computed in the question pass, not again in the main one
        assert charged["key_deviation"] == pytest.approx(charged["random"] + 1 / num_layers)
        assert charged["question_attention"] == pytest.approx(charged["random"] + (free - leading) / num_tokens)
        assert charged["question_deviation"] == pytest.approx(charged["question_attention"] + 1 / num_layers)

    def test_stored_tokens_are_those_of_new_chunks(self, make_engine: EngineMaker) -> None:
        engine = make_engine()
        sizes = [span.num_tokens for span in engine.prompts.encode(rag_prompt(1, 2)).spans]
        assert engine.generate(rag_prompt(1, 2, 1)).stats.stored_tokens == sum(sizes)
        assert engine.generate(rag_prompt(1, 2)).stats.stored_tokens == 0
        exact = engine.generate(rag_prompt(2, 1), recompute=RecomputeConfig(ratio=1.0))
        assert exact.stats.stored_tokens == sum(sizes)

    def test_sensitivity_is_measured_after_the_answer_that_first_uses_a_chunk(self, make_engine: EngineMaker) -> None:
        engine = make_engine()
        engine.generate(rag_prompt(1, 2))
        assert [entry.sensitivity is not None for entry in stored(engine, 1, 2).values()] == [True, True]

    def test_inline_sensitivity_makes_first_sight_equal_to_later_ones(self, make_engine: EngineMaker) -> None:
        engine = make_engine(encode={"sensitivity": "inline"}, ratio=0.1)
        first, later = engine.generate(rag_prompt(1, 2, 3)), engine.generate(rag_prompt(1, 2, 3))
        assert (first.stats.chunk_misses, later.stats.chunk_hits) == (3, 3)
        assert first.token_ids == later.token_ids

    def test_statistics_show_as_html(self, make_engine: EngineMaker) -> None:
        assert "<td>chunk_hits</td>" in make_engine().generate(rag_prompt(1)).stats._repr_html_()


class TestAnswers:
    def test_the_join_of_a_stream_equals_generate(self, make_engine: EngineMaker) -> None:
        engine = make_engine(max_new_tokens=24, encode={"behind": "passages"})
        engine.warm([passage(1), passage(2)])
        stream = engine.stream(rag_prompt(1, 2))
        text = "".join(stream)
        assert text == engine.generate(rag_prompt(1, 2)).text == stream.result.text
        assert len(stream.result.token_ids) == 24

    def test_the_first_decoded_token_stands_right_behind_the_prompt(self, make_engine: EngineMaker) -> None:
        engine = make_engine()
        positions: list[int] = []
        prompt = rag_prompt(1, 2)
        engine.warm(prompt.chunks)
        original = engine._adapter.forward_rows

        def spy(token_ids: torch.Tensor, rows: torch.Tensor, kv: Any, *options: Any) -> torch.Tensor:
            if rows.numel() == 1:
                positions.append(int(rows[0]))
            return original(token_ids, rows, kv, *options)

        engine._adapter.forward_rows = spy  # type: ignore[method-assign]
        stats = engine.generate(prompt, max_new_tokens=4).stats
        assert positions == [stats.prompt_tokens + step for step in range(3)]

    def test_stored_tensors_are_unchanged_by_any_request(self, make_engine: EngineMaker) -> None:
        engine = make_engine()
        engine.warm([passage(n) for n in (1, 2, 3)])

        def state() -> dict[str, str]:
            return {
                str(key): hashlib.sha256(
                    b"".join(bytes(tensor_bytes(t)) for t in (e.keys, e.values, e.sensitivity) if t is not None)
                ).hexdigest()
                for key, e in stored(engine, 1, 2, 3).items()
            }

        before = state()
        draw = random.Random(3)
        for policy in UNCALIBRATED:
            for ratio in (0.0, 0.3):
                order = draw.sample((1, 2, 3), 3)
                engine.generate(rag_prompt(*order), recompute=RecomputeConfig(policy=policy, ratio=ratio))
        assert {key: value for key, value in state().items() if key in before} == before

    def test_sampling_with_a_seed_repeats(self, make_engine: EngineMaker) -> None:
        engine = make_engine()
        engine.warm([passage(1)])
        options: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "top_k": 50, "max_new_tokens": 12}
        first = engine.generate(rag_prompt(1), seed=5, **options)
        again = engine.generate(rag_prompt(1), seed=5, **options)
        other = engine.generate(rag_prompt(1), seed=6, **options)
        assert first.token_ids == again.token_ids != other.token_ids

    def test_a_stop_text_ends_the_answer_and_is_not_part_of_it(self, make_engine: EngineMaker) -> None:
        engine = make_engine(max_new_tokens=24, ratio=1.0)
        whole = engine.generate(rag_prompt(1)).text
        stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
        found = engine.generate(rag_prompt(1), stop=[stop])
        assert found.text == whole[: whole.index(stop)]
        assert found.finish_reason == "stop"
        assert "".join(engine.stream(rag_prompt(1), stop=stop)) == found.text

    def test_the_token_limit_is_the_reason_for_the_end(self, make_engine: EngineMaker) -> None:
        found = make_engine().generate(rag_prompt(1), max_new_tokens=3)
        assert (found.finish_reason, found.stats.output_tokens) == ("length", 3)

    def test_an_exception_inside_generation_reaches_the_consumer_and_the_next_request_works(
        self, make_engine: EngineMaker
    ) -> None:
        engine = make_engine()
        expected = engine.generate(rag_prompt(1), reuse=False).text
        layer = engine.model.model.layers[1].mlp
        forward, calls = layer.forward, itertools.count()

        def failing(*args: Any) -> torch.Tensor:
            if next(calls) == 2:
                raise RuntimeError("device lost")
            return forward(*args)

        layer.forward = failing
        stream = engine.stream(rag_prompt(1), reuse=False)
        with pytest.raises(RuntimeError, match="device lost"):
            list(stream)
        del layer.forward
        assert engine.generate(rag_prompt(1), reuse=False).text == expected

    def test_closing_a_stream_early_frees_the_engine(self, make_engine: EngineMaker) -> None:
        engine = make_engine(max_new_tokens=200)
        stream = engine.stream(rag_prompt(1))
        next(stream)
        stream.close()
        with pytest.raises(RuntimeError, match="no result"):
            _ = stream.result
        assert engine.generate(rag_prompt(1), max_new_tokens=2).stats.output_tokens == 2

    def test_requests_may_be_interleaved_on_one_thread(self, make_engine: EngineMaker) -> None:
        engine = make_engine()
        alone = engine.generate(rag_prompt(1, 2), reuse=False).text
        stream = engine.stream(rag_prompt(1, 2), reuse=False)
        pieces = [next(stream)]
        engine.generate(rag_prompt(3))
        assert "".join([*pieces, *stream]) == alone

    def test_threads_get_the_answers_they_get_alone(self, make_engine: EngineMaker) -> None:
        engine = make_engine(ratio=0.2)
        engine.warm([passage(n) for n in range(6)])
        orders = [(n, (n + 1) % 6, (n + 2) % 6) for n in range(6)]
        alone = [engine.generate(rag_prompt(*order)).token_ids for order in orders]
        found: dict[int, tuple[int, ...]] = {}

        def ask(index: int) -> None:
            found[index] = engine.generate(rag_prompt(*orders[index])).token_ids

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[index] for index in range(6)] == alone

    @pytest.mark.parametrize("name", ["llama", "gemma2"])
    def test_two_engines_over_one_model_take_turns(self, name: str, make_engine: EngineMaker) -> None:
        first = make_engine(name, ratio=0.2)
        second = CacheCraftEngine(first.model, first.tokenizer, first.config)
        implementation = first.model.config._attn_implementation
        prompt = rag_prompt(1, 2)
        first.warm(prompt.chunks)
        second.warm(prompt.chunks)
        alone = first.generate(prompt).token_ids
        found: list[tuple[int, ...]] = []
        threads = [
            threading.Thread(target=lambda e=engine: found.extend(e.generate(prompt).token_ids for _ in range(4)))
            for engine in (first, second)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [alone] * 8
        assert first.model.config._attn_implementation == implementation

    def test_a_chunk_that_many_requests_want_at_once_is_computed_once(self, make_engine: EngineMaker) -> None:
        engine = make_engine(ratio=0.0)
        computed: list[tuple[int, ...]] = []
        encode = engine.library._encoder.encode

        def spy(token_ids: tuple[int, ...], *options: Any) -> ChunkKV:
            computed.append(tuple(token_ids))
            time.sleep(0.05)
            return encode(token_ids, *options)

        engine.library.keys("default")  # the encoder is that of these weights
        engine.library._encoder.encode = spy  # type: ignore[method-assign]
        results: list[GenerationResult] = []
        threads = [
            threading.Thread(target=lambda: results.append(engine.generate(rag_prompt(1, 2)))) for _ in range(10)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 10
        assert len(computed) == len(set(computed)) == 2
        assert len({result.token_ids for result in results}) == 1
        assert sum(result.stats.stored_tokens for result in results) == sum(len(ids) for ids in computed)

    def test_a_batch_keeps_its_order(self, make_engine: EngineMaker) -> None:
        engine = make_engine()
        prompts = [rag_prompt(n, n + 1) for n in range(3)]
        engine.warm([passage(n) for n in range(4)])
        alone = [engine.generate(prompt).text for prompt in prompts]
        assert [result.text for result in engine.generate_batch(prompts)] == alone


class TestFullPrefill:
    @pytest.mark.parametrize("name", sorted(FULL_PREFILL))
    def test_models_without_movable_keys_answer_by_full_prefill_with_one_warning(self, name: str) -> None:
        model = make(name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine = CacheCraftEngine(model, byte_level(), EngineConfig(max_new_tokens=8))
            results = [engine.generate(rag_prompt(1, 2)) for _ in range(2)]
            assert engine.warm([passage(1)]) == 0
        assert sum("prefilled in full" in str(warning.message) for warning in caught) == 1
        assert all(result.stats.fallback_reason for result in results)
        assert len(engine.store) == 0
        ids = torch.tensor([engine.prompts.encode(rag_prompt(1, 2)).token_ids])
        with torch.inference_mode():
            expected = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()
        eos_ids = end_of_sequence_ids(model, engine.tokenizer)
        assert list(results[0].token_ids) == [token for token in expected if token not in eos_ids]
        with pytest.raises(UnsupportedModelError):
            engine.verify()

    def test_dynamic_rope_is_reused_only_where_it_does_not_stretch(self) -> None:
        model = make("llama", max_position_embeddings=512, **rope("dynamic", factor=4.0))
        config = EngineConfig(max_new_tokens=4, context_window=4096, recompute=RecomputeConfig(ratio=1.0))
        with CacheCraftEngine(model, byte_level(), config) as engine:
            assert engine.fallback_reason is None
            short, long = rag_prompt(1), rag_prompt(*range(8))
            engine.warm(short.chunks)
            assert engine.generate(short).stats.chunk_hits == 1
            with pytest.warns(UserWarning, match="rotary frequencies change"):
                answer = engine.generate(long)
            assert "511 tokens" in (answer.stats.fallback_reason or "")
            assert answer.token_ids == engine.generate(long, reuse=False).token_ids
            assert engine.generate(short).token_ids == engine.generate(short, reuse=False).token_ids

    def test_a_model_that_can_be_reused_warns_about_nothing(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with CacheCraftEngine(make("llama"), byte_level(), EngineConfig(max_new_tokens=4)) as engine:
                assert engine.generate(rag_prompt(1)).stats.fallback_reason is None

    def test_a_prompt_without_chunks_says_so(self, make_engine: EngineMaker) -> None:
        stats = make_engine().generate(RagPrompt(question="Hello?")).stats
        assert stats.fallback_reason == "no known chunk in the prompt"
        assert stats.prefilled_tokens == stats.prompt_tokens


class TestKeeping:
    def test_warm_computes_once_and_counts(self, make_engine: EngineMaker, capsys: pytest.CaptureFixture[str]) -> None:
        engine = make_engine()
        texts = [passage(n) for n in (1, 2, 3)]
        assert engine.warm(texts, show_progress=True) == 3
        assert "chunk" in capsys.readouterr().err
        assert engine.warm(texts) == 0
        assert "chunk" not in capsys.readouterr().err

    def test_invalidate_drops_a_chunk_behind_whatever_it_was_computed(self, make_engine: EngineMaker) -> None:
        engine = make_engine(encode={"behind": "passages"})
        prompt = rag_prompt(1, 2)
        engine.generate(prompt)
        engine.generate(prompt, recompute=RecomputeConfig(ratio=1.0))
        assert len(engine.store) == 4
        assert engine.invalidate(texts=[passage(2)]) == 2
        stats = engine.generate(prompt).stats
        assert (stats.chunk_hits, stats.chunk_misses) == (1, 1)
        assert engine.invalidate() == 3
        assert len(engine.store) == 0

    def test_exact_kv_is_not_kept_where_that_is_switched_off(self, make_engine: EngineMaker) -> None:
        engine = make_engine(keep_exact=False, ratio=1.0)
        assert engine.generate(rag_prompt(1, 2)).stats.stored_tokens == 0
        assert len(engine.store) == 0

    def test_the_budget_of_the_store_holds_at_every_moment(self, make_engine: EngineMaker) -> None:
        size = 400_000
        engine = make_engine(store=StoreConfig(cold={"size": size}))  # type: ignore[arg-type]
        for number in range(12):
            engine.generate(rag_prompt(number, number + 1))
            assert engine.store.nbytes <= size
        assert len(engine.store) > 0

    def test_a_store_without_room_still_answers(self, make_engine: EngineMaker) -> None:
        engine = make_engine(store=StoreConfig(cold={"size": 0}), ratio=1.0)  # type: ignore[arg-type]
        found = engine.generate(rag_prompt(1, 2))
        assert found.token_ids == engine.generate(rag_prompt(1, 2), reuse=False).token_ids
        assert engine.generate(rag_prompt(1, 2), recompute=RecomputeConfig(ratio=0.1)).stats.chunk_misses == 2

    def test_a_closed_engine_says_so(self, make_engine: EngineMaker) -> None:
        engine = make_engine()
        engine.close()
        engine.close()
        texts = [passage(1)]
        for call in (engine.warm, engine.register, engine.is_stored, engine.prefetch, engine.invalidate):
            with pytest.raises(RuntimeError, match="closed"):
                call(texts)
        with pytest.raises(RuntimeError, match="closed"):
            engine.generate(rag_prompt(1))

    @pytest.mark.parametrize("kind", ["measure", "keep_head"])
    def test_an_answer_is_not_lost_with_what_it_teaches(
        self, kind: str, make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = make_engine()
        expected = engine.generate(rag_prompt(1, 2), reuse=False)

        def fail(*_: Any) -> None:
            raise torch.OutOfMemoryError("no room")

        monkeypatch.setattr(ChunkEncoder if kind == "measure" else ChunkLibrary, kind, fail)
        exact = RecomputeConfig(ratio=1.0) if kind == "keep_head" else RecomputeConfig(ratio=0.999)
        with pytest.warns(UserWarning, match="what an answer taught was not kept: OutOfMemoryError: no room"):
            found = engine.generate(rag_prompt(1, 2), recompute=exact)
        assert len(found.token_ids) == len(expected.token_ids)
        stream = engine.stream(rag_prompt(3, 4), recompute=exact)
        assert "".join(stream) == stream.result.text  # and without a second warning


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"namespace": 5}, "namespace: 5 is no text"),
            ({"namespace": ""}, "namespace: '' is empty"),
            ({"timeout_s": "5"}, "timeout_s: '5' is not above 0"),
            ({"timeout_s": 0}, "timeout_s: 0 is not above 0"),
        ],
    )
    def test_bad_options_are_refused_by_name(
        self, options: dict[str, Any], message: str, make_engine: EngineMaker
    ) -> None:
        with pytest.raises(ValueError, match=message):
            make_engine().generate(rag_prompt(1), **options)

    def test_a_list_that_holds_something_else_than_texts_is_refused(self, make_engine: EngineMaker) -> None:
        with pytest.raises(ValueError, match=r"texts\[1\]: 5 is no string"):
            make_engine().warm(["a text", 5])  # type: ignore[list-item]

    def test_settings_may_be_plain_values(self) -> None:
        with CacheCraftEngine(make("llama"), byte_level(), {"max_new_tokens": 2}) as engine:  # type: ignore[arg-type]
            found = engine.generate(rag_prompt(1), recompute={"ratio": 0.5})  # type: ignore[arg-type]
            assert (len(found.token_ids), found.stats.ratio) == (2, 0.5)

    def test_a_prompt_over_the_context_window_names_both_numbers(self, make_engine: EngineMaker) -> None:
        engine = make_engine(context_window=64)
        num_tokens = len(engine.prompts.encode(rag_prompt(1)).token_ids)
        with pytest.raises(PromptTooLongError, match=f"{num_tokens} tokens.*64"):
            engine.stream(rag_prompt(1))
        assert len(engine.store) == 0

    def test_an_answer_is_cut_to_what_the_context_window_leaves(self, make_engine: EngineMaker) -> None:
        engine = make_engine()
        num_tokens = len(engine.prompts.encode(rag_prompt(1)).token_ids)
        small = make_engine(context_window=num_tokens + 3)
        assert small.generate(rag_prompt(1), max_new_tokens=50).stats.output_tokens == 3

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({"temperature": -1.0}, "temperature"),
            ({"top_p": 0.0}, "top_p"),
            ({"max_new_tokens": 0}, "max_new_tokens"),
            ({"stop": [""]}, "stop"),
            ({"temprature": 1.0}, "temprature"),
        ],
    )
    def test_bad_sampling_options_are_refused_by_name(
        self, options: dict[str, Any], expected: str, make_engine: EngineMaker
    ) -> None:
        with pytest.raises(ValueError, match=expected):
            make_engine().generate(rag_prompt(1), **options)

    def test_bad_recompute_settings_are_refused_by_name(self) -> None:
        with pytest.raises(ValidationError, match="ratio"):
            RecomputeConfig(ratio=1.2)
        with pytest.raises(ValidationError, match="question_sensitivity"):
            RecomputeConfig(policy="best")  # type: ignore[arg-type]

    def test_a_missing_tokenizer_is_refused(self) -> None:
        with pytest.raises(ValueError, match="tokenizer"):
            CacheCraftEngine(make("llama"), None)

    def test_a_model_folder_without_tokenizer_is_refused(self, tmp_path: Path) -> None:
        make("llama").save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="tokenizer"):
            CacheCraftEngine.from_pretrained(str(tmp_path))

    def test_an_encoder_decoder_is_refused(self) -> None:
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(vocab_size=512, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
        with pytest.raises(ValueError, match="encoder-decoder"):
            CacheCraftEngine(T5ForConditionalGeneration(config), byte_level())

    def test_a_bare_string_is_refused_where_a_prompt_or_a_list_is_needed(self, make_engine: EngineMaker) -> None:
        engine = make_engine()
        with pytest.raises(TypeError, match="from_text"):
            engine.generate("What ends?")  # type: ignore[arg-type]
        for call in (engine.warm, engine.register, engine.invalidate):
            with pytest.raises(ValueError, match="one string"):
                call("a text of one chunk")

    def test_a_prompt_of_nothing_is_refused(self, make_engine: EngineMaker) -> None:
        with pytest.raises(ValueError, match="no tokens"):
            make_engine().generate(RagPrompt.from_text(""))


def test_a_local_folder_is_loaded_by_name(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)
    byte_level().save_pretrained(tmp_path)
    with CacheCraftEngine.from_pretrained(str(tmp_path), EngineConfig(max_new_tokens=4)) as engine:
        engine.generate(rag_prompt(1, 2))
        assert engine.generate(rag_prompt(2, 1)).stats.chunk_hits == 2
        assert len(engine.verify().checks) == 5
