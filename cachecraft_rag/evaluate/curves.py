"""The curves of one model on one sample of questions: one per setting."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from cachecraft_rag.config import Behind, RecomputeConfig
from cachecraft_rag.engine import CacheCraftEngine
from cachecraft_rag.evaluate.charge import BY_CFO
from cachecraft_rag.evaluate.curve import Curve
from cachecraft_rag.evaluate.hot_share import BUDGET_SHARE, hot_share_curve
from cachecraft_rag.evaluate.load_ahead import load_ahead_curve
from cachecraft_rag.evaluate.quality_curves import (
    behind_curve,
    chunk_size_curve,
    offset_curve,
    ratio_curve,
    target_curve,
)
from cachecraft_rag.evaluate.questions import INSTRUCTION, Question, Source
from cachecraft_rag.evaluate.resplit import Resplitter, resplit
from cachecraft_rag.evaluate.run import Evaluator
from cachecraft_rag.evaluate.stored_sample import distinct_chunks, stored_chunks
from cachecraft_rag.store_config import MemoryTierConfig, StoreConfig

_SHARE_OF_WINDOW = 0.9  # of what the context window leaves; instruction, question and template need the rest


@dataclass(frozen=True)
class Extent:
    """How much is measured.

    Attributes:
        questions: Most questions for divergence.
        context_tokens: Most tokens of a question's chunks.
        chunk_sizes: Chunk sizes in tokens; those that don't fit are left out.
        offsets: Strengths of the offset, beside the one that is set; 0 is off.
        ratios: Recompute ratios.
        target_factors: Targets over the largest divergence wanted.
        hot_shares: Hot shares of device memory.
        per_request: Chunks of a replayed request, at most.
        distinct: Different chunks that are replayed, at most.
        fewest: Different chunks that are replayed, at least: with fewer, tiers hold too few entries to compare.
        replayed: Requests whose hits are counted, per hot share.
        answered: Requests that are timed, per hot share.
        windows: Prefetch windows.
        loads: Requests that are timed, per window.
    """

    questions: int = 24
    context_tokens: int = 4096
    chunk_sizes: tuple[int, ...] = (256, 512, 768, 1024)
    offsets: tuple[float, ...] = (0.0, 0.5, 1.0)
    ratios: tuple[float, ...] = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
    target_factors: tuple[float, ...] = (0.5, 1.0, 2.0)
    hot_shares: tuple[float, ...] = (0.0, 0.15, 0.3, 0.45, 0.6, 0.8, 1.0)
    per_request: int = 4
    distinct: int = 48
    fewest: int = 24
    replayed: int = 1000
    answered: int = 12
    windows: tuple[int, ...] = tuple(range(9))
    loads: int = 8

    def over(self, questions: int, chunk_tokens: int, num_chunks: int) -> Extent:
        """The same for at most so many questions, each with so many chunks of a size that is among those measured."""
        return replace(
            self,
            questions=min(questions, self.questions),
            context_tokens=chunk_tokens * num_chunks,
            chunk_sizes=(*self.chunk_sizes, chunk_tokens),
        )


FULL_EXTENT = Extent()
QUICK_EXTENT = Extent(
    questions=6,
    context_tokens=2048,
    ratios=(0.0, 0.1, 0.2, 0.4),
    distinct=24,
    fewest=12,
    replayed=200,
    answered=3,
    loads=3,
)
"""A small sample: enough to see that everything works, not to decide by."""


def context_tokens(engine: CacheCraftEngine, extent: Extent, max_new_tokens: int) -> int:
    """Most tokens of all chunks of a prompt together: those of an extent, where the context window leaves as many."""
    if engine.context_window is None:
        return extent.context_tokens
    return min(extent.context_tokens, int(_SHARE_OF_WINDOW * (engine.context_window - max_new_tokens)))


class CurveMaker:
    """Measures curves with one engine on one sample; what several curves need is made once.

    Chunks that are computed behind something else than the engine's are in engines of their own, which have host
    memory only and are closed in ``close``.

    Args:
        engine: The engine; its model must be one that can reuse chunks. Its settings are used but for those measured.
        sources: Questions with their documents, in the order in which they are taken.
        extent: How much is measured.
        recompute: Policy, and ratio where another setting than the ratio is measured; ``None`` takes the engine's.
        instruction: System message of every prompt.
        max_new_tokens: Longest answer in tokens.
        with_answer: Whether answers are generated and held against the right ones; divergence needs none.
        disk: Where the prefetch windows are measured, see ``load_ahead_curve``.
        memory: Host memory of each engine made here, in bytes; the chunks of a prompt must fit.
        seed: Draws chunks and requests.
        show_progress: Whether to show progress bars.

    Attributes:
        chunk_sizes: Those of the extent that fit.

    Raises:
        ValueError: The model can't reuse chunks, the policy has no ratio, or no chunk size fits.
    """

    def __init__(
        self,
        engine: CacheCraftEngine,
        sources: Sequence[Source],
        extent: Extent = FULL_EXTENT,
        *,
        recompute: RecomputeConfig | None = None,
        instruction: str = INSTRUCTION,
        max_new_tokens: int = 32,
        with_answer: bool = False,
        disk: Path | None = None,
        memory: int = 2**30,
        seed: int = 0,
        show_progress: bool = False,
    ) -> None:
        recompute = recompute or engine.config.recompute
        self.recompute = recompute.changed(ratio=recompute.ratio)  # fixed, where it has a target or preset
        if self.recompute.policy in (BY_CFO, "none", "all"):
            raise ValueError(f"policy: {self.recompute.policy!r} has no ratio to choose; give another")
        self.engine, self.extent = engine, extent
        self._sources, self._instruction, self._with_answer = sources, instruction, with_answer
        self._disk, self._seed, self._show_progress = disk, seed, show_progress
        self._max_new_tokens, self._memory = max_new_tokens, memory
        self._evaluator = Evaluator(engine, instruction=instruction, max_new_tokens=max_new_tokens)
        self._beside: Evaluator | None = None
        self._opened = ExitStack()
        self._context_tokens = context_tokens(engine, extent, max_new_tokens)
        self.chunk_sizes = tuple(size for size in sorted(set(extent.chunk_sizes)) if size <= self._context_tokens)
        if not self.chunk_sizes:
            raise ValueError(
                f"chunk_sizes: none of {', '.join(map(str, extent.chunk_sizes))} fits into {self._context_tokens} "
                "tokens, for all chunks of a prompt together"
            )

    def close(self) -> None:
        """Release the engines made here; the one given stays open. Curves can be measured again afterwards."""
        self._evaluator.close()
        self._opened.close()
        self._beside = None

    def __enter__(self) -> CurveMaker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @cached_property
    def _samples(self) -> dict[int, list[Question]]:
        sizes, limit = self.chunk_sizes, self.extent.questions
        prompts = self.engine.prompts
        return dict(resplit(self._sources, prompts, sizes, self._context_tokens, limit=limit, seed=self._seed))

    def questions(self, chunk_tokens: int) -> list[Question]:
        """The sample's questions over chunks of one of the sizes.

        Raises:
            ValueError: It is none of ``chunk_sizes``.
        """
        if chunk_tokens not in self.chunk_sizes:
            raise ValueError(f"chunk_tokens: {chunk_tokens} is none of {', '.join(map(str, self.chunk_sizes))}")
        return self._samples[chunk_tokens]

    def all(self, chunk_tokens: int) -> list[Curve]:
        """Every curve that needs no calibration; those by another setting at this chunk size, one of ``chunk_sizes``.

        Engines made for that are closed.

        Raises:
            RuntimeError: A store has no room for what is measured.
            ValueError: It is none of them, or all questions are longer than the context window.
        """
        with self:
            encoding = (self.chunk_size(), self.behind(chunk_tokens), self.offset(chunk_tokens))
            curves = (*encoding, self.ratio(chunk_tokens), self.hot_share(chunk_tokens), self.load_ahead(chunk_tokens))
        return [curve for curve in curves if curve is not None]

    def chunk_size(self) -> Curve:
        """Quality and throughput against chunk size."""
        return chunk_size_curve(
            self._evaluator,
            self._samples,
            self.recompute,
            with_answer=self._with_answer,
            show_progress=self._show_progress,
        )

    def behind(self, chunk_tokens: int) -> Curve | None:
        """Divergence against what chunks are computed behind, at the default ratio.

        ``None`` for the policy ``predicted``: what it predicts from was fitted to chunks computed behind one thing.
        """
        if self.recompute.policy == "predicted":
            return None
        questions, current = self.questions(chunk_tokens), self.engine.config.encode.behind
        return behind_curve(
            self._evaluator_beside(), questions, self._at_default_ratio, current, show_progress=self._show_progress
        )

    def offset(self, chunk_tokens: int, behind: Behind | None = None) -> Curve:
        """Divergence against the strength of the offset, at the default ratio; ``behind`` as in ``ratio``."""
        return offset_curve(
            self._evaluator_behind(behind),
            self.questions(chunk_tokens),
            self._at_default_ratio,
            self.extent.offsets,
            behind=behind,
            show_progress=self._show_progress,
        )

    @property
    def _at_default_ratio(self) -> RecomputeConfig:
        return self.recompute.changed(ratio=RecomputeConfig().ratio)

    def _evaluator_behind(self, behind: Behind | None) -> Evaluator:
        own = self.engine.config.encode.behind
        return self._evaluator if behind in (None, own) else self._evaluator_beside()

    def _evaluator_beside(self) -> Evaluator:
        """The evaluator whose engines differ in what chunks are computed behind.

        They take tiers from the settings of the one it is given: the engine's own may name a disk or Redis of the
        user's, where trial chunks have no business, a target, or a calibration that fits no other chunks.
        """
        if self._beside is None:
            store = StoreConfig(device_size=0, cold=MemoryTierConfig(size=self._memory))
            plain = {"store": store, "recompute": self.recompute, "calibration": None}
            config = self.engine.config.model_copy(update=plain)
            engine = CacheCraftEngine(self.engine.model, self.engine.tokenizer, config)
            self._opened.enter_context(engine)
            self._beside = Evaluator(engine, instruction=self._instruction, max_new_tokens=self._max_new_tokens)
            self._opened.enter_context(self._beside)
        return self._beside

    def ratio(self, chunk_tokens: int, recompute: RecomputeConfig | None = None, behind: Behind | None = None) -> Curve:
        """Quality against ratio.

        Args:
            chunk_tokens: One of ``chunk_sizes``.
            recompute: Policy and its settings; ``None`` takes those given.
            behind: What chunks are computed behind; ``None`` takes the engine's.
        """
        return ratio_curve(
            self._evaluator_behind(behind),
            self.questions(chunk_tokens),
            recompute or self.recompute,
            self.extent.ratios,
            behind=behind,
            with_answer=self._with_answer,
            show_progress=self._show_progress,
        )

    def target(self, chunk_tokens: int, max_divergence: float) -> Curve:
        """Measured divergence against targets around the one that is wanted; the engine must be calibrated."""
        targets = [factor * max_divergence for factor in self.extent.target_factors]
        questions = self.questions(chunk_tokens)
        return target_curve(self._evaluator, questions, self.recompute, targets, show_progress=self._show_progress)

    def hot_share(self, chunk_tokens: int, recompute: RecomputeConfig | None = None) -> Curve | None:
        """Hit rate and time to first token against hot share; ``None`` where the sample has too few chunks."""
        questions = self.questions(chunk_tokens)
        texts = self._texts(chunk_tokens)
        per_request = min(self.extent.per_request, self._context_tokens // chunk_tokens, int(len(texts) * BUDGET_SHARE))
        if per_request == 0 or len(texts) < self.extent.fewest:
            return None
        return hot_share_curve(
            self.engine,
            stored_chunks(self.engine, texts),
            [question.prompt(self._instruction).question for question in questions],
            self.extent.hot_shares,
            recompute or self.recompute,
            per_request=per_request,
            num_replayed=self.extent.replayed,
            num_requests=self.extent.answered,
            instruction=self._instruction,
            seed=self._seed,
            show_progress=self._show_progress,
        )

    def _texts(self, chunk_tokens: int) -> list[str]:
        """Different chunks: first those of the questions, then others of their documents."""
        questions = self.questions(chunk_tokens)
        asked = {question.id for question in questions}
        cutter = Resplitter(self.engine.prompts, chunk_tokens, self._context_tokens)
        whole = [cutter.chunks(source) for source in self._sources if source.id in asked]
        return distinct_chunks([*(question.chunks for question in questions), *whole], self.extent.distinct)

    def load_ahead(self, chunk_tokens: int, recompute: RecomputeConfig | None = None) -> Curve:
        """Load time against prefetch window."""
        return load_ahead_curve(
            self.engine,
            self.questions(chunk_tokens),
            self.extent.windows,
            recompute or self.recompute,
            num_requests=self.extent.loads,
            folder=self._disk,
            instruction=self._instruction,
            show_progress=self._show_progress,
        )
