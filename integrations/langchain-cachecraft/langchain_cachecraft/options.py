"""What may differ from call to call: the fields of a model, with the options of one call in their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from cachecraft_rag import RecomputeConfig
from cachecraft_rag.config import PolicyName, Preset

GOALS = ("recompute_ratio", "target_divergence", "preset")
"""Options that each decide how much is recomputed, so that only one of them can."""

# What LangChain itself puts among the options of a call; it has done its work before the model is asked.
_OF_LANGCHAIN = {"stream", "ls_structured_output_format", "structured_output_format"}


@dataclass(frozen=True)
class CallOptions:
    """Options of one call; see the fields of ``ServedModel``."""

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
    target_divergence: float | None
    preset: Preset | None

    @classmethod
    def of(cls, model: BaseModel, given: Mapping[str, Any], others: tuple[str, ...] = ()) -> CallOptions:
        """Options of a model, replaced by those given with a call unless they are ``None``.

        Of the options that decide how much is recomputed, one given with the call takes the place of the model's.

        Args:
            model: Has a field for each.
            given: Options of the call.
            others: Options of the call that are read elsewhere.

        Raises:
            ValueError: An option has no such name or a value that its field does not take, or two are given that
                decide the same.
        """
        own = {field.name: getattr(model, field.name) for field in fields(cls)}
        if unknown := [name for name in given if name not in own and name not in _OF_LANGCHAIN and name not in others]:
            raise ValueError(f"{unknown[0]}: no option of a call; allowed: {', '.join(['stop', *own, *others])}")
        changes = {name: _checked(type(model), name, given[name]) for name in own if given.get(name) is not None}
        check_goals(changes)
        if any(name in changes for name in GOALS):
            own |= dict.fromkeys(GOALS)
        return cls(**{**own, **changes})

    def recompute(self, default: RecomputeConfig) -> RecomputeConfig:
        """How much is recomputed in this call; what is not given is the engine's.

        Raises:
            ValueError: A value is not allowed.
        """
        given = {
            "policy": self.policy,
            "ratio": self.recompute_ratio,
            "target_divergence": self.target_divergence,
            "preset": self.preset,
        }
        return default.changed(**{name: value for name, value in given.items() if value is not None})

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

    def as_dict(self) -> dict[str, Any]:
        """The options by name."""
        return asdict(self)


def _checked(kind: type[BaseModel], name: str, value: object) -> Any:
    """The value of an option as its field takes it; the engine would refuse it under a name that the user never gave.

    Raises:
        ValueError: The field does not take it.
    """
    try:
        return _adapter(kind, name).validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{name}: {value!r} is not allowed; {error.errors()[0]['msg']}") from error


@cache
def _adapter(kind: type[BaseModel], name: str) -> TypeAdapter[Any]:
    field = kind.model_fields[name]
    annotated: Any = Annotated  # put together while the program runs, which no type checker follows
    return TypeAdapter(annotated[field.annotation, field])


def check_goals(values: Mapping[str, Any]) -> None:
    """Refuse options that decide the same.

    Raises:
        ValueError: More than one of ``GOALS`` has a value.
    """
    given = [name for name in GOALS if values.get(name) is not None]
    if len(given) > 1:
        raise ValueError(
            f"{given[1]}: {values[given[1]]!r} beside {given[0]} {values[given[0]]!r}; each of {', '.join(GOALS)} "
            "decides how much is recomputed, so give one of them"
        )
