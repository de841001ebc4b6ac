"""The engines of this process: loaded on first use, shared by LLM objects that want the same one, fed with chunks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet, WeakValueDictionary

from cachecraft_rag import CacheCraftEngine, EngineConfig

#: Chunk texts remembered for an engine that is not loaded yet.
MAX_PENDING = 4096

_lock = threading.RLock()
_shared: WeakValueDictionary[Hashable, CacheCraftEngine] = WeakValueDictionary()
_fed: WeakSet[EngineHandle] = WeakSet()


@dataclass(frozen=True)
class EngineSpec:
    """What decides whether two LLM objects share an engine.

    Attributes:
        model: Folder, alias or hub id.
        dtype: Name of a torch dtype, or ``"auto"``.
        device: Where the model runs; ``None`` for the engine's choice.
        config: Settings of the engine.
    """

    model: str
    dtype: str
    device: str | None
    config: EngineConfig

    def load(self) -> CacheCraftEngine:
        """Load the model.

        Raises:
            ValueError: There is no such model.
        """
        return CacheCraftEngine.from_pretrained(self.model, self.config, dtype=self.dtype, device=self.device)


class EngineHandle:
    """An LLM object's way to its engine. Copies of the object share the handle; pickles leave the engine out.

    Args:
        engine: A ready engine; ``None`` loads one when it is asked for.
    """

    def __init__(self, engine: CacheCraftEngine | None = None) -> None:
        self._given = engine
        self._loaded: dict[EngineSpec, CacheCraftEngine] = {}
        self._pending: deque[str] = deque(maxlen=MAX_PENDING)

    @property
    def is_given(self) -> bool:
        """Whether the engine was handed over ready."""
        return self._given is not None

    @property
    def engines(self) -> list[CacheCraftEngine]:
        """Engines at hand now; empty before the first use."""
        return [self._given] if self._given is not None else [*self._loaded.values()]

    def get(self, spec: EngineSpec) -> CacheCraftEngine:
        """The engine, loaded at the first call; calls of other threads wait meanwhile.

        Raises:
            ValueError: There is no such model, or ``spec`` asks for settings that a ready engine doesn't have.
        """
        if self._given is not None:
            for field in ("namespace", "context_window"):
                wanted, has = getattr(spec.config, field), getattr(self._given.config, field)
                if wanted != has:
                    raise ValueError(f"{field}: {wanted!r}, but the given engine has {has!r}; set it in its config")
            return self._given
        engine = self._loaded.get(spec)
        if engine is None:
            with _lock:
                engine = self._loaded[spec] = _share(spec, spec.load)
                engine.register(self._pending)
                self._pending.clear()
        return engine

    def close(self) -> None:
        """Close the engines; a model given by name is loaded again when it is used again."""
        with _lock:
            for engine in self.engines:
                engine.close()
                for key in [key for key, shared in _shared.items() if shared is engine]:
                    del _shared[key]
            self._loaded.clear()

    def remember(self, texts: Iterable[str]) -> None:
        """Register chunk texts as soon as an engine is loaded."""
        self._pending.extend(texts)

    def __deepcopy__(self, memo: dict[int, Any]) -> EngineHandle:
        return self

    def __reduce__(self) -> tuple[type[EngineHandle], tuple[()]]:
        return EngineHandle, ()


def engine_of(hf_model: Any, tokenizer: Any, config: EngineConfig) -> CacheCraftEngine:
    """The engine on a ready model and tokenizer; the same one for the same objects and settings."""
    # An id can't be taken again while the engine lives, since the engine keeps the objects alive.
    return _share((id(hf_model), id(tokenizer), config), lambda: CacheCraftEngine(hf_model, tokenizer, config))


def feed(handle: EngineHandle) -> None:
    """Let the engine of a handle know every chunk text that passes through LlamaIndex from now on."""
    with _lock:
        _fed.add(handle)


def register_chunks(texts: Iterable[str]) -> None:
    """Make chunk texts known to every engine that is fed."""
    texts = list(texts)
    with _lock:
        handles = list(_fed)
    engines = {id(engine): engine for handle in handles for engine in handle.engines}
    for engine in engines.values():
        engine.register(texts)
    for handle in handles:
        if not handle.engines:
            handle.remember(texts)


def _share(key: Hashable, make: Callable[[], CacheCraftEngine]) -> CacheCraftEngine:
    with _lock:
        engine = _shared.get(key)
        if engine is None:
            engine = _shared[key] = make()
        return engine
