"""The engines of a process: one per model and settings, loaded when it is first needed, whoever asks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from cachecraft_rag.config import EngineConfig
from cachecraft_rag.engine import CacheCraftEngine


@dataclass(frozen=True)
class EngineKey:
    """What makes two engines the same. Namespaces don't: they travel with every request.

    Attributes:
        model: A local folder, an alias or a hub id.
        dtype: Name of a torch dtype, or ``"auto"``.
        device: Name of a torch device; ``None`` takes the first GPU, else the CPU.
        config: Settings of the engine.
    """

    model: str
    dtype: str = "auto"
    device: str | None = None
    config: EngineConfig = field(default_factory=EngineConfig)

    def load(self) -> CacheCraftEngine:
        """Load an engine of its own, whatever others exist.

        Raises:
            ValueError: There is no such model.
        """
        return CacheCraftEngine.from_pretrained(self.model, self.config, dtype=self.dtype, device=self.device)


class EnginePool:
    """Engines shared by everybody who asks for the same one. Safe to use from any thread.

    An engine that was closed, by whomever, is never handed out again: the next request makes a new one. One that was to
    be kept and that somebody else closed is let go when the pool is next asked for anything.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gates: WeakValueDictionary[Hashable, _Gate] = WeakValueDictionary()
        self._engines: WeakValueDictionary[Hashable, CacheCraftEngine] = WeakValueDictionary()
        self._kept: dict[Hashable, CacheCraftEngine] = {}

    def get(self, key: EngineKey, *, keep: bool = False) -> CacheCraftEngine:
        """The engine of a key; the first caller loads it, callers at the same time wait for that.

        Args:
            key: Which engine.
            keep: Whether the pool holds the engine until it is closed. Otherwise it goes with the last object that
                refers to it, unless another caller had it kept.

        Raises:
            ValueError: There is no such model.
        """
        return self._get(key, key.load, keep)

    def over(self, model: Any, tokenizer: Any, config: EngineConfig) -> CacheCraftEngine:
        """The engine over a ready model and tokenizer: the same one for the same two objects and equal settings.

        It goes with the last object that refers to it.

        Args:
            model: A transformers causal language model.
            tokenizer: Its tokenizer.
            config: Settings of the engine.

        Raises:
            ValueError: The model is no causal language model.
        """
        key = (_Identity(model), _Identity(tokenizer), config)
        return self._get(key, lambda: CacheCraftEngine(model, tokenizer, config), keep=False)

    def close(self, key: EngineKey) -> bool:
        """Close and forget the engine of a key, for everybody who shares it; ``False`` when none is open."""
        gate = self._gate(key)
        with gate.lock:
            with self._lock:
                engine = self._engines.pop(key, None)
                self._kept.pop(key, None)
            if engine is None or engine.is_closed:
                return False
            engine.close()
            return True

    def _get(self, key: Hashable, make: Callable[[], CacheCraftEngine], keep: bool) -> CacheCraftEngine:
        gate = self._gate(key)
        with gate.lock:
            with self._lock:
                engine = self._engines.get(key)
                if engine is not None and engine.is_closed:
                    engine = None
            if engine is None:
                engine = make()
                with self._lock:
                    self._engines[key] = engine
            if keep:
                with self._lock:
                    self._kept[key] = engine
            return engine

    def _gate(self, key: Hashable) -> _Gate:
        with self._lock:
            # Before anything is loaded, or the models of closed engines would be in memory beside the new one.
            self._kept = {kept: engine for kept, engine in self._kept.items() if not engine.is_closed}
            gate = self._gates.get(key)
            if gate is None:
                gate = self._gates[key] = _Gate()
            return gate


class _Gate:
    """A lock that can be held weakly: it lasts as long as somebody is inside or waits."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


class _Identity:
    """An object as a key: equal to itself only. Holds the object, so that its id can't become another's meanwhile."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


SHARED_ENGINES = EnginePool()
"""The engines of this process."""
