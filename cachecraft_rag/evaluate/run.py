"""Answers questions by full prefill and by every variant, and compares them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from cachecraft_rag.config import Behind, EngineConfig, RecomputeConfig
from cachecraft_rag.engine import CacheCraftEngine
from cachecraft_rag.evaluate.charge import BY_CFO, Charge, charge_for
from cachecraft_rag.evaluate.metrics import exact_match, rouge_l, token_f1
from cachecraft_rag.evaluate.questions import INSTRUCTION, Question
from cachecraft_rag.evaluate.teacher import answer_and_score, kl_divergence, score, top1_agreement
from cachecraft_rag.prompt import RagPrompt
from cachecraft_rag.result import GenerationResult
from cachecraft_rag.selection import POLICIES
from cachecraft_rag.stats import RequestStats
from cachecraft_rag.store_config import StoreConfig

FULL = "full prefill"
"""Label of the reference."""

PUBLISHED = ("key_deviation", "question_attention", "chunk_start", "inter_attention")
"""Selectors of others: CacheBlend, ProphetKV, EPIC, Cache-Craft."""

PUBLISHED_BEHIND: Behind = "prefix"
"""What their chunks are computed behind."""


@dataclass(frozen=True)
class Variant:
    """One way of reusing chunks.

    Attributes:
        label: What variants that differ only in how much they compute have in common: a line of the plot.
        recompute: Policy, ratio and whatever else; the ratio (of ``inter_attention``: alpha) is not looked at where
            ``charged`` is given.
        charged: Share of a full prefill that each request may compute, selection passes included; ``None`` keeps the
            ratio.
        with_answer: Whether an answer is generated; divergence and agreement need none.
        behind: ``EncodeConfig.behind`` of its chunks; ``None`` takes the engine's.
    """

    label: str
    recompute: RecomputeConfig
    charged: float | None = None
    with_answer: bool = True
    behind: Behind | None = None

    def __post_init__(self) -> None:
        if self.label in ("", FULL):
            raise ValueError(f"label: {self.label!r} is taken or empty; give another")
        if self.charged is not None and not 0.0 <= self.charged <= 1.0:
            raise ValueError(f"charged: {self.charged} is not in 0 to 1")

    @property
    def setting(self) -> str:
        """How much is computed, in words: variants of the same setting are compared."""
        if self.charged is not None:
            return f"charged {self.charged:g}"
        if self.recompute.target is not None:
            return f"target {self.recompute.target:g}"
        if self.recompute.policy == BY_CFO:
            return f"alpha {self.recompute.alpha:g}"
        return f"ratio {self.recompute.ratio:g}"


@dataclass(frozen=True)
class Outcome:
    """What one variant, or full prefill, did with one question.

    Attributes:
        question: ``Question.id``.
        label: ``Variant.label``, or ``FULL``.
        setting: ``Variant.setting``, or the empty text.
        policy: The selection policy that ran, or ``full_prefill``.
        ratio: Recompute ratio.
        charged_ratio: Share of a full prefill that was computed before the first token.
        is_reached: Whether that is as good as the charged target, see ``Charge``; ``None`` without a target.
        prompt_tokens: Length of the prompt.
        reference_tokens: Length of full prefill's own answer.
        kl: Mean divergence from full prefill over the tokens of its answer, in nats.
        top1: Share of those tokens on whose most likely value both agree.
        f1: Token F1 against the right answers; ``None`` without an answer, as for the following.
        exact_match: 1.0 where the answer is a right one.
        rouge_l: ROUGE-L against full prefill's answer.
        ttft_s: Seconds to the first token.
        ttft_ratio: The same over those of full prefill.
        answer: The answer.
        fallback_reason: Why the whole prompt was prefilled; ``None`` where chunks were reused.
    """

    question: str
    label: str
    setting: str
    policy: str
    ratio: float
    charged_ratio: float
    is_reached: bool | None
    prompt_tokens: int
    reference_tokens: int
    kl: float
    top1: float
    f1: float | None
    exact_match: float | None
    rouge_l: float | None
    ttft_s: float
    ttft_ratio: float
    answer: str | None
    fallback_reason: str | None

    def as_dict(self) -> dict[str, str | float | bool | None]:
        """Plain values, such as JSON and CSV hold; ``Outcome(**...)`` reads them back."""
        return asdict(self)


class Evaluator:
    """Compares variants with full prefill on one engine.

    Chunks are computed and stored before a question is asked, and nothing is learnt from answering: the order of
    variants does not matter. ``inter_attention`` reuses what earlier prompts left, so it gets two, each with half of
    the chunks in random order, answered in a namespace of its own that begins empty for every question. For variants
    whose chunks are computed behind something else there are engines of the same model, closed in
    ``close``.

    Args:
        engine: The engine; its model must be one that can reuse chunks.
        instruction: System message of every prompt.
        max_new_tokens: Longest answer in tokens.
        stop: Texts that end an answer.

    Raises:
        ValueError: The model can't reuse chunks, or an argument is out of its range.
    """

    def __init__(
        self,
        engine: CacheCraftEngine,
        *,
        instruction: str = INSTRUCTION,
        max_new_tokens: int = 32,
        stop: Sequence[str] = ("\n",),
    ) -> None:
        if engine.fallback_reason is not None:
            raise ValueError(f"engine: its model can't reuse chunks: {engine.fallback_reason}")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: {max_new_tokens} is too small; give at least 1")
        self._engine, self._instruction = engine, instruction
        self._max_new_tokens, self._stop = max_new_tokens, tuple(stop)
        self._namespace = f"{engine.config.namespace} by CFO"
        self._others: dict[str, CacheCraftEngine] = {}

    def close(self) -> None:
        """Release the engines made here; the one given stays open."""
        for engine in self._others.values():
            engine.close()
        self._others.clear()

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(self, question: Question, variants: Iterable[Variant]) -> Iterator[Outcome]:
        """Ask one question by full prefill, then by every variant; outcomes in that order.

        Raises:
            PromptTooLongError: Prompt and answer don't fit into the context window.
            RuntimeError: The store has no room for the question's chunks.
            ValueError: A charged target goes with a ratio that follows from a target divergence.
        """
        prompt = question.prompt(self._instruction)
        variants = list(variants)
        reference = answer_and_score(
            self._engine, prompt, max_new_tokens=self._max_new_tokens, stop=self._stop, reuse=False
        )
        asked = _Asked(question, prompt, reference.answer, reference.logits)
        yield asked.outcome(None, None, reference.logits, reference.answer.stats, reference.answer)
        ready: set[str] = set()
        for variant in variants:
            engine = self._engine_behind(variant.behind)
            if engine.config.encode.behind not in ready:
                ready.add(engine.config.encode.behind)
                engine.warm(question.chunks)
                if any(one.recompute.policy == BY_CFO and one.behind == variant.behind for one in variants):
                    self._leave_variants(engine, question)
            yield self._try(engine, asked, variant)

    def _engine_behind(self, behind: Behind | None) -> CacheCraftEngine:
        """The engine itself, or one like it that keeps its chunks in host memory only."""
        config = self._engine.config
        if behind is None or behind == config.encode.behind:
            return self._engine
        if behind not in self._others:
            config = EngineConfig(
                namespace=config.namespace,
                encode=config.encode.model_copy(update={"behind": behind}),
                store=StoreConfig(cold=config.store.cold),
                keep_exact=config.keep_exact,
                context_window=config.context_window,
            )
            self._others[behind] = CacheCraftEngine(self._engine.model, self._engine.tokenizer, config)
        return self._others[behind]

    def _leave_variants(self, engine: CacheCraftEngine, question: Question) -> None:
        """Answer two prompts that share the chunks between them, so that KV with recorded attention is left."""
        engine.invalidate(namespace=self._namespace)
        chunks = list(question.chunks)
        random.Random(question.id).shuffle(chunks)
        recompute = RecomputeConfig(policy="inter_attention")
        for half in (chunks[::2], chunks[1::2]):
            if half:
                prompt = replace(question, chunks=tuple(half)).prompt(self._instruction)
                engine.generate(prompt, recompute=recompute, namespace=self._namespace, max_new_tokens=1)

    def _try(self, engine: CacheCraftEngine, asked: _Asked, variant: Variant) -> Outcome:
        recompute, charge = variant.recompute, None
        namespace = self._namespace if recompute.policy == BY_CFO else None
        if variant.charged is not None:
            charge = charge_for(engine, asked.prompt, recompute, variant.charged, namespace)
            recompute = charge.recompute
        if not variant.with_answer:
            scored = score(engine, asked.prompt, asked.scored_ids, recompute=recompute, namespace=namespace)
            return asked.outcome(variant, charge, scored.logits, scored.stats, None)
        both = answer_and_score(
            engine,
            asked.prompt,
            asked.scored_ids,
            max_new_tokens=self._max_new_tokens,
            stop=self._stop,
            recompute=recompute,
            namespace=namespace,
        )
        return asked.outcome(variant, charge, both.logits, both.answer.stats, both.answer)


@dataclass(frozen=True, eq=False)
class _Asked:
    """A question, and what full prefill says to it."""

    question: Question
    prompt: RagPrompt
    reference: GenerationResult
    logits: torch.Tensor

    @property
    def scored_ids(self) -> tuple[int, ...]:
        """The tokens to score; an empty answer is scored where it ended, which no token changes."""
        return self.reference.token_ids or (0,)

    def outcome(
        self,
        variant: Variant | None,
        charge: Charge | None,
        logits: torch.Tensor,
        stats: RequestStats,
        answer: GenerationResult | None,
    ) -> Outcome:
        if stats.chunk_misses:
            raise RuntimeError(
                f"{stats.chunk_misses} chunks of {self.question.id} are not stored: give the store more room"
            )
        if charge is not None and abs(stats.charged_ratio - charge.charged_ratio) > 1e-9:
            raise RuntimeError(
                f"{stats.policy} was charged {stats.charged_ratio}, not the {charge.charged_ratio} that it should cost"
            )
        return Outcome(
            question=self.question.id,
            label=FULL if variant is None else variant.label,
            setting="" if variant is None else variant.setting,
            policy=stats.policy,
            ratio=1.0 if variant is None else stats.ratio,
            charged_ratio=stats.charged_ratio,
            is_reached=None if charge is None else charge.is_reached,
            prompt_tokens=stats.prompt_tokens,
            reference_tokens=len(self.reference.token_ids),
            kl=float(kl_divergence(self.logits, logits).mean()),
            top1=top1_agreement(self.logits, logits),
            f1=None if answer is None else token_f1(answer.text, self.question.answers),
            exact_match=None if answer is None else exact_match(answer.text, self.question.answers),
            rouge_l=None if answer is None else rouge_l(answer.text, self.reference.text),
            ttft_s=stats.ttft_s,
            ttft_ratio=stats.ttft_s / self.reference.stats.ttft_s,
            answer=None if answer is None else answer.text,
            fallback_reason=None if variant is None else stats.fallback_reason,
        )


def variants(
    policies: Sequence[str], amounts: Sequence[float], *, charged: bool = True, with_answer: bool = True
) -> list[Variant]:
    """Every policy with every amount; those of ``PUBLISHED`` as they were published: no offset, no averaged KV.

    Args:
        policies: Names of selection policies; each is its own label.
        amounts: Shares in 0 to 1.
        charged: Whether they are shares of a full prefill, all passes included, or recompute ratios.
        with_answer: Whether answers are generated.

    Raises:
        ValueError: There is no such policy, a share is out of its range, nothing is given, or ``inter_attention`` is
            not charged, which has no ratio.
    """
    if not policies or not amounts:
        raise ValueError("policies, amounts: give at least one of each")
    for policy in policies:
        if policy not in POLICIES:
            raise ValueError(f"policies: {policy!r} is none of {', '.join(POLICIES)}")
        if policy == BY_CFO and not charged:
            raise ValueError(f"policies: {policy!r} goes by alpha and has no ratio; give it a charged share")
    for amount in amounts:
        if not 0.0 <= amount <= 1.0:
            raise ValueError(f"amounts: {amount} is not in 0 to 1")
    made = []
    for amount in amounts:
        for policy in policies:
            settings: dict[str, object] = {"policy": policy}
            settings |= {} if charged else {"ratio": amount}
            settings |= {"offset": 0.0} if policy in PUBLISHED else {}
            recompute = RecomputeConfig.model_validate(settings)
            behind = PUBLISHED_BEHIND if policy in PUBLISHED else None
            made.append(Variant(policy, recompute, amount if charged else None, with_answer, behind))
    return made
