"""Draws the pictures of a report as SVG, which needs no script and prints sharply.

Colours are classes of the page's style sheet, so that a picture is right in the light, in the dark and
on paper. What has the same colour is one path: thousands of rectangles take kilobytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

from holdfast.messages.records import Cause
from holdfast.messages.reports import CAUSES, IncidentReport
from holdfast.view.history.checkpoints import SaveEntry
from holdfast.view.history.timeline import ShownLane
from holdfast.view.report.facts import GoodputBucket, LossSample, NodeLoad, SpeedSample
from holdfast.view.report.wording import clock, speed
from holdfast.view.wording import loss

WIDTH = 960
LEFT, RIGHT = 84, 10
PLOT = WIDTH - LEFT - RIGHT
SHORTEST = 0.6
"""Width below which a piece of a lane would not be seen; its causes are drawn as wide as this."""
OVERLAP = 0.4
"""Neighbours overlap a little, or the paper would shine through between them."""
PHASES = ("teardown", "detect", "stop", "rendezvous", "start", "first_step")
TIERS = (("memory", "memory"), ("peer", "other nodes"), ("storage", "storage"))


class Axis:
    """Time from left to right."""

    def __init__(self, begin: float, end: float) -> None:
        self.begin, self.end = begin, max(end, begin + 1e-3)

    def x(self, at: float) -> float:
        share = (at - self.begin) / (self.end - self.begin)
        return LEFT + PLOT * min(1.0, max(0.0, share))

    def drawn(self, y: float, height: float) -> str:
        """Draw marks with their times below, and lines up from them."""
        marks = []
        for i in range(7):
            at = self.begin + (self.end - self.begin) * i / 6
            anchor = "start" if i == 0 else "end" if i == 6 else "middle"
            x = _n(self.x(at))
            marks.append(f'<path class="grid" d="M{x} {_n(y - height)}V{_n(y)}"/>')
            text = clock(at, self.end - self.begin)
            marks.append(f'<text class="tick" x="{x}" y="{_n(y + 13)}" text-anchor="{anchor}">')
            marks.append(f"{text}</text>")
        return "".join(marks)


def _n(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


def _svg(height: float, label: str, parts: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {_n(height)}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )


def _stretched(picture: str) -> str:
    """Let a bar be as wide as its place, and as high."""
    return picture.replace("<svg ", '<svg preserveAspectRatio="none" ', 1)


def _rectangle(x: float, y: float, width: float, height: float) -> str:
    return f"M{_n(x)} {_n(y)}h{_n(width)}v{_n(height)}h{_n(-width)}z"


def _paths(found: Mapping[str, list[str]]) -> list[str]:
    return [
        f'<path class="c-{cause}" d="{"".join(found[cause])}"/>'
        for cause in CAUSES
        if found.get(cause)
    ]


# ---- what ranks did ----


def timeline(lanes: Sequence[ShownLane], axis: Axis, incidents: Sequence[IncidentReport]) -> str:
    """Draw what the ranks did, with the incidents above."""
    height = 13.0 if len(lanes) <= 32 else 8.0 if len(lanes) <= 64 else 5.0
    top, found = 26.0, dict[str, list[str]]()
    labels = []
    every = max(1, -(-len(lanes) // 32)) if height >= 8 else max(1, len(lanes) // 20)
    for number, lane in enumerate(lanes):
        y = top + number * height
        if number % every == 0:
            labels.append(
                f'<text class="lane" x="{LEFT - 6}" y="{_n(y + height / 2 + 3.2)}"'
                f' text-anchor="end">{escape(lane.name)}</text>'
            )
        for span in lane.spans:
            x = axis.x(span.begin)
            width = max(SHORTEST, axis.x(span.end) - x + OVERLAP)
            below, full = y, height - 1
            for cause in CAUSES:
                if cause not in span.shares:
                    continue
                part = full * span.shares[cause]
                found.setdefault(cause, []).append(_rectangle(x, below, width, part))
                below += part
    bottom = top + len(lanes) * height
    marks = _incident_marks(incidents, axis, top, bottom)
    parts = [*_paths(found), *labels, *marks, axis.drawn(bottom + 3, 0)]
    return _svg(bottom + 22, "what every rank did over time", parts)


def _incident_marks(
    incidents: Sequence[IncidentReport], axis: Axis, top: float, bottom: float
) -> list[str]:
    """Mark the incidents that broke a round; numbers that would touch are left out."""
    marks, free_from = [], 0.0
    for one in incidents:
        x = axis.x(one.at)
        broke = one.rung is not None
        style = "incident" if broke else "note"
        marks.append(f'<path class="{style}" d="M{_n(x)} {_n(top - 6)}V{_n(bottom)}"/>')
        text = str(one.id)
        if broke and x >= free_from:
            marks.append(f'<text class="mark" x="{_n(x)}" y="{_n(top - 9)}">{text}</text>')
            free_from = x + 7 * len(text) + 6
    return marks


def goodput(buckets: Sequence[GoodputBucket], axis: Axis) -> str:
    """Draw the share of each cause over time."""
    top, height, found = 8.0, 150.0, dict[str, list[str]]()
    for bucket in buckets:
        total = sum(bucket.seconds.values())
        if total <= 0:
            continue
        x, below = axis.x(bucket.begin), top + height
        width = axis.x(bucket.end) - x + OVERLAP
        for cause in CAUSES:
            part = height * bucket.seconds.get(cause, 0.0) / total
            if part > 0.02:
                below -= part
                found.setdefault(cause, []).append(_rectangle(x, below, width, part))
    scale = [
        f'<text class="tick" x="{LEFT - 6}" y="{_n(top + height * (1 - share) + 4)}"'
        f' text-anchor="end">{share:.0%}</text>'
        for share in (0.0, 0.5, 1.0)
    ]
    parts = [*_paths(found), *scale, axis.drawn(top + height + 3, 0)]
    return _svg(top + height + 22, "share of each cause over time", parts)


def ledger(seconds: Mapping[Cause, float]) -> str:
    """Draw all causes as one bar."""
    total, x, parts = sum(seconds.values()), 0.0, []
    for cause in CAUSES:
        width = WIDTH * seconds.get(cause, 0.0) / total if total else 0.0
        if width > 0:
            path = _rectangle(x, 0, max(width, 0.8), 34)
            parts.append(f'<path class="c-{cause}" d="{path}"><title>{cause}</title></path>')
            x += width
    return _stretched(_svg(34, "rank-seconds by cause", parts))


def phases(incident: IncidentReport, longest_s: float) -> str:
    """Draw the phases of a repair; the longest repair of the report is as wide as the picture."""
    x, parts, total = 0.0, [], max(longest_s, 1e-6)
    for name, seconds in incident.phases.items():
        number = PHASES.index(name)
        width = WIDTH * seconds / total
        path = _rectangle(x, 0, max(width, 0.5), 12)
        title = f"{name.replace('_', ' ')} {seconds:.2f} s"
        parts.append(f'<path class="p{number}" d="{path}"><title>{title}</title></path>')
        x += width
    return _stretched(_svg(12, "phases of the repair", parts))


# ---- curves ----


def curve(
    points: Sequence[tuple[float, float | None]],
    axis: Axis,
    label: str,
    written: Callable[[float], str] = speed,
) -> str:
    """Draw a value over time, from 0 or below; where it is unknown there is a gap."""
    top, height = 10.0, 120.0
    known = [value for _, value in points if value is not None]
    least = min(0.0, *known) if known else 0.0
    most = max(0.0, *known) * 1.05 if known else 0.0
    span = most - least or 1.0
    line, pen = [], False
    for at, value in points:
        if value is None:
            pen = False
            continue
        y = top + height * (1 - (value - least) / span)
        line.append(f"{'L' if pen else 'M'}{_n(axis.x(at))} {_n(y)}")
        pen = True
    scale = [
        f'<text class="tick" x="{LEFT - 6}" y="{_n(top + height * (1 - share) + 4)}"'
        f' text-anchor="end">{written(least + span * share)}</text>'
        for share in (0.0, 0.5, 1.0)
    ]
    path = f'<path class="curve" d="{"".join(line)}"/>'
    grid = axis.drawn(top + height + 3, height)
    return _svg(top + height + 22, label, [grid, path, *scale])


def steps_per_s(samples: Sequence[SpeedSample], axis: Axis) -> str:
    return curve([(one.at, one.steps_per_s) for one in samples], axis, "steps per second")


def steps(samples: Sequence[SpeedSample], axis: Axis) -> str:
    return curve([(one.at, float(one.step)) for one in samples], axis, "highest finished step")


def losses(samples: Sequence[LossSample], axis: Axis) -> str:
    points = [(one.at, None if isinstance(one.loss, str) else one.loss) for one in samples]
    return curve(points, axis, "loss", loss)


def saves(found: Sequence[SaveEntry], axis: Axis) -> str:
    """Draw when saves were whole in each tier; a failed one is a cross."""
    top, height, parts = 8.0, 24.0, []
    for number, (tier, name) in enumerate(TIERS):
        y = top + number * height + height / 2
        parts.append(f'<path class="grid" d="M{LEFT} {_n(y)}H{WIDTH - RIGHT}"/>')
        parts.append(
            f'<text class="lane" x="{LEFT - 6}" y="{_n(y + 3.5)}" text-anchor="end">{name}</text>'
        )
        dots, loaded, failed = [], [], []
        for save in found:
            entry = save.tiers.get(tier)
            if entry is None:
                continue
            x = axis.x(entry.at)
            if entry.error:
                failed.append(f"M{_n(x - 4)} {_n(y - 4)}l8 8m0 -8l-8 8")
            else:
                begin = axis.x(entry.at - entry.seconds)
                dots.append(_rectangle(begin, y - 5, max(1.6, x - begin), 10))
                if entry.verified:
                    loaded.append(f"M{_n(x - 5)} {_n(y - 10)}h10l-5 5z")
        parts += [
            f'<path class="save-{tier}" d="{"".join(dots)}"/>' if dots else "",
            f'<path class="loaded" d="{"".join(loaded)}"/>' if loaded else "",
            f'<path class="failed" d="{"".join(failed)}"/>' if failed else "",
        ]
    bottom = top + height * len(TIERS)
    return _svg(bottom + 22, "saves by tier over time", [*parts, axis.drawn(bottom + 3, 0)])


def sparkline(load: NodeLoad, which: int, axis: Axis) -> str:
    """Draw one share of a node's machine over time, small."""
    width, height = 120.0, 22.0
    line: list[str] = []
    for at, point in load.points:  # A sample holds until there is another.
        value = point[which]
        if value is not None:
            x = width * min(1.0, max(0.0, (at - axis.begin) / (axis.end - axis.begin)))
            y = height - 1 - (height - 2) * min(1.0, value)
            line.append(f"H{_n(x)}V{_n(y)}" if line else f"M{_n(x)} {_n(y)}")
    if not line:
        return ""
    line.append(f"H{_n(width)}")
    path = f'<path class="curve" d="{"".join(line)}"/>'
    return f'<svg class="spark" viewBox="0 0 {_n(width)} {_n(height)}" role="img">{path}</svg>'
