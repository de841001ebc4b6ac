"""Puts stored chunk KV into the prompt's buffer, each layer just before it computes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Executor

import torch

from cachecraft_rag.chunk_kv import LayeredKV
from cachecraft_rag.plan import Action, RequestPlan
from cachecraft_rag.prompt_kv import PromptKV
from cachecraft_rag.rope import Moves, RopeSpec


def assemble(
    plan: RequestPlan,
    chunk_kvs: Sequence[LayeredKV | None],
    rope: RopeSpec,
    kv: PromptKV,
    readers: Executor | None = None,
) -> None:
    """Move every chunk's KV to its place in the prompt.

    Args:
        plan: Where the chunks go.
        chunk_kvs: The KV of every chunk that is not prefilled, on any device; left unchanged.
        rope: The rotation of every layer.
        kv: The prompt's buffer.
        readers: Threads that read ahead, so that a layer is loaded while the one before it computes; it is then put in
            place when the buffer is asked for it. ``None`` puts everything in place at once.

    Raises:
        CorruptEntryError: Stored KV turned out to be damaged; with ``readers``, ``PromptKV.ready`` raises it.
    """
    assembly = _DeviceAssembly if kv.keys.is_cuda and readers is not None else _Assembly
    kv.fill_by(assembly(plan, chunk_kvs, rope, kv, readers).fill)
    if readers is None:
        kv.ready(kv.keys.shape[0] - 1)


class _Assembly:
    """Threads read; whoever computes moves the keys, with all cores, and reads what is not there yet."""

    def __init__(
        self,
        plan: RequestPlan,
        chunk_kvs: Sequence[LayeredKV | None],
        rope: RopeSpec,
        kv: PromptKV,
        readers: Executor | None,
    ) -> None:
        self._rope, self._kv = rope, kv
        self._placed: list[tuple[int, LayeredKV]] = []
        for chunk, chunk_kv in zip(plan.chunks, chunk_kvs, strict=True):
            if chunk.action is not Action.PREFILL:
                assert chunk_kv is not None, "every chunk that is not prefilled has KV"
                self._placed.append((chunk.start, chunk_kv))
        # All chunks of a layer move at once, with what lies between them: that is computed later, and written then.
        first = min((start for start, _ in self._placed), default=0)
        end = max((start + chunk_kv.num_tokens for start, chunk_kv in self._placed), default=0)
        delta = torch.zeros(end - first, dtype=torch.long)
        for start, chunk_kv in self._placed:
            delta[start - first : start - first + chunk_kv.num_tokens] = start - chunk_kv.base
        self._place = slice(first, end)
        self._moves = Moves(delta, kv.keys.device) if delta.any() else None
        if readers is not None:
            unread = [chunk_kv for _, chunk_kv in self._placed if not chunk_kv.is_read]
            for layer_idx in range(len(rope.layers) if unread else 0):
                for chunk_kv in unread:
                    readers.submit(chunk_kv.read, layer_idx)  # an error comes again when the layer is asked for

    def fill(self, layer_idx: int) -> None:
        """Put one layer of every chunk in place."""
        buffer_keys, buffer_values = self._kv.keys[layer_idx, 0], self._kv.values[layer_idx, 0]
        layout = self._rope.layers[layer_idx]
        for start, chunk_kv in self._placed:
            keys, values = chunk_kv.layer(layer_idx)
            place = slice(start, start + chunk_kv.num_tokens)
            buffer_keys[:, place].copy_(keys, non_blocking=True)
            buffer_values[:, place].copy_(values, non_blocking=True)
        if layout is not None and self._moves is not None:
            keys = buffer_keys[:, self._place]
            self._moves.move(keys, layout, out=keys)


class _DeviceAssembly(_Assembly):
    """On a GPU one thread queues all copies and rotations on a stream of their own; layers wait for their event."""

    def __init__(
        self,
        plan: RequestPlan,
        chunk_kvs: Sequence[LayeredKV | None],
        rope: RopeSpec,
        kv: PromptKV,
        readers: Executor | None,
    ) -> None:
        super().__init__(plan, chunk_kvs, rope, kv, readers)
        device = kv.keys.device
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))  # which allocated the buffer and stored the chunks
        for buffer in (kv.keys, kv.values):
            buffer.record_stream(self._stream)  # given up halfway, it is not to be anybody else's before the copies end
        self._events = [torch.cuda.Event() for _ in rope.layers]
        self._queued = [threading.Event() for _ in rope.layers]
        self._error: Exception | None = None
        threading.Thread(target=self._queue, name="cachecraft-copy", daemon=True).start()

    def fill(self, layer_idx: int) -> None:
        """Have the current stream wait for a layer."""
        self._queued[layer_idx].wait()
        if self._error is not None:
            raise self._error
        torch.cuda.current_stream(self._kv.keys.device).wait_event(self._events[layer_idx])

    @torch.inference_mode()
    def _queue(self) -> None:
        try:
            with torch.cuda.stream(self._stream):
                for layer_idx, (event, queued) in enumerate(zip(self._events, self._queued, strict=True)):
                    super().fill(layer_idx)
                    event.record(self._stream)
                    queued.set()
        except Exception as error:  # raised again where the layer is waited for
            self._error = error
        finally:
            for queued in self._queued:
                queued.set()
