"""Recommends settings for a model and a sample of questions, each by a curve and a rule."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cachecraft_rag.config import EngineConfig, RecomputeConfig
from cachecraft_rag.evaluate.curve import Curve
from cachecraft_rag.evaluate.curve_report import write_curves
from cachecraft_rag.evaluate.curves import CurveMaker
from cachecraft_rag.evaluate.quality_curves import BEHIND
from cachecraft_rag.evaluate.recommend import (
    largest_target,
    last_gain,
    quickest_chunk_size,
    smallest_ratio,
    smallest_window,
    surely_closer,
)
from cachecraft_rag.store.build import device_budgets

_FEW = 20  # questions below which an interval says little


@dataclass(frozen=True)
class Recommendation:
    """One setting.

    Attributes:
        field: Its name in ``EngineConfig``, as in ``"store.hot_share"``.
        before: Its value until now.
        value: The value that is recommended.
        why: The figures that led to it.
        curve: Name of the curve behind it.
    """

    field: str
    before: object
    value: float | int | str
    why: str
    curve: str

    @property
    def texts(self) -> tuple[str, str, str, str]:
        """Field, value until now, value and reason."""
        return self.field, _text(self.before), _text(self.value), self.why


@dataclass(frozen=True)
class Tuning:
    """What was recommended and measured.

    Attributes:
        config: The settings with what is recommended in its place.
        recommendations: What was recommended.
        curves: What was measured.
        notes: What to know before relying on it.
    """

    config: EngineConfig
    recommendations: tuple[Recommendation, ...]
    curves: tuple[Curve, ...]
    notes: tuple[str, ...]

    def write(self, folder: Path, title: str) -> list[Path]:
        """Write ``config.json``, ``tuning.csv``, ``tuning.md`` and a plot per curve into a folder, which is made.

        Raises:
            ImportError: The ``bench`` extra is not installed.
            ValueError: The settings hold a key as bytes.
        """
        config = folder / "config.json"
        self.config.to_file(config)
        rows = [item.texts for item in self.recommendations]
        header = ("setting", "now", "recommended", "why")
        table = "\n".join("| " + " | ".join(row) + " |" for row in (header, ("---",) * 4, *rows))
        chosen = {item.curve: item.value for item in self.recommendations}
        return [
            config,
            *write_curves(self.curves, folder, title, name="tuning", head=[table, *self.notes], chosen=chosen),
        ]


def tune(maker: CurveMaker, base: EngineConfig, max_divergence: float | None = None) -> Tuning:
    """Measure one curve after another, each with what the ones before recommend.

    Chunk size by ``quickest_chunk_size``, what chunks are computed behind and then the offset by ``surely_closer``,
    ratio by ``smallest_ratio``, with a calibration perhaps a target instead by ``largest_target``, hot share by
    ``last_gain``, prefetch window by ``smallest_window``. A calibration is of one offset and of chunks computed behind
    one thing: it is dropped where another is recommended.

    Args:
        maker: Makes the curves.
        base: The settings that recommendations go into.
        max_divergence: How far answers may be from full prefill's on average, in nats per token; ``None`` takes the
            target of the preset ``"balanced"``.

    Raises:
        ValueError: The divergence is not above 0, all questions are longer than the context window, or see
            ``CurveMaker``.
        RuntimeError: A store has no room for what is measured.
    """
    if max_divergence is None:
        max_divergence = RecomputeConfig(preset="balanced").target
    if max_divergence is None or not max_divergence > 0:
        raise ValueError(f"max_divergence: {max_divergence} must be above 0; for no divergence set the ratio to 1.0")
    sizes = maker.chunk_size()
    size = quickest_chunk_size(sizes, base.chunk_tokens)
    chunk_tokens = int(size.value)
    settings, found, curves = _encoding(maker, base, chunk_tokens)
    goal, recompute, measured = _goal(maker, settings, chunk_tokens, max_divergence)
    found = [Recommendation("chunk_tokens", base.chunk_tokens, chunk_tokens, size.why, sizes.name), *found, goal]
    curves = [sizes, *curves, *measured]
    store: dict[str, float | int] = {}
    hot = maker.hot_share(chunk_tokens, recompute)
    if hot is not None:
        share = last_gain(hot)
        store["hot_share"] = share.value
        found.append(Recommendation("store.hot_share", base.store.hot_share, share.value, share.why, hot.name))
        curves.append(hot)
    loads = maker.load_ahead(chunk_tokens, recompute)
    window = smallest_window(loads)
    store["load_ahead"] = int(window.value)
    found.append(Recommendation("store.load_ahead", base.store.load_ahead, int(window.value), window.why, loads.name))
    curves.append(loads)
    tuned = {"chunk_tokens": chunk_tokens, "recompute": recompute, "store": base.store.model_copy(update=store)}
    notes = _notes(maker, base, settings, len(maker.questions(chunk_tokens)), hot is not None)
    return Tuning(settings.model_copy(update=tuned), tuple(found), tuple(curves), tuple(notes))


def _encoding(
    maker: CurveMaker, base: EngineConfig, chunk_tokens: int
) -> tuple[EngineConfig, list[Recommendation], list[Curve]]:
    """What chunks are computed behind and the offset: in the settings, as recommended, and what was measured."""
    behinds = maker.behind(chunk_tokens)
    if behinds is None:
        return base, [], []
    choice = surely_closer(behinds)
    behind = BEHIND[int(choice.value)]
    offsets = maker.offset(chunk_tokens, behind)
    offset = surely_closer(offsets)
    found = [
        Recommendation("encode.behind", base.encode.behind, behind, choice.why, behinds.name),
        Recommendation("recompute.offset", base.recompute.offset, offset.value, offset.why, offsets.name),
    ]
    is_same = all(item.value == item.before for item in found)
    changes = {
        "encode": base.encode.model_copy(update={"behind": behind}),
        "recompute": base.recompute.changed(offset=offset.value),
        "calibration": base.calibration if is_same else None,
    }
    return base.model_copy(update=changes), found, [behinds, offsets]


def _goal(
    maker: CurveMaker, base: EngineConfig, chunk_tokens: int, max_divergence: float
) -> tuple[Recommendation, RecomputeConfig, list[Curve]]:
    """The target or the ratio: as recommended, as settings, and what was measured."""
    ratios = maker.ratio(chunk_tokens, base.recompute, base.encode.behind)
    ratio = smallest_ratio(ratios, max_divergence)
    curves = [ratios]
    if base.calibration is not None:
        targets = maker.target(chunk_tokens, max_divergence)
        curves.append(targets)
        computed = {x: interval.value for x, interval in ratios.values("charged")}
        target = largest_target(targets, max_divergence, computed.get(ratio.value, 1.0))
        if target is not None:
            made = base.recompute.changed(target_divergence=target.value)
            before = base.recompute.target
            field = "recompute.target_divergence"
            return Recommendation(field, before, target.value, target.why, targets.name), made, curves
    made = base.recompute.changed(ratio=ratio.value)
    return Recommendation("recompute.ratio", base.recompute.ratio, ratio.value, ratio.why, ratios.name), made, curves


def _text(value: object) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _notes(
    maker: CurveMaker, base: EngineConfig, settings: EngineConfig, num_questions: int, has_hot_share: bool
) -> list[str]:
    notes = []
    if num_questions < _FEW:
        notes.append(f"{num_questions} questions: too few to rely on the intervals; give {_FEW} or more.")
    if base.calibration is not None and settings.calibration is None:
        notes.append(
            f"{base.calibration} does not fit the recommended behind and offset and is left out: calibrate with them."
        )
    if maker.recompute.policy == "predicted":
        notes.append("The policy predicted is fitted to one behind and offset; they stay as they are.")
    if not has_hot_share:
        notes.append("The sample has too few chunks to replay requests for; the hot share stays as it is.")
    hot, warm = device_budgets(base.store, maker.engine.model.device)
    if hot + warm == 0:
        notes.append("There is no device memory for chunks here: the hot share matters where device_size is set.")
    if base.store.disk is None and base.store.remote is None:
        notes.append("No disk or remote tier is set: the prefetch window matters where one is.")
    return notes
