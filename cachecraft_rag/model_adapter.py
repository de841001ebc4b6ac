"""The only file that knows transformers' cache, mask and attention interfaces.

Nothing is patched. A forward pass over selected rows uses two extension points: a ``Cache`` whose layers scatter the
new rows into the prompt's buffer before attention, and an attention function registered under our own name. A name
without a mask function makes transformers skip mask building, so the positions decide what every row sees.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from cachecraft_rag.attention import QueryBlock, attend, attention_mass, plan_blocks, sdpa_block
from cachecraft_rag.attention_record import AttentionObserver
from cachecraft_rag.prompt_kv import PromptKV

ATTENTION_NAME = "cachecraft"

_active = threading.local()
# Engines that share a model take turns: the attention name is a setting of the model.
_locks: WeakKeyDictionary[Any, threading.Lock] = WeakKeyDictionary()
_locks_guard = threading.Lock()


@dataclass(eq=False)
class _RowAttention:
    """What the attention function must know of the forward pass that runs on this thread."""

    positions: torch.Tensor
    windows: tuple[int | None, ...]
    base: str
    observe: AttentionObserver | None
    blocks: dict[int | None, list[QueryBlock]]
    calls: int = 0


def _attend_rows(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function in transformers' signature: ``query`` ``[1, num_heads, num_rows, head_dim]``."""
    context: _RowAttention | None = getattr(_active, "context", None)
    if context is None:
        raise RuntimeError(
            "the model is running inside a CacheCraftEngine on another thread; call it through the engine, or load a "
            "second copy of the model"
        )
    window = context.windows[context.calls] if context.calls < len(context.windows) else None
    context.calls += 1
    if window not in context.blocks:
        context.blocks[window] = plan_blocks(context.positions, window, allow_causal=context.base == "sdpa")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if context.observe is not None:
        context.observe(query, key, context.positions, window, scale, options.get("softcap"))
    if context.base == "sdpa":

        def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: QueryBlock) -> torch.Tensor:
            return sdpa_block(q, k, v, block, scale)

    else:
        eager = sys.modules[type(module).__module__].eager_attention_forward  # each architecture brings its own

        def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: QueryBlock) -> torch.Tensor:
            bias = block.bias(q.dtype, q.device)
            output: torch.Tensor = eager(module, q, k, v, bias, scaling=scale, dropout=0.0, **options)[0]
            return output

    return attend(query, key, value, context.blocks[window], kernel), None


AttentionInterface.register(ATTENTION_NAME, _attend_rows)


class _BufferLayer(CacheLayerMixin):
    """One layer of the prompt's buffer: new rows are scattered in place, attention sees everything up to the last."""

    is_sliding = False

    def __init__(self, kv: PromptKV, layer_idx: int, rows: torch.Tensor | None, start: int, end: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.keys: torch.Tensor = kv.keys[layer_idx]
        self.values: torch.Tensor = kv.values[layer_idx]
        self.kv, self.layer_idx = kv, layer_idx
        self.rows, self.start, self.end = rows, start, end
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        raise AssertionError("the buffer is allocated before the forward pass")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.kv.ready(self.layer_idx)  # the layer before this one has computed while it was loaded
        self.kv.correct(self.layer_idx, key_states[0], value_states[0])
        if self.rows is None:
            self.keys[:, :, self.start : self.end] = key_states
            self.values[:, :, self.start : self.end] = value_states
        else:
            self.keys.index_copy_(2, self.rows, key_states)
            self.values.index_copy_(2, self.rows, value_states)
        return self.keys[:, :, : self.end], self.values[:, :, : self.end]

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self.end, 0

    def get_seq_length(self) -> int:
        return self.start

    def get_max_length(self) -> int:
        return self.keys.shape[2]

    get_max_cache_shape = get_max_length  # its name before transformers 5


class _EndOfForward(Exception):
    """Raised by a capturing layer when the layers above are not needed."""


class _CaptureLayer(CacheLayerMixin):
    """Keeps what the model computes for one layer; the last one wanted ends the forward pass."""

    is_sliding = False

    def __init__(self, is_last: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.is_last = is_last

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values, self.is_initialized = key_states, value_states, True
        if self.is_last:
            raise _EndOfForward
        return key_states, value_states

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return (query_length if isinstance(query_length, int) else query_length.shape[0]), 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


class ModelAdapter:
    """Runs a transformers causal language model over rows of a ``PromptKV``.

    Attributes:
        model: The model, as it was given.
        config: Its text configuration.
        device: Device of its embeddings.
        num_layers: Number of layers that the configuration names.
        windows: Sliding window per layer in tokens; ``None`` for full attention.
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
        with _locks_guard:
            self._lock = _locks.setdefault(self.model, threading.Lock())
        self._kv_shape: tuple[int, int, int, torch.dtype] | None = None

    def new_kv(self, capacity: int) -> PromptKV:
        """An empty buffer for ``capacity`` tokens of this model."""
        if self._kv_shape is None:
            keys, values = self.capture(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long), 1)[0]
            self._kv_shape = (keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
        heads, key_dim, value_dim, dtype = self._kv_shape
        return PromptKV(self.num_layers, heads, key_dim, value_dim, capacity, dtype, self.device)

    @torch.inference_mode()
    def forward_rows(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: PromptKV,
        observe: AttentionObserver | None = None,
    ) -> torch.Tensor:
        """Compute some rows of a prompt in one forward pass; their KV is scattered into the buffer layer by layer.

        Args:
            token_ids: ``[num_rows]`` int64, the tokens at ``positions``.
            positions: ``[num_rows]`` int64 on the CPU, strictly increasing. Every row attends to all positions up to
                its own, so those must be in the buffer or among the rows.
            kv: The prompt's buffer.
            observe: Called in every layer, in order, before its attention.

        Returns:
            Logits of the last row, ``[vocab_size]`` float32.
        """
        return self._forward_rows(token_ids, positions, kv, observe)

    @torch.inference_mode()
    def forward_rows_recording(
        self, token_ids: torch.Tensor, positions: torch.Tensor, kv: PromptKV, record_from: int
    ) -> torch.Tensor:
        """Like ``forward_rows``, but returns the attention that the rows from ``record_from`` on pay.

        Returns:
            ``[num_layers, positions[-1] + 1]`` float32, summed over heads and the recorded rows.
        """
        recorded: list[torch.Tensor] = []

        def observe(query: torch.Tensor, key: torch.Tensor, places: torch.Tensor, *options: Any) -> None:
            rows = slice(record_from, None)
            recorded.append(attention_mass(query[:, :, rows], key, places[rows], *options))

        self._forward_rows(token_ids, positions, kv, observe)
        return torch.stack(recorded)

    def _forward_rows(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: PromptKV,
        observe: AttentionObserver | None,
        every_row: bool = False,
    ) -> torch.Tensor:
        start, end = int(positions[0]), int(positions[-1]) + 1
        is_run = end - start == positions.numel()
        rows = None if is_run else positions.to(kv.keys.device)
        layers: list[Any] = [_BufferLayer(kv, layer_idx, rows, start, end) for layer_idx in range(self.num_layers)]
        with self._lock:  # before the model's own attention is read: another thread may have ours set
            context = _RowAttention(positions, self.windows, self._base_attention(), observe, {})
            with self._own_attention(context):
                logits = self._call(token_ids, positions, Cache(layers=layers), every_row)
        if context.calls != self.num_layers:
            raise RuntimeError(f"{context.calls} of {self.num_layers} layers used the registered attention function")
        kv.length = max(kv.length, end)
        return logits

    @torch.inference_mode()
    def forward_rows_scoring(self, token_ids: torch.Tensor, positions: torch.Tensor, kv: PromptKV) -> torch.Tensor:
        """Like ``forward_rows``, but returns the logits of all rows, ``[num_rows, vocab_size]`` float32."""
        return self._forward_rows(token_ids, positions, kv, None, every_row=True)

    @torch.inference_mode()
    def forward_plain(self, token_ids: torch.Tensor, kv: PromptKV) -> torch.Tensor:
        """Ordinary prefill of a whole prompt with the model's own attention and masks: the reference.

        Args:
            token_ids: ``[num_tokens]`` int64.
            kv: An empty buffer; holds the prompt's KV afterwards.

        Returns:
            Logits of the last token, ``[vocab_size]`` float32.
        """
        end = token_ids.numel()
        layers: list[Any] = [_BufferLayer(kv, layer_idx, None, 0, end) for layer_idx in range(self.num_layers)]
        with self._lock:
            logits = self._call(token_ids, torch.arange(end), Cache(layers=layers))
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
        layers: list[Any] = [_CaptureLayer(layer_idx == num_layers - 1) for layer_idx in range(self.num_layers)]
        with self._lock:
            try:
                self._call(token_ids, positions, Cache(layers=layers))
            except _EndOfForward:
                layers = layers[:num_layers]  # reached the last layer that was asked for
        missing = [layer_idx for layer_idx, layer in enumerate(layers) if layer.keys is None]
        if missing:
            raise RuntimeError(f"layers {missing} keep no keys and values in the cache")
        return [(layer.keys, layer.values) for layer in layers if layer.keys is not None and layer.values is not None]

    def _call(
        self, token_ids: torch.Tensor, positions: torch.Tensor, cache: Cache, every_row: bool = False
    ) -> torch.Tensor:
        arguments: dict[str, Any] = {self._cache_name: cache, "use_cache": True}
        if self._takes_logits_to_keep:
            arguments["logits_to_keep"] = 0 if every_row else 1  # 0 keeps all
        ids, position_ids = token_ids.to(self.device)[None], positions.to(self.device)[None]
        output = self.model(input_ids=ids, position_ids=position_ids, **arguments)
        logits: torch.Tensor = output.logits[0].float() if every_row else output.logits[0, -1].float()
        return logits

    def _base_attention(self) -> str:
        """``"sdpa"`` or ``"eager"``: what a row's attention must equal. Kernels that only differ in speed use sdpa."""
        return "eager" if self.config._attn_implementation == "eager" else "sdpa"

    @contextmanager
    def _own_attention(self, context: _RowAttention) -> Iterator[None]:
        before = [config._attn_implementation for config in self._configs]
        _active.context = context
        try:
            for config in self._configs:
                config._attn_implementation = ATTENTION_NAME
            yield
        finally:
            for config, name in zip(self._configs, before, strict=True):
                config._attn_implementation = name
            _active.context = None


def _windows(config: Any, num_layers: int) -> tuple[int | None, ...]:
    """Sliding window of every layer, from ``layer_types`` where the configuration has them."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        uses_window = getattr(config, "use_sliding_window", True)
        return (window if uses_window else None,) * num_layers
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
