"""What a tier did: figures for statistics, and the counters behind them."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Sequence
from html import escape
from typing import Literal

from pydantic import BaseModel, ConfigDict

from cachecraft_rag.store.pace import Pace

Event = Literal["misses", "evictions", "demotions", "lowered", "corrupt", "errors", "expired", "dropped", "declined"]

_LOADS_KEPT = 1024  # load times kept for the percentiles: recent ones, and a few kilobytes at most


class TierStats(BaseModel):
    """Figures of one tier since it was opened.

    Attributes:
        name: Name of the tier.
        entries: Entries held now.
        bytes: Bytes held now.
        capacity: Byte budget; ``None`` when the tier has none of its own.
        hits: Look-ups that found their entry.
        misses: Look-ups that did not, for whatever reason.
        hit_tokens: Tokens of all entries found: what need not be computed again.
        evictions: Entries pushed out for lack of room.
        demotions: Entries that went on to a slower tier when they were pushed out.
        lowered: Entries whose precision was lowered in place, for lack of room.
        corrupt: Damaged or foreign entries found, each removed and answered as a miss.
        errors: Failed operations, each answered as a miss or as not stored.
        expired: Entries whose time to live ran out.
        dropped: Entries on their way to this tier that were given up because too many were waiting.
        declined: Entries that were left here because computing them is quicker.
        open_s: Seconds of all look-ups that found their entry, without the layers that were left to be read later.
        bytes_loaded: Bytes of the entries that were read in full, as they are held here.
        load_s: Seconds spent reading them.
        load_p50_s: Median time spent reading one of them, in seconds; 0.0 before the first.
        load_p95_s: 95th percentile of the same.
        tiers: Figures of the tiers inside, fastest first; empty for a single tier.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    entries: int
    bytes: int
    capacity: int | None
    hits: int = 0
    misses: int = 0
    hit_tokens: int = 0
    evictions: int = 0
    demotions: int = 0
    lowered: int = 0
    corrupt: int = 0
    errors: int = 0
    expired: int = 0
    dropped: int = 0
    declined: int = 0
    open_s: float = 0.0
    bytes_loaded: int = 0
    load_s: float = 0.0
    load_p50_s: float = 0.0
    load_p95_s: float = 0.0
    tiers: tuple[TierStats, ...] = ()

    def _repr_html_(self) -> str:
        columns = (
            "name",
            "entries",
            "bytes",
            "capacity",
            "hits",
            "misses",
            "evictions",
            "demotions",
            "corrupt",
            "errors",
        )
        rows = "".join(
            f"<tr>{''.join(f'<td>{escape(str(getattr(tier, column)))}</td>' for column in columns)}</tr>"
            for tier in (*self.tiers, self)
        )
        head = "".join(f"<th>{column}</th>" for column in columns)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"

    def over(self, tiers: Sequence[TierStats]) -> TierStats:
        """These figures of a whole, with those of the tiers inside and what was loaded from them."""
        loaded = {name: sum(getattr(tier, name) for tier in tiers) for name in ("bytes_loaded", "load_s")}
        return self.model_copy(update={**loaded, "tiers": tuple(tiers)})


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed; 0.0 for no values."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)] if values else 0.0


class TierCounters:
    """Counts what happens in a tier. Thread-safe.

    Args:
        name: Name of the tier, for the log.
        logger: Where failures are reported, each kind once.

    Attributes:
        pace: How long reading an entry takes, per token.
    """

    def __init__(self, name: str, logger: logging.Logger) -> None:
        self._name, self._logger = name, logger
        self._lock = threading.Lock()
        self.pace = Pace()
        self._hits = self._hit_tokens = self._bytes_loaded = 0
        self._open_s = self._load_s = 0.0
        self._events: dict[str, int] = {}
        self._loads: deque[float] = deque(maxlen=_LOADS_KEPT)
        self._reported: set[str] = set()

    def hit(self, num_tokens: int, seconds: float) -> None:
        """Count a look-up that found its entry, and the seconds until it did."""
        with self._lock:
            self._hits += 1
            self._hit_tokens += num_tokens
            self._open_s += seconds

    def loaded(self, num_tokens: int, nbytes: int, seconds: float) -> None:
        """Count an entry that was read in full, and the seconds spent on that, opening it included."""
        self.pace.add(num_tokens, seconds)
        with self._lock:
            self._bytes_loaded += nbytes
            self._load_s += seconds
            self._loads.append(seconds)

    def count(self, event: Event, number: int = 1) -> None:
        """Count an event."""
        with self._lock:
            self._events[event] = self._events.get(event, 0) + number

    def error(self, doing: str, error: BaseException) -> None:
        """Count a failed operation; the first of its kind is logged, the others would only repeat it.

        Args:
            doing: What failed: ``"reading"``.
            error: Why.
        """
        kind = f"OSError {error.errno}" if type(error) is OSError else type(error).__name__
        with self._lock:
            self._events["errors"] = self._events.get("errors", 0) + 1
            is_new = kind not in self._reported
            self._reported.add(kind)
        if is_new:
            self._logger.warning(
                "%s store: %s failed (%s: %s); it counts as a miss, and more failures of this kind are only counted",
                self._name,
                doing,
                type(error).__name__,
                error,
            )

    @property
    def num_errors(self) -> int:
        """Failed operations so far."""
        with self._lock:
            return self._events.get("errors", 0)

    def stats(self, entries: int, nbytes: int, capacity: int | None) -> TierStats:
        """The figures so far, with what the tier holds now."""
        with self._lock:
            loads = list(self._loads)
            return TierStats(
                name=self._name,
                entries=entries,
                bytes=nbytes,
                capacity=capacity,
                hits=self._hits,
                hit_tokens=self._hit_tokens,
                open_s=self._open_s,
                bytes_loaded=self._bytes_loaded,
                load_s=self._load_s,
                load_p50_s=percentile(loads, 0.5),
                load_p95_s=percentile(loads, 0.95),
            ).model_copy(update=self._events)
