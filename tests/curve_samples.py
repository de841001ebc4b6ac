"""Small extents, sources and curves for the tests of measured curves."""

from __future__ import annotations

from collections.abc import Mapping

from cachecraft_rag import CacheCraftEngine
from cachecraft_rag.evaluate.bootstrap import Interval
from cachecraft_rag.evaluate.curve import Curve, Point
from cachecraft_rag.evaluate.curves import CurveMaker, Extent
from cachecraft_rag.evaluate.questions import Source
from tests.conftest import passage

SMALL = Extent(
    questions=2,
    context_tokens=400,
    chunk_sizes=(64, 128, 5000),
    ratios=(0.0, 0.3, 1.0),
    hot_shares=(0.0, 0.5, 1.0),
    per_request=2,
    distinct=10,
    fewest=10,
    replayed=60,
    answered=2,
    windows=(0, 2),
    loads=2,
)


def sources(number: int = 2, num_paragraphs: int = 6) -> list[Source]:
    texts = ["\n\n".join(passage(50 * n + index, 3) for index in range(num_paragraphs)) for n in range(number)]
    return [Source(f"q{n}", "What ends first?", ("the lease",), (text,)) for n, text in enumerate(texts)]


def maker(engine: CacheCraftEngine, extent: Extent = SMALL) -> CurveMaker:
    return CurveMaker(engine, sources(), extent, max_new_tokens=3)


def settled(
    name: str, values: Mapping[float, object], best: object, current: object, labels: tuple[str, ...] = ()
) -> Curve:
    """A curve of one figure, with the lowest divergence at the best value."""
    kls = {x: 0.01 if value == best else 0.05 for x, value in values.items()}
    points = []
    for x, value in values.items():
        figures = {"kl": Interval(kls[x], kls[x], kls[x])}
        if value != current:
            change = kls[x] - next(kls[other] for other, found in values.items() if found == current)
            figures["kl_change"] = Interval(change, change, change)
        points.append(Point(x, figures))
    return Curve(name, name, name, ("kl",), tuple(points), "by hand", labels)
