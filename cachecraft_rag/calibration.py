"""How far a model's answers drift from full prefill's, predicted from what was left uncorrected."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cachecraft_rag.deviation import DeviationModel

FORMAT_VERSION = 1
"""Raised whenever the meaning of a residual or of the curve changes, so that old files are refused."""


class Calibration(BaseModel):
    """The curve of one model, one policy and the settings that were in force when it was measured.

    The prediction is ``margin * scale * residual ** exponent``. A residual is what a policy's scores add up to over the
    tokens that are not recomputed. The curve is fitted to the *mean* divergence and not to its logarithm: divergences
    scatter over orders of magnitude from question to question, and a line through logarithms finds their geometric
    mean, far below the mean that a target is about. ``margin`` then covers what samples of questions leave uncertain,
    and where the curve is too low: it is the largest upper prediction bound, over the ratios that were measured, of
    measured over predicted divergence, whole questions drawn again, so that the mean over as many other questions of
    the kind stays below the target too. A single answer may still be above it.

    Attributes:
        version: ``FORMAT_VERSION``.
        fingerprint: ``CacheCraftEngine.fingerprint`` of the model.
        policy: The selection policy whose scores make the residual.
        settings: Other settings of the engine that change what reuse costs, as text by name.
        scale: Divergence in nats at residual 1, before the margin.
        exponent: Slope of the curve in logarithms; above 0, so that a prediction never falls with the residual.
        margin: Factor on top, at least 1.
        quantile: Confidence of the bound that ``margin`` is.
        num_questions: Questions it was measured on.
        deviation: What the policy ``predicted`` predicts from, whatever the policy of the curve; ``None`` in files made
            before there was one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = FORMAT_VERSION
    fingerprint: str = Field(min_length=1)
    policy: str = Field(min_length=1)
    settings: dict[str, str] = Field(default_factory=dict)
    scale: float = Field(ge=1e-12, le=1e12)
    exponent: float = Field(ge=0.1, le=10.0)  # far beyond what is measured, and no power overflows
    margin: float = Field(default=1.0, ge=1.0, allow_inf_nan=False)
    quantile: float = Field(default=0.9, gt=0.0, lt=1.0)
    num_questions: int = Field(ge=1)
    deviation: DeviationModel | None = None

    def predict(self, residual: float) -> float:
        """Divergence in nats per token that a residual leads us to expect, margin included; 0 at residual 0."""
        return float(self.margin * self.scale * residual**self.exponent)

    def residual_for(self, target: float) -> float:
        """The largest residual whose predicted divergence is at most ``target``, but for a trace against rounding."""
        return float((target / (self.margin * self.scale)) ** (1.0 / self.exponent)) * (1.0 - 1e-9)

    def check(self, fingerprint: str, settings: Mapping[str, str]) -> None:
        """Make sure that it was measured on this model under these settings.

        Raises:
            ValueError: It was not; the message names both sides.
        """
        self.check_model(fingerprint)
        for name in sorted({*self.settings, *settings}):
            theirs, ours = self.settings.get(name), settings.get(name)
            if theirs != ours:
                raise ValueError(
                    f"calibration: it was measured with {name} {theirs}, but this engine has {ours}; "
                    "use the same setting, or measure again with `cachecraft calibrate`"
                )

    def check_model(self, fingerprint: str) -> None:
        """Make sure that it was measured on this model.

        Raises:
            ValueError: It was not; the message names both.
        """
        if self.fingerprint != fingerprint:
            raise ValueError(
                f"calibration: it was measured on the model {self.fingerprint}, but this one is {fingerprint}; "
                "measure again with `cachecraft calibrate`"
            )

    def save(self, path: Path | str) -> None:
        """Write it as JSON; folders are made."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str) -> Calibration:
        """Read a file that ``save`` wrote.

        Raises:
            ValueError: There is no such file, it is no calibration, or one of another version.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"calibration: {str(path)!r} can't be read ({error}); `cachecraft calibrate` makes such a file"
            ) from error
        try:
            calibration = cls.model_validate_json(text)
        except ValidationError as error:
            first: Any = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ValueError(
                f"calibration: {str(path)!r} is no calibration file ({where + ': ' if where else ''}{first['msg']}); "
                "`cachecraft calibrate` makes one"
            ) from error
        if calibration.version != FORMAT_VERSION:
            raise ValueError(
                f"calibration: {str(path)!r} has version {calibration.version}, this release reads {FORMAT_VERSION}; "
                "measure again with `cachecraft calibrate`"
            )
        return calibration
