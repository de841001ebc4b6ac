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
import torch.nn.functional as F

from cachecraft_rag.rope import Moves, RotaryLayout

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
        first, end = int(positions[0]), int(positions[-1]) + 1
        # Slices are quicker than indices, so what lies between chunks takes part: with weight 0 it is not moved.
        self._span, inside = slice(first, end), positions - first
        weights = torch.zeros(sensitivity.shape[0], end - first)
        weights[:, inside] = sensitivity.sqrt()
        chunks = torch.full((end - first,), -1)
        chunks[inside] = chunk_index
        chunks = chunks.to(device)
        self._between = (chunks < 0).nonzero()[:, 0]
        # Seen as alike are the tokens of chunks; what lies between counts as some of these, evenly spread.
        self._stand_ins = inside[torch.linspace(0, inside.numel() - 1, self._between.numel()).long()].to(device)
        self._weights, self._places = weights.to(device), learnt.to(device)
        self._learnt = (learnt - first).to(device)
        self._rows = torch.searchsorted(rows, learnt).to(device)
        self._common = (1.0 + _SAME_CHUNK * (chunks[:, None] == chunks[self._learnt][None, :]).float()) / _ALIKE
        self._layouts, self._strength = layouts, strength
        self._to_span, self._from_learnt = Moves(torch.arange(first, end), device), Moves(-learnt, device)

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
        changed_keys = new_keys[:, self._rows].float() - keys[:, self._places].float()
        changed_values = new_values[:, self._rows].float() - values[:, self._places].float()
        layout = self._layouts[layer_idx]
        if layout is not None:  # what tokens have in common shows before the rotation by their positions
            changed_keys = self._from_learnt.move(changed_keys, layout)

        alike = self._alike(values[:, self._span])
        learnt_weights = weights[self._learnt] * _ALIKE**0.5
        inverses = _inverses(alike[self._learnt].float() * learnt_weights * learnt_weights[:, None])
        weights = weights.to(keys.dtype)[:, None]
        for buffer, changes, turned in ((keys, changed_keys, layout), (values, changed_values, None)):
            coefficients = _trusted(inverses, _by_token(changes))
            if coefficients is None:
                continue
            coefficients *= (self._strength * _ALIKE**0.5 * learnt_weights)[:, None]
            moved = (alike @ coefficients.to(alike.dtype)).unflatten(1, (buffer.shape[0], -1)).transpose(0, 1)
            if turned is not None:
                moved = self._to_span.move(moved, turned, keys.dtype)
            buffer[:, self._span].addcmul_(moved, weights)

    def _alike(self, values: torch.Tensor) -> torch.Tensor:
        """What a token has in common with those that are learnt from, ``[span, num_learnt]``, dtype of the KV.

        Times ``_ALIKE`` and the weights of both it is the covariance of their changes. What is moved is rounded to that
        dtype anyway; all passes over all tokens are in it.
        """
        features = torch.cat(values.unbind(), dim=1)  # a copy, of a single head too: what follows is in place
        features[self._between] = features[self._stand_ins]
        features = F.batch_norm(features, None, None, training=True, eps=1e-9)  # mean 0 and variance 1, of every column
        features /= torch.linalg.vector_norm(features, dim=1, keepdim=True).clamp_(min=1e-3)
        self._common = self._common.to(features.dtype)
        return (features @ features[self._learnt].T).clamp_(min=0.0).square_().add_(self._common)


def _by_token(heads: torch.Tensor) -> torch.Tensor:
    """``[num_kv_heads, n, dim]`` as ``[n, num_kv_heads * dim]``."""
    return heads.transpose(0, 1).flatten(1)


def _inverses(covariance: torch.Tensor) -> torch.Tensor:
    """Inverse of a covariance ``[n, n]`` with each amount of noise added, ``[num_noises, n, n]``."""
    noises = torch.tensor(_NOISES, device=covariance.device)[:, None, None]
    inverses: torch.Tensor = torch.linalg.inv_ex(covariance + noises * torch.eye(len(covariance)).to(noises))[0]
    return inverses  # no numbers where the KV holds none: then nothing is trusted


def _trusted(inverses: torch.Tensor, changes: torch.Tensor) -> torch.Tensor | None:
    """Coefficients of the regression with the noise that foretells left-out changes best.

    Args:
        inverses: From ``_inverses``.
        changes: ``[n, dim]``.

    Returns:
        ``[n, dim]``; ``None`` where leaving everything as it is would foretell them as well.
    """
    coefficients = inverses @ changes
    left_out = coefficients / inverses.diagonal(dim1=1, dim2=2)[..., None]  # what is known without a token, less it
    errors = left_out.square().sum(dim=(1, 2))
    best = int(errors.argmin())
    return coefficients[best] if errors[best] < changes.square().sum() else None
