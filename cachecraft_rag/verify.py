"""The correctness gate of a model: the identities that reuse rests on, measured on the model itself."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

import torch

from cachecraft_rag.capability import Capability
from cachecraft_rag.errors import UnsupportedModelError
from cachecraft_rag.model_adapter import ModelAdapter
from cachecraft_rag.rope import RopeSpec

_CHUNK_TOKENS = 64
_LOGIT_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Check:
    """One identity: what was compared, the largest relative error found, and the largest allowed."""

    name: str
    error: float
    tolerance: float

    @property
    def is_passed(self) -> bool:
        """Whether the error is within the tolerance."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class VerifyReport:
    """All checks of one model; every one passed, or ``verify`` had raised."""

    model: str
    dtype: str
    checks: tuple[Check, ...]

    def __str__(self) -> str:
        lines = [f"{check.name:<58} {check.error:9.2e} <= {check.tolerance:.0e}" for check in self.checks]
        return "\n".join([f"{self.model} ({self.dtype})", *lines])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{escape(c.name)}</td><td>{c.error:.2e}</td><td>{c.tolerance:.0e}</td></tr>" for c in self.checks
        )
        head = f"<tr><th>{escape(self.model)} ({self.dtype})</th><th>error</th><th>allowed</th></tr>"
        return f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"


def verify(adapter: ModelAdapter, capability: Capability, model_name: str) -> VerifyReport:
    """Measure the identities on random tokens.

    Raises:
        UnsupportedModelError: The model can't reuse chunks, or an identity does not hold; the message says which.
    """
    if capability.reason is not None or capability.rope is None:
        raise UnsupportedModelError(f"{model_name}: {capability.reason}")
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(0, adapter.config.vocab_size, (_CHUNK_TOKENS,), generator=generator)
    here = torch.arange(_CHUNK_TOKENS)
    # Layer 0 sees only the tokens themselves, so its keys are known exactly at any position.
    first, second, third = (adapter.capture(token_ids, here + at, 1)[0][0][0] for at in (5, 300, 170))
    layer_0 = RopeSpec(capability.rope.layers[:1])
    moved = layer_0.rerotate(first[None], 295)[0]
    halfway = layer_0.rerotate(first[None], 165)
    twice = layer_0.rerotate(halfway, 130)[0]
    tolerance = _LOGIT_TOLERANCE[first.dtype]

    reference_kv = adapter.new_kv(_CHUNK_TOKENS)
    reference = adapter.forward_plain(token_ids, reference_kv)
    kv = adapter.new_kv(_CHUNK_TOKENS)
    kv.place(0, torch.ones_like(kv.keys[:, 0]), torch.ones_like(kv.values[:, 0]))
    recomputed = adapter.forward_rows(token_ids, here, kv)
    half = _CHUNK_TOKENS // 2
    reused_kv = adapter.new_kv(_CHUNK_TOKENS)
    reused_kv.place(0, *reference_kv.slice(0, half))
    reused = adapter.forward_rows(token_ids[half:], here[half:], reused_kv)
    checks = (
        Check("keys of layer 0, moved 5 -> 300, equal keys computed at 300", _error(moved, second), tolerance),
        Check("keys moved 5 -> 170 -> 300 equal keys moved 5 -> 300", _error(twice, moved), tolerance),
        Check("keys moved 5 -> 170 equal keys computed at 170", _error(halfway[0], third), tolerance),
        Check("logits at recompute ratio 1.0 equal full prefill", _error(recomputed, reference), tolerance),
        Check("logits over reused KV in place equal full prefill", _error(reused, reference), tolerance),
    )
    failed = [check for check in checks if not check.is_passed]
    if failed:
        found = "; ".join(f"{check.name}: error {check.error:.2e}, allowed {check.tolerance:.0e}" for check in failed)
        raise UnsupportedModelError(f"{model_name}: {found}")
    return VerifyReport(model_name, str(first.dtype).removeprefix("torch."), checks)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-12))
