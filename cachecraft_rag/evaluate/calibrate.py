"""Measures how far a model's answers drift from full prefill's, and what predicts it.

For every prompt full prefill answers greedily; then the same answer is scored behind several recompute ratios, and the
divergence is set against what the policy's scores say was left uncorrected. Before that, stored KV is compared with
full prefill's, token by token, to learn what predicts how far it is off.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tqdm.auto import tqdm

from cachecraft_rag.calibration import Calibration
from cachecraft_rag.candidates import Candidates
from cachecraft_rag.config import RecomputeConfig, SamplingConfig
from cachecraft_rag.deviation import DeviationFit, DeviationModel, relative_deviation
from cachecraft_rag.engine import CacheCraftEngine
from cachecraft_rag.errors import UnsupportedModelError
from cachecraft_rag.evaluate.bootstrap import predicted_mean
from cachecraft_rag.evaluate.fitting import fits
from cachecraft_rag.evaluate.teacher import kl_divergence, score
from cachecraft_rag.prompt import RagPrompt
from cachecraft_rag.quality import calibrated_settings
from cachecraft_rag.request import Request
from cachecraft_rag.selection import POLICIES, ScoringPolicy

RATIOS = (0.05, 0.1, 0.2, 0.4)

_MOST_COMPARED = 16  # prompts: each gives thousands of tokens to fit seven numbers per layer to
_NAMESPACE = "cachecraft-calibration"  # of its own: what users have stored is neither used nor changed
_LEAST_DIVERGENCE = 1e-6  # below it there is only rounding
_EXPONENTS = (0.25, 3.0)  # what a few odd questions may make of it; measured: 0.7 to 1.1


@dataclass(frozen=True)
class Measurement:
    """One prompt answered at one ratio.

    Attributes:
        prompt: Number of the prompt.
        ratio: The recompute ratio.
        residual: ``RequestStats.residual``.
        divergence: Mean KL divergence from full prefill per token of its answer, in nats.
    """

    prompt: int
    ratio: float
    residual: float
    divergence: float


def calibrate(
    engine: CacheCraftEngine,
    prompts: Sequence[RagPrompt],
    ratios: Sequence[float] = RATIOS,
    answer_tokens: int = 24,
    *,
    recompute: RecomputeConfig | None = None,
    quantile: float = 0.9,
    show_progress: bool = False,
) -> Calibration:
    """Measure an engine and fit the curve that predicts its divergence.

    Args:
        engine: The engine: its model, and the settings that will be in force later.
        prompts: Prompts like those to come, with their chunks; some dozens. Those that don't fit into the context
            window are left out.
        ratios: Recompute ratios to measure, between 0 and 1.
        answer_tokens: Longest answer in tokens.
        recompute: Policy and its settings; ``None`` takes the engine's. The ratio is not looked at.
        quantile: Confidence that the mean over as many other prompts of the kind is below the prediction; above 0.5.
        show_progress: Whether to show a progress bar.

    Raises:
        RuntimeError: The store has no room for the chunks of one prompt.
        UnsupportedModelError: The model can't reuse chunks.
        ValueError: An argument is out of its range, the policy gives no scores, the prompts hold no chunks, or fewer
            than two of them fit.
    """
    check(engine, prompts, ratios, recompute)
    prompts = fitting(engine, prompts)
    regressor = fit_deviation(engine, prompts, show_progress=show_progress)
    found = measure(
        engine, prompts, ratios, answer_tokens, recompute=recompute, deviation=regressor, show_progress=show_progress
    )
    return fit(engine, found, recompute=recompute, quantile=quantile, deviation=regressor)


def measure(
    engine: CacheCraftEngine,
    prompts: Sequence[RagPrompt],
    ratios: Sequence[float] = RATIOS,
    answer_tokens: int = 24,
    *,
    recompute: RecomputeConfig | None = None,
    deviation: DeviationModel | None = None,
    show_progress: bool = False,
) -> list[Measurement]:
    """Answer every prompt by full prefill and score the answer at every ratio; arguments and errors as above.

    Args:
        deviation: For the policy ``predicted``, from ``fit_deviation``; ``None`` takes the engine's.

    Raises:
        PromptTooLongError: A prompt doesn't fit into the context window; see ``fitting``.
    """
    recompute = recompute or engine.config.recompute
    check(engine, prompts, ratios, recompute)
    measurements: list[Measurement] = []
    with engine.intake.quality.predicting_by(deviation):
        for number, prompt in enumerate(tqdm(prompts, desc="calibrate", unit="prompt", disable=not show_progress)):
            try:
                measurements += _measure_one(engine, number, prompt, ratios, answer_tokens, recompute)
            finally:
                engine.invalidate(namespace=_NAMESPACE)
    return measurements


def check(
    engine: CacheCraftEngine,
    prompts: Sequence[RagPrompt],
    ratios: Sequence[float] = RATIOS,
    recompute: RecomputeConfig | None = None,
) -> None:
    """Make sure that an engine can be calibrated with these; arguments and errors as above."""
    recompute = recompute or engine.config.recompute
    if not isinstance(POLICIES[recompute.policy], ScoringPolicy):
        raise ValueError(f"policy: {recompute.policy!r} gives tokens no scores, so there is nothing to predict from")
    if len(set(ratios)) < 2 or not all(0.0 < ratio < 1.0 for ratio in ratios):
        raise ValueError(f"ratios: {tuple(ratios)} must be at least two numbers between 0 and 1")
    if len(prompts) < 2:
        raise ValueError(f"prompts: {len(prompts)} can't show how much prompts differ; give at least 2, better 30")
    if engine.fallback_reason is not None:
        raise UnsupportedModelError(engine.fallback_reason)


def fitting(engine: CacheCraftEngine, prompts: Sequence[RagPrompt]) -> list[RagPrompt]:
    """The prompts that fit into the context window.

    Raises:
        ValueError: They are fewer than two.
    """
    try:
        found = [prompt for prompt in prompts if fits(engine, prompt, _NAMESPACE)]
    finally:
        engine.invalidate(namespace=_NAMESPACE)
    if len(found) < 2:
        raise ValueError(
            f"prompts: {len(prompts) - len(found)} of {len(prompts)} are longer than the model's context window; "
            "give at least 2 that fit, better 30"
        )
    return found


def fit_deviation(
    engine: CacheCraftEngine, prompts: Sequence[RagPrompt], *, show_progress: bool = False
) -> DeviationModel:
    """Compare the stored KV of some prompts' chunks with full prefill's, and fit what predicts the difference.

    Arguments and errors as in ``measure``; the engine's policy is not looked at.
    """
    found = DeviationFit(engine.model.config.get_text_config().num_hidden_layers)
    compared = prompts[:_MOST_COMPARED]
    for prompt in tqdm(compared, desc="compare", unit="prompt", disable=not show_progress):
        try:
            engine.warm(prompt.chunks, namespace=_NAMESPACE)
            stored, full = _prefilled(engine, prompt, reuse=True), _prefilled(engine, prompt, reuse=False)
        finally:
            engine.invalidate(namespace=_NAMESPACE)
        if stored.plan is not None and stored.kv is not None and full.kv is not None:
            chunk_kvs = [chunk.chunk_kv for chunk in stored.chunks]
            candidates = Candidates(stored.plan, chunk_kvs, len(stored.kv.keys))
            features = candidates.features(torch.tensor(stored.encoded.token_ids), stored.kv)
            values = [kv.values[:, 0, :, candidates.positions.to(kv.values.device)] for kv in (stored.kv, full.kv)]
            found.add(features, relative_deviation(*values))
    return found.model()


def _prefilled(engine: CacheCraftEngine, prompt: RagPrompt, reuse: bool) -> Request:
    """A request whose buffer holds every chunk as it is stored, or as it is computed behind what precedes it."""
    as_stored = RecomputeConfig(policy="none", ratio=0.0)
    request = engine.intake.take(prompt, SamplingConfig(max_new_tokens=1), as_stored, _NAMESPACE)
    engine.prefill(request, reuse)
    return request


def _measure_one(
    engine: CacheCraftEngine,
    number: int,
    prompt: RagPrompt,
    ratios: Sequence[float],
    answer_tokens: int,
    recompute: RecomputeConfig,
) -> list[Measurement]:
    fixed = [recompute.changed(ratio=ratio) for ratio in ratios]
    own = engine.generate(
        prompt, reuse=False, recompute=fixed[0], namespace=_NAMESPACE, max_new_tokens=answer_tokens, temperature=0.0
    )
    answer = own.token_ids or (0,)  # where the answer is empty, the token that ended it counts, and any stands for it
    reference = score(engine, prompt, answer, reuse=False, recompute=fixed[0], namespace=_NAMESPACE)
    engine.warm(prompt.chunks, namespace=_NAMESPACE)
    found = []
    for ratio, settings in zip(ratios, fixed, strict=True):
        result = score(engine, prompt, answer, recompute=settings, namespace=_NAMESPACE)
        if result.stats.chunk_misses:
            raise RuntimeError(f"{result.stats.chunk_misses} chunks of a prompt are not stored: enlarge the store")
        if result.stats.residual:  # none where every chunk is exact
            divergence = float(kl_divergence(reference.logits, result.logits).mean())
            found.append(Measurement(number, ratio, result.stats.residual, divergence))
    return found


def fit(
    engine: CacheCraftEngine,
    measurements: Sequence[Measurement],
    *,
    recompute: RecomputeConfig | None = None,
    quantile: float = 0.9,
    deviation: DeviationModel | None = None,
) -> Calibration:
    """Fit the curve to what ``measure`` found; arguments and errors as above.

    A target gives all prompts about the same residual. So the exponent is how divergence falls within a prompt as more
    is recomputed, and the scale is a mean over prompts. Both come from the quasi-likelihood whose spread grows with
    the mean, which needs no logarithm of a divergence near 0. One power need not fit all ratios, so the margin is what
    the mean over them needs, or the ratio at which the curve is lowest.
    """
    recompute = recompute or engine.config.recompute
    if not 0.5 < quantile < 1.0:
        raise ValueError(f"quantile: {quantile} is not between 0.5 and 1")
    prompts = _by_prompt(measurements)
    if len(prompts) < 2:
        raise ValueError(f"prompts: {len(prompts)} of them reuse chunks; give at least 2 whose chunks are not exact")
    exponent = _exponent(prompts)
    scales = [float(np.exp(logs[:, 1] - exponent * logs[:, 0]).mean()) for logs in prompts]
    scale = float(np.mean(scales))
    excesses = [[one / scale for one in scales], *_excesses(measurements, scale, exponent)]
    margin = max(1.0, *(predicted_mean(found, confidence=2 * quantile - 1).high for found in excesses))
    return Calibration(
        fingerprint=engine.fingerprint,
        policy=recompute.policy,
        settings=calibrated_settings(engine.config, recompute),
        scale=scale,
        exponent=exponent,
        margin=margin,
        quantile=quantile,
        num_questions=len(prompts),
        deviation=deviation,
    )


def _by_prompt(measurements: Sequence[Measurement]) -> list[np.ndarray]:
    """Logarithms of residual and divergence, ``[num_ratios, 2]`` per prompt that was measured at several residuals."""
    points: defaultdict[int, set[tuple[float, float]]] = defaultdict(set)
    for item in measurements:
        points[item.prompt].add((item.residual, max(item.divergence, _LEAST_DIVERGENCE)))
    return [np.log(sorted(found)) for found in points.values() if len({residual for residual, _ in found}) > 1]


def _excesses(measurements: Sequence[Measurement], scale: float, exponent: float) -> Iterable[list[float]]:
    """Measured over predicted divergence, one list per ratio."""
    found: defaultdict[float, list[float]] = defaultdict(list)
    for item in measurements:
        found[item.ratio].append(item.divergence / (scale * item.residual**exponent))
    return found.values()


def _exponent(prompts: Sequence[np.ndarray]) -> float:
    """The exponent of the best curves, each prompt with a scale of its own: the least of a convex function."""
    low, high = _EXPONENTS
    for _ in range(60):
        middle = (low + high) / 2
        # Slope of log(mean(divergence / residual ** exponent)) + exponent * mean(log residual), added up over prompts.
        slope = 0.0
        for logs in prompts:
            excess = logs[:, 1] - middle * logs[:, 0]
            weights = np.exp(excess - excess.max())
            slope += len(logs) * float(logs[:, 0].mean() - np.average(logs[:, 0], weights=weights))
        low, high = (low, middle) if slope > 0 else (middle, high)
    return (low + high) / 2
