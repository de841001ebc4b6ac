"""What prompts begin with before their first chunk: system message, tools, instruction.

Nothing stands before a head, so its KV is the same in every prompt that begins with it: it is reused as it is, without
moving it and without recomputing anything.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.keys import ChunkKey, KeyMaker, context_hash
from cachecraft_rag.pieces import common_prefix
from cachecraft_rag.prompt import EncodedPrompt
from cachecraft_rag.prompt_kv import PromptKV
from cachecraft_rag.store import ChunkStore

MIN_HEAD_TOKENS = 16
"""Shorter ones are computed in less time than it takes to find them."""

_MAX_SEEN = 256
_MAX_KEPT = 64
_NOTHING = context_hash(())
_HEADS = "\0heads"  # the name under which they are noted among the documents
_Name = tuple[str, tuple[int, ...]]  # namespace and ids


class PromptHeads:
    """Keeps the KV of what two prompts that ask different things begin with, and finds it for later ones. Thread-safe.

    One prompt doesn't tell what of its head comes again: a date may stand in it, or a question before the chunks. So
    what is kept is what two prompts have in common whose heads, or whose texts after the last chunk, differ.

    Args:
        store: Where the KV is kept.
    """

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._seen: OrderedDict[_Name, tuple[int, ...]] = OrderedDict()
        self._kept: OrderedDict[_Name, None] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, encoded: EncodedPrompt, keys: KeyMaker) -> ChunkKV | None:
        """Exact KV of the longest known head that a prompt begins with."""
        head = encoded.head_ids
        if len(head) < MIN_HEAD_TOKENS:
            return None
        with self._lock:
            known = [ids for namespace, ids in self._kept if namespace == keys.namespace and head[: len(ids)] == ids]
            if (keys.namespace, head) not in self._seen:  # another process may have kept it
                known.append(head)
        for ids in sorted(set(known), key=len, reverse=True):
            found = self._store.get(_key(ids, keys))
            if found is not None and found.matches(ids) and not found.is_lossy:
                self._note(keys.namespace, ids)
                return found
        return None

    def learn(self, encoded: EncodedPrompt, keys: KeyMaker, kv: PromptKV) -> int:
        """After an answer: keep what its prompt and an earlier one begin with.

        Args:
            encoded: The prompt.
            keys: Keys of its namespace.
            kv: Its buffer.

        Returns:
            Tokens whose KV was stored.
        """
        head, tail = encoded.head_ids, encoded.tail_ids
        if len(head) < MIN_HEAD_TOKENS:
            return 0
        name = (keys.namespace, head)
        with self._lock:
            earlier = [ids for namespace, ids in self._seen if namespace == keys.namespace and ids != head]
            asks_anew = self._seen.get(name, tail) != tail
            self._seen[name] = tail
            _trim(self._seen, name, _MAX_SEEN)
        num_common = len(head) if asks_anew else max((common_prefix(head, ids) for ids in earlier), default=0)
        if num_common < MIN_HEAD_TOKENS:
            return 0
        common = head[:num_common]
        key = _key(common, keys)
        self._note(keys.namespace, common)
        if self._store.contains(key):
            return 0
        self._store.documents.add(keys.namespace, _HEADS, [key.chunk])  # first, so that nothing is kept unnoted
        return num_common * self._store.put(key, ChunkKV(*kv.slice(0, num_common), common, 0))

    def forget(self, namespace: str) -> None:
        """Drop what the prompts of a namespace began with, whichever process kept it."""
        with self._lock:
            for known in (self._seen, self._kept):
                for name in [name for name in known if name[0] == namespace]:
                    del known[name]
        for chunk in self._store.documents.chunks(namespace, _HEADS):
            self._store.remove(ChunkKey(namespace, chunk, _NOTHING))
        self._store.documents.remove(namespace, _HEADS)

    def _note(self, namespace: str, ids: tuple[int, ...]) -> None:
        with self._lock:
            self._kept[namespace, ids] = None
            _trim(self._kept, (namespace, ids), _MAX_KEPT)


def _key(ids: tuple[int, ...], keys: KeyMaker) -> ChunkKey:
    return keys.key(ids, _NOTHING)


def _trim(known: OrderedDict[_Name, Any], newest: _Name, most: int) -> None:
    known.move_to_end(newest)
    while len(known) > most:
        known.popitem(last=False)
