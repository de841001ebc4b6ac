"""The engines of this process: one per model and settings, loaded when it is first needed, whoever asks.

LangChain makes new chat model objects all the time (``configurable_fields`` makes one per call). None of them owns an
engine that was loaded by name, so none of them loads the weights again.
"""

from __future__ import annotations

import threading
import uuid
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from cachecraft_rag import CacheCraftEngine, EngineConfig


@dataclass(frozen=True)
class EngineKey:
    """What makes two engines the same.

    Attributes:
        model: A local folder, an alias or a hub id.
        dtype: Name of a torch dtype, or ``"auto"``.
        device: Name of a torch device; ``None`` takes the first GPU, else the CPU.
        config: Settings of the engine.
    """

    model: str
    dtype: str
    device: str | None
    config: EngineConfig


class EngineRegistry:
    """Engines loaded by name, and names for engines that were made elsewhere. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gates: dict[EngineKey, threading.Lock] = {}
        self._loaded: dict[EngineKey, CacheCraftEngine] = {}
        self._tokens: WeakKeyDictionary[CacheCraftEngine, str] = WeakKeyDictionary()

    def get(self, key: EngineKey) -> CacheCraftEngine:
        """The engine of a key; the first caller loads it, callers at the same time wait for that.

        Raises:
            ValueError: There is no such model.
        """
        with self._gate(key):
            if key not in self._loaded:
                self._loaded[key] = CacheCraftEngine.from_pretrained(
                    key.model, key.config, dtype=key.dtype, device=key.device
                )
            return self._loaded[key]

    def close(self, key: EngineKey) -> bool:
        """Close and forget the engine of a key; ``False`` when it is not loaded. The next ``get`` loads a new one."""
        with self._gate(key):
            engine = self._loaded.pop(key, None)
            if engine is not None:
                engine.close()
        return engine is not None

    def token_of(self, engine: CacheCraftEngine) -> str:
        """A name for an engine made elsewhere; unique among all processes, so it never means another engine."""
        with self._lock:
            return self._tokens.setdefault(engine, uuid.uuid4().hex)

    def by_token(self, token: str) -> CacheCraftEngine:
        """The engine that got a name from ``token_of``.

        Raises:
            ValueError: It lives in another process, or is gone.
        """
        with self._lock:
            engine = next((engine for engine, name in self._tokens.items() if name == token), None)
        if engine is None:
            raise ValueError(
                "engine: a chat model made with a ready engine can only be unpickled in the process that holds the "
                "engine; make it with model= to load the model by name wherever it is needed"
            )
        return engine

    def _gate(self, key: EngineKey) -> threading.Lock:
        with self._lock:
            return self._gates.setdefault(key, threading.Lock())


ENGINES = EngineRegistry()
"""The engines of this process."""
