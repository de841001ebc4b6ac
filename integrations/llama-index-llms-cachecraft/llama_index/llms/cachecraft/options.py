"""Options of one call: what LlamaIndex and users pass as keyword arguments to the methods of an LLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cachecraft_rag import RecomputeConfig

SAMPLING = ("max_new_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "seed", "stop")
_REUSE = ("reuse", "policy", "recompute_ratio")
_ALIASES = {"max_tokens": "max_new_tokens"}
# LlamaIndex itself sends these to whatever LLM it has (DocumentContextExtractor); they only mean something over HTTP.
_WITHOUT_MEANING = ("extra_headers",)


@dataclass(frozen=True)
class CallOptions:
    """How one prompt is answered.

    Attributes:
        sampling: Fields of ``SamplingConfig``.
        reuse: Whether chunks are reused.
        recompute: Changes to the engine's ``RecomputeConfig``.
    """

    sampling: dict[str, Any]
    reuse: bool
    recompute: dict[str, Any]

    def recompute_config(self, default: RecomputeConfig) -> RecomputeConfig | None:
        """The engine's settings with this call's changes; ``None`` when there are none.

        Raises:
            ValueError: The policy is not known, or the ratio is out of range.
        """
        return RecomputeConfig(**{**default.model_dump(), **self.recompute}) if self.recompute else None


def call_options(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> CallOptions:
    """Options of one call; those given as ``None`` keep their default.

    Args:
        defaults: Values of the LLM's fields, by name.
        given: Keyword arguments of the call.

    Raises:
        ValueError: An option is not known, or given under two names.
    """
    unknown = sorted(set(given) - {*SAMPLING, *_REUSE, *_ALIASES, *_WITHOUT_MEANING})
    if unknown:
        allowed = ", ".join([*SAMPLING, *_ALIASES, *_REUSE])
        raise ValueError(f"{', '.join(unknown)}: not an option of a call; allowed are {allowed}")
    options = {name: defaults[name] for name in (*SAMPLING, *_REUSE)}
    for name, value in given.items():
        target = _ALIASES.get(name, name)
        if target != name and given.get(target) is not None and value is not None:
            raise ValueError(f"{name}: {value!r} and {target}={given[target]!r} mean the same; give one of them")
        if value is not None and target in options:
            options[target] = value
    recompute = {"policy": options["policy"], "ratio": options["recompute_ratio"]}
    return CallOptions(
        sampling={name: options[name] for name in SAMPLING},
        reuse=options["reuse"],
        recompute={name: value for name, value in recompute.items() if value is not None},
    )
