"""Every error this package raises on purpose.

    CacheCraftError
    ├── UnsupportedModelError      this model can't be served from cached chunks (generate falls back; verify raises)
    ├── PromptTooLongError         the prompt does not fit into the context window
    ├── EngineBusyError            so many requests wait that another one is not taken in
    ├── DeadlineExceededError      the answer was not complete in the time that the request gave it
    ├── RequestCancelledError      the request was cancelled from another thread
    └── StoreError
        ├── StoreUnavailableError  a tier can't be reached: the caller treats it as a miss
        └── CorruptEntryError      an entry is damaged: it is removed and treated as a miss

Bad arguments are plain ``ValueError`` or ``TypeError`` that name the field, the value and what is allowed.
"""

from __future__ import annotations


class CacheCraftError(Exception):
    """Base of all errors of cachecraft-rag."""


class UnsupportedModelError(CacheCraftError):
    """The model can't be served exactly from cached chunks; the message says why."""


class PromptTooLongError(CacheCraftError):
    """The prompt leaves no room for an answer in the model's context window.

    Attributes:
        prompt_tokens: Length of the prompt in tokens.
        context_window: Largest number of tokens the model may see, answer included.
    """

    def __init__(self, prompt_tokens: int, context_window: int) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens, but the context window holds {context_window} (answer included): "
            "retrieve fewer or shorter chunks, or use a model with a longer context"
        )
        self.prompt_tokens = prompt_tokens
        self.context_window = context_window

    def __reduce__(self) -> tuple[type[PromptTooLongError], tuple[int, int]]:
        return type(self), (self.prompt_tokens, self.context_window)


class EngineBusyError(CacheCraftError):
    """So many requests wait that another one is not taken in.

    Attributes:
        max_waiting: How many may wait.
    """

    def __init__(self, max_waiting: int) -> None:
        super().__init__(
            f"{max_waiting} requests are waiting, and no more may: try again later, or raise "
            "SchedulerConfig.max_waiting (to serve more at once: max_batch and memory)"
        )
        self.max_waiting = max_waiting

    def __reduce__(self) -> tuple[type[EngineBusyError], tuple[int]]:
        return type(self), (self.max_waiting,)


class DeadlineExceededError(CacheCraftError, TimeoutError):
    """The answer was not complete in the time that the request gave it.

    Attributes:
        timeout_s: That time in seconds, from the call on.
    """

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"timeout_s: the answer was not complete after {timeout_s:g} s, waiting in line included")
        self.timeout_s = timeout_s

    def __reduce__(self) -> tuple[type[DeadlineExceededError], tuple[float]]:
        return type(self), (self.timeout_s,)


class RequestCancelledError(CacheCraftError):
    """The request was cancelled from another thread."""

    def __init__(self) -> None:
        super().__init__("the request was cancelled")

    def __reduce__(self) -> tuple[type[RequestCancelledError], tuple[()]]:
        return type(self), ()


class StoreError(CacheCraftError):
    """Something went wrong inside the chunk store."""


class StoreUnavailableError(StoreError):
    """A tier of the store can't be reached."""


class CorruptEntryError(StoreError):
    """A stored entry is damaged or does not belong to this model."""
