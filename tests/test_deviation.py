"""The regressor of deviations: its features, its fit, its place in a calibration, and the policy that uses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from typer.testing import CliRunner

from cachecraft_rag import CacheCraftEngine, EngineConfig, RagPrompt, RecomputeConfig, SamplingConfig
from cachecraft_rag.calibration import Calibration
from cachecraft_rag.candidates import Candidates
from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.cli import app
from cachecraft_rag.deviation import (
    FEATURES,
    LEAST_DEVIATION,
    DeviationFit,
    DeviationModel,
    is_repeated,
    relative_deviation,
    token_features,
)
from cachecraft_rag.evaluate.calibrate import calibrate, fit_deviation
from cachecraft_rag.evaluate.charge import charge_for
from cachecraft_rag.evaluate.teacher import score
from cachecraft_rag.request import Request
from tests.conftest import EngineMaker, passage, prefill_logits, rag_prompt
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level

PROMPTS = [rag_prompt(*numbers) for numbers in ((1, 2, 3), (4, 5, 6), (7, 8, 9))]
RATIOS = (0.1, 0.4)
PREDICTED = RecomputeConfig(policy="predicted", ratio=0.2)
# One layer where all counts, one where only the sensitivity does.
KNOWN = ((-1.0, 0.5, -0.3, 0.2, 0.7, 0.4, -0.6), (0.5, 0.9, 0.0, 0.0, 0.0, 0.0, 0.0))


def some_features(num_tokens: int, seed: int = 0) -> torch.Tensor:
    """``[2, num_tokens, 6]``: five numbers and one that is 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(2, num_tokens, len(FEATURES), generator=generator)
    features[..., -1] = (features[..., -1] > 0).float()
    return features


def known_model() -> DeviationModel:
    return DeviationModel(coefficients=KNOWN, explained=1.0, num_tokens=1)


class TestFit:
    def test_it_recovers_a_known_relation(self) -> None:
        fit = DeviationFit(2)
        features = some_features(3000)
        fit.add(features, known_model().predict(features))
        found = fit.model()
        assert torch.allclose(torch.tensor(found.coefficients), torch.tensor(KNOWN), atol=2e-3)
        fresh = some_features(50, seed=1)
        assert torch.allclose(found.predict(fresh), known_model().predict(fresh), rtol=0.02)
        assert found.explained == pytest.approx(1.0, abs=1e-5)
        assert found.num_tokens == 3000

    def test_noise_is_averaged_away_and_told(self) -> None:
        fit = DeviationFit(2)
        features = some_features(20_000)
        noise = torch.randn(2, 20_000, generator=torch.Generator().manual_seed(2))
        fit.add(features, known_model().predict(features) * noise.exp())
        found = fit.model()
        assert torch.allclose(torch.tensor(found.coefficients), torch.tensor(KNOWN), atol=0.06)
        assert 0.2 < found.explained < 0.8

    def test_prompt_by_prompt_is_the_same_as_all_at_once(self) -> None:
        features = some_features(300)
        deviations = known_model().predict(features) + 0.1
        whole, parts = DeviationFit(2), DeviationFit(2)
        whole.add(features, deviations)
        for tokens in torch.arange(300).split(70):
            parts.add(features[:, tokens], deviations[:, tokens])
        assert parts.model().num_tokens == whole.model().num_tokens
        expected = torch.tensor(whole.model().coefficients)
        assert torch.allclose(torch.tensor(parts.model().coefficients), expected, atol=1e-6)

    def test_values_that_depend_on_no_context_are_predicted_to_be_right(self) -> None:
        fit = DeviationFit(2)
        features = some_features(300)
        deviations = known_model().predict(features)
        deviations[0] = 0.0
        fit.add(features, deviations)
        assert torch.allclose(fit.model().predict(some_features(20))[0], torch.tensor(LEAST_DEVIATION))
        assert fit.model().explained > 0.99

    def test_chunks_of_one_length_say_nothing_of_others(self) -> None:
        fit = DeviationFit(2)
        features = some_features(300)
        features[..., 2] = 3.0
        fit.add(features, known_model().predict(features))
        assert all(abs(row[3]) < 1e-6 for row in fit.model().coefficients)

    def test_nothing_to_compare_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="prompts: none of them"):
            DeviationFit(2).model()


class TestModel:
    def test_a_prediction_is_the_formula_of_the_docstring(self) -> None:
        features = some_features(3)
        expected = (features[1, 2] * torch.tensor(KNOWN[1][1:])).sum() + KNOWN[1][0]
        assert known_model().predict(features)[1, 2] == pytest.approx(float(expected.exp()))

    @pytest.mark.parametrize("coefficients", [[], [[1.0] * 6], [[1.0] * 7, [1.0] * 8], [[float("nan")] * 7]])
    def test_what_would_be_no_regressor_is_refused(self, coefficients: list[list[float]]) -> None:
        with pytest.raises(ValidationError, match="coefficients"):
            DeviationModel.model_validate({"coefficients": coefficients, "explained": 0.5, "num_tokens": 9})

    def test_features_of_another_model_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"3 layers.*fitted on 2"):
            known_model().predict(torch.zeros(3, 5, len(FEATURES)))


class TestFeatures:
    def test_they_are_those_made_by_hand(self) -> None:
        found = token_features(
            token_ids=torch.tensor([7, 8, 7, 7, 9]),
            chunk_index=torch.tensor([0, 0, 0, 2, 2]),
            offset_in_chunk=torch.tensor([0, 1, 2, 0, 1]),
            chunk_tokens=torch.tensor([3, 3, 3, 2, 2]),
            sensitivity=torch.tensor([[0.0, 0.25, 1.0, 1.0, 4.0]]),
            key_norm=torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]]),
        )
        least = LEAST_DEVIATION**2
        expected = [
            torch.tensor([least, 0.25, 1.0, 1.0, 4.0]).log(),
            torch.tensor([1.0, 2.0, 3.0, 1.0, 2.0]).log(),
            torch.tensor([3.0, 3.0, 3.0, 2.0, 2.0]).log(),
            torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).log(),
            torch.tensor([1.0, 1.0, 1.0, 3.0, 3.0]).log(),
            torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0]),
        ]
        assert len(expected) == len(FEATURES)
        assert torch.allclose(found, torch.stack(expected, dim=1)[None])

    @given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), min_size=1, max_size=30))
    def test_a_token_is_repeated_where_it_stands_earlier_in_its_chunk(self, tokens: list[tuple[int, int]]) -> None:
        tokens.sort(key=lambda token: token[0])
        chunks, ids = (torch.tensor(column) for column in zip(*tokens, strict=True))
        expected = [token in tokens[:place] for place, token in enumerate(tokens)]
        assert is_repeated(ids, chunks).tolist() == expected

    def test_values_that_are_off_by_their_own_size_deviate_by_one(self) -> None:
        full = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0))
        full = full / full.square().sum(dim=(1, 3), keepdim=True).sqrt()  # every token of size 1
        factors = torch.tensor([0.0, 0.5, 1.0, 2.0, 3.0])
        found = relative_deviation(full * factors[:, None], full)
        assert torch.allclose(found, (factors - 1).abs().expand(2, -1))
        assert torch.allclose(relative_deviation(7 * full * factors[:, None], 7 * full), found, atol=1e-6)

    def test_a_request_reads_them_from_stored_chunks(self, make_engine: EngineMaker) -> None:
        engine, prompt = make_engine(), rag_prompt(1, 2, 1)
        engine.warm(prompt.chunks)
        request = prefilled(engine, prompt, RecomputeConfig(policy="none", ratio=0.0))
        assert request.plan is not None
        assert request.kv is not None
        stored = [chunk.chunk_kv.complete() for chunk in request.chunks if chunk.chunk_kv is not None]
        token_ids = torch.tensor(request.encoded.token_ids)
        candidates = Candidates(request.plan, stored, engine.model.config.num_hidden_layers)
        positions, found = candidates.positions, candidates.features(token_ids, request.kv)
        places = [n for span in request.encoded.spans for n in range(span.start, span.end)]
        assert positions.tolist() == places
        for column, name in enumerate(FEATURES):
            for layer_idx in range(engine.model.config.num_hidden_layers):
                assert torch.allclose(
                    found[layer_idx, :, column],
                    torch.cat([by_hand(name, layer_idx, n, kv) for n, kv in enumerate(stored)]),
                    atol=1e-4,
                ), name


def by_hand(name: str, layer_idx: int, number: int, kv: ChunkKV) -> torch.Tensor:
    """One feature of all tokens of a chunk."""
    ones = torch.ones(kv.num_tokens)
    if name == "sensitivity":
        assert kv.sensitivity is not None
        return kv.sensitivity[layer_idx].float().clamp(min=LEAST_DEVIATION**2).log()
    if name == "key_norm":
        return kv.keys[layer_idx].square().sum(dim=(0, 2)).sqrt().log()
    return {
        "place": torch.arange(1.0, kv.num_tokens + 1).log(),
        "length": (ones * kv.num_tokens).log(),
        "chunks_before": (ones * (number + 1)).log(),
        "is_repeated": torch.tensor([float(t in kv.token_ids[:n]) for n, t in enumerate(kv.token_ids)]),
    }[name]


def prefilled(engine: CacheCraftEngine, prompt: RagPrompt, recompute: RecomputeConfig, reuse: bool = True) -> Request:
    request = engine.intake.take(prompt, SamplingConfig(max_new_tokens=4), recompute)
    engine.prefill(request, reuse)
    return request


@pytest.fixture(scope="module")
def calibration_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measured on the tiny llama, for the default policy."""
    path = tmp_path_factory.mktemp("deviation") / "calibration.json"
    with CacheCraftEngine(make("llama"), byte_level(), EngineConfig()) as engine:
        calibrate(engine, PROMPTS, RATIOS, answer_tokens=2).save(path)
    return path


class TestCalibrating:
    def test_what_was_fitted_is_in_the_file(self, calibration_file: Path) -> None:
        found = Calibration.load(calibration_file).deviation
        assert found is not None
        assert len(found.coefficients) == 3
        assert found.num_tokens > 1000
        assert 0.0 < found.explained < 1.0

    def test_predictions_for_a_new_prompt_follow_what_it_really_deviates(self, make_engine: EngineMaker) -> None:
        engine = make_engine()
        regressor = fit_deviation(engine, PROMPTS)
        prompt = rag_prompt(11, 12, 13)
        engine.warm(prompt.chunks)
        stored, full = (
            prefilled(engine, prompt, RecomputeConfig(policy="none", ratio=0.0), reuse) for reuse in (True, False)
        )
        assert stored.plan is not None
        assert stored.kv is not None
        assert full.kv is not None
        chunk_kvs = [chunk.chunk_kv for chunk in stored.chunks]
        candidates = Candidates(stored.plan, chunk_kvs, engine.model.config.num_hidden_layers)
        places, features = candidates.positions, candidates.features(torch.tensor(stored.encoded.token_ids), stored.kv)
        real = relative_deviation(stored.kv.values[:, 0, :, places], full.kv.values[:, 0, :, places])
        predicted = regressor.predict(features)
        for layer_idx in (1, 2):  # values of the first layer depend on no context
            pair = torch.stack([predicted[layer_idx].log(), real[layer_idx].clamp(min=LEAST_DEVIATION).log()])
            assert float(torch.corrcoef(pair)[0, 1]) > 0.3

    def test_it_leaves_the_engine_as_it_was(self, make_engine: EngineMaker) -> None:
        engine = make_engine()
        engine.warm([passage(1)])
        before = (engine.store.nbytes, len(engine.library.registry))
        calibrate(engine, PROMPTS, RATIOS, answer_tokens=2, recompute=PREDICTED)
        assert (engine.store.nbytes, len(engine.library.registry)) == before
        with pytest.raises(ValueError, match="cachecraft calibrate"):
            engine.generate(PROMPTS[0], recompute=PREDICTED)

    def test_the_policy_itself_can_be_calibrated(self, make_engine: EngineMaker, tmp_path: Path) -> None:
        found = calibrate(make_engine(), PROMPTS, RATIOS, answer_tokens=2, recompute=PREDICTED)
        assert found.policy == "predicted"
        found.save(tmp_path / "own.json")
        engine = make_engine(policy="predicted", ratio=0.2, calibration=str(tmp_path / "own.json"))
        stats = engine.generate(PROMPTS[0]).stats
        assert stats.residual is not None
        assert stats.predicted_divergence == pytest.approx(found.predict(stats.residual))

    def test_the_command_fits_it_for_a_policy_that_needs_it(self, tmp_path: Path) -> None:
        make("llama").save_pretrained(tmp_path / "model")
        byte_level().save_pretrained(tmp_path / "model")
        docs = [[{"id": f"d{n}", "text": passage(10 * q + n)} for n in range(2)] for q in range(3)]
        lines = [{"id": f"q{q}", "question": "?", "answers": ["it"], "docs": found} for q, found in enumerate(docs)]
        (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        out = tmp_path / "calibration.json"
        arguments = ["calibrate", str(tmp_path / "model"), str(tmp_path / "questions.jsonl"), "--out", str(out)]
        result = CliRunner().invoke(app, [*arguments, "--policy", "predicted", "--answer-tokens", "2"])
        assert result.exit_code == 0, result.output
        assert "of how stored values differ" in result.output
        recompute = RecomputeConfig(policy="predicted", target_divergence=0.5)
        config = EngineConfig(recompute=recompute, calibration=str(out))
        with CacheCraftEngine.from_pretrained(str(tmp_path / "model"), config) as engine:
            assert engine.generate(PROMPTS[0], max_new_tokens=1).stats.predicted_divergence is not None


class TestPolicy:
    def test_without_a_calibration_it_says_how_to_make_one(self, make_engine: EngineMaker) -> None:
        with pytest.raises(ValueError, match=r"'predicted' needs.*cachecraft calibrate.*no such file"):
            make_engine(policy="predicted")
        with pytest.raises(ValueError, match=r"'predicted' needs.*cachecraft calibrate"):
            make_engine().stream(rag_prompt(1), recompute=PREDICTED)

    def test_an_older_calibration_without_regressor_is_not_enough(
        self, make_engine: EngineMaker, calibration_file: Path, tmp_path: Path
    ) -> None:
        older = json.loads(calibration_file.read_text(encoding="utf-8"))
        del older["deviation"]
        (tmp_path / "older.json").write_text(json.dumps(older), encoding="utf-8")
        engine = make_engine(calibration=str(tmp_path / "older.json"))
        engine.generate(rag_prompt(1))
        with pytest.raises(ValueError, match="older than that policy"):
            engine.generate(rag_prompt(1), recompute=PREDICTED)

    def test_a_regressor_of_other_weights_is_refused(self, make_engine: EngineMaker, calibration_file: Path) -> None:
        engine = make_engine(calibration=str(calibration_file))
        engine.generate(rag_prompt(1), recompute=PREDICTED)
        with torch.no_grad():
            engine.model.lm_head.weight.mul_(2.0)
        with pytest.raises(ValueError, match="measured on the model"):
            engine.generate(rag_prompt(1), recompute=PREDICTED)

    def test_any_calibration_of_the_model_lets_it_choose(
        self, make_engine: EngineMaker, calibration_file: Path
    ) -> None:
        engine = make_engine(calibration=str(calibration_file), policy="predicted", ratio=0.2)
        prompt = rag_prompt(1, 2, 3)
        for _ in range(2):  # the second time with measured sensitivity
            stats = engine.generate(prompt).stats
            assert stats.policy == "predicted"
            assert stats.reused_tokens + stats.recomputed_tokens + stats.prefilled_tokens == stats.prompt_tokens
        assert stats.chunk_hits == 3
        chunk_tokens = sum(span.num_tokens for span in engine.prompts.encode(prompt).spans)
        assert stats.recomputed_tokens == -(-chunk_tokens * 2 // 10)
        assert stats.residual is not None

    def test_it_costs_the_question_pass_and_nothing_more(
        self, make_engine: EngineMaker, calibration_file: Path
    ) -> None:
        engine = make_engine(calibration=str(calibration_file), keep_exact=False)
        prompt = rag_prompt(1, 2, 3)
        engine.warm(prompt.chunks)
        costs = [
            score(engine, prompt, [5], recompute=RecomputeConfig(policy=policy, ratio=0.2)).stats.charged_ratio
            for policy in ("predicted", "question_sensitivity", "key_deviation")
        ]
        assert costs[0] == costs[1] != costs[2]
        charge = charge_for(engine, prompt, RecomputeConfig(policy="predicted"), 0.3)
        assert score(engine, prompt, [5], recompute=charge.recompute).stats.charged_ratio == charge.charged_ratio

    def test_everything_recomputed_equals_full_prefill(self, make_engine: EngineMaker, calibration_file: Path) -> None:
        engine = make_engine(calibration=str(calibration_file), keep_exact=False)
        prompt = rag_prompt(1, 2, 3)
        engine.warm(prompt.chunks)
        logits, request = prefill_logits(engine, prompt, policy="predicted", ratio=1.0)
        reference, _ = prefill_logits(engine, prompt, reuse=False)
        assert request.figures["chunk_hits"] == 3
        assert torch.allclose(logits, reference, atol=1e-4)
