"""How long a token takes: to be loaded from a tier, or to be computed."""

from __future__ import annotations

import threading

_KEPT = 0.9  # what an earlier measurement still counts for after each new one


class Pace:
    """Seconds per token, the latest measurements counting most. Thread-safe."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._lock = threading.Lock()

    def add(self, num_tokens: int, seconds: float) -> None:
        """Take in a measurement."""
        with self._lock:
            self._tokens = _KEPT * self._tokens + num_tokens
            self._seconds = _KEPT * self._seconds + seconds

    @property
    def s_per_token(self) -> float | None:
        """Seconds per token; ``None`` before the first measurement."""
        with self._lock:
            return self._seconds / self._tokens if self._tokens else None
