"""All hashing of the engine: what a model is, what a tokenizer is, and under which key a chunk's KV is found.

xxh3-128 everywhere: the same digest in every process and on every machine, unlike ``hash()``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

TokenIds = Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int32]]

FORMAT_VERSION = 1
"""Raised whenever the meaning of a stored entry changes, so that old entries become misses."""

# Entries of a model's config that name or describe it without changing a single activation.
_IRRELEVANT = frozenset(
    {
        "_name_or_path",
        "_attn_implementation_autoset",
        "architectures",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "id2label",
        "label2id",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    }
)


def digest(*parts: bytes | str) -> str:
    """Hash length-prefixed parts, so that ("ab", "c") and ("a", "bc") differ.

    Returns:
        32 hexadecimal digits.
    """
    state = xxhash.xxh3_128()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def token_bytes(token_ids: TokenIds) -> bytes:
    """Token ids as little-endian 32-bit integers."""
    return np.asarray(token_ids, dtype="<i4").tobytes()


def context_hash(token_ids: TokenIds) -> str:
    """Hash of everything that stands before a chunk, in token ids."""
    return digest("context", token_bytes(token_ids))


def model_fingerprint(config: Mapping[str, Any], weights: Iterable[tuple[str, torch.Tensor]], adapters: str) -> str:
    """Identify everything that decides a model's keys and values.

    Args:
        config: The model's configuration as a plain mapping; entries that change no activation are left out.
        weights: Parameters and buffers by name, any dtype and device; every byte is hashed.
        adapters: Description of the active adapters.

    Returns:
        32 hexadecimal digits.
    """
    relevant = {name: value for name, value in config.items() if name not in _IRRELEVANT}
    state = xxhash.xxh3_128()
    for name, tensor in weights:
        state.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        if tensor.device.type != "meta":  # offloaded: nothing is stored for such a model
            state.update(tensor_bytes(tensor))
    return digest("model", json.dumps(relevant, sort_keys=True, default=str), state.digest(), adapters)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor of any dtype, copied to host memory only when it lives elsewhere."""
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Identify how a tokenizer turns text into ids (vocabulary, merges, normaliser, added tokens)."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        settings = json.loads(backend.to_str())
        for call_option in ("padding", "truncation"):  # left behind by the last call; they change no ids of a chunk
            settings.pop(call_option, None)
        return digest("tokenizer", type(tokenizer).__name__, json.dumps(settings, sort_keys=True))
    vocabulary = json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return digest("tokenizer", type(tokenizer).__name__, vocabulary, repr(tokenizer.special_tokens_map))


@dataclass(frozen=True)
class ChunkKey:
    """Name of one stored entry: a chunk of one model and tenant, computed behind one context.

    Attributes:
        namespace: The tenant the entry belongs to.
        chunk: 32 hexadecimal digits over format version, model, tokenizer, namespace and token ids.
        context: ``context_hash`` of what the KV was computed behind.
    """

    namespace: str
    chunk: str
    context: str

    def __str__(self) -> str:
        return f"{self.chunk}-{self.context}"


@dataclass(frozen=True)
class KeyMaker:
    """Makes the keys of one model, tokenizer and namespace.

    Attributes:
        model: Model fingerprint.
        tokenizer: Tokenizer fingerprint.
        namespace: The tenant.
    """

    model: str
    tokenizer: str
    namespace: str

    def chunk(self, token_ids: TokenIds) -> str:
        """Digest that all entries of a chunk share, whatever they were computed behind."""
        return digest("chunk", str(FORMAT_VERSION), self.model, self.tokenizer, self.namespace, token_bytes(token_ids))

    def key(self, token_ids: TokenIds, context: str) -> ChunkKey:
        """Key of a chunk's KV computed behind ``context`` (a ``context_hash``)."""
        return ChunkKey(self.namespace, self.chunk(token_ids), context)
