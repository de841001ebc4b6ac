"""Finds out by experiment whether a model can be served from cached chunks, and how it rotates its keys.

Configurations lie and new architectures appear every month, so the model itself is asked: the same tokens are computed
at two offsets, and each layer's keys must differ by exactly one known rotation. What can't be proved this way is
served by full prefill, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from cachecraft_rag.model_adapter import ModelAdapter
from cachecraft_rag.rope import RopeSpec, RotaryLayout, rerotate_keys

FIXED_ROPE_KINDS = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
LENGTH_DEPENDENT_ROPE_KINDS = frozenset({"dynamic", "longrope", "su"})

_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
_PROBE_TOKENS = 24
_PROBE_OFFSET = 37
_PROBE_WINDOW = 6


@dataclass(frozen=True, eq=False)
class Capability:
    """What the probe found.

    Attributes:
        reason: Why chunks can't be reused; ``None`` when they can.
        rope: The rotation of every layer; ``None`` when chunks can't be reused.
        max_tokens: Longest prompt plus answer for which the rotation is fixed; ``None`` for any length.
        context_tokens: What single chunks are computed behind takes so many of them.
    """

    reason: str | None
    rope: RopeSpec | None = None
    max_tokens: int | None = None
    context_tokens: int = 0

    def with_context(self, num_tokens: int) -> Capability:
        """The same where chunks are computed behind so many tokens, which may be more than precede them in a prompt."""
        return replace(self, context_tokens=num_tokens)

    def reason_for(self, num_tokens: int) -> str | None:
        """Why a prompt plus answer of this length can't reuse chunks; ``None`` when it can."""
        longest = num_tokens + self.context_tokens  # no chunk is longer than its prompt
        if self.reason is None and self.max_tokens is not None and longest > self.max_tokens:
            behind = f", and what chunks are computed behind {self.context_tokens}" if self.context_tokens else ""
            return (
                f"this model's rotary frequencies change beyond {self.max_tokens} tokens, and prompt plus answer may "
                f"take {num_tokens}{behind}"
            )
        return self.reason


class _NotMovable(Exception):
    """The reason why chunks can't be reused."""


def probe(adapter: ModelAdapter) -> Capability:
    """Ask the model how it rotates keys and whether rows can be recomputed exactly.

    Never raises for a model it can't handle: any failure inside the model is the reason for full prefill.
    """
    reason = _structural_reason(adapter)
    if reason is not None:
        return Capability(reason)
    try:
        rope = _find_rotation(adapter)
        _check_windows(adapter)
        _check_recompute(adapter)
    except _NotMovable as found:
        return Capability(str(found))
    except Exception as error:
        return Capability(f"the probe of this model failed: {type(error).__name__}: {error}")
    return Capability(None, rope, _fixed_length(adapter.config))


def rope_kinds(config: Any) -> set[str]:
    """Names of the RoPE kinds of a configuration, of all its layer types."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    entries = [entry for entry in parameters.values() if isinstance(entry, dict)] or [parameters]
    return {str(entry.get("rope_type", entry.get("type", "default"))) for entry in entries}


def _structural_reason(adapter: ModelAdapter) -> str | None:
    config, kind = adapter.config, getattr(adapter.config, "model_type", "unknown")
    if getattr(adapter.model, "_is_stateful", False) or adapter.num_layers == 0:
        return f"{kind} keeps a recurrent state instead of keys and values per token"
    foreign = {
        t for t in getattr(config, "layer_types", None) or () if t not in ("full_attention", "sliding_attention")
    }
    if foreign:
        return f"{kind} has layers without a KV cache that can be moved: {', '.join(sorted(foreign))}"
    if not _inverse_frequencies(adapter):
        return f"{kind} has no rotary position embedding, so its keys can't be moved to another position"
    if not adapter.takes_positions:
        return f"{kind} does not take position_ids"
    unknown = rope_kinds(config) - FIXED_ROPE_KINDS - LENGTH_DEPENDENT_ROPE_KINDS
    if unknown:
        return f"the RoPE kind {', '.join(sorted(unknown))} of {kind} is not known to be moved exactly"
    return None


def _inverse_frequencies(adapter: ModelAdapter) -> list[torch.Tensor]:
    """The distinct inverse-frequency buffers of the model (one per layer type where bases differ)."""
    found: list[torch.Tensor] = []
    for name, buffer in adapter.model.named_buffers():
        leaf = name.rsplit(".", 1)[-1]
        if not leaf.endswith("inv_freq") or "original" in leaf:
            continue
        if not any(buffer.shape == known.shape and torch.equal(buffer, known) for known in found):
            found.append(buffer.detach().float())
    return found


def _find_rotation(adapter: ModelAdapter) -> RopeSpec:
    token_ids = _probe_tokens(adapter, _PROBE_TOKENS)
    here = torch.arange(_PROBE_TOKENS)
    at_start = adapter.capture(token_ids, here, adapter.num_layers)
    moved = adapter.capture(token_ids, here + _PROBE_OFFSET, adapter.num_layers)
    if len({keys.shape for keys, _ in at_start}) > 1:
        raise _NotMovable("the layers of this model have keys of different shapes")
    tolerance = _TOLERANCE[at_start[0][0].dtype]
    candidates: list[RotaryLayout | None] = [None]
    for inv_freq in _inverse_frequencies(adapter):
        candidates += [RotaryLayout(inv_freq, interleaved) for interleaved in (False, True)]
    layers: list[RotaryLayout | None] = []
    for layer_idx, ((old_keys, old_values), (new_keys, new_values)) in enumerate(zip(at_start, moved, strict=True)):
        if _token_error(old_values, new_values) > tolerance:
            raise _NotMovable(f"values of layer {layer_idx} depend on the absolute position")
        errors = [_token_error(_moved(old_keys, layout), new_keys) for layout in candidates]
        best = min(range(len(candidates)), key=errors.__getitem__)
        if errors[best] > tolerance:
            raise _NotMovable(
                f"keys of layer {layer_idx} move by no known rotation (relative error {errors[best]:.2g})"
            )
        layers.append(candidates[best])
    if all(layout is None for layout in layers):
        raise _NotMovable("the keys of this model do not depend on their position")
    return RopeSpec(tuple(layers))


def _check_windows(adapter: ModelAdapter) -> None:
    """Take out the sliding windows that the configuration names and the model ignores.

    No window of a real model is as short as a probe, so for one pass the model gets one that is.
    """
    named, full = adapter.windows, (None,) * adapter.num_layers
    if named == full:
        return
    token_ids, positions = _probe_tokens(adapter, _PROBE_TOKENS), torch.arange(_PROBE_TOKENS)
    expected = adapter.new_kv(_PROBE_TOKENS)
    adapter.forward_plain(token_ids, expected, window=_PROBE_WINDOW)
    errors = []
    try:
        for windows in (tuple(None if window is None else _PROBE_WINDOW for window in named), full):
            adapter.windows = windows
            found = adapter.new_kv(_PROBE_TOKENS)
            adapter.forward_rows(token_ids, positions, found)
            errors.append(max(_token_error(*layers) for layers in zip(found.values, expected.values, strict=True)))
    finally:
        adapter.windows = named
    if min(errors) > _TOLERANCE[expected.values.dtype]:
        raise _NotMovable(f"rows see other tokens than by the sliding windows of the configuration ({min(errors):.2g})")
    if errors[1] < errors[0]:
        adapter.windows = full


def _check_recompute(adapter: ModelAdapter) -> None:
    """Recomputing all rows over foreign KV, in two passes, must give the logits of a plain prefill."""
    token_ids = _probe_tokens(adapter, _PROBE_TOKENS)
    positions = torch.arange(_PROBE_TOKENS)
    reference_kv = adapter.new_kv(_PROBE_TOKENS)
    reference = adapter.forward_plain(token_ids, reference_kv)
    kv = adapter.new_kv(_PROBE_TOKENS)
    kv.keys.fill_(1.0)
    kv.values.fill_(1.0)
    split = _PROBE_TOKENS // 3
    early = torch.cat([positions[:split], positions[-1:]])
    adapter.forward_rows(token_ids[early], early, kv)
    logits = adapter.forward_rows(token_ids[split:], positions[split:], kv)
    tolerance = _TOLERANCE[kv.keys.dtype]
    values = max(_token_error(*layers) for layers in zip(kv.values, reference_kv.values, strict=True))
    last = float((logits - reference).norm() / reference.norm().clamp(min=1e-12))
    if values > tolerance or last > 3 * tolerance:
        raise _NotMovable(
            f"recomputing all tokens differs from plain prefill (relative error of values {values:.2g}, "
            f"of logits {last:.2g})"
        )


def _fixed_length(config: Any) -> int | None:
    if not rope_kinds(config) & LENGTH_DEPENDENT_ROPE_KINDS:
        return None
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    original = parameters.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    limit = original or config.max_position_embeddings
    return int(limit) - 1


def _probe_tokens(adapter: ModelAdapter, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(20250215)
    return torch.randint(0, adapter.config.vocab_size, (count,), generator=generator)


def _moved(keys: torch.Tensor, layout: RotaryLayout | None) -> torch.Tensor:
    fits = layout is not None and layout.rotary_dim <= keys.shape[-1]
    return rerotate_keys(keys, _PROBE_OFFSET, layout) if fits and layout is not None else keys


def _token_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error of the median token; both ``[1, num_kv_heads, num_tokens, head_dim]``.

    A wrong rotation moves every token. Rounding may send single tokens to other experts (mixture of experts), which
    says nothing about positions.
    """
    difference = (found.float() - expected.float()).square().sum(dim=(0, 1, 3)).sqrt()
    return float((difference / expected.float().square().sum(dim=(0, 1, 3)).sqrt().clamp(min=1e-12)).median())
