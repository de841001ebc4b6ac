"""Runs models; with its two parts, model_cache and model_attention, all that knows transformers' interfaces.

A forward pass over selected rows uses two extension points: a ``Cache`` whose layers scatter the new rows into the
prompt's buffer before attention, and an attention function registered under our own name. Nothing stays patched.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers.cache_utils import Cache

from cachecraft_rag.attention_record import AttentionObserver
from cachecraft_rag.kv_pool import KVPool
from cachecraft_rag.linear_rows import LinearRows
from cachecraft_rag.model_attention import ATTENTION_NAME, BatchPass, RecordingPass, RowPass, set_pass
from cachecraft_rag.model_cache import BatchLayer, BufferLayer, CaptureLayer, EndOfForward
from cachecraft_rag.prompt_kv import PromptKV
from cachecraft_rag.sparse_attention import SparseKeys

# Engines that share a model take turns: the attention name is a setting of the model.
_locks: WeakKeyDictionary[Any, threading.Lock] = WeakKeyDictionary()
_locks_guard = threading.Lock()


class ModelAdapter:
    """Runs a transformers causal language model over rows of a ``PromptKV``.

    Attributes:
        model: The model, as it was given.
        config: Its text configuration.
        device: Device of its embeddings.
        num_layers: Number of layers that the configuration names.
        windows: Sliding window per layer in tokens, as the configuration has them; ``None`` for full attention.
            ``probe`` takes out those that the model does not look at.
    """

    def __init__(self, model: Any) -> None:
        self.model: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.config: Any = self.model.config.get_text_config()
        self.device: torch.device = self.model.get_input_embeddings().weight.device
        self.num_layers: int = getattr(self.config, "num_hidden_layers", 0)
        self.windows = _windows(self.config, self.num_layers)
        parameters = inspect.signature(self.model.forward).parameters
        self.takes_positions = "position_ids" in parameters
        self._cache_name = next((name for name in ("cache", "past_key_values") if name in parameters), "cache")
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        # Modules read the attention name from their own config, which may be a part of the model's.
        self._configs = list({id(m.config): m.config for m in self.model.modules() if hasattr(m, "config")}.values())
        self._linear_rows = LinearRows(self.model)
        with _locks_guard:
            self._lock = _locks.setdefault(self.model, threading.Lock())
        self._pool: KVPool | None = None

    def new_kv(self, capacity: int) -> PromptKV:
        """A buffer of its own for ``capacity`` tokens of this model; zero."""
        keys, values = self._kv_pool().make(capacity)
        return PromptKV(keys.zero_(), values.zero_())

    def request_kv(self, capacity: int) -> PromptKV:
        """A buffer for ``capacity`` tokens of this model that requests before may have used; to be released."""
        pool = self._kv_pool()
        buffers = pool.take(capacity)
        keys, values = (whole[:, :, :, :capacity] for whole in buffers)
        return PromptKV(keys, values, partial(pool.give, buffers))

    def drop_buffers(self, num_kept: int = 0) -> None:
        """Let go of the buffers that were released, but for some."""
        if self._pool is not None:
            self._pool.shrink(num_kept)

    def kv_bytes(self, capacity: int) -> int:
        """Bytes of such a buffer; 0 as long as none was ever made (models that keep their own cache)."""
        return 0 if self._pool is None else self._pool.token_bytes * capacity

    def _kv_pool(self) -> KVPool:
        if self._pool is None:
            first = self.capture(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long), 1)[0]
            keys, values = ((self.num_layers, one.shape[1], one.shape[3]) for one in first)
            self._pool = KVPool(keys, values, first[0].dtype, self.device)
        return self._pool

    @torch.inference_mode()
    def forward_rows(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: PromptKV,
        observe: AttentionObserver | None = None,
        sparse: SparseKeys | None = None,
    ) -> torch.Tensor:
        """Compute some rows of a prompt in one forward pass; their KV is scattered into the buffer layer by layer.

        Args:
            token_ids: ``[num_rows]`` int64, the tokens at ``positions``.
            positions: ``[num_rows]`` int64 on the CPU, strictly increasing. Every row attends to all positions up to
                its own, so those must be in the buffer or among the rows.
            kv: The prompt's buffer.
            observe: Called in every layer, in order, before its attention.
            sparse: Chooses the keys that are read; ``None`` reads all.

        Returns:
            Logits of the last row, ``[vocab_size]`` float32.
        """
        make_pass = partial(RowPass, positions, self.windows, observe=observe, sparse=sparse)
        return self._forward_rows(token_ids, positions, kv, make_pass)

    @torch.inference_mode()
    def forward_rows_recording(
        self, token_ids: torch.Tensor, positions: torch.Tensor, kv: PromptKV, record_from: int
    ) -> torch.Tensor:
        """Like ``forward_rows``, but returns the attention that the rows from ``record_from`` on pay.

        It ends with the last layer's attention, so it returns no logits.

        Returns:
            ``[num_layers, positions[-1] + 1]`` float32, summed over heads and the recorded rows.
        """
        masses: list[torch.Tensor] = []
        make_pass = partial(RecordingPass, positions, self.windows, record_from=record_from, masses=masses)
        with suppress(EndOfForward):
            self._forward_rows(token_ids, positions, kv, make_pass)
        return torch.stack(masses)

    def _forward_rows(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: PromptKV,
        make_pass: Callable[[str], RowPass],
    ) -> torch.Tensor:
        start, end = int(positions[0]), int(positions[-1]) + 1
        is_run = end - start == positions.numel()
        rows = None if is_run else positions.to(kv.keys.device)
        layers: list[Any] = [BufferLayer(kv, layer_idx, rows, start, end) for layer_idx in range(self.num_layers)]
        with self._lock:  # before the model's own attention is read: another thread may have ours set
            context = make_pass(self._base_attention())
            with self._own_attention(context):
                logits = self._call(token_ids[None], positions[None], Cache(layers=layers), context)
        self._check_calls(context)
        kv.length = max(kv.length, end)
        return logits[0] if context.every_row else logits[0, -1]

    @torch.inference_mode()
    def forward_batch(
        self,
        token_ids: Sequence[int],
        kvs: Sequence[PromptKV],
        observers: Sequence[AttentionObserver | None],
    ) -> torch.Tensor:
        """Compute the next row of several prompts in one forward pass; the weights are read once for all of them.

        Args:
            token_ids: The token behind each prompt's last one.
            kvs: The prompts' buffers, each another one, with room for it.
            observers: As ``observe`` of ``forward_rows``, one per prompt.

        Returns:
            Logits of every row, ``[num_prompts, vocab_size]`` float32.
        """
        layers: list[Any] = [BatchLayer(kvs, layer_idx) for layer_idx in range(self.num_layers)]
        ids, positions = torch.tensor(token_ids)[:, None], torch.tensor([[kv.length] for kv in kvs])
        with self._lock:
            context = BatchPass(kvs, self.windows, self._base_attention(), observers)
            with self._own_attention(context):
                logits = self._call(ids, positions, Cache(layers=layers))[:, -1]
        self._check_calls(context)
        for kv in kvs:
            kv.length += 1
        return logits

    @torch.inference_mode()
    def forward_rows_scoring(self, token_ids: torch.Tensor, positions: torch.Tensor, kv: PromptKV) -> torch.Tensor:
        """Like ``forward_rows``, but returns the logits of all rows, ``[num_rows, vocab_size]`` float32."""
        return self._forward_rows(token_ids, positions, kv, partial(RowPass, positions, self.windows, every_row=True))

    @torch.inference_mode()
    def forward_plain(self, token_ids: torch.Tensor, kv: PromptKV, window: int | None = None) -> torch.Tensor:
        """Ordinary prefill of a whole prompt with the model's own attention and masks: the reference.

        Args:
            token_ids: ``[num_tokens]`` int64.
            kv: An empty buffer; holds the prompt's KV afterwards.
            window: What is written in the place of every sliding window of the model meanwhile; ``None`` leaves them.

        Returns:
            Logits of the last token, ``[vocab_size]`` float32.
        """
        end = token_ids.numel()
        layers: list[Any] = [BufferLayer(kv, layer_idx, None, 0, end) for layer_idx in range(self.num_layers)]
        with self._lock, self._windows_set_to(window):
            logits = self._call(token_ids[None], torch.arange(end)[None], Cache(layers=layers))[0, -1]
        kv.length = end
        return logits

    @torch.inference_mode()
    def capture(
        self, token_ids: torch.Tensor, positions: torch.Tensor, num_layers: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values that the model computes for a run of tokens with nothing before it.

        Args:
            token_ids: ``[num_tokens]`` int64.
            positions: ``[num_tokens]`` int64, consecutive.
            num_layers: How many of the first layers; the forward pass ends when the last one's keys are there.

        Returns:
            Per layer keys and values, ``[1, num_kv_heads, num_tokens, head_dim]``.
        """
        layers: list[Any] = [CaptureLayer(layer_idx == num_layers - 1) for layer_idx in range(self.num_layers)]
        with self._lock:
            try:
                self._call(token_ids[None], positions[None], Cache(layers=layers))
            except EndOfForward:
                layers = layers[:num_layers]  # reached the last layer that was asked for
        missing = [layer_idx for layer_idx, layer in enumerate(layers) if layer.keys is None]
        if missing:
            raise RuntimeError(f"layers {missing} keep no keys and values in the cache")
        return [(layer.keys, layer.values) for layer in layers if layer.keys is not None and layer.values is not None]

    def _call(
        self, token_ids: torch.Tensor, positions: torch.Tensor, cache: Cache, row_pass: RowPass | None = None
    ) -> torch.Tensor:
        """Logits ``[batch, num_rows, vocab_size]`` float32 of ``[batch, num_rows]`` tokens: all rows, or the last."""
        every_row, reads_last = (False, None) if row_pass is None else (row_pass.every_row, row_pass.reads_last)
        arguments: dict[str, Any] = {self._cache_name: cache, "use_cache": True}
        if self._takes_logits_to_keep:
            arguments["logits_to_keep"] = 0 if every_row else 1  # 0 keeps all
        ids, position_ids = token_ids.to(self.device), positions.to(self.device)
        with self._linear_rows.active(token_ids.shape[1], reads_last):
            output = self.model(input_ids=ids, position_ids=position_ids, **arguments)
        logits: torch.Tensor = (output.logits if every_row else output.logits[:, -1:]).float()
        return logits

    def _check_calls(self, context: RowPass | BatchPass) -> None:
        if context.calls != self.num_layers:
            raise RuntimeError(f"{context.calls} of {self.num_layers} layers used the registered attention function")

    @contextmanager
    def _windows_set_to(self, window: int | None) -> Iterator[None]:
        """Overwrite the sliding windows of the configurations and of the modules that keep one of their own."""
        holders = [] if window is None else [*self._configs, *self.model.modules()]
        before = [(holder, holder.sliding_window) for holder in holders if _has_window(holder)]
        try:
            for holder, _ in before:
                holder.sliding_window = window
            yield
        finally:
            for holder, own in before:
                holder.sliding_window = own

    def _base_attention(self) -> str:
        """``"sdpa"`` or ``"eager"``: what a row's attention must equal. Kernels that only differ in speed use sdpa."""
        return "eager" if self.config._attn_implementation == "eager" else "sdpa"

    @contextmanager
    def _own_attention(self, context: RowPass | BatchPass) -> Iterator[None]:
        before = [config._attn_implementation for config in self._configs]
        set_pass(context)
        try:
            for config in self._configs:
                config._attn_implementation = ATTENTION_NAME
            yield
        finally:
            for config, name in zip(self._configs, before, strict=True):
                config._attn_implementation = name
            set_pass(None)


def _has_window(holder: Any) -> bool:
    return isinstance(getattr(holder, "sliding_window", None), int)


def _windows(config: Any, num_layers: int) -> tuple[int | None, ...]:
    """Sliding window of every layer, from ``layer_types`` where the configuration has them."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        uses_window = getattr(config, "use_sliding_window", True)
        return (window if uses_window else None,) * num_layers
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
