"""Which prompts fit into the context window: found out before anything is computed for the others."""

from __future__ import annotations

from cachecraft_rag.config import RecomputeConfig, SamplingConfig
from cachecraft_rag.engine import CacheCraftEngine
from cachecraft_rag.errors import PromptTooLongError
from cachecraft_rag.prompt import RagPrompt

_PLAIN = RecomputeConfig(policy="none", ratio=0.0)  # needs no calibration


def fits(engine: CacheCraftEngine, prompt: RagPrompt, namespace: str | None = None) -> bool:
    """Whether a prompt leaves room for at least one token of an answer; its chunks are known to the engine afterwards.

    Args:
        engine: The engine.
        prompt: The prompt.
        namespace: Where its chunks are registered; ``None`` takes the engine's.
    """
    try:
        engine.intake.take(prompt, SamplingConfig(max_new_tokens=1), _PLAIN, namespace)
    except PromptTooLongError:
        return False
    return True
