"""Settings of the engine from a file, such as ``cachecraft tune`` writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachecraft_rag import EngineConfig, RecomputeConfig, StoreConfig
from llama_index.llms.cachecraft import CacheAlignedNodeParser, CacheCraftLLM

CONFIG = EngineConfig(
    namespace="legal",
    recompute=RecomputeConfig(ratio=0.3),
    store=StoreConfig(load_ahead=5),
    max_new_tokens=33,
    context_window=900,
    chunk_tokens=300,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    CONFIG.to_file(path)
    return path


def test_a_file_sets_the_engine_and_the_fields_that_are_the_same(file: Path) -> None:
    for given in (file, str(file)):
        llm = CacheCraftLLM(model="none", engine_config=given)  # type: ignore[arg-type]
        assert llm._key.config == CONFIG
        assert (llm.namespace, llm.max_new_tokens, llm.context_window) == ("legal", 33, 900)


def test_fields_that_are_given_come_before_the_file(file: Path) -> None:
    llm = CacheCraftLLM(model="none", engine_config=file, context_window=800, namespace="other", max_new_tokens=5)
    assert (llm._key.config.context_window, llm._key.config.store.load_ahead) == (800, 5)
    assert (llm.namespace, llm.max_new_tokens) == ("other", 5)


def test_without_a_file_everything_is_at_its_default() -> None:
    assert CacheCraftLLM(model="none")._key.config == EngineConfig(context_window=None, calibration=None)


def test_settings_survive_llama_indexs_serialisation(file: Path) -> None:
    llm = CacheCraftLLM(model="none", engine_config=file)
    file.unlink()
    assert CacheCraftLLM.from_dict(llm.to_dict())._key == llm._key


def test_a_parser_cuts_chunks_of_the_size_that_the_engine_is_set_for(file: Path) -> None:
    llm = CacheCraftLLM(model="none", engine_config=file)
    parser = CacheAlignedNodeParser.from_llm(llm)
    assert (parser.min_tokens, parser.max_tokens) == (200, 300)
    own = CacheAlignedNodeParser.from_llm(llm, max_tokens=600)
    assert (own.min_tokens, own.max_tokens) == (512, 600)
    default = CacheAlignedNodeParser.from_llm(CacheCraftLLM(model="none"))
    assert (default.min_tokens, default.max_tokens) == (512, 768)


def test_a_bad_file_is_refused_with_the_setting(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"recompute": {"ratio": 2}}')
    with pytest.raises(ValueError, match=r"recompute\.ratio: 2: .*less than or equal to 1"):
        CacheCraftLLM(model="none", engine_config=path)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        CacheCraftLLM(model="none", engine_config=tmp_path / "none.json")  # type: ignore[arg-type]


def test_a_ready_engine_has_its_own_settings(llm: CacheCraftLLM) -> None:
    with pytest.raises(ValueError, match="engine_config: can't be given together with a ready engine"):
        CacheCraftLLM(engine=llm.engine, engine_config=CONFIG)
    assert llm.chunk_limits == llm.engine.config.chunk_limits
