"""Chunk KV in fewer bits: how an entry is packed for a smaller tier and unpacked before it is used.

    model   as computed
    k16v8   keys as computed; values int8, a scale per token and head
    int8    keys int8, a scale per channel over 64 tokens; values int8, a scale per token and head
    int4    keys per channel over 64 tokens, values per token over 64 channels, asymmetric (KIVI, arXiv 2402.02750)

Keys carry a few channels that are far larger than the rest, the same at every token; a scale per channel keeps them
from costing the other channels their bits. Keys are packed in the rotation they were computed in, so unpack first and
rotate to the new position afterwards: rotating mixes pairs of channels. The scales of int8 are float32 (4 bytes for
64 keys or ``head_dim`` values); those of int4 are described in ``_to_4_bits``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch.nn import functional

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.store_config import Precision
from cachecraft_rag.variants import VariantInfo

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
_Kind = Literal["full", "int8", "int4"]

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
"""From the most to the fewest bits."""
GROUP = 64
"""Numbers that share a scale in int4, and keys that share one in int8."""

_KINDS: dict[Precision, tuple[_Kind, _Kind]] = {  # of the keys and of the values
    "model": ("full", "full"),
    "k16v8": ("full", "int8"),
    "int8": ("int8", "int8"),
    "int4": ("int4", "int4"),
}

# Steps of int4 by their code, as shares of the largest. A table: exp2 rounds differently with the place in a tensor.
_STEPS = torch.exp2((torch.arange(256) - 255) / 8)


@dataclass(frozen=True, eq=False)
class PackedKV:
    """A chunk's KV at some precision. Callers must not modify the tensors.

    The fields are all that a serialiser has to keep: ``PackedKV(**fields)`` rebuilds the entry.

    Attributes:
        precision: How keys and values are packed.
        dtype: Dtype of the keys and values before packing.
        key_dim: Channels per head of the keys.
        value_dim: Channels per head of the values.
        token_ids: The chunk's token ids.
        base: Position of the first token when the keys were rotated.
        parts: The tensors by name, as ``layout`` says; the first dimension of all is the layer.
        was_lossy: Whether it was held in fewer bits before it was packed.
        variant: As in ``ChunkKV``.
        inter_attention: As in ``ChunkKV``; never packed.

    Raises:
        ValueError: The parts don't have the names, dtypes and shapes of the layout, or the attention not one figure per
            token.
    """

    precision: Precision
    dtype: torch.dtype
    key_dim: int
    value_dim: int
    token_ids: tuple[int, ...]
    base: int
    parts: Mapping[str, torch.Tensor]
    was_lossy: bool = False
    variant: VariantInfo | None = None
    inter_attention: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision: {self.precision!r} is none of {', '.join(PRECISIONS)}")
        if "keys" not in self.parts or self.parts["keys"].ndim != 4 or not self.token_ids:
            raise ValueError("parts: must hold keys of 4 dimensions, and token_ids at least one token")
        expected = self.layout(*self.parts["keys"].shape[:2])
        if (sensitivity := self.parts.get("sensitivity")) is not None:
            expected["sensitivity"] = (sensitivity.dtype, (self.parts["keys"].shape[0], self.num_tokens))
        found = {name: (part.dtype, tuple(part.shape)) for name, part in self.parts.items()}
        if found != expected:
            raise ValueError(f"parts: {found} are not {self.precision} KV of {self.num_tokens} tokens, {expected}")
        if self.inter_attention is not None and self.inter_attention.shape != (self.num_tokens,):
            raise ValueError(
                f"inter_attention: {tuple(self.inter_attention.shape)} is not one figure for each of {self.num_tokens} "
                "tokens"
            )

    @property
    def num_tokens(self) -> int:
        """Length of the chunk in tokens."""
        return len(self.token_ids)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.parts["keys"].shape[0]

    @property
    def sensitivity(self) -> torch.Tensor | None:
        """The chunk's sensitivity, which is never packed."""
        return self.parts.get("sensitivity")

    @property
    def is_lossy(self) -> bool:
        """Whether its numbers are no longer those computed."""
        return self.was_lossy or self.precision != "model"

    @property
    def is_read(self) -> bool:
        """Whether all layers are in memory: always."""
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, 4 per token id, and what was recorded, as ``ChunkKV.nbytes``."""
        recorded = 0 if self.variant is None else self.variant.nbytes
        recorded += 0 if self.inter_attention is None else self.inter_attention.nbytes
        return sum(part.nbytes for part in self.parts.values()) + 4 * self.num_tokens + recorded

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name."""
        return dict(self.parts)

    def layout(self, num_layers: int, num_kv_heads: int) -> Layout:
        """Dtype and shape that each part must have, by name; ``sensitivity`` comes on top when it was measured."""
        return {
            **_layout("keys", self._kinds[0], self.dtype, (num_layers, num_kv_heads, self.num_tokens, self.key_dim)),
            **_layout(
                "values", self._kinds[1], self.dtype, (num_layers, num_kv_heads, self.num_tokens, self.value_dim)
            ),
        }

    def to(self, device: torch.device) -> PackedKV:
        """The same entry with its tensors on a device; the sensitivity stays where it is, as in ``ChunkKV.to``."""
        moved = {name: part if name == "sensitivity" else part.to(device) for name, part in self.parts.items()}
        return replace(self, parts=moved)

    def unpack(self, device: torch.device | None = None) -> ChunkKV:
        """The KV in its original dtype.

        Tensors that were packed as they are (all of ``model``, the keys of ``k16v8``, the sensitivity) are not copied:
        as everything that comes from a store they are for reading only.

        Args:
            device: Where to unpack, after moving the smaller packed tensors there; ``None`` stays where they are.
        """
        packed = self if device is None else self.to(device)
        keys = _decode("keys", self._kinds[0], packed.parts, self.dtype, self.key_dim)
        values = _decode("values", self._kinds[1], packed.parts, self.dtype, self.value_dim)
        recorded = packed.parts.get("sensitivity"), self.is_lossy, self.variant, self.inter_attention
        return ChunkKV(keys, values, self.token_ids, self.base, *recorded)

    def matches(self, token_ids: Sequence[int]) -> bool:
        """Whether this entry really holds these tokens."""
        return self.token_ids == tuple(token_ids)

    def read(self, layer_idx: int) -> None:
        """Nothing: it is in memory."""
        return

    def layer(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each ``[num_kv_heads, num_tokens, head_dim]``: equal to that of ``unpack``."""
        parts = {name: part[layer_idx, None] for name, part in self.parts.items()}
        keys = _decode("keys", self._kinds[0], parts, self.dtype, self.key_dim)
        values = _decode("values", self._kinds[1], parts, self.dtype, self.value_dim)
        return keys[0], values[0]

    def complete(self) -> ChunkKV:
        """All layers unpacked, where the tensors are."""
        return self.unpack()

    def lower(self, precision: Precision) -> PackedKV:
        """The entry at a precision of fewer bits; itself when it has no more bits already.

        Raises:
            ValueError: Unknown precision.
        """
        if precision in PRECISIONS and PRECISIONS.index(precision) <= PRECISIONS.index(self.precision):
            return self
        return pack(self.unpack(), precision)

    @property
    def _kinds(self) -> tuple[_Kind, _Kind]:
        return _KINDS[self.precision]


def pack(chunk_kv: ChunkKV, precision: Precision) -> PackedKV:
    """Pack a chunk's KV; lossy except for ``model``, which keeps the tensors themselves.

    A head in which any number is not finite comes back with numbers that are not finite.

    Args:
        chunk_kv: At least one token; keys and values of one floating dtype.
        precision: What to pack it to.

    Raises:
        ValueError: Unknown precision, no tokens, or a sensitivity that is not ``[num_layers, num_tokens]``.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision: {precision!r} is none of {', '.join(PRECISIONS)}")
    if not chunk_kv.token_ids:
        raise ValueError("chunk_kv: has no tokens; give at least one")
    key_kind, value_kind = _KINDS[precision]
    parts = {**_encode("keys", key_kind, chunk_kv.keys), **_encode("values", value_kind, chunk_kv.values)}
    if chunk_kv.sensitivity is not None:
        parts["sensitivity"] = chunk_kv.sensitivity
    dims = chunk_kv.keys.shape[-1], chunk_kv.values.shape[-1]
    return PackedKV(
        precision,
        chunk_kv.keys.dtype,
        *dims,
        chunk_kv.token_ids,
        chunk_kv.base,
        parts,
        chunk_kv.is_lossy,
        chunk_kv.variant,
        chunk_kv.inter_attention,
    )


def _layout(name: str, kind: _Kind, dtype: torch.dtype, shape: tuple[int, int, int, int]) -> Layout:
    layers, heads, tokens, channels = shape
    if kind == "full":
        return {name: (dtype, shape)}
    if kind == "int8":
        scales = (layers, heads, -(-tokens // GROUP), channels) if name == "keys" else shape[:3]
        return {name: (torch.int8, shape), f"{name}_scale": (torch.float32, scales)}
    along, count = (channels, -(-tokens // GROUP)) if name == "keys" else (tokens, -(-channels // GROUP))
    return {
        name: (torch.uint8, (layers, heads, tokens, -(-channels // 2))),
        f"{name}_low": (dtype, (layers, heads, along, count)),
        f"{name}_step": (torch.uint8, (layers, heads, along, count)),
        f"{name}_top": (torch.float32, (layers, heads)),
    }


def _encode(name: str, kind: _Kind, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
    if kind == "full":
        return {name: numbers}
    if kind == "int8":
        if name == "values":
            rows, scale = _to_8_bits(numbers, axis=3)
            return {name: rows, f"{name}_scale": scale[..., 0]}
        groups = [_to_8_bits(numbers.narrow(2, at, size), axis=2) for at, size in _groups(numbers.shape[2])]
        return {
            name: torch.cat([codes for codes, _ in groups], dim=2),
            f"{name}_scale": torch.cat([scale for _, scale in groups], dim=2),
        }
    codes, low, step, top = _to_4_bits(numbers.transpose(2, 3) if name == "keys" else numbers)
    nibbles = functional.pad(codes.transpose(2, 3) if name == "keys" else codes, (0, numbers.shape[-1] % 2))
    # Two channels per byte, the even one in the low half.
    return {
        name: nibbles[..., 0::2] | nibbles[..., 1::2] << 4,
        f"{name}_low": low,
        f"{name}_step": step,
        f"{name}_top": top,
    }


def _decode(
    name: str, kind: _Kind, parts: Mapping[str, torch.Tensor], dtype: torch.dtype, channels: int
) -> torch.Tensor:
    packed = parts[name]
    if kind == "full":
        return packed
    if kind == "int8":
        numbers, scale = packed.float(), parts[f"{name}_scale"]
        if name == "values":
            return numbers.mul_(scale[..., None]).to(dtype)
        for group, (at, size) in enumerate(_groups(numbers.shape[2])):
            numbers.narrow(2, at, size).mul_(scale.narrow(2, group, 1))
        return numbers.to(dtype)
    low, top = parts[f"{name}_low"].float(), parts[f"{name}_top"]
    numbers = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :channels].float()
    axis = 2 if name == "keys" else 3
    step = _steps(parts[f"{name}_step"], top)
    if name == "keys":
        low, step = low.transpose(2, 3), step.transpose(2, 3)
    for group, (at, size) in enumerate(_groups(numbers.shape[axis])):
        part = numbers.narrow(axis, at, size)
        part.mul_(step.narrow(axis, group, 1)).add_(low.narrow(axis, group, 1))
    limits = torch.finfo(dtype)  # half a step beyond the largest number of float16 would be infinite
    return numbers.clamp_(limits.min, limits.max).to(dtype)


def _to_8_bits(numbers: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes -127 to 127, and their scale along ``axis``, kept as a dimension of size 1."""
    scale = numbers.abs().amax(dim=axis, keepdim=True).float() / 127
    return (numbers.float() / _divisor(scale)).round_().clamp_(-127, 127).to(torch.int8), scale


def _to_4_bits(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise ``[num_layers, num_kv_heads, rows, columns]`` in groups of columns.

    Returns:
        Codes 0 to 15 as uint8; the least number of each group, exact in the given dtype; its step as a code; and the
        largest step of each layer and head, float32.
    """
    low = torch.cat([part.amin(dim=-1, keepdim=True) for part in _split(numbers)], dim=-1)
    high = torch.cat([part.amax(dim=-1, keepdim=True) for part in _split(numbers)], dim=-1)
    step = (high.float() - low.float()) / 15
    top = step.amax(dim=(2, 3))
    # 8 bits per step instead of 16 keep int4 below 0.28 of bfloat16: eighths of an octave below the largest step of the
    # head, rounded towards the larger step, which costs 4 % of precision on average and 9 % at most. Code 0: constant.
    eighths = torch.log2(top[..., None, None] / step).mul_(8).floor_()
    step_codes = torch.where(step > 0, (255 - eighths).clamp_(1, 255), 0).nan_to_num_(nan=255).to(torch.uint8)
    divisor = _divisor(_steps(step_codes, top))
    codes = [
        (part.float() - low[..., group, None].float()).div_(divisor[..., group, None]).round_().clamp_(0, 15)
        for group, part in enumerate(_split(numbers))
    ]
    return torch.cat([part.to(torch.uint8) for part in codes], dim=-1), low, step_codes, top


def _steps(codes: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    steps = _STEPS.to(codes.device)[codes.int()].mul_(top[..., None, None])
    return torch.where(codes > 0, steps, 0.0)


def _divisor(scale: torch.Tensor) -> torch.Tensor:
    """The scale, 1 where it is zero: all numbers of such a group are equal, and their codes come out as 0."""
    return torch.where(scale == 0, 1.0, scale)


def _groups(length: int) -> Iterator[tuple[int, int]]:
    """Start and size of each group along an axis; the last may be shorter."""
    return ((at, min(GROUP, length - at)) for at in range(0, length, GROUP))


def _split(numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(numbers.narrow(-1, at, size) for at, size in _groups(numbers.shape[-1]))
