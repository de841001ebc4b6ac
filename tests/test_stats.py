"""Statistics of a request."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from cachecraft_rag.stats import RequestStats

# fmt: off
PROMISED = (
    "prompt_tokens", "reused_tokens", "recomputed_tokens", "prefilled_tokens", "charged_ratio", "chunk_hits",
    "chunk_misses", "hits_by_tier", "bytes_loaded", "queue_s", "load_s", "select_s", "prefill_s", "ttft_s", "decode_s",
    "output_tokens", "policy", "fallback_reason",
)
# fmt: on


@pytest.mark.parametrize("name", PROMISED)
def test_every_promised_figure_exists(name: str) -> None:
    assert name in RequestStats.model_fields


def test_figures_start_at_nothing_reused() -> None:
    stats = RequestStats(prompt_tokens=12)
    assert (stats.reused_tokens, stats.recomputed_tokens, stats.chunk_hits) == (0, 0, 0)
    assert stats.charged_ratio == 1.0
    assert stats.fallback_reason is None


def test_figures_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RequestStats(prompt_tokens=12).reused_tokens = 3  # type: ignore[misc]


def test_two_requests_share_no_dictionary() -> None:
    first, second = RequestStats(prompt_tokens=1), RequestStats(prompt_tokens=2)
    assert first.hits_by_tier is not second.hits_by_tier


def test_figures_survive_json() -> None:
    stats = RequestStats(prompt_tokens=12, hits_by_tier={"cold": 2}, ttft_s=0.25, fallback_reason="no RoPE")
    assert RequestStats.model_validate_json(stats.model_dump_json()) == stats


def test_notebooks_get_one_row_per_figure() -> None:
    stats = RequestStats(prompt_tokens=1234, ttft_s=0.123456789, policy="question_sensitivity")
    html = stats._repr_html_()
    assert html.count("<tr>") == len(RequestStats.model_fields) + 1  # and the head
    assert "<td>prompt_tokens</td><td>1234</td>" in html
    assert "<td>ttft_s</td><td>0.1235</td>" in html
    assert "<td>policy</td><td>question_sensitivity</td>" in html


def test_a_reason_with_angle_brackets_is_shown_as_text() -> None:
    html = RequestStats(prompt_tokens=1, fallback_reason="got <class 'torch.Tensor'>")._repr_html_()
    assert "<class" not in html
    assert "&lt;class" in html
