"""The policy ``inter_attention``: variants of chunks, exact reuse, CFO, and what becomes of variants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from cachecraft_rag import CacheCraftEngine, EngineConfig, RecomputeConfig, SamplingConfig, StoreConfig
from cachecraft_rag.cfo import num_to_recompute
from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.config import PolicyName
from cachecraft_rag.errors import CorruptEntryError
from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.plan import Action, make_plan
from cachecraft_rag.request import Request
from cachecraft_rag.selection import POLICIES
from cachecraft_rag.selection.base import SelectionContext
from cachecraft_rag.store import TieredStore
from cachecraft_rag.store.codec import EntryCodec
from cachecraft_rag.store.precision import PRECISIONS, pack
from cachecraft_rag.store.readers import BytesReader
from cachecraft_rag.store_config import Precision
from cachecraft_rag.variant_choice import Variants
from cachecraft_rag.variants import Prefix, VariantInfo
from tests.codec_entries import KEY, MASTER, entry
from tests.conftest import EngineMaker, passage, prefill_logits, rag_prompt
from tests.test_store_format import resealed
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level

POLICY: PolicyName = "inter_attention"
TOLERANCE = 2e-4


def entries(engine: CacheCraftEngine, number: int, namespace: str = "default") -> dict[ChunkKey, ChunkKV]:
    """The stored entries of a passage."""
    chunk = chunk_of(engine, number, namespace)
    found = {key: engine.store.get(key) for key in engine.store.variants(chunk)}
    return {key: entry for key, entry in found.items() if entry is not None}


def chunk_of(engine: CacheCraftEngine, number: int, namespace: str = "default") -> str:
    return engine.library.keys(namespace).chunk(engine.prompts.encode_chunk(passage(number)))


def variants(engine: CacheCraftEngine, number: int) -> dict[ChunkKey, VariantInfo]:
    """What was recorded of the stored entries of a passage."""
    return {key: entry.variant for key, entry in entries(engine, number).items() if entry.variant is not None}


def probed(engine: CacheCraftEngine, *numbers: int, **recompute: Any) -> Request:
    """A request over some passages that has computed its first logits."""
    return prefill_logits(engine, rag_prompt(*numbers), policy=POLICY, **recompute)[1]


@pytest.fixture
def planner(make_engine: EngineMaker) -> CacheCraftEngine:
    return make_engine(policy=POLICY)


@pytest.fixture
def make_planner() -> Iterator[Callable[..., CacheCraftEngine]]:
    """Make engines with other settings of the policy: ``make_planner("llama", alpha=2.0)``."""
    engines: list[CacheCraftEngine] = []

    def maker(name: str = "llama", **recompute: object) -> CacheCraftEngine:
        settings = RecomputeConfig.model_validate({"policy": POLICY, **recompute})
        engines.append(CacheCraftEngine(make(name), byte_level(), EngineConfig(recompute=settings, max_new_tokens=4)))
        return engines[-1]

    yield maker
    for engine in engines:
        engine.close()


def test_the_policy_is_one_of_the_configuration() -> None:
    assert POLICY in get_args(PolicyName)
    assert POLICIES[POLICY].name == POLICY
    assert not POLICIES[POLICY].needs_sensitivity


@pytest.mark.parametrize(("field", "value"), [("alpha", 0.0), ("alpha", -1.0), ("alpha", float("inf"))])
def test_an_alpha_that_is_no_strength_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        RecomputeConfig(alpha=value)


def test_at_least_one_variant_is_kept() -> None:
    with pytest.raises(ValueError, match="max_variants"):
        RecomputeConfig(max_variants=0)


@pytest.mark.parametrize(
    ("cfos", "actions", "budgets"),
    [
        ((0.0, 0.0, 0.0), "rrr", (0, 0, 0)),
        ((0.5, 0.07, 0.3), "rrr", (5, 2, 6)),  # 5, 1.4 and 6 tokens
        ((0.91, 1.0, 0.95), "ppr", (0, 0, 19)),  # 9.1 is all of 10; the last token of the prompt is computed anyway
        ((0.9, 0.96, 1.0), "rpp", (9, 0, 0)),
    ],
)
def test_a_plan_by_cfo_gives_every_chunk_its_own_budget(
    cfos: tuple[float, ...], actions: str, budgets: tuple[int, ...]
) -> None:
    spans = [(5, 15), (15, 35), (40, 60)]
    plan = make_plan(60, spans, [True] * 3, [False] * 3, 0.15, cfos)
    assert "".join(chunk.action.value[0] for chunk in plan.chunks) == actions
    assert plan.chunk_budgets == budgets
    assert plan.budget == sum(budgets)
    assert plan.ratio == pytest.approx(plan.budget / max(1, plan.num_candidates))


def test_chunks_computed_in_place_are_exact_up_to_the_first_approximate_one() -> None:
    spans = [(0, 10), (10, 20), (20, 30), (30, 40)]
    plan = make_plan(50, spans, [False, True, False, False], [False, True, False, False], 0.15, (1.0, 0.0, 1.0, 1.0))
    assert plan.computed_exactly == [0, 2, 3]
    plan = make_plan(50, spans, [False, False, True, False], [False] * 4, 0.15, (1.0, 1.0, 0.2, 1.0))
    assert plan.computed_exactly == [0, 1]


class TestFirstSight:
    def test_the_first_request_is_an_ordinary_prefill_and_records_every_chunk(self, planner: CacheCraftEngine) -> None:
        prompt = rag_prompt(1, 2, 3)
        reference = planner.generate(prompt, reuse=False)
        first = planner.generate(prompt)
        assert first.token_ids == reference.token_ids
        assert first.stats.charged_ratio == 1.0
        assert (first.stats.chunk_misses, first.stats.recomputed_tokens) == (3, 0)
        assert first.stats.stored_tokens == sum(span.num_tokens for span in planner.prompts.encode(prompt).spans)
        hashes = [chunk_of(planner, number) for number in (1, 2, 3)]
        for place, number in enumerate((1, 2, 3)):
            ((key, info),) = variants(planner, number).items()
            assert info.prefix.chunks == tuple(hashes[:place])
            assert info.prefix.context == key.context
            assert info.is_exact
            assert 0.5 <= info.cci < 1.0
            assert (info.a_bar > 0.0) == (place > 0)
            assert info.b_bar > 0.0

    def test_the_record_is_that_of_the_attention_itself(self, make_engine: EngineMaker) -> None:
        engine = make_engine("llama", policy=POLICY)
        prompt = rag_prompt(1, 2, 3)
        engine.generate(prompt)
        encoded = engine.prompts.encode(prompt)
        eager = make("llama")
        eager.set_attn_implementation("eager")
        with torch.inference_mode():
            weights = eager(torch.tensor([encoded.token_ids]), output_attentions=True).attentions
        (entry,) = entries(engine, 3).values()
        info = entry.variant
        assert info is not None
        spans = [slice(span.start, span.end) for span in encoded.spans]
        layers = torch.stack([layer[0].sum(dim=0) for layer in weights])  # [num_layers, rows, columns]
        own = layers[:, spans[2]]
        inter = [float(own[:, :, span].sum()) for span in spans[:2]]
        assert info.inter == pytest.approx(inter, rel=1e-3)
        n = encoded.spans[2].num_tokens
        a_bar = sum(total / (n * (span.stop - span.start)) for total, span in zip(inter, spans, strict=False))
        assert info.a_bar == pytest.approx(a_bar / len(layers), rel=1e-3)
        inside = own[:, :, spans[2]].tril(-1).sum() / n**2 / len(layers)
        assert info.b_bar == pytest.approx(float(inside), rel=1e-3)
        paid = (own[:, :, spans[0]].sum(dim=2) + own[:, :, spans[1]].sum(dim=2)).mean(dim=0)
        assert entry.inter_attention is not None
        assert torch.allclose(entry.inter_attention.float(), paid, rtol=5e-3, atol=1e-3)

    def test_a_chunk_behind_approximate_kv_is_computed_in_place_and_stored_as_made_alone(
        self, planner: CacheCraftEngine
    ) -> None:
        planner.generate(rag_prompt(1, 2))
        request = probed(planner, 2, 3)
        assert request.plan is not None
        assert [chunk.action for chunk in request.plan.chunks] == [Action.REUSE, Action.PREFILL]
        assert request.plan.computed_exactly == []
        planner.generate(rag_prompt(2, 3))
        ((key, entry),) = entries(planner, 3).items()
        assert entry.variant is None
        assert key.context == planner.library._encoder.context
        alone = planner.library._encoder.encode(entry.token_ids, with_sensitivity=False)
        assert torch.equal(entry.keys, alone.keys)
        again = probed(planner, 2, 3, alpha=0.5)
        assert again.chunks[1].cfo == 0.25


class TestReuse:
    def test_the_same_prefix_again_needs_no_recompute_and_every_bit_is_equal(self, planner: CacheCraftEngine) -> None:
        prompt = rag_prompt(1, 2, 3)
        reference, full = prefill_logits(planner, prompt, reuse=False)
        planner.generate(prompt)
        found, request = prefill_logits(planner, prompt)
        assert request.plan is not None
        assert request.kv is not None
        assert full.kv is not None
        assert [chunk.is_exact for chunk in request.plan.chunks] == [True] * 3
        assert [chunk.cfo for chunk in request.chunks] == [0.0] * 3
        assert request.stats().recomputed_tokens == 0
        assert request.stats().ratio == 0.0
        for span in request.encoded.spans:
            for one, other in zip(
                request.kv.slice(span.start, span.end), full.kv.slice(span.start, span.end), strict=True
            ):
                assert torch.allclose(one, other, atol=1e-5)
        for chunk, span in zip(request.chunks, request.encoded.spans, strict=True):
            stored = planner.store.get(chunk.key)
            assert stored is not None
            keys, values = request.kv.slice(span.start, span.end)
            assert torch.equal(stored.keys, keys)
            assert torch.equal(stored.values, values)
        assert (found - reference).abs().max() < TOLERANCE

    def test_a_longer_prompt_with_the_same_beginning_reuses_it_exactly_and_records_the_rest(
        self, planner: CacheCraftEngine
    ) -> None:
        planner.generate(rag_prompt(1, 2))
        prompt = rag_prompt(1, 2, 3)
        reference = planner.generate(prompt, reuse=False)
        request = probed(planner, 1, 2, 3)
        assert request.plan is not None
        assert [chunk.action for chunk in request.plan.chunks] == [Action.REUSE, Action.REUSE, Action.PREFILL]
        assert request.plan.computed_exactly == [2]
        assert planner.generate(prompt).token_ids == reference.token_ids
        (info,) = variants(planner, 3).values()
        assert info.prefix.chunks == (chunk_of(planner, 1), chunk_of(planner, 2))
        assert planner.generate(prompt).stats.recomputed_tokens == 0

    def test_another_order_recomputes_as_many_tokens_of_every_chunk_as_its_cfo_says(
        self, planner: CacheCraftEngine
    ) -> None:
        planner.generate(rag_prompt(1, 2, 3))
        result = planner.generate(rag_prompt(3, 1, 2), recompute=RecomputeConfig(policy=POLICY, alpha=0.5))
        request = probed(planner, 3, 1, 2, alpha=0.5)
        plan, stats = request.plan, request.stats()
        assert plan is not None
        expected: list[int] = []
        for chunk, span in zip(request.chunks, request.encoded.spans, strict=True):
            assert chunk.cfo is not None
            assert chunk.cfo > 0.0
            (info,) = variants(planner, (3, 1, 2)[len(expected)]).values()
            assert chunk.cfo == info.overhead(chunk.prefix, 0.5)
            expected.append(num_to_recompute(chunk.cfo, span.num_tokens))
        assert plan.chunk_budgets == tuple(expected)
        assert stats.recomputed_tokens == result.stats.recomputed_tokens == sum(expected)
        assert stats.ratio == pytest.approx(sum(expected) / plan.num_candidates)
        assert stats.prefilled_tokens == stats.prompt_tokens - sum(span.num_tokens for span in request.encoded.spans)
        rows = stats.prefilled_tokens + sum(expected)
        assert stats.charged_ratio == pytest.approx(rows / stats.prompt_tokens)

    def test_ratio_and_preset_are_ignored(self, planner: CacheCraftEngine) -> None:
        planner.generate(rag_prompt(1, 2, 3))
        plain, bold = probed(planner, 2, 1), probed(planner, 2, 1, ratio=1.0)
        named = probed(planner, 2, 1, preset="exact")
        assert plain.plan is not None
        assert plain.plan.budget > 0
        assert plain.plan == (bold.plan and named.plan)

    @pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2", "glm"])
    def test_with_an_alpha_that_recomputes_everything_logits_are_those_of_full_prefill(
        self, name: str, make_planner: Callable[..., CacheCraftEngine]
    ) -> None:
        engine = make_planner(name, alpha=1e9)
        engine.generate(rag_prompt(1, 2, 3))
        engine.warm([passage(4)])
        for order in ((3, 1, 2), (4, 2), (2, 4, 1, 3)):
            reference, _ = prefill_logits(engine, rag_prompt(*order), reuse=False)
            found, request = prefill_logits(engine, rag_prompt(*order))
            assert request.stats().chunk_hits == len(order)
            assert request.stats().charged_ratio == 1.0
            assert (found - reference).abs().max() < TOLERANCE

    def test_the_tokens_that_paid_most_attention_to_other_chunks_are_recomputed(
        self, planner: CacheCraftEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        planner.generate(rag_prompt(1, 2))
        seen: list[tuple[SelectionContext, torch.Tensor]] = []
        select = POLICIES[POLICY].select

        def spy(context: SelectionContext) -> torch.Tensor:
            seen.append((context, select(context)))
            return seen[-1][1]

        monkeypatch.setattr(POLICIES[POLICY], "select", spy, raising=True)
        probed(planner, 2, 1, alpha=0.4)
        ((context, chosen),) = seen
        (entry,) = entries(planner, 2).values()
        paid = entry.inter_attention
        assert paid is not None
        budgets = context.chunk_budgets
        assert budgets is not None
        in_first = chosen[context.chunk_index[chosen] == 0]
        assert sorted(paid[context.offset_in_chunk[in_first]].tolist()) == sorted(
            paid.sort(descending=True).values[: budgets[0]].tolist()
        )
        in_second = chosen[context.chunk_index[chosen] == 1]  # it stood first: nothing to pay attention to
        assert context.offset_in_chunk[in_second].tolist() == list(range(budgets[1]))

    def test_chunks_that_were_warmed_count_as_made_alone(self, planner: CacheCraftEngine) -> None:
        planner.warm([passage(1), passage(2)])
        request = probed(planner, 1, 2)
        assert [chunk.cfo for chunk in request.chunks] == [0.5, 0.5]

    def test_exact_entries_of_another_policy_are_reused_as_they_are_and_nowhere_else(
        self, planner: CacheCraftEngine
    ) -> None:
        planner.generate(rag_prompt(1, 2), recompute=RecomputeConfig(ratio=1.0))
        assert variants(planner, 2) == {}
        assert [chunk.cfo for chunk in probed(planner, 1, 2).chunks] == [0.0, 0.0]
        assert [chunk.chunk_kv for chunk in probed(planner, 2, 1).chunks] == [None, None]

    def test_a_variant_of_lower_cfo_is_preferred(self, planner: CacheCraftEngine) -> None:
        planner.generate(rag_prompt(3, 4, 5))
        planner.warm([passage(5)])
        alone, seen = probed(planner, 9, 8, 5), probed(planner, 3, 4, 9, 5)
        assert alone.chunks[2].key.context == planner.library._encoder.context
        ((key, info),) = variants(planner, 5).items()
        assert seen.chunks[3].key == key
        assert seen.chunks[3].cfo == info.overhead(seen.chunks[3].prefix, 1.0) < 0.5

    def test_other_policies_neither_record_nor_use_variants_elsewhere(self, make_engine: EngineMaker) -> None:
        engine = make_engine(policy="chunk_start", ratio=0.3)
        engine.generate(rag_prompt(1, 2), recompute=RecomputeConfig(policy=POLICY))
        request = prefill_logits(engine, rag_prompt(2, 1))[1]
        assert request.stats().chunk_hits == 0
        assert request.recorder is None
        assert [chunk.cfo for chunk in request.chunks] == [None, None]
        assert prefill_logits(engine, rag_prompt(1, 2))[1].stats().recomputed_tokens == 0

    def test_a_chunk_twice_in_one_prompt_is_two_variants(self, planner: CacheCraftEngine) -> None:
        prompt = rag_prompt(1, 2, 1)
        planner.generate(prompt)
        assert len(variants(planner, 1)) == 2
        again = planner.generate(prompt)
        assert again.stats.recomputed_tokens == 0
        assert again.token_ids == planner.generate(prompt, reuse=False).token_ids

    def test_a_prompt_that_ends_with_a_chunk_gives_logits(self, planner: CacheCraftEngine) -> None:
        prompt = rag_prompt(1, 2)
        encoded = planner.prompts.encode(prompt)
        planner.generate(prompt)
        cut = replace(encoded, token_ids=encoded.token_ids[: encoded.spans[1].end])
        request = Request(cut, SamplingConfig(max_new_tokens=4), planner.config.recompute, "default", started=0.0)
        planner.prefill(request, True)
        assert request.plan is not None
        assert request.plan.budget == 0
        assert request.stats().recomputed_tokens == 1
        assert request.logits is not None


class TestKeeping:
    def test_no_more_variants_than_allowed_are_kept(self, make_planner: Callable[..., CacheCraftEngine]) -> None:
        engine = make_planner(alpha=9.0, max_variants=2)
        for before in (1, 2, 3, 4):
            engine.generate(rag_prompt(before, 5))
            assert len(variants(engine, 5)) == min(before, 2)
        newest = (chunk_of(engine, 4),)
        assert newest in {info.prefix.chunks for info in variants(engine, 5).values()}

    def test_a_variant_that_is_used_outlives_those_that_are_not(
        self, make_planner: Callable[..., CacheCraftEngine]
    ) -> None:
        engine = make_planner(alpha=9.0, max_variants=2)
        engine.generate(rag_prompt(1, 5))
        for _ in range(10):
            assert engine.generate(rag_prompt(1, 5)).stats.recomputed_tokens == 0
        for before in (2, 3):
            engine.generate(rag_prompt(before, 5))
        behind = {info.prefix.chunks for info in variants(engine, 5).values()}
        assert behind == {(chunk_of(engine, 1),), (chunk_of(engine, 3),)}

    def test_a_variant_that_is_no_longer_used_makes_room(self, make_planner: Callable[..., CacheCraftEngine]) -> None:
        engine = make_planner(alpha=9.0, max_variants=2)
        for _ in range(4):
            engine.generate(rag_prompt(1, 5))
        for before in (2, 3, 4, 6):
            engine.generate(rag_prompt(before, 5))
        assert (chunk_of(engine, 1),) not in {info.prefix.chunks for info in variants(engine, 5).values()}

    def test_kv_made_alone_is_neither_counted_nor_dropped(self, make_planner: Callable[..., CacheCraftEngine]) -> None:
        engine = make_planner(alpha=9.0, max_variants=1)
        engine.warm([passage(5)])
        for before in (1, 2, 3):
            engine.generate(rag_prompt(before, 5))
        assert len(entries(engine, 5)) == 2
        assert len(variants(engine, 5)) == 1

    def test_an_evicted_variant_is_not_chosen(self, planner: CacheCraftEngine) -> None:
        planner.generate(rag_prompt(1, 2))
        (key,) = variants(planner, 2)
        planner.store.remove(key)
        request = probed(planner, 1, 2)
        assert [chunk.chunk_kv is None for chunk in request.chunks] == [False, True]

    def test_an_entry_of_other_tokens_under_the_key_is_removed_and_misses(self, planner: CacheCraftEngine) -> None:
        planner.generate(rag_prompt(1, 2))
        (key,) = variants(planner, 2)
        foreign = planner.store.get(key)
        assert foreign is not None
        planner.store.put(key, ChunkKV(foreign.keys, foreign.values, foreign.token_ids[::-1], foreign.base))
        request = probed(planner, 1, 2)
        assert request.chunks[1].chunk_kv is None
        assert not planner.store.contains(key)

    @pytest.mark.parametrize("claim", ["exact under another key", "approximate under the exact key"])
    def test_a_variant_under_the_wrong_kind_of_key_is_not_used(self, planner: CacheCraftEngine, claim: str) -> None:
        planner.generate(rag_prompt(1, 2))
        ((key, entry),) = entries(planner, 2).items()
        info = entry.variant
        assert info is not None
        planner.store.remove(key)
        is_exact = claim.startswith("exact")
        lying = replace(info, is_exact=is_exact)
        wrong = ChunkKey(key.namespace, key.chunk, "0" * 32) if is_exact else key
        planner.store.put(wrong, replace(entry, variant=lying))
        fresh = Variants(planner.store, 10)
        exact = ChunkKey(key.namespace, key.chunk, info.prefix.context)
        assert list(fresh.ranked(exact, "canonical", info.prefix, info.num_tokens, 1.0)) == []

    def test_kv_marked_as_made_from_approximate_kv_is_exact_for_no_policy(self, planner: CacheCraftEngine) -> None:
        planner.generate(rag_prompt(1, 2))
        ((key, made),) = entries(planner, 2).items()
        assert made.variant is not None
        planner.store.put(key, replace(made, variant=replace(made.variant, is_exact=False)))
        request = prefill_logits(planner, rag_prompt(1, 2), policy="chunk_start", ratio=0.2)[1]
        assert [chunk.key == chunk.exact_key for chunk in request.chunks] == [True, True]
        assert [chunk.is_exact for chunk in request.chunks] == [True, False]

    def test_namespaces_are_never_crossed(self, planner: CacheCraftEngine) -> None:
        planner.generate(rag_prompt(1, 2), namespace="acme")
        assert planner.generate(rag_prompt(1, 2), namespace="other").stats.chunk_hits == 0
        assert planner.generate(rag_prompt(1, 2), namespace="acme").stats.recomputed_tokens == 0
        assert planner.invalidate([passage(1)], namespace="other") == 2
        assert planner.generate(rag_prompt(1, 2), namespace="acme").stats.chunk_hits == 2

    def test_changed_weights_find_no_variant(self, planner: CacheCraftEngine) -> None:
        prompt = rag_prompt(1, 2)
        planner.generate(prompt)
        planner.model.model.layers[0].mlp.up_proj.weight.data.mul_(3.0)
        found = planner.generate(prompt)
        assert found.stats.chunk_hits == 0
        assert found.token_ids == planner.generate(prompt, reuse=False).token_ids

    def test_what_is_remembered_of_chunks_is_bounded(self, planner: CacheCraftEngine) -> None:
        planner.generate(rag_prompt(1, 2, 3))
        known = Variants(planner.store, 2)
        for number in (1, 2, 3):
            chunk = chunk_of(planner, number)
            ((key, info),) = variants(planner, number).items()
            assert list(known.ranked(key, "", info.prefix, info.num_tokens, 1.0)) == [(key, 0.0)]
            assert chunk in known._chunks
        assert len(known._chunks) == 2


class TestInvalidation:
    def test_variants_made_behind_a_chunk_go_with_it(self, planner: CacheCraftEngine) -> None:
        planner.generate(rag_prompt(1, 2, 3))
        planner.generate(rag_prompt(4, 5))
        assert planner.invalidate([passage(2)]) == 2  # itself and the variant of 3
        assert [len(entries(planner, number)) for number in (1, 2, 3, 4, 5)] == [1, 0, 0, 1, 1]
        assert planner.invalidate([passage(2)]) == 0

    def test_kv_made_alone_stays(self, planner: CacheCraftEngine) -> None:
        planner.warm([passage(2)])
        planner.generate(rag_prompt(1, 2), recompute=RecomputeConfig(policy=POLICY, alpha=9.0))
        assert len(entries(planner, 2)) == 2
        assert planner.invalidate([passage(1)]) == 2
        assert len(entries(planner, 2)) == 1
        assert variants(planner, 2) == {}

    def test_a_document_takes_the_variants_behind_its_chunks_along(self, planner: CacheCraftEngine) -> None:
        planner.register([passage(1)], document_id="lease.pdf")
        planner.generate(rag_prompt(1, 2))
        assert planner.invalidate(document_ids=["lease.pdf"]) == 2

    def test_another_process_that_shares_the_disk_drops_them_too(self, tmp_path: Path) -> None:
        with on_disk(tmp_path) as first:
            first.generate(rag_prompt(1, 2, 3))
        with on_disk(tmp_path) as second:
            assert second.invalidate([passage(1)]) == 3
            assert second.generate(rag_prompt(3, 2)).stats.chunk_hits == 0


def on_disk(folder: Path, **disk: object) -> CacheCraftEngine:
    config = EngineConfig(
        store=StoreConfig.model_validate({"disk": {"path": str(folder), **disk}}),
        recompute=RecomputeConfig(policy=POLICY),
        max_new_tokens=4,
    )
    return CacheCraftEngine(make("llama"), byte_level(), config)


class TestDisk:
    @pytest.mark.parametrize("compression", ["none", "zstd"])
    def test_variants_and_their_records_come_back_from_disk(self, tmp_path: Path, compression: str) -> None:
        prompt = rag_prompt(1, 2, 3)
        with on_disk(tmp_path, compression=compression) as first:
            reference = first.generate(prompt, reuse=False)
            first.generate(prompt)
            written = {number: entries(first, number) for number in (1, 2, 3)}
            swapped = probed(first, 3, 1, 2)
        with on_disk(tmp_path, compression=compression) as second:
            again = second.generate(prompt)
            assert again.stats.hits_by_tier == {"disk": 3}
            assert again.stats.recomputed_tokens == 0
            assert again.token_ids == reference.token_ids
            for number, before in written.items():
                after = entries(second, number)
                assert after.keys() == before.keys()
                for key, entry in before.items():
                    assert after[key].variant == entry.variant
                    assert entry.inter_attention is not None
                    paid = after[key].inter_attention
                    assert paid is not None
                    assert torch.equal(paid, entry.inter_attention)
            assert probed(second, 3, 1, 2).plan == swapped.plan

    def test_variants_are_chosen_by_their_headers(self, tmp_path: Path) -> None:
        with on_disk(tmp_path) as first:
            first.generate(rag_prompt(1, 2))
        with on_disk(tmp_path) as second:
            (key,) = second.store.variants(chunk_of(second, 2))
            second.library.look_up(second.prompts.encode(rag_prompt(1, 2)), second.library.keys("default"), alpha=1.0)
            assert isinstance(second.store, TieredStore)
            assert second.store.stats().tiers[1].bytes_loaded == 0
            assert second.store.contains(key)

    def test_a_variant_that_lost_bits_is_reused_without_recompute_but_is_not_exact(self, tmp_path: Path) -> None:
        with on_disk(tmp_path, precision="int8") as first:
            first.generate(rag_prompt(1, 2))
        with on_disk(tmp_path, precision="int8") as second:
            request = probed(second, 1, 2, alpha=0.7)
            assert [chunk.cfo for chunk in request.chunks] == [0.0, 0.0]
            assert [chunk.is_exact for chunk in request.chunks] == [False, False]
            assert request.plan is not None
            assert request.plan.budget == 0
            assert probed(second, 1, 2, 3).plan.computed_exactly == []  # type: ignore[union-attr]


class TestEntries:
    """Records on their way through the codec."""

    @pytest.mark.parametrize("master_key", [None, MASTER], ids=["plain", "encrypted"])
    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_a_record_survives_every_precision_and_several_shards(
        self, precision: Precision, master_key: bytes | None
    ) -> None:
        made = recorded(1100)
        codec = EntryCodec(precision, "zstd", master_key=master_key)
        shards = codec.encode(KEY, made)
        assert len(shards) == 2
        lazy = codec.open(KEY, [BytesReader(shard) for shard in shards])
        for back in (lazy, lazy.complete(), pack(made, precision), pack(made, precision).lower("int4").unpack()):
            assert back.variant == made.variant
            assert back.inter_attention is not None
            assert torch.equal(back.inter_attention, made.inter_attention)  # type: ignore[arg-type]

    def test_a_record_counts_in_the_size_of_an_entry(self) -> None:
        made = recorded(70)
        assert made.variant is not None
        bare = replace(made, variant=None, inter_attention=None)
        assert made.nbytes == bare.nbytes + made.variant.nbytes + 2 * 70
        assert pack(made, "model").nbytes == made.nbytes

    def test_shards_of_different_variants_do_not_mix(self) -> None:
        one, other = recorded(1100), recorded(1100, a_bar=0.25)
        codec = EntryCodec()
        with pytest.raises(CorruptEntryError, match="another version"):
            codec.decode(KEY, [codec.encode(KEY, one)[0], codec.encode(KEY, other)[1]])

    @pytest.mark.parametrize(
        "change",
        [
            {"variant": "{}"},
            {"variant": "no JSON"},
            {"variant": 5},
            {"inter_attention": {"name": "inter_attention", "dtype": "float16", "shape": [4]}},
            {"inter_attention": {"name": "inter_attention", "dtype": "float16", "shape": [2**40]}},
        ],
    )
    def test_a_record_that_makes_no_sense_is_refused(self, change: dict[str, Any]) -> None:
        codec = EntryCodec()
        (shard,) = codec.encode(KEY, recorded(5))
        with pytest.raises(CorruptEntryError):
            codec.decode(KEY, [resealed(shard, lambda header: header.update(change))])


def recorded(num_tokens: int, a_bar: float = 0.125) -> ChunkKV:
    """An entry with a record."""
    info = VariantInfo(Prefix(("a" * 32, "b" * 32), KEY.context), (3.5, 0.1), a_bar, 0.3, num_tokens, is_exact=True)
    return replace(entry(num_tokens), variant=info, inter_attention=torch.rand(num_tokens).to(torch.float16))
