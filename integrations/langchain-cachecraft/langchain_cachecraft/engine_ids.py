"""Names for ready engines, which have none: what a pickle holds in place of an engine."""

from __future__ import annotations

import threading
import uuid
from weakref import WeakKeyDictionary

from cachecraft_rag import CacheCraftEngine


class EngineIds:
    """Ids of engines that were made elsewhere. Safe to use from any thread; engines are held weakly."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids: WeakKeyDictionary[CacheCraftEngine, str] = WeakKeyDictionary()

    def id_of(self, engine: CacheCraftEngine) -> str:
        """The id of an engine; unique among all processes, so it never means another engine."""
        with self._lock:
            return self._ids.setdefault(engine, uuid.uuid4().hex)

    def engine_of(self, engine_id: str) -> CacheCraftEngine:
        """The engine that got an id from ``id_of``.

        Raises:
            ValueError: It lives in another process, or is gone.
        """
        with self._lock:
            engine = next((engine for engine, known in self._ids.items() if known == engine_id), None)
        if engine is None:
            raise ValueError(
                "engine: a chat model made with a ready engine can only be unpickled in the process that holds the "
                "engine; make it with model= to load the model by name wherever it is needed"
            )
        return engine


ENGINE_IDS = EngineIds()
"""The ids of this process."""
