"""The curve that predicts divergence, its file, and how it is measured."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from typer.testing import CliRunner

from cachecraft_rag import CacheCraftEngine, EngineConfig, RecomputeConfig, UnsupportedModelError
from cachecraft_rag.calibration import FORMAT_VERSION, Calibration
from cachecraft_rag.cli import app
from cachecraft_rag.evaluate.calibrate import Measurement, calibrate, fit, measure
from tests.conftest import EngineMaker, passage, rag_prompt
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level

PROMPTS = [rag_prompt(*numbers) for numbers in ((1, 2, 3), (4, 5, 6), (7, 8, 9))]


def curve(**changes: Any) -> Calibration:
    values = {"fingerprint": "f" * 32, "policy": "question_sensitivity", "scale": 2.0, "exponent": 0.7, "margin": 1.5}
    return Calibration(**{**values, "num_questions": 9, **changes})


def made_up(exponent: float, scale: float, spread: float, num_prompts: int = 40) -> list[Measurement]:
    """Divergences that scatter by a factor around a curve of known mean, prompt by prompt."""
    draw = random.Random(3)
    found = []
    for prompt in range(num_prompts):
        factor = draw.lognormvariate(-(spread**2) / 2, spread)  # of mean 1
        for ratio in (0.05, 0.1, 0.2, 0.4):
            residual = (0.3 - 0.5 * ratio) * draw.uniform(0.5, 1.5)
            found.append(Measurement(prompt, ratio, residual, factor * scale * residual**exponent))
    return found


class TestCurve:
    def test_it_is_the_formula_of_the_docstring(self) -> None:
        assert curve().predict(0.25) == pytest.approx(1.5 * 2.0 * 0.25**0.7)
        assert curve().predict(0.0) == 0.0

    @given(a=st.floats(0, 10), b=st.floats(0, 10), exponent=st.floats(0.1, 4), scale=st.floats(1e-6, 1e3))
    def test_a_prediction_never_falls_with_the_residual(
        self, a: float, b: float, exponent: float, scale: float
    ) -> None:
        found = curve(exponent=exponent, scale=scale)
        assert found.predict(min(a, b)) <= found.predict(max(a, b))

    # Far below any target the residual would have too few bits left (1e-318).
    @given(target=st.just(0.0) | st.floats(1e-30, 10), exponent=st.floats(0.2, 4), scale=st.floats(1e-3, 1e3))
    def test_the_residual_for_a_target_keeps_to_it_and_a_little_more_does_not(
        self, target: float, exponent: float, scale: float
    ) -> None:
        found = curve(exponent=exponent, scale=scale)
        residual = found.residual_for(target)
        assert found.predict(residual) <= target
        if target > 1e-9:
            assert found.predict(residual * 1.01) > target

    @pytest.mark.parametrize(
        ("field", "value"),
        [("scale", 0.0), ("scale", float("nan")), ("exponent", 0.0), ("margin", 0.9), ("num_questions", 0)],
    )
    def test_what_would_not_be_a_curve_is_refused(self, field: str, value: float) -> None:
        with pytest.raises(ValidationError, match=field):
            curve(**{field: value})


class TestFile:
    def test_saving_and_loading_gives_the_same(self, tmp_path: Path) -> None:
        saved = curve(settings={"encode.behind": "'prefix'"})
        saved.save(tmp_path / "new" / "calibration.json")
        assert Calibration.load(tmp_path / "new" / "calibration.json") == saved

    def test_no_file_is_an_error_that_says_how_to_make_one(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"none\.json.*cachecraft calibrate"):
            Calibration.load(tmp_path / "none.json")

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"scale": 1}'])
    def test_another_file_is_an_error_that_names_it(self, text: str, tmp_path: Path) -> None:
        path = tmp_path / "other.json"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"other\.json.*no calibration file"):
            Calibration.load(path)

    def test_a_file_of_another_version_is_refused_with_both(self, tmp_path: Path) -> None:
        path = tmp_path / "old.json"
        path.write_text(json.dumps({**curve().model_dump(), "version": FORMAT_VERSION + 1}), encoding="utf-8")
        with pytest.raises(ValueError, match=f"version {FORMAT_VERSION + 1}, this release reads {FORMAT_VERSION}"):
            Calibration.load(path)

    def test_another_fingerprint_is_refused_with_both(self) -> None:
        with pytest.raises(ValueError, match=f"{'f' * 32}.*{'0' * 32}"):
            curve().check("0" * 32, {})

    @pytest.mark.parametrize(
        ("theirs", "ours"), [({"a": "1"}, {"a": "2"}), ({"a": "1"}, {}), ({}, {"a": "2"}), ({"b": "1"}, {"a": "1"})]
    )
    def test_another_setting_is_refused_by_name(self, theirs: dict[str, str], ours: dict[str, str]) -> None:
        with pytest.raises(ValueError, match="measured with a "):
            curve(settings=theirs).check("f" * 32, ours)


class TestFit:
    @pytest.mark.parametrize("exponent", [0.6, 1.0, 2.0])
    def test_it_finds_the_curve_that_the_figures_lie_on(self, exponent: float, make_engine: EngineMaker) -> None:
        found = fit(make_engine(), made_up(exponent, 0.4, spread=0.0))
        assert found.exponent == pytest.approx(exponent, abs=1e-6)
        assert found.scale == pytest.approx(0.4)
        assert found.margin == pytest.approx(1.0)

    def test_scattered_figures_have_their_mean_below_the_prediction(self, make_engine: EngineMaker) -> None:
        # Log-normal with spread 1: the median is 0.6 of the mean, which a line through logarithms would find.
        measurements = made_up(1.0, 0.4, spread=1.0)
        found = fit(make_engine(), measurements)
        assert found.margin > 1.05
        assert sum(item.divergence / found.predict(item.residual) for item in measurements) < len(measurements)
        assert found.predict(0.2) > 0.4 * 0.2 * 0.8

    def test_the_margin_covers_the_ratio_at_which_the_curve_is_lowest(self, make_engine: EngineMaker) -> None:
        # Divergence levels off: a power through all four is too low in the middle.
        levels = {0.05: (0.4, 0.2), 0.1: (0.3, 0.19), 0.2: (0.2, 0.15), 0.4: (0.1, 0.03)}
        points = [Measurement(n, ratio, *level) for n in range(30) for ratio, level in levels.items()]
        found = fit(make_engine(), points)
        assert found.margin > 1.2
        for residual, divergence in levels.values():
            assert divergence <= found.predict(residual) * (1 + 1e-9)

    def test_more_confidence_and_fewer_prompts_need_more_margin(self, make_engine: EngineMaker) -> None:
        engine, measurements = make_engine(), made_up(1.0, 0.4, spread=1.0)
        margins = [fit(engine, measurements, quantile=quantile).margin for quantile in (0.6, 0.8, 0.95)]
        assert margins == sorted(margins)
        few = [item for item in measurements if item.prompt % 5 == 0]
        spread = [fit(engine, items).margin - 1 for items in (few, measurements)]
        assert spread[0] > spread[1]

    def test_a_curve_that_falls_is_not_believed(self, make_engine: EngineMaker) -> None:
        falling = [Measurement(prompt, 0.1, residual, 0.1 / residual) for prompt in (0, 1) for residual in (0.1, 0.2)]
        assert fit(make_engine(), falling).exponent > 0

    def test_no_divergence_at_all_still_gives_a_curve(self, make_engine: EngineMaker) -> None:
        same = [Measurement(prompt, 0.1, residual, 0.0) for prompt in (0, 1) for residual in (0.1, 0.2)]
        assert 0 < fit(make_engine(), same).predict(0.1) < 1e-4

    def test_prompts_that_differ_in_level_and_in_reach_do_not_bend_the_curve(self, make_engine: EngineMaker) -> None:
        # The prompt of small residuals has the large divergences: one line through all points would be flat.
        reaches = {0: (0.01, 0.02, 0.04), 1: (0.1, 0.2, 0.4)}
        level = {0: 1.9, 1: 0.1}
        points = [Measurement(n, 0.1, x, level[n] * x) for n, reach in reaches.items() for x in reach]
        found = fit(make_engine(), points)
        assert found.exponent == pytest.approx(1.0)
        assert found.scale == pytest.approx(1.0)

    def test_too_few_prompts_with_something_to_compare_are_refused(self, make_engine: EngineMaker) -> None:
        points = [Measurement(0, 0.1, 0.1, 0.1), Measurement(0, 0.2, 0.05, 0.1), Measurement(1, 0.1, 0.1, 0.1)]
        with pytest.raises(ValueError, match="prompts: 1 of them"):
            fit(make_engine(), points)

    @pytest.mark.parametrize("quantile", [0.5, 1.0, -1.0])
    def test_a_quantile_out_of_range_is_refused(self, quantile: float, make_engine: EngineMaker) -> None:
        with pytest.raises(ValueError, match=f"quantile: {quantile}"):
            fit(make_engine(), made_up(1.0, 1.0, 0.0), quantile=quantile)


class TestMeasuring:
    def test_less_is_left_and_answers_are_closer_where_more_is_recomputed(self, make_engine: EngineMaker) -> None:
        engine = make_engine()
        found = measure(engine, PROMPTS, (0.05, 0.9), answer_tokens=4)
        assert [(item.prompt, item.ratio) for item in found] == [(n, r) for n in range(3) for r in (0.05, 0.9)]
        for little, much in zip(found[::2], found[1::2], strict=True):
            assert little.residual > much.residual > 0
        divergences = [sum(item.divergence for item in found if item.ratio == ratio) for ratio in (0.05, 0.9)]
        assert divergences[0] > divergences[1] > 0

    def test_the_users_chunks_are_neither_used_nor_changed(self, make_engine: EngineMaker) -> None:
        engine = make_engine()
        engine.warm([passage(1)])
        before = (engine.store.nbytes, len(engine.library.registry))
        calibrate(engine, PROMPTS, (0.2, 0.4), answer_tokens=2)
        assert (engine.store.nbytes, len(engine.library.registry)) == before

    def test_an_engine_accepts_its_own_calibration(self, make_engine: EngineMaker, tmp_path: Path) -> None:
        found = calibrate(make_engine(), PROMPTS, (0.1, 0.4), answer_tokens=2)
        assert found.num_questions == 3
        found.save(tmp_path / "own.json")
        result = make_engine(calibration=str(tmp_path / "own.json")).generate(PROMPTS[0])
        assert result.stats.predicted_divergence is not None
        assert result.stats.residual is not None
        assert result.stats.predicted_divergence == pytest.approx(found.predict(result.stats.residual))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"ratios": ()}, "ratios"),
            ({"ratios": (0.0, 0.1)}, "ratios"),
            ({"ratios": (0.5, 1.0)}, "ratios"),
            ({"ratios": (0.5, 0.5)}, "ratios"),
            ({"prompts": PROMPTS[:1]}, "prompts: 1"),
            ({"recompute": RecomputeConfig(policy="random")}, "'random' gives tokens no scores"),
        ],
    )
    def test_bad_arguments_are_refused_by_name(
        self, options: dict[str, Any], message: str, make_engine: EngineMaker
    ) -> None:
        with pytest.raises(ValueError, match=message):
            calibrate(make_engine(), **{"prompts": PROMPTS, **options})

    def test_a_model_that_reuses_nothing_cannot_be_calibrated(self) -> None:
        with pytest.warns(UserWarning, match="prefilled in full"):
            engine = CacheCraftEngine(make("gpt2"), byte_level(), EngineConfig())
        with pytest.raises(UnsupportedModelError, match=re.escape(str(engine.fallback_reason))):
            calibrate(engine, PROMPTS)
        engine.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and three questions."""
    folder = tmp_path_factory.mktemp("calibrate")
    make("llama").save_pretrained(folder / "model")
    byte_level().save_pretrained(folder / "model")
    lines = [
        {"id": f"q{n}", "question": "What ends?", "answers": ["it"], "docs": [{"id": "d", "text": passage(n)}] * 2}
        for n in range(3)
    ]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return folder


class TestCommand:
    def run(self, folder: Path, *options: str) -> Any:
        arguments = ["calibrate", str(folder / "model"), str(folder / "questions.jsonl"), *options]
        return CliRunner().invoke(app, arguments)

    def test_it_writes_a_file_that_an_engine_of_that_model_takes(self, folder: Path, tmp_path: Path) -> None:
        path = tmp_path / "calibration.json"
        result = self.run(folder, "--out", str(path), "--answer-tokens", "2", "--policy", "question_attention")
        assert result.exit_code == 0, result.output
        assert f"wrote {path}" in result.output.replace("\n", "")
        config = EngineConfig(
            recompute=RecomputeConfig(policy="question_attention", target_divergence=0.5), calibration=str(path)
        )
        with CacheCraftEngine.from_pretrained(str(folder / "model"), config) as engine:
            assert engine.generate(PROMPTS[0], max_new_tokens=1).stats.predicted_divergence is not None
        with pytest.raises(ValueError, match="measured on the model"):
            CacheCraftEngine(make("qwen2"), byte_level(), config)

    @pytest.mark.parametrize("option", ["--policy", "--behind"])
    def test_an_unknown_name_ends_with_a_message(self, option: str, folder: Path) -> None:
        result = self.run(folder, option, "nothing")
        assert result.exit_code == 1
        assert "nothing" in result.output
