"""When tokens come out of transformers' ``generate``."""

from __future__ import annotations

import time


class TokenTimes:
    """A streamer that notes when the prompt and then every token came.

    Attributes:
        times: Seconds of ``time.perf_counter``: that of the prompt, then one per token, then that of the end.
    """

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: object) -> None:
        """Take the prompt, then one token after the other."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """The answer is complete."""
        self.times.append(time.perf_counter())
