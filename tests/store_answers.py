"""Requests over chunks with secrets, and what engines answer, for tests of the store on whole engines."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from cachecraft_rag import CacheCraftEngine, RagPrompt
from cachecraft_rag.evaluate import score
from cachecraft_rag.store import TierStats

SECRETS = (4711, 8032, 1956, 6248, 9370, 5183)
ENTRY_BYTES = 80_000  # a little more than the largest entry takes
# Measured with the KV, so that first sight of a chunk gives what later sights give, and computed behind texts that are
# the same for all, so that it does not matter either which chunks an engine has seen before.
ENCODE = {"sensitivity": "inline", "behind": "passages"}
SETTINGS: dict[str, Any] = {"ratio": 0.2, "encode": ENCODE, "max_new_tokens": 4}


class Answer(NamedTuple):
    """What an engine makes of a request.

    Attributes:
        token_ids: The answer.
        logits: ``[num_tokens, vocab_size]``, what its tokens were drawn from.
    """

    token_ids: tuple[int, ...]
    logits: torch.Tensor

    def is_same(self, other: Answer) -> bool:
        """Whether two answers are equal: tokens exactly, logits up to rounding."""
        return self.token_ids == other.token_ids and torch.allclose(self.logits, other.logits, atol=1e-4, rtol=1e-4)


def document(index: int) -> str:
    """A chunk with a secret of its own and otherwise the same words as the others."""
    return f"The files of the vault say: the number is {SECRETS[index]}. It opens the door of the oldest room."


def prompt_of(indices: Sequence[int]) -> RagPrompt:
    return RagPrompt("Be brief.", tuple(document(index) for index in indices), "What is the number?")


def ask(engine: CacheCraftEngine, indices: Sequence[int], namespace: str | None = None) -> Answer:
    """Answer a request, and look its chunks up once more for the logits."""
    prompt = prompt_of(indices)
    token_ids = engine.generate(prompt, namespace=namespace).token_ids
    return Answer(token_ids, score(engine, prompt, token_ids or (0,), namespace=namespace).logits)


def requests(number: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Random requests: one to three different chunks in any order."""
    draw = random.Random(seed)
    return [tuple(draw.sample(range(len(SECRETS)), draw.randint(1, 3))) for _ in range(number)]


def tiers_of(engine: CacheCraftEngine) -> dict[str, TierStats]:
    """Figures of every tier by its name."""
    engine.store.flush()
    stats = engine.store.stats()
    return {tier.name: tier for tier in stats.tiers or (stats,)}


def tiers(cold_entries: int = 1, **others: Any) -> dict[str, Any]:
    """Settings of a store with little memory, so that what lies behind it is used."""
    return {"cold": {"size": cold_entries * ENTRY_BYTES}, "compute_if_faster": False, **others}
