"""Writes metrics as text: OpenMetrics, or the older format of Prometheus for those who ask for that."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate

from holdfast.view.follower import Follower
from holdfast.view.metrics.families import families
from holdfast.view.metrics.model import BOUNDS, Distribution, Family, Labels

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PLAIN = "text/plain; version=0.0.4; charset=utf-8"

_ESCAPED = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
_UNSAFE = re.compile(r"[\ud800-\udfff]")
"""Halves of surrogate pairs, which names of files may contain and UTF-8 may not."""


def metrics_text(*followers: Follower, openmetrics: bool = True) -> str:
    """Write all metrics of these jobs."""
    return written(families(followers), openmetrics)


def written(found: Sequence[Family], openmetrics: bool = True) -> str:
    """Write these metrics."""
    lines = [line for one in found for line in _family(one, openmetrics)]
    return "\n".join([*lines, "# EOF\n"] if openmetrics else [*lines, ""])


def accepted(header: str) -> bool:
    """Return whether a client takes OpenMetrics, by its Accept header."""
    return "application/openmetrics-text" in header


def _family(one: Family, openmetrics: bool) -> Iterator[str]:
    suffix = {"counter": "_total", "info": "_info"}.get(one.kind, "")
    name = one.name if openmetrics else one.name + suffix
    kind = one.kind if openmetrics or one.kind != "info" else "gauge"
    yield f"# HELP {name} {one.help.translate(_ESCAPED)}"
    yield f"# TYPE {name} {kind}"
    if one.unit and openmetrics:
        yield f"# UNIT {name} {one.unit}"
    for labels, value in one.samples:
        yield f"{one.name}{suffix}{_labels(labels)} {_number(value)}"
    for distribution in one.distributions:
        yield from _histogram(one.name, distribution)


def _histogram(name: str, one: Distribution) -> Iterator[str]:
    cumulated = list(accumulate(one.counts))
    for bound, count in zip((*map(_number, BOUNDS), "+Inf"), cumulated, strict=True):
        yield f"{name}_bucket{_labels((*one.labels, ('le', bound)))} {count}"
    yield f"{name}_count{_labels(one.labels)} {cumulated[-1]}"
    yield f"{name}_sum{_labels(one.labels)} {_number(one.total)}"


def _labels(labels: Labels) -> str:
    pairs = (f'{name}="{_UNSAFE.sub("?", value).translate(_ESCAPED)}"' for name, value in labels)
    return f"{{{','.join(pairs)}}}"


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(round(value, 6) if abs(value) >= 1e-3 else float(f"{value:.6g}"))
    return "NaN" if math.isnan(value) else f"{value:+}".title()
