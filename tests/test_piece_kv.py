"""The KV of a piece: views of its chunk's, in memory or still to be read."""

from __future__ import annotations

import pytest
import torch

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.piece_kv import PieceKV
from tests.conftest import EngineMaker, passage


def entry(num_tokens: int = 10) -> ChunkKV:
    torch.manual_seed(1)
    keys, values = torch.randn(3, 2, num_tokens, 4), torch.randn(3, 2, num_tokens, 4)
    return ChunkKV(keys, values, tuple(range(num_tokens)), 5, torch.rand(3, num_tokens).half(), is_lossy=True)


def test_a_piece_has_its_part_of_everything() -> None:
    whole = entry()
    piece = PieceKV(whole, 3, 7)
    assert piece.token_ids == (3, 4, 5, 6)
    assert (piece.num_tokens, piece.num_layers, piece.base, piece.nbytes) == (4, 3, 8, whole.nbytes)
    assert (piece.is_read, piece.is_lossy, piece.variant, piece.inter_attention) == (True, True, None, None)
    assert (piece.matches([3, 4, 5, 6]), piece.matches(range(4))) == (True, False)
    piece.read(1)
    keys, values = piece.layer(1)
    assert keys.equal(whole.keys[1, :, 3:7])
    assert values.equal(whole.values[1, :, 3:7])
    assert keys.data_ptr() == whole.keys[1, :, 3:].data_ptr()
    assert piece.sensitivity is not None
    assert whole.sensitivity is not None
    assert piece.sensitivity.equal(whole.sensitivity[:, 3:7])
    complete = piece.complete()
    assert (complete.token_ids, complete.base, complete.is_lossy) == ((3, 4, 5, 6), 8, True)
    assert complete.keys.equal(whole.keys[:, :, 3:7])


@pytest.mark.parametrize(("start", "end"), [(-1, 3), (3, 3), (4, 11)])
def test_what_is_no_part_is_refused(start: int, end: int) -> None:
    with pytest.raises(ValueError, match=f"start, end: {start}, {end} is no part of 10 tokens"):
        PieceKV(entry(), start, end)


def test_the_beginning_of_a_chunk_has_the_kv_that_is_computed_for_it_alone(make_engine: EngineMaker) -> None:
    engine = make_engine()
    encoder = engine.library._encoder
    ids = engine.prompts.encode_chunk(passage(1))
    head = PieceKV(encoder.encode(ids, False), 0, 60).complete()
    alone = encoder.encode(ids[:60], False)
    assert (head.token_ids, head.base) == (alone.token_ids, alone.base)
    torch.testing.assert_close(head.keys, alone.keys, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(head.values, alone.values, atol=1e-5, rtol=1e-5)
