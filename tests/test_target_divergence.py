"""Quality as a setting: the smallest sufficient ratio per request, and full prefill where reuse looks risky."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from cachecraft_rag import CacheCraftEngine, EngineConfig, RagPrompt, RecomputeConfig, RequestStats
from cachecraft_rag.calibration import Calibration
from cachecraft_rag.evaluate import kl_divergence, score
from cachecraft_rag.evaluate.calibrate import calibrate
from cachecraft_rag.quality import Goal, calibrated_settings, residuals
from tests.conftest import EngineMaker, passage, prefill_logits, rag_prompt
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level

PROMPT = rag_prompt(1, 2, 3)
# Predicts the residual itself, so that a target is a residual.
EngineOf = Callable[..., CacheCraftEngine]


@pytest.fixture
def make_calibrated(make_engine: EngineMaker, tmp_path: Path) -> EngineOf:
    """Make engines whose predicted divergence is the residual itself, with passages 1 to 6 stored."""

    def maker(*, warm: bool = True, curve: dict[str, Any] | None = None, **options: Any) -> CacheCraftEngine:
        plain = make_engine(**options)
        values = {
            "fingerprint": plain.fingerprint,
            "policy": plain.config.recompute.policy,
            "settings": calibrated_settings(plain.config, plain.config.recompute),
            **{"scale": 1.0, "exponent": 1.0, "num_questions": 9},
            **(curve or {}),
        }
        Calibration(**values).save(tmp_path / "calibration.json")
        engine = make_engine(calibration=str(tmp_path / "calibration.json"), **options)
        if warm:
            engine.warm([passage(number) for number in range(1, 7)])
        return engine

    return maker


def ask(engine: CacheCraftEngine, prompt: RagPrompt = PROMPT, **recompute: Any) -> RequestStats:
    settings = engine.config.recompute.changed(**recompute)
    return engine.generate(prompt, recompute=settings, max_new_tokens=1).stats


def residual_at(engine: CacheCraftEngine, ratio: float, prompt: RagPrompt = PROMPT) -> float:
    residual = ask(engine, prompt, ratio=ratio).residual
    assert residual is not None
    return residual


class TestSettings:
    @pytest.mark.parametrize(
        ("preset", "ratio", "target"),
        [("exact", 1.0, None), ("high", 0.3, 0.03), ("balanced", 0.15, 0.06), ("fast", 0.05, 0.15)],
    )
    def test_a_preset_stands_for_a_target_and_for_a_ratio_without_calibration(
        self, preset: Any, ratio: float, target: float | None
    ) -> None:
        config = RecomputeConfig(preset=preset)
        assert (config.ratio, config.target) == (ratio, target)

    def test_a_target_is_the_one_given_and_a_ratio_has_none(self) -> None:
        assert RecomputeConfig(target_divergence=0.07).target == 0.07
        assert RecomputeConfig(ratio=0.2).target is None

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            ({"preset": "high", "target_divergence": 0.1}, ("target_divergence: 0.1", "'high'")),
            ({"preset": "high", "ratio": 0.5}, ("ratio: 0.5", "'high'")),
            ({"target_divergence": 0.1, "ratio": 0.5}, ("ratio: 0.5", "target_divergence")),
            ({"target_divergence": -0.1}, ("target_divergence",)),
            ({"target_divergence": float("nan")}, ("target_divergence",)),
            ({"max_ratio": 1.5}, ("max_ratio",)),
            ({"preset": "best"}, ("preset", "'balanced'")),
        ],
    )
    def test_what_contradicts_itself_is_refused_by_name(self, values: dict[str, Any], words: tuple[str, ...]) -> None:
        with pytest.raises(ValidationError) as caught:
            RecomputeConfig(**values)
        assert all(word in str(caught.value) for word in words)

    @pytest.mark.parametrize("values", [{"preset": "high"}, {"target_divergence": 0.2}, {"ratio": 0.4}, {}])
    def test_settings_survive_a_dump(self, values: dict[str, Any]) -> None:
        config = RecomputeConfig(**values)
        assert RecomputeConfig(**config.model_dump()) == config

    def test_what_decides_the_amount_takes_the_place_of_what_did(self) -> None:
        config = RecomputeConfig(preset="high", policy="question_attention", seed=3)
        changed = config.changed(ratio=0.5)
        assert (changed.preset, changed.ratio, changed.policy, changed.seed) == (None, 0.5, "question_attention", 3)
        assert config.changed(target_divergence=0.1).target == 0.1
        assert config.changed(policy="random").preset == "high"
        assert RecomputeConfig(ratio=0.4).changed(preset="fast").ratio == 0.05


class TestResiduals:
    def test_they_are_the_sums_of_what_is_left(self) -> None:
        left = residuals(torch.tensor([1.0, 4.0, 0.5, 2.0]))
        assert left.tolist() == [7.5, 3.5, 1.5, 0.5, 0.0]

    @pytest.mark.parametrize(
        ("target", "budget"), [(10.0, 0), (7.5, 1), (3.6, 1), (1.5 + 1e-6, 2), (0.6, None), (0.0, None)]
    )
    def test_the_budget_is_the_smallest_that_keeps_to_the_target(self, target: float, budget: int | None) -> None:
        calibration = Calibration(fingerprint="f", policy="p", scale=1.0, exponent=1.0, num_questions=1)
        left = residuals(torch.tensor([1.0, 4.0, 0.5, 2.0]))
        assert Goal(calibration, target, 0.5).budget(left) == budget

    def test_a_score_that_is_no_number_is_never_good_enough(self) -> None:
        calibration = Calibration(fingerprint="f", policy="p", scale=1.0, exponent=1.0, num_questions=1)
        assert Goal(calibration, 1.0, 0.5).budget(residuals(torch.tensor([0.1, float("nan")]))) == 1
        assert Goal(calibration, 1.0, 0.5).budget(residuals(torch.tensor([float("nan"), float("nan")]))) is None


class TestRequests:
    @pytest.mark.parametrize(
        "policy", ["question_sensitivity", "question_attention", "question_deviation", "key_deviation"]
    )
    def test_the_smallest_budget_below_the_target_is_recomputed(self, policy: str, make_calibrated: EngineOf) -> None:
        engine = make_calibrated(policy=policy)
        below = residual_at(engine, 0.2)
        stats = ask(engine, target_divergence=below * (1 + 1e-6))
        assert stats.ratio == pytest.approx(0.2, abs=0.01)
        assert stats.residual == pytest.approx(below)
        assert stats.predicted_divergence == pytest.approx(below)
        assert stats.fallback_reason is None
        assert stats.recomputed_tokens == ask(engine, ratio=0.2).recomputed_tokens
        assert ask(engine, target_divergence=below * (1 - 1e-6)).recomputed_tokens == stats.recomputed_tokens + 1

    def test_the_answer_is_that_of_the_ratio_that_was_chosen(self, make_calibrated: EngineOf) -> None:
        engine = make_calibrated()
        target = residual_at(engine, 0.2) * (1 + 1e-6)
        by_ratio = score(engine, PROMPT, [5, 6], recompute=RecomputeConfig(ratio=0.2))
        by_target = score(engine, PROMPT, [5, 6], recompute=RecomputeConfig(target_divergence=target))
        assert torch.equal(by_target.logits, by_ratio.logits)
        assert by_target.stats.charged_ratio == by_ratio.stats.charged_ratio

    def test_a_smaller_target_recomputes_more_and_predicts_less(self, make_calibrated: EngineOf) -> None:
        engine = make_calibrated()
        worst = residual_at(engine, 1e-9)
        found = [ask(engine, target_divergence=worst * share, max_ratio=1.0) for share in (2, 0.9, 0.6, 0.3, 0.1)]
        assert found[0].recomputed_tokens == 0
        recomputed = [stats.recomputed_tokens for stats in found]
        assert recomputed == sorted(set(recomputed))
        for stats, share in zip(found, (2, 0.9, 0.6, 0.3, 0.1), strict=True):
            assert stats.predicted_divergence is not None
            assert stats.predicted_divergence <= worst * share

    def test_the_ratio_varies_by_request(self, make_calibrated: EngineOf) -> None:
        engine = make_calibrated()
        target = residual_at(engine, 0.2)
        orders = [(1, 2, 3), (4, 5, 6), (3, 5, 1), (6, 2, 4)]
        ratios = {ask(engine, rag_prompt(*order), target_divergence=target).ratio for order in orders}
        assert len(ratios) > 2

    def test_target_0_is_full_prefill_below_and_everything_at_max_ratio_1(self, make_calibrated: EngineOf) -> None:
        engine = make_calibrated(keep_exact=False)
        refused = ask(engine, target_divergence=0.0)
        assert refused.fallback_reason is not None
        everything = ask(engine, target_divergence=0.0, max_ratio=1.0)
        assert everything.fallback_reason is None
        assert everything.recomputed_tokens > 0
        assert everything.reused_tokens == 0
        assert (everything.ratio, everything.predicted_divergence) == (1.0, 0.0)

    def test_a_fixed_ratio_is_kept_and_its_divergence_predicted(self, make_calibrated: EngineOf) -> None:
        engine = make_calibrated(curve={"scale": 2.0, "margin": 1.5})
        stats = ask(engine, ratio=0.2)
        assert stats.ratio == 0.2
        assert stats.residual is not None
        assert stats.predicted_divergence == pytest.approx(3.0 * stats.residual)
        assert (ask(engine, ratio=1.0).residual, ask(engine, ratio=1.0).predicted_divergence) == (0.0, 0.0)
        unseen = ask(engine, rag_prompt(3, 2, 1), ratio=0.0)
        assert (unseen.residual, unseen.predicted_divergence) == (None, None)

    def test_without_a_calibration_there_is_a_residual_and_no_prediction(self, make_engine: EngineMaker) -> None:
        engine = make_engine(ratio=0.2)
        stats = ask(engine)
        assert stats.residual is not None
        assert stats.predicted_divergence is None
        assert ask(engine, policy="random").residual is None

    def test_a_prompt_of_exact_chunks_needs_nothing(self, make_calibrated: EngineOf) -> None:
        engine = make_calibrated()
        ask(engine, ratio=1.0)  # keeps them behind what precedes them here
        stats = ask(engine, target_divergence=0.0)
        assert stats.fallback_reason is None
        assert (stats.recomputed_tokens, stats.ratio, stats.predicted_divergence) == (0, 0.0, 0.0)
        assert stats.reused_tokens > 0


class TestRefusal:
    def test_the_answer_is_full_prefills_and_the_reason_has_both_numbers(self, make_calibrated: EngineOf) -> None:
        engine = make_calibrated(keep_exact=False)
        least, target = residual_at(engine, 0.5), 0.5 * residual_at(engine, 0.5)
        settings = RecomputeConfig(target_divergence=target)
        result = engine.generate(PROMPT, recompute=settings)
        assert result.stats.fallback_reason == f"predicted divergence {least:.4g} above the target {target:.4g}"
        assert result.token_ids == engine.generate(PROMPT, reuse=False).token_ids
        found, reference = (
            score(engine, PROMPT, [5, 6], recompute=recompute, reuse=reuse)
            for recompute, reuse in ((settings, True), (None, False))
        )
        assert torch.equal(found.logits, reference.logits)

    def test_the_statistics_count_the_passes_and_the_full_prefill(self, make_calibrated: EngineOf) -> None:
        stats = ask(make_calibrated(), target_divergence=0.0)
        assert stats.prefilled_tokens == stats.prompt_tokens
        assert (stats.reused_tokens, stats.recomputed_tokens, stats.chunk_hits) == (0, 0, 3)
        assert (stats.policy, stats.ratio, stats.predicted_divergence) == ("full_prefill", 1.0, 0.0)
        assert 1.0 < stats.charged_ratio < 1.5
        assert stats.select_s > 0
        assert stats.prefill_s > 0

    def test_what_it_computed_is_exact_and_serves_the_next_question(self, make_calibrated: EngineOf) -> None:
        engine = make_calibrated()
        assert ask(engine, target_divergence=0.0).stored_tokens > 0
        other = rag_prompt(1, 2, 3, question="And what begins last?")
        reference = prefill_logits(engine, other, reuse=False)[0]
        engine_stats = ask(engine, other, target_divergence=0.0)
        assert engine_stats.fallback_reason is None
        assert engine_stats.reused_tokens > 0
        logits, _ = prefill_logits(engine, other, ratio=0.0)
        torch.testing.assert_close(logits, reference, atol=1e-4, rtol=1e-4)

    def test_without_keep_exact_nothing_is_stored(self, make_calibrated: EngineOf) -> None:
        engine = make_calibrated(keep_exact=False)
        before = engine.store.nbytes
        assert ask(engine, target_divergence=0.0).stored_tokens == 0
        assert engine.store.nbytes == before

    def test_chunks_that_were_not_measured_yet_are_afterwards(self, make_calibrated: EngineOf) -> None:
        same_kv = {"behind": "passages"}  # behind neighbours it depends on what else is stored
        engine = make_calibrated(warm=False, keep_exact=False, encode=same_kv)
        other = make_calibrated(keep_exact=False, encode=same_kv)
        target = 1.01 * residual_at(other, 0.5)
        first = ask(engine, target_divergence=target)
        assert first.fallback_reason is not None  # unmeasured tokens count as if they depended on context entirely
        assert (first.chunk_misses, first.charged_ratio > 1.5) == (3, True)
        second = ask(engine, target_divergence=target)
        assert second.fallback_reason is None
        assert second.ratio == ask(other, target_divergence=target).ratio


class TestCalibrations:
    def test_a_target_without_calibration_is_refused_and_names_the_command(self, make_engine: EngineMaker) -> None:
        engine = make_engine()
        with pytest.raises(ValueError, match=r"target_divergence: 0\.1 .*cachecraft calibrate"):
            ask(engine, target_divergence=0.1)
        with pytest.raises(ValueError, match=r"target_divergence: 0\.1 .*cachecraft calibrate"):
            score(engine, PROMPT, [5], recompute=RecomputeConfig(target_divergence=0.1))
        with pytest.raises(ValueError, match=r"target_divergence: 0\.1 .*cachecraft calibrate"):
            CacheCraftEngine(
                make("llama"), byte_level(), EngineConfig(recompute=RecomputeConfig(target_divergence=0.1))
            )

    @pytest.mark.parametrize(("preset", "ratio"), [("exact", 1.0), ("high", 0.3), ("balanced", 0.15), ("fast", 0.05)])
    def test_a_preset_without_calibration_is_its_ratio(
        self, preset: str, ratio: float, make_engine: EngineMaker
    ) -> None:
        engine = make_engine(keep_exact=False)
        by_preset, by_ratio = ask(engine, preset=preset), ask(engine, ratio=ratio)
        assert by_preset.ratio == ratio
        engine = make_engine(keep_exact=False)
        assert ask(engine, ratio=ratio).recomputed_tokens == by_preset.recomputed_tokens
        assert by_ratio.chunk_hits == (0 if preset == "exact" else 3)

    def test_a_preset_with_calibration_is_its_target(self, make_calibrated: EngineOf) -> None:
        plain = make_calibrated()
        scale = 0.06 / residual_at(plain, 0.25)
        engine = make_calibrated(curve={"scale": scale})
        balanced, fast = ask(engine, preset="balanced"), ask(engine, preset="fast")
        assert balanced.ratio == pytest.approx(0.25, abs=0.01)
        assert balanced.predicted_divergence == pytest.approx(0.06, rel=0.05)
        assert fast.ratio < balanced.ratio
        exact = ask(engine, preset="exact")
        assert (exact.ratio, exact.fallback_reason, exact.predicted_divergence) == (1.0, None, 0.0)

    def test_a_file_of_another_model_is_refused_with_both_fingerprints(self, make_calibrated: EngineOf) -> None:
        with pytest.raises(ValueError, match=r"f{32}.*this one is [0-9a-f]{32}"):
            make_calibrated(curve={"fingerprint": "f" * 32})

    def test_a_file_measured_behind_something_else_is_refused(self, make_calibrated: EngineOf) -> None:
        with pytest.raises(ValueError, match=r"encode\.behind 'none'"):
            make_calibrated(curve={"settings": {"encode.behind": "'none'"}})

    def test_a_calibration_of_another_policy_serves_no_target_and_leaves_presets_their_ratio(
        self, make_calibrated: EngineOf
    ) -> None:
        engine = make_calibrated()
        with pytest.raises(ValueError, match=r"'key_deviation'.*'question_sensitivity'"):
            ask(engine, policy="key_deviation", target_divergence=0.1)
        with pytest.raises(ValueError, match=r"'chunk_start' does not; allowed: .*question_sensitivity"):
            ask(engine, policy="chunk_start", target_divergence=0.1)
        assert ask(engine, policy="chunk_start", preset="high").ratio == 0.3

    def test_after_a_change_of_weights_a_target_is_refused_and_a_preset_keeps_its_ratio(
        self, make_calibrated: EngineOf
    ) -> None:
        engine = make_calibrated()
        with torch.no_grad():
            engine.model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
        with pytest.raises(ValueError, match="measured on the model"):
            ask(engine, target_divergence=0.1)
        stats = ask(engine, preset="high")
        assert (stats.ratio, stats.predicted_divergence) == (0.3, None)

    def test_a_measured_calibration_keeps_to_its_target_on_other_prompts(
        self, make_engine: EngineMaker, tmp_path: Path
    ) -> None:
        numbers = range(1, 31)
        prompts = [rag_prompt(n, n + 1, question=f"What ends before {n}?") for n in numbers]
        calibration = calibrate(make_engine(), prompts[:15], (0.1, 0.3, 0.6), answer_tokens=4)
        calibration.save(tmp_path / "measured.json")
        engine = make_engine(calibration=str(tmp_path / "measured.json"), keep_exact=False)
        engine.warm([passage(number) for number in range(1, 32)])
        sample = ask(engine, prompts[20], ratio=0.3).predicted_divergence
        assert sample is not None
        settings = RecomputeConfig(target_divergence=sample, max_ratio=0.9)
        divergences, ratios = [], set()
        for prompt in prompts[15:]:
            answer = engine.generate(prompt, reuse=False, max_new_tokens=4).token_ids or (0,)
            reference = score(engine, prompt, answer, reuse=False).logits
            found = score(engine, prompt, answer, recompute=settings)
            divergences.append(float(kl_divergence(reference, found.logits).mean()))
            ratios.add(found.stats.ratio)
        assert 0 < sum(divergences) / len(divergences) <= sample
        assert len(ratios) > 5
