"""One request on its way through the engine: its chunks, its plan, its figures."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from cachecraft_rag.attention_record import ChunkRecorder
from cachecraft_rag.config import RecomputeConfig, SamplingConfig
from cachecraft_rag.decode import NextLogits
from cachecraft_rag.deviation import DeviationModel
from cachecraft_rag.history import AnswerHistory, AnswerWatch
from cachecraft_rag.keys import KeyMaker
from cachecraft_rag.plan import Action, RequestPlan
from cachecraft_rag.prefill import PrefillResult
from cachecraft_rag.prompt import EncodedPrompt
from cachecraft_rag.prompt_kv import PromptKV
from cachecraft_rag.quality import Goal
from cachecraft_rag.request_chunk import RequestChunk
from cachecraft_rag.similar import AskedQuestion
from cachecraft_rag.stats import RequestStats


@dataclass(eq=False)
class Request:
    """What the engine knows of a request while it runs.

    Attributes:
        encoded: The prompt.
        sampling: How the answer is drawn.
        recompute: Policy and ratio.
        namespace: Whose chunks are reused.
        started: ``time.perf_counter()`` at the call.
        goal: How its ratio is chosen and its divergence predicted; ``None`` for the ratio of ``recompute``.
        deviation: Predicts deviations, where the policy asks for that.
        since: ``Forgetting.count`` of the namespace at the call.
        question: The user's question, where the prompt names it.
        asked: The same with what is known from similar ones, where these are looked for.
        figures: Fields of ``RequestStats`` as they become known.
        keys: Names what is stored, for the model as it was when the request was begun; ``None`` without reuse.
        chunks: The chunks, when they are reused.
        plan: What happens to them.
        kv: The prompt's buffer; ``None`` for a model that keeps its own cache.
        recorder: What chunks that are to become variants paid attention to.
        watch: Records what the answer looks at, where the policy learns from it.
        logits: Logits of the last prompt token, ``[vocab_size]`` float32.
        next_logits: The decoding step.
    """

    encoded: EncodedPrompt
    sampling: SamplingConfig
    recompute: RecomputeConfig
    namespace: str
    started: float
    goal: Goal | None = None
    deviation: DeviationModel | None = None
    since: int = 0
    question: str = ""
    asked: AskedQuestion | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    keys: KeyMaker | None = None
    chunks: list[RequestChunk] = field(default_factory=list)
    plan: RequestPlan | None = None
    kv: PromptKV | None = None
    recorder: ChunkRecorder | None = None
    watch: AnswerWatch | None = None
    logits: torch.Tensor | None = None
    next_logits: NextLogits | None = None

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.encoded.token_ids)

    @property
    def capacity(self) -> int:
        """Length of the prompt and the longest answer."""
        return self.num_tokens + self.sampling.max_new_tokens

    def release(self) -> None:
        """Let go of the prompt's KV, and give its buffer back."""
        if self.kv is not None:
            self.kv.release()
        self.kv = self.logits = self.next_logits = None

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time of a block to a figure."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.figures[name] = self.figures.get(name, 0.0) + time.perf_counter() - started

    @property
    def earlier(self) -> list[torch.Tensor | None] | None:
        """What earlier answers looked at in every chunk, where the policy wants to know."""
        return None if self.watch is None else self.watch.earlier

    def watch_answer(self, history: AnswerHistory, num_layers: int) -> None:
        """If the policy is ``history``, look up what is known of the chunks, and have the answer recorded."""
        if self.recompute.policy == "history":
            names = [(chunk.exact_key.namespace, chunk.exact_key.chunk) for chunk in self.chunks]
            bounds = [(span.start, span.end) for span in self.encoded.spans]
            self.watch = AnswerWatch(history, names, bounds, num_layers)

    def count_lookups(self) -> None:
        """Fill in hits, misses and bytes after the chunks were looked up."""
        loaded = [chunk.chunk_kv for chunk in self.chunks if chunk.chunk_kv is not None]
        self.figures |= {
            "chunk_hits": len(loaded),
            "chunk_misses": len(self.chunks) - len(loaded),
            "hits_by_tier": dict(Counter(chunk.tier for chunk in self.chunks if chunk.tier is not None)),
            "loads_declined": sum(chunk.is_declined for chunk in self.chunks),
            "bytes_loaded": sum(chunk_kv.nbytes for chunk_kv in loaded),
        }

    def count_prefill(self, prefill: PrefillResult, encoded_tokens: int, num_layers: int) -> None:
        """Fill in what was chosen and computed before the first token.

        Args:
            prefill: What came of it; when it was refused, the full prefill to come is counted too.
            encoded_tokens: Tokens computed for chunks that were not stored.
            num_layers: Number of layers of the model.
        """
        self.plan, self.recorder = prefill.plan, prefill.recorder
        self.count_tokens(prefill.selected)
        everything = self.num_tokens * num_layers
        computed = prefill.token_layers + encoded_tokens * num_layers
        self.figures |= {
            "charged_ratio": (computed + (0 if prefill.refusal is None else everything)) / everything,
            "select_s": prefill.select_s,
            "prefill_s": prefill.prefill_s,
            "ratio": self._ratio(prefill.plan),
            "residual": prefill.residual,
            "predicted_divergence": prefill.predicted_divergence,
        }

    def _ratio(self, plan: RequestPlan) -> float:
        is_chosen = plan.chunk_budgets is not None or (self.goal is not None and self.goal.target is not None)
        return plan.ratio if is_chosen else self.recompute.ratio

    def count_tokens(self, selected: torch.Tensor) -> None:
        """Fill in the token counts; ``selected`` are the positions that were computed again."""
        assert self.plan is not None
        hits = [chunk for chunk in self.plan.chunks if chunk.action is Action.REUSE]
        stored = sum(chunk.end - chunk.start for chunk in hits)
        again = sum(int(((selected >= chunk.start) & (selected < chunk.end)).sum()) for chunk in hits)
        again += sum(chunk.end == self.num_tokens for chunk in hits)  # the last token is computed in any case
        reused = self.plan.head + stored - again
        self.figures |= {
            "reused_tokens": reused,
            "recomputed_tokens": again,
            "prefilled_tokens": self.num_tokens - reused - again,
        }

    def stats(self) -> RequestStats:
        """The figures so far."""
        return RequestStats(prompt_tokens=self.num_tokens, **{"ratio": self.recompute.ratio, **self.figures})
