"""The tokens that may be recomputed, and what is stored about them."""

from __future__ import annotations

import pytest
import torch

from cachecraft_rag.candidates import Candidates
from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.plan import make_plan

LAYERS = 2
SPANS = [(2, 5), (5, 7), (8, 12)]


def kv(num_tokens: int, first: float | None = None) -> ChunkKV:
    """The KV of a chunk whose sensitivities count up from a number in the first layer, and are ten times that above."""
    counted = None if first is None else torch.arange(first, first + num_tokens).float()
    return ChunkKV(
        token_ids=tuple(range(num_tokens)),
        keys=torch.zeros(LAYERS, 1, num_tokens, 2),
        values=torch.zeros(LAYERS, 1, num_tokens, 2),
        base=0,
        sensitivity=None if counted is None else torch.stack([counted, 10 * counted]).half(),
        inter_attention=None if counted is None else counted.half(),
    )


def candidates(num_tokens: int, exact: tuple[bool, bool, bool], chunk_kvs: list[ChunkKV | None]) -> Candidates:
    return Candidates(make_plan(num_tokens, SPANS, [True] * 3, exact, 0.5), chunk_kvs, LAYERS)


def test_they_are_the_tokens_of_chunks_that_are_not_exact() -> None:
    found = candidates(14, (False, True, False), [None, None, None])
    assert found.positions.tolist() == [2, 3, 4, 8, 9, 10, 11]
    assert found.chunk_index.tolist() == [0, 0, 0, 2, 2, 2, 2]
    assert found.offset_in_chunk.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert len(found) == 7


def test_the_prompts_last_token_is_none_of_them() -> None:
    found = candidates(12, (True, True, False), [None, None, None])
    assert found.positions.tolist() == [8, 9, 10]


def test_where_all_is_exact_there_are_none() -> None:
    found = candidates(14, (True, True, True), [kv(3, 1), kv(2, 1), kv(4, 1)])
    assert len(found) == 0
    assert found.sensitivity.shape == (LAYERS, 0)
    assert found.by_chunk(torch.empty(0)) == (None, None, None)


def test_what_is_stored_is_looked_up_and_stands_at_1_or_0_where_nothing_is() -> None:
    found = candidates(12, (False, False, False), [kv(3, 1), None, kv(4, 5)])
    assert found.sensitivity.tolist() == [[1, 2, 3, 1, 1, 5, 6, 7], [10, 20, 30, 1, 1, 50, 60, 70]]
    assert found.inter_attention.tolist() == [1, 2, 3, 0, 0, 5, 6, 7]
    assert found.sensitivity.dtype == torch.float32


def test_a_chunk_whose_sensitivity_is_not_measured_yet_counts_as_unknown() -> None:
    found = candidates(14, (False, True, True), [kv(3), kv(2, 1), None])
    assert found.sensitivity.tolist() == [[1, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize("num_tokens", [12, 14])
def test_values_go_to_chunks_and_back(num_tokens: int) -> None:
    found = candidates(num_tokens, (False, True, False), [None, None, None])
    values = torch.arange(1.0, len(found) + 1)
    by_chunk = found.by_chunk(values)
    assert by_chunk[1] is None
    assert [len(whole) for whole in by_chunk if whole is not None] == [3, 4]
    assert torch.equal(found.gather(by_chunk), values)
