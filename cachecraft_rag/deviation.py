"""Predicts how far the stored values of a token are from those of a full prefill, from what is known without a pass.

A ridge regression per layer, on logarithms: what depends on context in one place does so, by a factor, in others.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator

FEATURES = ("sensitivity", "place", "length", "key_norm", "chunks_before", "is_repeated")
"""What a prediction is made of, in the order of the coefficients: the first five as logarithms."""

LEAST_DEVIATION = 1e-3
"""Smaller ones count as this: the first layer's are 0, and logarithms of rounding errors would spoil the fit."""

_RIDGE = 1e-4  # of the variance of a logarithm: decides only where all chunks are alike, in length for example

Coefficient = Annotated[float, Field(allow_inf_nan=False)]


class DeviationModel(BaseModel):
    """The coefficients of one model.

    Attributes:
        coefficients: For every layer the constant, then one per entry of ``FEATURES``.
        explained: Share of the variance of the logarithms that they explain, mean over layers that have any.
        num_tokens: Tokens it was fitted on.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    coefficients: tuple[tuple[Coefficient, ...], ...] = Field(min_length=1)
    explained: float = Field(allow_inf_nan=False)
    num_tokens: int = Field(ge=1)

    @field_validator("coefficients")
    @classmethod
    def _check_number(cls, rows: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        for layer_idx, row in enumerate(rows):
            if len(row) != 1 + len(FEATURES):
                raise ValueError(f"layer {layer_idx} has {len(row)}, not {1 + len(FEATURES)}")
        return rows

    def predict(self, features: torch.Tensor) -> torch.Tensor:
        """Relative change of the values to expect, as ``relative_deviation`` measures it.

        Args:
            features: ``[num_layers, num_tokens, len(FEATURES)]`` float32.

        Returns:
            ``[num_layers, num_tokens]`` float32 on the CPU, above 0.

        Raises:
            ValueError: The features are of a model with another number of layers.
        """
        weights = torch.tensor(self.coefficients, dtype=torch.float32)
        if features.shape[0] != weights.shape[0]:
            raise ValueError(f"features: they have {features.shape[0]} layers, and this was fitted on {len(weights)}")
        return (torch.einsum("lnf,lf->ln", features.cpu(), weights[:, 1:]) + weights[:, :1]).exp()


class DeviationFit:
    """Fits a ``DeviationModel`` to tokens that come prompt by prompt; only sums are kept.

    Args:
        num_layers: Number of layers of the model.
    """

    def __init__(self, num_layers: int) -> None:
        size = 2 + len(FEATURES)  # constant, features, logarithm of the deviation
        self._products = torch.zeros(num_layers, size, size, dtype=torch.float64)

    def add(self, features: torch.Tensor, deviations: torch.Tensor) -> None:
        """Add the tokens of a prompt.

        Args:
            features: ``[num_layers, num_tokens, len(FEATURES)]``.
            deviations: ``[num_layers, num_tokens]``, from ``relative_deviation``.
        """
        target = deviations.double().cpu().clamp(min=LEAST_DEVIATION).log()[..., None]
        columns = torch.cat([torch.ones_like(target), features.double().cpu(), target], dim=2)
        self._products += columns.transpose(1, 2) @ columns

    def model(self) -> DeviationModel:
        """The best coefficients.

        Raises:
            ValueError: No tokens were added.
        """
        num_tokens = int(self._products[0, 0, 0])
        if num_tokens == 0:
            raise ValueError("prompts: none of them has a chunk that is not exact, so there is nothing to predict from")
        means = self._products[:, 0, 1:] / num_tokens
        covariance = self._products[:, 1:, 1:] / num_tokens - means[:, :, None] * means[:, None, :]
        inner, cross, variance = covariance[:, :-1, :-1], covariance[:, :-1, -1], covariance[:, -1, -1]
        ridge = _RIDGE * torch.eye(len(FEATURES), dtype=torch.float64)
        slopes = torch.linalg.solve(inner + ridge, cross)
        constant = means[:, -1] - (slopes * means[:, :-1]).sum(dim=1)
        left = variance - 2 * (slopes * cross).sum(dim=1) + torch.einsum("lf,lfg,lg->l", slopes, inner, slopes)
        varies = variance > 1e-9
        explained = (1.0 - left[varies] / variance[varies]).mean() if bool(varies.any()) else torch.zeros(())
        coefficients = torch.cat([constant[:, None], slopes], dim=1).tolist()
        return DeviationModel(
            coefficients=tuple(map(tuple, coefficients)), explained=float(explained), num_tokens=num_tokens
        )


def token_features(
    token_ids: torch.Tensor,
    chunk_index: torch.Tensor,
    offset_in_chunk: torch.Tensor,
    chunk_tokens: torch.Tensor,
    sensitivity: torch.Tensor,
    key_norm: torch.Tensor,
) -> torch.Tensor:
    """What the deviation of the tokens of a prompt's chunks is predicted from.

    Args:
        token_ids: ``[num_tokens]`` int64.
        chunk_index: Number of the chunk of every token in the prompt, ``[num_tokens]`` int64.
        offset_in_chunk: Its place in it, ``[num_tokens]`` int64.
        chunk_tokens: Length of its chunk, ``[num_tokens]`` int64.
        sensitivity: Stored sensitivity, ``[num_layers, num_tokens]``.
        key_norm: Euclidean norm of the stored key, all heads together, ``[num_layers, num_tokens]``.

    Returns:
        ``[num_layers, num_tokens, len(FEATURES)]`` float32 on the CPU.
    """
    per_token = torch.stack(
        [
            (offset_in_chunk + 1.0).log(),
            chunk_tokens.float().log(),
            (chunk_index + 1.0).log(),
            is_repeated(token_ids, chunk_index).float(),
        ]
    )
    place, length, before, repeated = per_token[:, None].expand(-1, sensitivity.shape[0], -1)
    sensitive = sensitivity.float().cpu().clamp(min=LEAST_DEVIATION**2).log()
    norm = key_norm.float().cpu().clamp(min=1e-6).log()
    return torch.stack([sensitive, place, length, norm, before, repeated], dim=2)


def is_repeated(token_ids: torch.Tensor, chunk_index: torch.Tensor) -> torch.Tensor:
    """Whether the same token stands earlier in the same chunk, ``[num_tokens]`` bool; arguments as above."""
    _, kind = torch.stack([chunk_index, token_ids]).unique(dim=1, return_inverse=True)
    order = kind.sort(stable=True)
    repeated = torch.zeros_like(kind, dtype=torch.bool)
    repeated[order.indices[1:]] = order.values[1:] == order.values[:-1]
    return repeated


def relative_deviation(stored: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """How far stored values are from those of a full prefill, over the root of the layer's mean squared value.

    Args:
        stored: ``[num_layers, num_kv_heads, num_tokens, head_dim]``.
        full: The same tokens behind what really precedes them.

    Returns:
        ``[num_layers, num_tokens]`` float32: the root of what ``ChunkKV.sensitivity`` is behind another passage.
    """
    change = (stored.float() - full.float()).square().sum(dim=(1, 3))
    scale = full.float().square().sum(dim=(1, 3)).mean(dim=1, keepdim=True)
    return (change / scale.clamp(min=1e-12)).sqrt()
