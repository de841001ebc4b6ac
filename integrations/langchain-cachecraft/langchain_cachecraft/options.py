"""What may differ from call to call: the fields of a chat model, with the options of one call in their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from cachecraft_rag import RecomputeConfig
from cachecraft_rag.config import PolicyName

# What LangChain itself puts among the options of a call; it has done its work before the model is asked.
_OF_LANGCHAIN = {"stream", "ls_structured_output_format", "structured_output_format"}


@dataclass(frozen=True)
class CallOptions:
    """Options of one call; see the fields of ``ChatCacheCraft``. The engine checks the values."""

    model: str
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    seed: int | None
    timeout: float | None
    reuse: bool
    policy: PolicyName | None
    recompute_ratio: float | None

    @classmethod
    def of(cls, chat: object, given: Mapping[str, Any]) -> CallOptions:
        """Options of a chat model, replaced by those given with a call unless they are ``None``.

        Raises:
            ValueError: An option has no such name.
        """
        own = {field.name: getattr(chat, field.name) for field in fields(cls)}
        if unknown := [name for name in given if name not in own and name not in _OF_LANGCHAIN]:
            raise ValueError(f"{unknown[0]}: no option of a call; allowed: {', '.join(['stop', *own])}")
        return cls(**{**own, **{name: given[name] for name in own if given.get(name) is not None}})

    def recompute(self, default: RecomputeConfig) -> RecomputeConfig:
        """Policy and ratio of this call; those not given are the engine's."""
        given = {"policy": self.policy, "ratio": self.recompute_ratio}
        return RecomputeConfig(
            **default.model_dump() | {name: value for name, value in given.items() if value is not None}
        )

    def sampling(self) -> dict[str, Any]:
        """The options that the engine's ``stream`` takes under its own names."""
        return {
            "max_new_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "repetition_penalty": self.repetition_penalty,
            "seed": self.seed,
        }
