"""All RoPE arithmetic: moving keys that are already rotated to another position.

A key rotated at position a is moved to b by rotating it once more by b - a (RoFormer, arXiv 2104.09864: rotations
add up). Attention scaling (YaRN, longrope) is not applied again: the stored keys carry it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class RotaryLayout:
    """How one layer rotates its keys.

    Attributes:
        inv_freq: The model's own inverse frequencies, ``[rotary_dim / 2]`` float32.
        interleaved: Whether dimension pairs are neighbours (GLM, Cohere) or half a rotary dimension apart (Llama).
    """

    inv_freq: torch.Tensor
    interleaved: bool = False

    @property
    def rotary_dim(self) -> int:
        """Number of leading key dimensions that are rotated; the others are left alone."""
        return 2 * self.inv_freq.numel()


def rerotate_keys(
    keys: torch.Tensor, delta: int | torch.Tensor, layout: RotaryLayout, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Move rotated keys by ``delta`` positions.

    Args:
        keys: ``[..., num_tokens, head_dim]``, any float dtype; not modified.
        delta: New position minus old position, in tokens: the same for all, or ``[num_tokens]`` integers.
        layout: The rotation of the layer the keys belong to.
        out: Where the moved keys are written, same shape and dtype as ``keys``; ``None`` makes a new tensor.

    Returns:
        Keys of the same shape and dtype, ``keys`` themselves where there is nothing to do and no ``out``. Angles and
        rotation are computed in float32.
    """
    if isinstance(delta, int) and delta == 0:
        return keys if out is None else out.copy_(keys, non_blocking=True)
    return _turn_keys(keys, *_turn(delta, layout, keys.device), layout, out)


def _turn(delta: int | torch.Tensor, layout: RotaryLayout, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of a move by ``delta`` positions, float32, ``[rotary_dim / 2]`` or ``[num_tokens, ...]``."""
    inv_freq = layout.inv_freq.to(device=device, dtype=torch.float32)
    angle = delta.to(device)[:, None] * inv_freq if isinstance(delta, torch.Tensor) else delta * inv_freq
    return angle.cos(), angle.sin()


def _turn_keys(
    keys: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: RotaryLayout,
    out: torch.Tensor | None = None,
    room: torch.Tensor | None = None,
) -> torch.Tensor:
    """Move rotated keys in the dtype of cosine and sine; as ``rerotate_keys`` otherwise. ``out`` may be ``keys``.

    ``room`` takes what is computed on the way: from ``_room_for``; ``None`` makes it.
    """
    rotated = torch.empty_like(keys) if out is None else out
    width = layout.rotary_dim
    if layout.interleaved:
        pairs = keys[..., :width].to(cos.dtype).unflatten(-1, (width // 2, 2))
        first, second = pairs.unbind(-1)
        rotated[..., :width] = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
    else:
        half = width // 2
        halves = keys[..., :half], keys[..., half:width]
        widened, moved = (_room_for(keys, layout, cos.dtype) if room is None else room).split(2)
        first, second = halves if keys.dtype == cos.dtype else (widened[n].copy_(one) for n, one in enumerate(halves))
        torch.mul(first, cos, out=moved[0]).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=moved[1]).addcmul_(first, sin)
        rotated[..., :half], rotated[..., half:width] = moved  # only now: keys may be where they are written
    if width < keys.shape[-1] and rotated is not keys:
        rotated[..., width:] = keys[..., width:]
    return rotated


def _room_for(keys: torch.Tensor, layout: RotaryLayout, dtype: torch.dtype) -> torch.Tensor:
    """Both halves of the keys and both of what they become, ``[4, ..., num_tokens, rotary_dim / 2]``."""
    return torch.empty(4, *keys.shape[:-1], layout.rotary_dim // 2, dtype=dtype, device=keys.device)


class Moves:
    """Moves of several tokens; layers that rotate alike share their cosine and sine.

    They also share the memory for what is computed on the way: touching new memory takes as long as the rotation.

    Args:
        delta: New position minus old position of each, ``[num_tokens]`` integers.
        device: Where the keys are.
    """

    def __init__(self, delta: torch.Tensor, device: torch.device) -> None:
        self._delta, self._device = delta, device
        self._turns: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}
        self._rooms: dict[tuple[int, torch.dtype, torch.Size], torch.Tensor] = {}

    def move(
        self,
        keys: torch.Tensor,
        layout: RotaryLayout,
        dtype: torch.dtype = torch.float32,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Move keys of these tokens, ``[..., num_tokens, head_dim]``, in ``dtype``; ``out`` may be ``keys``."""
        if (id(layout), dtype) not in self._turns:
            cos, sin = _turn(self._delta, layout, self._device)
            self._turns[id(layout), dtype] = cos.to(dtype), sin.to(dtype)
        place = id(layout), dtype, keys.shape
        if place not in self._rooms and not layout.interleaved:
            self._rooms[place] = _room_for(keys, layout, dtype)
        return _turn_keys(keys, *self._turns[id(layout), dtype], layout, out, self._rooms.get(place))


@dataclass(frozen=True, eq=False)
class RopeSpec:
    """The rotation of every layer of a model; ``None`` marks a layer without positions in its keys.

    Attributes:
        layers: One entry per layer. Layers that rotate alike share one ``RotaryLayout`` object.
    """

    layers: tuple[RotaryLayout | None, ...]

    def rerotate(self, keys: torch.Tensor, delta: int) -> torch.Tensor:
        """Move the keys of all layers.

        Args:
            keys: ``[num_layers, num_kv_heads, num_tokens, head_dim]``; not modified.
            delta: New position minus old position, in tokens.

        Returns:
            The same shape and dtype; ``keys`` itself when there is nothing to do.
        """
        groups = self._groups()
        if delta == 0 or all(layout is None for layout, _ in groups):
            return keys
        if len(groups) == 1 and groups[0][0] is not None:
            return rerotate_keys(keys, delta, groups[0][0])
        moved = keys.clone()
        for layout, layer_indices in groups:
            if layout is not None:
                index = torch.tensor(layer_indices, device=keys.device)
                moved[index] = rerotate_keys(keys[index], delta, layout)
        return moved

    def _groups(self) -> Sequence[tuple[RotaryLayout | None, list[int]]]:
        groups: list[tuple[RotaryLayout | None, list[int]]] = []
        for layer_idx, layout in enumerate(self.layers):
            for known, members in groups:
                if known is layout:
                    members.append(layer_idx)
                    break
            else:
                groups.append((layout, [layer_idx]))
        return groups
