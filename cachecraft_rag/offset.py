"""Moves the KV that is not recomputed by what is learnt from the KV that is.

In every layer both the old and the new KV of the recomputed tokens are at hand. How they changed tells how the others
should: tokens of one chunk miss the same context, and tokens that are alike react to it alike. So the change of the
others is predicted by Gaussian process regression (Rasmussen and Williams, 2006, eq. 2.25): the covariance of two
tokens' changes is the product of their sensitivities and of a kernel that adds up what all tokens have in common, what
those of one chunk have, and how alike their stored values are. How far to trust it is decided in every layer, for
keys and for values, by leaving each recomputed token out in turn (section 5.4.2): where the others don't foretell it,
nothing is moved.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from cachecraft_rag.rope import Moves, RotaryLayout, rerotate_keys

MAX_FIT = 128
"""Recomputed tokens that are learnt from: twice as many take twice the time and bring 1 to 3 % less divergence."""

# Covariance of two tokens' changes, as multiples of what all tokens have in common.
_SAME_CHUNK = 4.0
_ALIKE = 16.0
_NOISES = (8.0, 32.0, 128.0, 512.0)


class Offset:
    """The correction of one request.

    Args:
        positions: Positions of all tokens of reused chunks, ``[num_tokens]`` int64, increasing.
        chunk_index: Number of the chunk of each, ``[num_tokens]``.
        sensitivity: How much each token's values depend on context, ``[num_layers, num_tokens]`` float32.
        selected: Positions of those that are recomputed, ``[num_selected]``.
        rows: Positions of all rows of the forward pass, increasing.
        layouts: The rotation of every layer.
        strength: Share of the predicted change that is applied.
        device: Where the prompt's KV is.
    """

    def __init__(
        self,
        positions: torch.Tensor,
        chunk_index: torch.Tensor,
        sensitivity: torch.Tensor,
        selected: torch.Tensor,
        rows: torch.Tensor,
        layouts: Sequence[RotaryLayout | None],
        strength: float,
        device: torch.device,
    ) -> None:
        step = -(-selected.numel() // MAX_FIT)
        learnt = selected[::step].contiguous()
        self._positions = positions.to(device)
        self._learnt = torch.searchsorted(positions, learnt).to(device)
        self._rows = torch.searchsorted(rows, learnt).to(device)
        self._weights = sensitivity.sqrt().to(device)
        chunks = chunk_index.to(device)
        self._common = 1.0 + _SAME_CHUNK * (chunks[:, None] == chunks[self._learnt][None, :]).float()
        self._layouts, self._strength = layouts, strength
        self._moves = Moves(positions, device)

    def correct(
        self,
        layer_idx: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        new_keys: torch.Tensor,
        new_values: torch.Tensor,
    ) -> None:
        """Move the stored KV of a layer, in place, before the new rows are written over it.

        Args:
            layer_idx: The layer.
            keys: The prompt's keys, ``[num_kv_heads, capacity, head_dim]``, rotated.
            values: The prompt's values.
            new_keys: Keys of the rows that were computed, ``[num_kv_heads, num_rows, head_dim]``, rotated.
            new_values: Their values.
        """
        weights = self._weights[layer_idx]
        scale = weights[self._learnt].square().mean().sqrt()
        if not scale > 0.0:
            return  # values of the first layer depend on no context
        weights = weights / scale  # only their ratios count, and float16 holds neither tiny nor huge numbers
        places = self._positions[self._learnt]
        changed_keys = new_keys[:, self._rows].float() - keys[:, places].float()
        changed_values = new_values[:, self._rows].float() - values[:, places].float()
        layout = self._layouts[layer_idx]
        if layout is not None:  # what tokens have in common shows before the rotation by their positions
            changed_keys = rerotate_keys(changed_keys, -places, layout)

        kernel = self._kernel(values, weights)
        inverses = _inverses(kernel[self._learnt].float())
        changes = [_by_token(changed_keys), _by_token(changed_values)]
        coefficients = torch.cat([_trusted(inverses, part) for part in changes], dim=1)
        if not coefficients.any():
            return
        predicted = kernel @ (self._strength * coefficients).to(kernel.dtype)
        key_part, value_part = predicted.split(
            [keys.shape[0] * keys.shape[2], values.shape[0] * values.shape[2]], dim=1
        )
        moved_keys = key_part.unflatten(1, (keys.shape[0], keys.shape[2])).transpose(0, 1)
        if layout is not None:
            moved_keys = self._moves.move(moved_keys, layout, keys.dtype)
        moved_values = value_part.unflatten(1, (values.shape[0], values.shape[2])).transpose(0, 1)
        keys.index_add_(1, self._positions, moved_keys)
        values.index_add_(1, self._positions, moved_values)

    def _kernel(self, values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Covariance of all tokens with those that are learnt from, ``[num_tokens, num_learnt]``, dtype of the KV.

        What is moved is rounded to that dtype anyway; all passes over all tokens are in it.
        """
        features = _by_token(values[:, self._positions])
        features = features - features.mean(dim=0)
        features = functional.normalize(features / (features.square().mean(dim=0).sqrt() + 1e-6), dim=1)
        alike = (features @ features[self._learnt].T).clamp_(min=0.0).square_()
        self._common, weights = self._common.to(alike.dtype), weights.to(alike.dtype)
        return alike.mul_(_ALIKE).add_(self._common).mul_(weights[:, None]).mul_(weights[self._learnt][None, :])


def _by_token(heads: torch.Tensor) -> torch.Tensor:
    """``[num_kv_heads, n, dim]`` as ``[n, num_kv_heads * dim]``."""
    return heads.transpose(0, 1).flatten(1)


def _inverses(covariance: torch.Tensor) -> torch.Tensor:
    """Inverse of a covariance ``[n, n]`` with each amount of noise added, ``[num_noises, n, n]``."""
    noises = torch.tensor(_NOISES, device=covariance.device)[:, None, None]
    factors, _ = torch.linalg.cholesky_ex(covariance + noises * torch.eye(len(covariance)).to(noises))
    return torch.cholesky_inverse(factors)  # no numbers where the KV holds none: then nothing is trusted


def _trusted(inverses: torch.Tensor, changes: torch.Tensor) -> torch.Tensor:
    """Coefficients of the regression with the noise that foretells left-out changes best.

    Args:
        inverses: From ``_inverses``.
        changes: ``[n, dim]``.

    Returns:
        ``[n, dim]``; zeros where leaving everything as it is would foretell them better.
    """
    coefficients = inverses @ changes
    left_out = coefficients / inverses.diagonal(dim1=1, dim2=2)[..., None]  # what is known without a token, less it
    errors = left_out.square().sum(dim=(1, 2))
    best = int(errors.argmin())
    return coefficients[best] if errors[best] < changes.square().sum() else torch.zeros_like(changes)
