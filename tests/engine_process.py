"""A process of its own with engines on a shared disk and server: ``python -m tests.engine_process FOLDER URL NUMBERS``.

Asks for the passages of the numbers (``1,2``) in one prompt, once through either tier, and prints what it found.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from cachecraft_rag import CacheCraftEngine, EngineConfig
from tests.conftest import rag_prompt
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level

TIERS = ("disk", "remote")
# The same KV in every process, whatever it has seen before.
SETTINGS: dict[str, Any] = {"encode": {"sensitivity": "inline", "behind": "passages"}, "max_new_tokens": 4}


def answer(folder: str, url: str, numbers: list[int]) -> dict[str, Any]:
    """Hits per tier, and the answers."""
    places: dict[str, dict[str, str]] = {"disk": {"path": folder}, "remote": {"url": url}}
    found: dict[str, Any] = {}
    for tier in TIERS:
        store = {"cold": {"size": 0}, tier: places[tier], "compute_if_faster": False}
        config = EngineConfig.model_validate({"store": store, **SETTINGS})
        with CacheCraftEngine(make("llama"), byte_level(), config) as engine:
            result = engine.generate(rag_prompt(*numbers))
        found[tier] = {"hits": result.stats.hits_by_tier.get(tier, 0), "token_ids": result.token_ids}
    return found


if __name__ == "__main__":
    _, place, address, wanted = sys.argv
    sys.stdout.write(json.dumps(answer(place, address, [int(number) for number in wanted.split(",")])) + "\n")
