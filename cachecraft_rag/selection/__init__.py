"""Which tokens of reused chunks are recomputed: one policy per file, chosen by name."""

from __future__ import annotations

from typing import get_args

from cachecraft_rag.config import PolicyName
from cachecraft_rag.selection.base import ScoringPolicy, SelectionContext, SelectionPolicy
from cachecraft_rag.selection.chunk_start import ChunkStart
from cachecraft_rag.selection.fixed import AllTokens, NoTokens
from cachecraft_rag.selection.history import History
from cachecraft_rag.selection.inter_attention import InterAttention
from cachecraft_rag.selection.key_deviation import KeyDeviation
from cachecraft_rag.selection.predicted import Predicted
from cachecraft_rag.selection.question_attention import QuestionAttention
from cachecraft_rag.selection.question_deviation import QuestionDeviation
from cachecraft_rag.selection.question_sensitivity import QuestionSensitivity
from cachecraft_rag.selection.random import RandomTokens

POLICIES: dict[str, SelectionPolicy] = {
    policy.name: policy
    for policy in (
        NoTokens(),
        AllTokens(),
        RandomTokens(),
        ChunkStart(),
        KeyDeviation(),
        QuestionAttention(),
        QuestionDeviation(),
        QuestionSensitivity(),
        InterAttention(),
        History(),
        Predicted(),
    )
}

assert set(POLICIES) == set(get_args(PolicyName)), "every policy that the configuration names exists"

__all__ = ["POLICIES", "ScoringPolicy", "SelectionContext", "SelectionPolicy"]
