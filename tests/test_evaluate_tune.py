"""What the tuner makes of measured curves: settings, in force for what is measured after them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cachecraft_rag import CacheCraftEngine, EngineConfig, RecomputeConfig, StoreConfig
from cachecraft_rag.config import Behind
from cachecraft_rag.evaluate.calibrate import calibrate
from cachecraft_rag.evaluate.curve import Curve
from cachecraft_rag.evaluate.curves import CurveMaker, Extent
from cachecraft_rag.evaluate.quality_curves import BEHIND
from cachecraft_rag.evaluate.tune import tune
from tests.conftest import EngineMaker
from tests.curve_samples import SMALL, maker, settled, sources

pytest.importorskip("matplotlib")


class Settled(CurveMaker):
    """Measures everything but behind and offset, whose curves say which is the best."""

    def __init__(self, engine: CacheCraftEngine, extent: Extent, behind: Behind, offset: float) -> None:
        super().__init__(engine, sources(), extent, max_new_tokens=3)
        self.best, self.asked = (behind, offset), [""]

    def behind(self, chunk_tokens: int) -> Curve:
        xs = {float(x): name for x, name in enumerate(BEHIND)}
        return settled("behind", xs, self.best[0], self.engine.config.encode.behind, BEHIND)

    def offset(self, chunk_tokens: int, behind: Behind | None = None) -> Curve:
        self.asked.append(behind or "")
        return settled("offset", {x: x for x in (0.0, 0.5, 1.0)}, self.best[1], self.recompute.offset)


def test_everything_that_is_recommended_is_in_the_settings_and_the_rest_stays(
    make_engine: EngineMaker, tmp_path: Path
) -> None:
    store = StoreConfig.model_validate({"disk": {"path": str(tmp_path / "kv")}})
    base = EngineConfig(namespace="legal", recompute=RecomputeConfig(preset="fast", max_ratio=0.4), store=store)
    with maker(make_engine(encode={"behind": "passages"})) as made:
        tuning = tune(made, base, 100.0)
    values = {item.field: item.value for item in tuning.recommendations}
    assert list(values) == [
        "chunk_tokens",
        "encode.behind",
        "recompute.offset",
        "recompute.ratio",
        "store.hot_share",
        "store.load_ahead",
    ]
    config = tuning.config
    assert values["recompute.ratio"] == 0.0  # any divergence is below 100
    assert config.encode.behind == values["encode.behind"]
    assert config.recompute.offset == values["recompute.offset"]
    assert config.recompute == RecomputeConfig(ratio=0.0, max_ratio=0.4, offset=config.recompute.offset)
    assert (config.chunk_tokens, config.store.hot_share) == (values["chunk_tokens"], values["store.hot_share"])
    assert config.store.load_ahead == values["store.load_ahead"]
    assert (config.namespace, config.store.disk) == ("legal", base.store.disk)
    names = [curve.name for curve in tuning.curves]
    assert names == ["chunk_size", "behind", "offset", "ratio", "hot_share", "load_ahead"]
    assert any("2 questions" in note for note in tuning.notes)
    assert any("device_size" in note for note in tuning.notes)
    assert not any("prefetch" in note for note in tuning.notes)
    assert not (tmp_path / "kv").exists()
    paths = tuning.write(tmp_path / "out", "Title")
    assert EngineConfig.from_file(paths[0]) == config


def test_with_a_calibration_targets_are_tried_too(make_engine: EngineMaker, tmp_path: Path) -> None:
    path = str(tmp_path / "calibration.json")
    extent = replace(SMALL, chunk_sizes=(64,), hot_shares=(0.5,), replayed=4, answered=1, windows=(1,), loads=1)
    questions = maker(make_engine(), extent).questions(64)
    calibrate(make_engine(), [question.prompt() for question in questions], answer_tokens=3).save(path)
    engine = make_engine(calibration=path)
    curve = maker(engine, extent).target(64, 0.2)
    assert [point.x for point in curve.points] == [0.1, 0.2, 0.4]
    computed = [charged.value for _, charged in curve.values("charged")]
    assert computed == sorted(computed, reverse=True)
    same = Settled(engine, extent, "neighbours", 0.5)
    tuning = tune(same, engine.config, 5.0)
    assert [curve.name for curve in tuning.curves][:5] == ["chunk_size", "behind", "offset", "ratio", "target"]
    assert tuning.config.recompute.ratio == 0.0  # nothing computes less than that
    only_all = replace(extent, ratios=(1.0,))
    tuning = tune(Settled(engine, only_all, "neighbours", 0.5), engine.config, 5.0)
    assert tuning.config.recompute.target == 10.0  # the largest that was tried; less than full prefill is computed
    assert tuning.config.calibration == path
    changes: tuple[tuple[Behind, float], ...] = (("prefix", 0.5), ("neighbours", 0.0))
    for behind, offset in changes:  # what it was not measured with
        with Settled(engine, only_all, behind, offset) as other:
            tuning = tune(other, engine.config, 5.0)
        assert "target" not in [curve.name for curve in tuning.curves]
        assert (tuning.config.calibration, tuning.config.recompute.target) == (None, None)
        assert any("calibrate with them" in note for note in tuning.notes)
        CacheCraftEngine(engine.model, engine.tokenizer, tuning.config).close()  # it can be made


def test_what_is_surely_closer_is_in_the_settings_and_in_force_for_the_ratio(
    make_engine: EngineMaker, tmp_path: Path
) -> None:
    extent = replace(SMALL, chunk_sizes=(64,), hot_shares=(0.5,), replayed=4, answered=1, windows=(1,), loads=1)
    engine = make_engine()
    made = Settled(engine, extent, "none", 0.0)
    with made:
        tuning = tune(made, EngineConfig(), 100.0)
        expected = made.ratio(64, RecomputeConfig(offset=0.0), "none")
        own = made.ratio(64)
    assert made.asked == ["", "none"]  # the offsets are tried on what was chosen
    ratios = next(curve for curve in tuning.curves if curve.name == "ratio")
    assert ratios.values("kl") == expected.values("kl") != own.values("kl")
    texts = {item.field: item.texts[1:3] for item in tuning.recommendations}
    assert texts["encode.behind"] == ("neighbours", "none")
    assert texts["recompute.offset"] == ("0.5", "0")
    paths = tuning.write(tmp_path / "out", "Title")
    config = EngineConfig.from_file(paths[0])
    assert (config.encode.behind, config.recompute.offset) == ("none", 0.0)
    assert {"behind.png", "offset.png"} <= {path.name for path in paths}
    assert "| encode.behind | neighbours | none | divergence 0.0100" in paths[2].read_text(encoding="utf-8")


def test_a_divergence_that_is_not_above_0_is_refused(make_engine: EngineMaker) -> None:
    for value in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="max_divergence"):
            tune(maker(make_engine()), EngineConfig(), value)


def test_what_the_policy_predicted_is_fitted_to_stays(make_engine: EngineMaker, tmp_path: Path) -> None:
    path = str(tmp_path / "calibration.json")
    extent = replace(SMALL, chunk_sizes=(64,), ratios=(1.0,), hot_shares=(0.5,), replayed=4, answered=1, windows=(1,))
    engine, predicted = make_engine(), RecomputeConfig(policy="predicted")
    prompts = [question.prompt() for question in maker(engine, extent).questions(64)]
    calibrate(engine, prompts, answer_tokens=3, recompute=predicted).save(path)
    config = engine.config.model_copy(update={"recompute": predicted, "calibration": path})
    with CacheCraftEngine(engine.model, engine.tokenizer, config) as predicting, maker(predicting, extent) as made:
        assert made.behind(64) is None
        tuning = tune(made, config, 100.0)
    assert (tuning.config.encode, tuning.config.recompute.offset) == (config.encode, config.recompute.offset)
    assert tuning.config.calibration == path
    assert "behind" not in [curve.name for curve in tuning.curves]
    assert any("policy predicted" in note for note in tuning.notes)
