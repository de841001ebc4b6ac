"""Every error this package raises on purpose.

    CacheCraftError
    ├── UnsupportedModelError      this model can't be served from cached chunks (generate falls back; verify raises)
    ├── PromptTooLongError         the prompt does not fit into the context window
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


class StoreError(CacheCraftError):
    """Something went wrong inside the chunk store."""


class StoreUnavailableError(StoreError):
    """A tier of the store can't be reached."""


class CorruptEntryError(StoreError):
    """A stored entry is damaged or does not belong to this model."""
