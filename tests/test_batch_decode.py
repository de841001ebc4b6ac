"""One step of several requests in one pass, and what happens when the pass fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cachecraft_rag import CacheCraftEngine
from cachecraft_rag.batch_decode import NextRow, row_alone, rows_together
from cachecraft_rag.request import Request
from tests.conftest import EngineMaker, passage, prefill_logits, rag_prompt

TOKENS = (7, 8, 9)


def prefilled(engine: CacheCraftEngine, **recompute: Any) -> list[Request]:
    engine.warm([passage(number) for number in (1, 2, 3)])
    return [prefill_logits(engine, rag_prompt(*order), **recompute)[1] for order in ((1, 2), (3,), (2, 3, 1))]


def logits(rows: list[NextRow | Exception]) -> torch.Tensor:
    return torch.stack([row.logits for row in rows if isinstance(row, NextRow)])


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3", "qwen3", "mixtral", "glm"])
def test_rows_together_are_close_to_rows_alone(name: str, make_engine: EngineMaker) -> None:
    engine = make_engine(name)
    alone = [row_alone(request, token) for request, token in zip(prefilled(engine), TOKENS, strict=True)]
    together = rows_together(engine._adapter, prefilled(engine), TOKENS)
    assert torch.allclose(logits(together), logits(alone), atol=1e-4)
    assert [row.likeliest for row in together if isinstance(row, NextRow)] == logits(alone).argmax(-1).tolist()


def test_what_each_answer_looks_at_is_recorded_in_a_batch_too(make_engine: EngineMaker) -> None:
    engine = make_engine()
    alone, together = (prefilled(engine, policy="history", ratio=0.2) for _ in range(2))
    for request, token in zip(alone, TOKENS, strict=True):
        row_alone(request, token)
    rows_together(engine._adapter, together, TOKENS)
    for one, other in zip(alone, together, strict=True):
        assert one.watch is not None
        assert other.watch is not None
        assert len(one.watch._paid) == engine._adapter.num_layers
        assert torch.allclose(torch.stack(one.watch._paid), torch.stack(other.watch._paid), atol=1e-4)


def test_a_failed_pass_is_done_row_by_row_and_only_the_culprit_fails(
    make_engine: EngineMaker, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    expected = logits(rows_together(engine._adapter, prefilled(engine), TOKENS))
    found = rows_together(engine._adapter, prefilled(engine), (7, 10**6, 9))
    assert isinstance(found[1], IndexError)
    assert torch.allclose(logits(found), expected[[0, 2]], atol=1e-4)
    assert "a pass of 3 requests failed" in caplog.text


def test_a_failed_pass_leaves_no_half_of_a_record(make_engine: EngineMaker) -> None:
    engine = make_engine()
    requests = prefilled(engine, policy="history", ratio=0.2)
    rows_together(engine._adapter, requests, (7, 10**6, 9))
    assert [request.watch for request in requests] == [None] * 3
