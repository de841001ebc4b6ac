"""How much of a request must be recomputed, so that its answer stays as close to full prefill's as was asked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from cachecraft_rag.calibration import Calibration
from cachecraft_rag.config import EngineConfig, RecomputeConfig
from cachecraft_rag.deviation import DeviationModel
from cachecraft_rag.model_state import ModelState
from cachecraft_rag.selection import POLICIES, ScoringPolicy

# What decides how many tokens, and what no policy with scores looks at; every other setting changes what reuse costs.
_NO_SETTING = {"policy", "ratio", "target_divergence", "preset", "max_ratio", "seed", "alpha", "max_variants"}


@dataclass(frozen=True)
class Goal:
    """What a request goes by.

    Attributes:
        calibration: Predicts the divergence.
        target: Divergence to stay at or below; ``None`` keeps the ratio of the plan, and only predicts.
        max_ratio: Largest share of the candidates to recompute for a target.
    """

    calibration: Calibration
    target: float | None
    max_ratio: float

    def budget(self, left: torch.Tensor) -> int | None:
        """The smallest budget that keeps to the target; ``None`` when it would be above ``max_ratio``.

        Args:
            left: ``residuals`` of the candidates.
        """
        assert self.target is not None
        allowed = self.calibration.residual_for(self.target)
        budget = int((~(left <= allowed)).sum())  # residuals fall: those that are too large, or no number, come first
        return budget if budget <= self.largest_budget(left) else None

    def largest_budget(self, left: torch.Tensor) -> int:
        """Number of candidates that ``max_ratio`` allows to recompute; arguments as for ``budget``."""
        return math.floor(self.max_ratio * (left.numel() - 1) + 1e-6)


def residuals(scores: torch.Tensor) -> torch.Tensor:
    """What the tokens that are not recomputed add up to, for every budget.

    Args:
        scores: ``[num_candidates]``, not negative.

    Returns:
        ``[num_candidates + 1]`` float64 on the CPU, falling; at ``k`` the sum of all scores but the ``k`` highest, and
        0 at the end.
    """
    smallest_first = scores.double().cpu().sort().values
    return torch.cat([torch.zeros(1, dtype=torch.float64), smallest_first.cumsum(0)]).flip(0)


class Quality:
    """Knows the calibration of one engine.

    Args:
        config: Its settings.
        state: Tells what the model is now.

    Raises:
        ValueError: The file can't be read, was measured on another model or with other settings, or there is a
            ``target_divergence`` and no file, or the policy is ``predicted`` and no file has a regressor for it.
    """

    def __init__(self, config: EngineConfig, state: ModelState) -> None:
        self._config, self._state = config, state
        self._calibration: Calibration | None = None
        if config.calibration is not None:
            self._calibration = Calibration.load(config.calibration)
            self._calibration.check(state.fingerprint(), calibrated_settings(config, config.recompute))
        self._deviation = None if self._calibration is None else self._calibration.deviation
        self.goal(config.recompute)
        self.deviation(config.recompute)

    def goal(self, recompute: RecomputeConfig) -> Goal | None:
        """What a request goes by; ``None`` for a fixed ratio whose divergence can't be predicted.

        Raises:
            ValueError: There is a ``target_divergence``, and no calibration for its policy and this model.
        """
        try:
            calibration = self._fitting(recompute)
        except ValueError:
            if recompute.target_divergence is not None:
                raise
            return None  # a preset stands for a fixed ratio then
        return Goal(calibration, recompute.target, recompute.max_ratio)

    def deviation(self, recompute: RecomputeConfig) -> DeviationModel | None:
        """What the policy ``predicted`` predicts from; ``None`` for every other policy.

        Raises:
            ValueError: Nothing is fitted for that policy and this model.
        """
        if recompute.policy != "predicted":
            return None
        if self._deviation is None:
            lack = "there is no such file" if self._calibration is None else "this one is older than that policy"
            raise ValueError(
                "policy: 'predicted' needs EngineConfig(calibration=...), a file in which `cachecraft calibrate` puts "
                f"a regressor of deviations, and {lack}"
            )
        if self._calibration is not None:
            self._calibration.check_model(self._state.fingerprint())
        return self._deviation

    @contextmanager
    def predicting_by(self, deviation: DeviationModel | None) -> Iterator[None]:
        """Use a regressor that is in no file yet, while the block lasts; ``None`` keeps the one of the file."""
        before = self._deviation
        self._deviation = before if deviation is None else deviation
        try:
            yield
        finally:
            self._deviation = before

    def _fitting(self, recompute: RecomputeConfig) -> Calibration:
        asked, policy = f"target_divergence: {recompute.target_divergence} needs", recompute.policy
        if not isinstance(POLICIES[policy], ScoringPolicy):
            allowed = ", ".join(name for name, other in POLICIES.items() if isinstance(other, ScoringPolicy))
            raise ValueError(f"{asked} a policy that scores tokens, and {policy!r} does not; allowed: {allowed}")
        calibration = self._calibration
        if calibration is None:
            raise ValueError(
                f"{asked} EngineConfig(calibration=...), the file that `cachecraft calibrate` measures for a model"
            )
        if calibration.policy != policy:
            raise ValueError(f"{asked} a calibration of the policy {policy!r}; this one is of {calibration.policy!r}")
        calibration.check(self._state.fingerprint(), calibrated_settings(self._config, recompute))
        return calibration


def calibrated_settings(config: EngineConfig, recompute: RecomputeConfig) -> dict[str, str]:
    """The settings that change what reuse costs at a given residual, as text by name."""
    own = {f"recompute.{name}": value for name, value in recompute if name not in _NO_SETTING}
    encode: dict[str, str] = {"encode.behind": config.encode.behind}
    if config.encode.behind not in ("none", "chat_head"):
        encode["encode.instruction"] = config.encode.instruction
    return {name: repr(value) for name, value in {**own, **encode}.items()}
