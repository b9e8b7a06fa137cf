"""Collects the metrics of jobs, for whichever format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from holdfast.view.follower import Follower
from holdfast.view.metrics.catalogue import METRICS
from holdfast.view.metrics.model import BOUNDS, Distribution, Facts, Family, Metric, MetricValue

RECOVERY = "holdfast_recovery_seconds"
RECOVERY_HELP = "Time from a fault to the first step after it, of each fault that broke a round."


def families(followers: Sequence[Follower]) -> list[Family]:
    """Return all metrics of these jobs, those without a value left out."""
    facts = [_facts(follower) for follower in followers]
    found = []
    for metric in METRICS:
        samples = [sample for one in facts for sample in _samples(metric, one)]
        if samples:
            found.append(Family(metric.name, metric.kind, metric.help, metric.unit, samples))
    found.append(_recoveries(facts))
    return found


def _facts(follower: Follower) -> Facts:
    return Facts(
        follower,
        follower.status(),
        follower.goodput(),
        follower.incidents(),
        follower.now,
    )


def _samples(metric: Metric, facts: Facts) -> Iterator[MetricValue]:
    job = (("job", facts.follower.name),)
    for labels, value in metric.values(facts):
        if value is not None:
            yield MetricValue((*job, *labels.items()), float(value))


def _recoveries(facts: Iterable[Facts]) -> Family:
    """Summarize how long repairs took; only what broke a round was repaired."""
    distributions = []
    for one in facts:
        took = [i.lost_s for i in one.incidents if i.lost_s is not None and i.rung is not None]
        counts = [0] * (len(BOUNDS) + 1)
        for seconds in took:
            counts[sum(seconds > bound for bound in BOUNDS)] += 1
        labels = (("job", one.follower.name),)
        distributions.append(Distribution(labels, tuple(counts), sum(took)))
    return Family(RECOVERY, "histogram", RECOVERY_HELP, "seconds", (), distributions)


def names() -> dict[str, set[str]]:
    """Return the names of all series, as queries use them, each with its labels."""
    suffixes = {"counter": "_total", "info": "_info", "gauge": ""}
    found = {one.name + suffixes[one.kind]: {"job", *one.labels} for one in METRICS}
    for suffix in ("_bucket", "_sum", "_count"):
        found[RECOVERY + suffix] = {"job", "le"} if suffix == "_bucket" else {"job"}
    return found
