"""Options of one call: what LlamaIndex and users pass as keyword arguments to the methods of an LLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cachecraft_rag import RecomputeConfig

SAMPLING = ("max_new_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "seed", "stop")
# What decides how much is recomputed, by its name in RecomputeConfig: at most one of them.
_GOALS = {"recompute_ratio": "ratio", "target_divergence": "target_divergence", "preset": "preset"}
_REUSE = ("reuse", "policy", *_GOALS)
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
            ValueError: The policy or the preset is not known, or a number is out of range.
        """
        return default.changed(**self.recompute) if self.recompute else None


def call_options(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> CallOptions:
    """Options of one call; those given as ``None`` keep their default.

    A ratio, target or preset that is given takes the place of whichever of the three is the default.

    Args:
        defaults: Values of the LLM's fields, by name.
        given: Keyword arguments of the call.

    Raises:
        ValueError: An option is not known, or given under two names, or two decide how much is recomputed.
    """
    unknown = sorted(set(given) - {*SAMPLING, *_REUSE, *_ALIASES, *_WITHOUT_MEANING})
    if unknown:
        allowed = ", ".join([*SAMPLING, *_ALIASES, *_REUSE])
        raise ValueError(f"{', '.join(unknown)}: not an option of a call; allowed are {allowed}")
    options = {name: defaults[name] for name in (*SAMPLING, *_REUSE)}
    if any(given.get(name) is not None for name in _GOALS):
        options |= dict.fromkeys(_GOALS)
    for name, value in given.items():
        target = _ALIASES.get(name, name)
        if target != name and given.get(target) is not None and value is not None:
            raise ValueError(f"{name}: {value!r} and {target}={given[target]!r} mean the same; give one of them")
        if value is not None and target in options:
            options[target] = value
    check_one_goal(options)
    recompute = {"policy": options["policy"], **{field: options[name] for name, field in _GOALS.items()}}
    return CallOptions(
        sampling={name: options[name] for name in SAMPLING},
        reuse=options["reuse"],
        recompute={name: value for name, value in recompute.items() if value is not None},
    )


def check_one_goal(options: Mapping[str, Any]) -> None:
    """Refuse two settings that each decide how much is recomputed.

    Raises:
        ValueError: Two of ratio, target and preset are given.
    """
    goals = [name for name in _GOALS if options[name] is not None]
    if len(goals) > 1:
        first, second = goals[:2]
        raise ValueError(f"{first}: {options[first]!r} beside {second}={options[second]!r}; give one of them")
