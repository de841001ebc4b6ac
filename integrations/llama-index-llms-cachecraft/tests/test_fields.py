"""Fields of ``CacheCraftLLM``: what they change, and which are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cachecraft_rag import CacheCraftEngine, EngineConfig, RecomputeConfig
from llama_index.llms.cachecraft import CacheCraftLLM
from tests.conftest import passage
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level


def test_fields_control_reuse(make_llm: Callable[..., CacheCraftLLM]) -> None:
    engine = CacheCraftEngine(make("llama"), byte_level(), EngineConfig(recompute=RecomputeConfig(ratio=0.3)))
    engine.warm([passage(1)])
    prompt = f"{passage(1)} Why?"

    def stats(llm: CacheCraftLLM, **options: Any) -> dict[str, Any]:
        return llm.complete(prompt, **options).raw["cachecraft"]

    assert stats(make_llm(engine=engine))["ratio"] == 0.3
    assert stats(make_llm(engine=engine, recompute_ratio=0.5))["ratio"] == 0.5
    llm = make_llm(engine=engine, policy="chunk_start", recompute_ratio=0.0)
    assert (stats(llm)["policy"], stats(llm)["recomputed_tokens"]) == ("chunk_start", 0)
    assert stats(llm, policy="random", recompute_ratio=0.9)["recomputed_tokens"] > 0
    assert stats(make_llm(engine=engine, reuse=False))["fallback_reason"] == "reuse=False"
    assert stats(llm, reuse=False)["reused_tokens"] == 0


def test_a_preset_target_or_ratio_takes_the_place_of_the_engines(make_llm: Callable[..., CacheCraftLLM]) -> None:
    goals = [{"preset": "high"}, {"ratio": 0.4}]
    configs = [EngineConfig(recompute=RecomputeConfig(**goal)) for goal in goals]
    for config, default in zip(configs, [0.3, 0.4], strict=True):
        engine = CacheCraftEngine(make("llama"), byte_level(), config)
        engine.warm([passage(1)])

        def ratio(llm: CacheCraftLLM, **options: Any) -> float:
            return llm.complete(f"{passage(1)} Why?", **options).raw["cachecraft"]["ratio"]

        assert ratio(make_llm(engine=engine)) == default
        assert ratio(make_llm(engine=engine, policy="random")) == default
        llm = make_llm(engine=engine, preset="fast")
        assert ratio(llm) == 0.05
        assert ratio(llm, recompute_ratio=0.7) == 0.7
        assert ratio(llm, preset="exact") == 1.0
        assert ratio(make_llm(engine=engine, recompute_ratio=0.5), preset="balanced") == 0.15
        with pytest.raises(ValueError, match=r"recompute_ratio: 0\.5 beside preset='fast'; give one"):
            ratio(llm, recompute_ratio=0.5, preset="fast")
        with pytest.raises(ValueError, match="calibrat"):
            ratio(llm, target_divergence=0.1)


def test_wrong_fields_are_refused_by_name(make_llm: Callable[..., CacheCraftLLM]) -> None:
    engine = make_llm().engine
    for fields, message in [
        ({}, "model: give exactly one of"),
        ({"model": "a", "engine": engine}, "model: give exactly one of"),
        ({"hf_model": engine.model}, "tokenizer: give hf_model and tokenizer together"),
        ({"model": "a", "tokenizer": engine.tokenizer}, "tokenizer: give hf_model and tokenizer together"),
        ({"engine": engine, "dtype": "float32"}, "dtype: 'float32' has no effect"),
        ({"engine": engine, "context_window": 99}, "context_window: 99, but the given engine has None"),
        ({"model": "a", "temprature": 0.5}, "temprature"),
        ({"model": "a", "temperature": -0.5}, "temperature"),
        ({"model": "a", "recompute_ratio": 1.5}, "recompute_ratio"),
        ({"model": "a", "policy": "best"}, "policy"),
        ({"model": "a", "preset": "best"}, "preset"),
        ({"model": "a", "target_divergence": -1.0}, "target_divergence"),
        ({"model": "a", "preset": "fast", "recompute_ratio": 0.5}, "recompute_ratio: 0.5 beside preset='fast'"),
        ({"engine": engine, "calibration": "other.json"}, "calibration: 'other.json', but the given engine has None"),
        ({"model": "a", "stop": [""]}, "stop"),
        ({"model": "a", "namespace": ""}, "namespace"),
    ]:
        with pytest.raises(ValueError, match=message):
            CacheCraftLLM(**fields)


def test_a_model_that_does_not_exist_is_refused_at_the_first_use(tmp_path: Any) -> None:
    llm = CacheCraftLLM(model=str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="does not exist"):
        llm.complete("Hello")


def test_one_stop_text_may_be_a_string() -> None:
    assert CacheCraftLLM(model="a", stop="\n").stop == ["\n"]
    assert CacheCraftLLM(model="a", stop=None).stop == []
