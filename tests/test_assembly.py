"""Chunks on their way into the prompt's buffer."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cachecraft_rag.assembly import assemble
from cachecraft_rag.capability import probe
from cachecraft_rag.chunk_kv import ChunkKV, LayeredKV
from cachecraft_rag.encoder import ChunkEncoder
from cachecraft_rag.errors import CorruptEntryError
from cachecraft_rag.model_adapter import ModelAdapter
from cachecraft_rag.plan import make_plan
from cachecraft_rag.prefill import selective_prefill
from cachecraft_rag.prompt_kv import PromptKV
from cachecraft_rag.rope import RopeSpec
from cachecraft_rag.selection import POLICIES
from cachecraft_rag.store import EntryCodec
from cachecraft_rag.store.readers import BytesReader
from tests.store_entries import key
from tests.tiny_models import make

IDS = torch.randint(3, 500, (150,), generator=torch.Generator().manual_seed(4))
SPANS = [(10, 50), (55, 95), (95, 135)]
KEY = key("chunk")


class Setting:
    """A prompt of 150 tokens with three chunks computed behind a prefix."""

    def __init__(self, name: str = "llama", ratio: float = 0.2) -> None:
        self.adapter = ModelAdapter(make(name))
        encoder = ChunkEncoder(self.adapter, (tuple(range(3, 9)), tuple(range(100, 140))))
        self.chunk_kvs: list[ChunkKV] = [encoder.encode(IDS[start:end].tolist(), True) for start, end in SPANS]
        self.plan = make_plan(150, SPANS, [True] * 3, [False] * 3, ratio)
        rope = probe(self.adapter).rope
        assert rope is not None
        self.rope: RopeSpec = rope

    def assembled(self, chunk_kvs: list[LayeredKV], readers: ThreadPoolExecutor | None = None) -> PromptKV:
        kv = self.adapter.new_kv(160)
        assemble(self.plan, chunk_kvs, self.rope, kv, readers)
        return kv

    def lazy(self) -> list[LayeredKV]:
        """The chunks as if they came from a disk."""
        codec = EntryCodec()
        return [codec.open(KEY, [BytesReader(s) for s in codec.encode(KEY, kv)]) for kv in self.chunk_kvs]

    def damaged(self) -> list[LayeredKV]:
        """The same, the last one with a byte of its last layer flipped."""
        codec, chunks = EntryCodec(), self.lazy()
        shard = bytearray(codec.encode(KEY, self.chunk_kvs[-1])[0])
        shard[-20] ^= 1
        return [*chunks[:-1], codec.open(KEY, [BytesReader(bytes(shard))])]


@pytest.mark.parametrize("name", ["llama", "gemma3", "glm"])
def test_read_ahead_or_not_the_buffer_is_the_same(name: str) -> None:
    setting = Setting(name)
    at_once = setting.assembled(list(setting.chunk_kvs))
    with ThreadPoolExecutor(3) as readers:
        ahead = setting.assembled(setting.lazy(), readers)
        assert not ahead.keys.any()  # nothing is in place before it is asked for
        for layer_idx in range(setting.adapter.num_layers):
            for one, other in zip(ahead.layer(layer_idx), at_once.layer(layer_idx), strict=True):
                assert torch.equal(one, other)
    assert torch.equal(ahead.keys, at_once.keys)
    assert torch.equal(ahead.values, at_once.values)


def test_every_layer_is_placed_just_before_it_computes() -> None:
    setting = Setting()
    kv = setting.adapter.new_kv(160)
    assemble(setting.plan, list(setting.chunk_kvs), setting.rope, kv)
    expected = selective_prefill(setting.adapter, setting.plan, setting.chunk_kvs, IDS, kv, POLICIES["chunk_start"])
    with ThreadPoolExecutor(2) as readers:
        ahead = setting.assembled(setting.lazy(), readers)
        result = selective_prefill(
            setting.adapter, setting.plan, setting.chunk_kvs, IDS, ahead, POLICIES["chunk_start"]
        )
    assert torch.equal(result.logits, expected.logits)
    assert ahead.fill_s > 0.0


def test_a_layer_is_read_while_the_one_before_is_used() -> None:
    """The reader of the second layer runs although nobody has asked for that layer yet."""
    setting, read = Setting(), threading.Event()

    class Watched:
        def __init__(self, kv: LayeredKV) -> None:
            self._kv = kv

        def __getattr__(self, name: str) -> object:
            return getattr(self._kv, name)

        def read(self, layer_idx: int) -> None:
            self._kv.read(layer_idx)
            if layer_idx == 1:
                read.set()

    with ThreadPoolExecutor(1) as readers:
        setting.assembled([Watched(kv) for kv in setting.lazy()], readers).layer(0)  # type: ignore[misc]
        assert read.wait(20)


@pytest.mark.parametrize("threads", [0, 2])
def test_a_damaged_layer_comes_out_where_it_is_needed(threads: int) -> None:
    setting = Setting()
    if not threads:
        with pytest.raises(CorruptEntryError):
            setting.assembled(setting.damaged())
        return
    with ThreadPoolExecutor(threads) as readers:
        kv = setting.assembled(setting.damaged(), readers)
        with pytest.raises(CorruptEntryError):
            selective_prefill(setting.adapter, setting.plan, setting.chunk_kvs, IDS, kv, POLICIES["chunk_start"])


@pytest.mark.gpu
def test_on_a_gpu_copies_run_beside_the_computation() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    setting = Setting()
    expected = setting.assembled(list(setting.chunk_kvs))
    device_kv = PromptKV(
        torch.zeros_like(expected.keys, device="cuda"), torch.zeros_like(expected.values, device="cuda")
    )
    with ThreadPoolExecutor(2) as readers:
        assemble(setting.plan, setting.lazy(), setting.rope, device_kv, readers)
        device_kv.ready(setting.adapter.num_layers - 1)
    torch.cuda.synchronize()
    assert torch.allclose(device_kv.keys.cpu(), expected.keys, atol=1e-5)
    assert torch.equal(device_kv.values.cpu(), expected.values)
