"""Sparse attention: which blocks of reused chunks are looked at, and that nothing else changes."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from cachecraft_rag import EngineConfig
from cachecraft_rag.attention import QueryBlock, attend, plan_blocks, sdpa_block
from cachecraft_rag.sparse_attention import KEY_BLOCK, SparseKeys
from tests.conftest import EngineMaker, passage, prefill_logits, rag_prompt

NUM_KEYS = 900
CHUNKS = [(20, 340), (350, 650), (650, 860)]
POSITIONS = torch.cat([torch.arange(40, 860, 7), torch.arange(860, NUM_KEYS)])
CPU = torch.device("cpu")
SCALING = 0.35
DIM = 8


def drawn(num_heads: int = 4, num_kv_heads: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    query = torch.randn(1, num_heads, POSITIONS.numel(), DIM, generator=draw)
    key, value = torch.randn(2, 1, num_kv_heads, NUM_KEYS, DIM, generator=draw).unbind()
    return query, key, value


class Reader:
    """A kernel that notes which keys it is given, told by their values."""

    def __init__(self) -> None:
        self.read: list[tuple[QueryBlock, list[int]]] = []

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: QueryBlock) -> torch.Tensor:
        self.read.append((block, v[0, 0, :, 0].long().tolist()))
        return sdpa_block(q, k, v, block, SCALING)


def run(
    share: float,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    window: int | None = None,
    softcap: float | None = None,
    kernel: Reader | None = None,
) -> torch.Tensor:
    sparse = SparseKeys(POSITIONS, CHUNKS, share, NUM_KEYS, CPU)
    blocks = plan_blocks(POSITIONS, window)
    return sparse.attend(*tensors, blocks, kernel or partial(sdpa_block, scaling=SCALING), SCALING, softcap)


def numbered(tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The same with values that say which key they belong to."""
    query, key, value = tensors
    return query, key, torch.arange(NUM_KEYS, dtype=torch.float32)[None, None, :, None].expand_as(value).contiguous()


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
def test_with_all_blocks_kept_it_is_the_dense_attention(heads: tuple[int, int], window: int | None) -> None:
    tensors = drawn(*heads)
    dense = attend(*tensors, plan_blocks(POSITIONS, window), partial(sdpa_block, scaling=SCALING))
    assert torch.allclose(run(1.0, tensors, window), dense, atol=1e-5)


@pytest.mark.parametrize("share", [0.05, 0.25, 0.5])
def test_every_chunk_keeps_its_share_of_blocks_and_all_other_text_is_read(share: float) -> None:
    reader = Reader()
    run(share, numbered(drawn()), kernel=reader)  # type: ignore[arg-type]
    assert len(reader.read) == len(plan_blocks(POSITIONS, None))
    for block, read in reader.read:
        places = POSITIONS[slice(*block.rows)].tolist()
        assert read == sorted(set(read))
        assert read[-1] <= places[-1]
        outside = [key for key in range(places[-1] + 1) if not any(start <= key < end for start, end in CHUNKS)]
        assert set(outside) <= set(read)
        for start, end in CHUNKS:
            own = {(place - start) // KEY_BLOCK for place in places if start <= place < end}
            kept = {(key - start) // KEY_BLOCK for key in read if start <= key < end}
            begun = math.ceil((min(end, places[-1] + 1) - start) / KEY_BLOCK)
            quota = math.ceil(share * math.ceil((end - start) / KEY_BLOCK))
            assert own <= kept
            assert len(kept) == max(0, min(begun, max(quota, len(own))))


def test_rows_see_of_the_kept_keys_what_causality_allows() -> None:
    query, key, value = drawn()
    reader = Reader()
    run(0.25, numbered((query, key, value)), kernel=reader)  # type: ignore[arg-type]
    output = run(0.25, (query, key, value))
    for block, read in reader.read:
        first, last = block.rows
        for row in range(first, last, 17):
            keys = [k for k in read if k <= POSITIONS[row]]
            scores = query[0, :, row] @ key[0, :, keys].transpose(1, 2).repeat_interleave(2, 0)
            weights = (torch.diagonal(scores, dim1=0, dim2=1).T * SCALING).softmax(-1)
            expected = torch.einsum("hk,hkd->hd", weights, value[0, :, keys].repeat_interleave(2, 0))
            assert torch.allclose(output[0, row], expected, atol=1e-5)


def test_the_block_that_the_question_looks_for_is_kept() -> None:
    query, key, value = drawn()
    wanted = range(350 + 3 * KEY_BLOCK, 350 + 4 * KEY_BLOCK)
    query[0, :, -60:, 0] = 5.0
    key[0, :, list(wanted), 0] = 5.0
    reader = Reader()
    run(0.05, numbered((query, key, value)), kernel=reader)  # type: ignore[arg-type]
    block, read = reader.read[-1]
    assert int(POSITIONS[block.rows[1] - 1]) == NUM_KEYS - 1
    assert set(wanted) <= set(read)


def test_a_block_of_scattered_keys_counts_more_than_its_mean_says() -> None:
    query, key, _value = drawn(1, 1)
    key[:, :, 20:860] = 0.0
    spread = 20 + 2 * KEY_BLOCK
    key[:, :, spread : spread + KEY_BLOCK : 2] = 3.0
    key[:, :, spread + 1 : spread + KEY_BLOCK : 2] = -3.0  # their mean is that of all other blocks
    sparse = SparseKeys(POSITIONS, CHUNKS, 0.1, NUM_KEYS, CPU)
    mass = sparse._mass(query[0, :, -40:], sparse._summarise(key[0]), SCALING, None)
    assert int(mass.argmax()) == 2


def test_blocks_out_of_the_window_take_no_ones_place() -> None:
    reader = Reader()
    run(0.05, numbered(drawn()), window=200, kernel=reader)  # type: ignore[arg-type]
    for block, read in reader.read:
        first, last = block.keys
        assert read
        assert first <= read[0]
        assert read[-1] < last


def test_a_softcap_bounds_the_estimate_as_it_bounds_the_scores() -> None:
    tensors = drawn()
    assert torch.allclose(run(0.25, tensors, softcap=1e6), run(0.25, tensors), atol=1e-4)
    assert torch.isfinite(run(0.25, tensors, softcap=2.0)).all()


def test_an_engine_answers_with_it_and_the_exact_ratio_stays_exact(make_engine: EngineMaker) -> None:
    prompt = rag_prompt(0, 1, 2, 3)
    engine = make_engine()
    engine.warm([passage(number) for number in range(4)])
    full, _ = prefill_logits(engine, prompt, reuse=False)

    def at(**recompute: float) -> torch.Tensor:
        return prefill_logits(engine, prompt, **recompute)[0]

    dense, nearly_all, few = (at(ratio=0.2, attend_share=share) for share in (1.0, 0.999999, 0.1))
    assert torch.equal(dense, at(ratio=0.2))
    assert torch.allclose(dense, nearly_all, atol=1e-4)  # rounded up: every block is kept
    assert not torch.allclose(dense, few, atol=1e-4)
    assert torch.allclose(at(ratio=1.0, attend_share=0.1), full, atol=1e-4)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1])
def test_a_share_out_of_its_range_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="attend_share"):
        EngineConfig.model_validate({"recompute": {"attend_share": share}})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_it_chooses_the_same_blocks_on_a_gpu() -> None:
    tensors = drawn()
    blocks, kernel = plan_blocks(POSITIONS, None), partial(sdpa_block, scaling=SCALING)
    cuda = torch.device("cuda")
    sparse = SparseKeys(POSITIONS, CHUNKS, 0.25, NUM_KEYS, cuda)
    on_gpu = sparse.attend(*(tensor.to(cuda) for tensor in tensors), blocks, kernel, SCALING, None)
    assert torch.allclose(on_gpu.cpu(), run(0.25, tensors), atol=1e-4)
