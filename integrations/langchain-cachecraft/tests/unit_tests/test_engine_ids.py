"""Ids of ready engines."""

from __future__ import annotations

import gc

import pytest

from cachecraft_rag import CacheCraftEngine
from langchain_cachecraft.engine_ids import EngineIds
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level


def test_an_id_leads_back_to_its_engine(engine: CacheCraftEngine) -> None:
    ids = EngineIds()
    engine_id = ids.id_of(engine)
    assert ids.id_of(engine) == engine_id
    assert ids.engine_of(engine_id) is engine
    with pytest.raises(ValueError, match="engine: a chat model made with a ready engine can only be unpickled"):
        ids.engine_of("of another process")


def test_an_id_does_not_keep_its_engine() -> None:
    ids = EngineIds()
    engine_id = ids.id_of(CacheCraftEngine(make("llama"), byte_level()))
    gc.collect()
    with pytest.raises(ValueError, match="in the process that holds the engine"):
        ids.engine_of(engine_id)
