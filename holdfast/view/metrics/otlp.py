"""Pushes metrics to an OpenTelemetry collector: OTLP over HTTP, as JSON.

The encoding is that of the protocol's own JSON mapping: 64-bit integers are strings, as are NaN and
infinity; counters are cumulative sums. A push never holds anything up: it runs in a thread of its own,
only the newest state is ever sent, and what cannot be delivered is tried again, with a growing pause,
until there is a newer one.
"""

from __future__ import annotations

import json
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from holdfast import __version__
from holdfast.errors import UsageError
from holdfast.messages.losses import written
from holdfast.view.metrics.model import BOUNDS, Distribution, Family, Labels

log = logging.getLogger("holdfast.metrics")

PATH: Final = "/v1/metrics"
TIMEOUT_S: Final = 10.0
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0
RETRIED: Final = frozenset({429, 502, 503, 504})
"""Answers after which the protocol wants another try; after others the data is dropped."""
UNITS: Final = {"": "", "seconds": "s", "bytes": "By", "ratio": "1"}

Json = dict[str, Any]


def target(url: str) -> str:
    """Return where to push to; the path is added where only a collector is named."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(f"--otlp {url}: give the collector's URL, as http://127.0.0.1:4318")
    return url if parts.path.endswith(PATH) else url.rstrip("/") + PATH


def encoded(found: Sequence[Family], now: float, began: float) -> bytes:
    """Encode metrics as one request."""
    metrics = [_metric(one, _nanoseconds(now), _nanoseconds(began)) for one in found]
    attributes = _attributes((("service.name", "holdfast"), ("service.version", __version__)))
    scope = {"name": "holdfast", "version": __version__}
    one = {
        "resource": {"attributes": attributes},
        "scopeMetrics": [{"scope": scope, "metrics": metrics}],
    }
    return json.dumps({"resourceMetrics": [one]}, separators=(",", ":")).encode()


def _metric(one: Family, now: str, began: str) -> Json:
    found: Json = {"name": one.name, "description": one.help, "unit": UNITS[one.unit]}
    times = {"timeUnixNano": now}
    points = [
        {"attributes": _attributes(labels), **times, "asDouble": written(value)}
        for labels, value in one.samples
    ]
    if one.kind == "histogram":
        points = [_distribution(each, now, began) for each in one.distributions]
        return found | {"histogram": {"aggregationTemporality": 2, "dataPoints": points}}
    if one.kind == "counter":
        for point in points:
            point["startTimeUnixNano"] = began
        about = {"aggregationTemporality": 2, "isMonotonic": True}
        return found | {"sum": {**about, "dataPoints": points}}
    return found | {"gauge": {"dataPoints": points}}


def _distribution(one: Distribution, now: str, began: str) -> Json:
    return {
        "attributes": _attributes(one.labels),
        "startTimeUnixNano": began,
        "timeUnixNano": now,
        "count": str(sum(one.counts)),
        "sum": one.total,
        "bucketCounts": [str(count) for count in one.counts],
        "explicitBounds": list(BOUNDS),
    }


def _attributes(labels: Labels) -> list[Json]:
    return [{"key": name, "value": {"stringValue": value}} for name, value in labels]


def _nanoseconds(at: float) -> str:
    return str(round(at * 1e9))


# ---- pushing ----


class Pusher:
    """Sends the newest state to a collector, in a thread of its own."""

    def __init__(self, url: str, said: Callable[[str], None] = log.warning) -> None:
        self._url = url
        self._say = said
        self._newest: bytes | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._silent = False
        """Whether the collector was reported to be away, and has not been back since."""
        self.sent = 0
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="holdfast-otlp", daemon=True)
        self._thread.start()

    def put(self, body: bytes) -> None:
        """Send this as soon as possible; an older state that has not been sent is dropped."""
        with self._changed:
            self.dropped += self._newest is not None
            self._newest = body
            self._changed.notify()

    def close(self, limit_s: float = 2.0) -> None:
        """Send what is left, if that is possible within the limit."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(limit_s)

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._newest is not None or self._closed)
                body, self._newest = self._newest, None
            if body is None:
                return
            if self._deliver(body):
                pause_s = FIRST_PAUSE_S
                continue
            with self._changed:
                if self._closed:
                    return
                if self._newest is None:
                    self._newest = body
                self._changed.wait(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _deliver(self, body: bytes) -> bool:
        """Send once; False if it is to be tried again."""
        headers = {"Content-Type": "application/json", "User-Agent": f"holdfast/{__version__}"}
        request = urllib.request.Request(self._url, body, headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S):
                pass
        except urllib.error.HTTPError as error:
            self._complain(f"answers {error.code} {error.reason}")
            self.dropped += error.code not in RETRIED
            return error.code not in RETRIED
        except (OSError, ValueError) as error:
            self._complain(str(getattr(error, "reason", error)))
            return False
        self.sent += 1
        if self._silent:
            self._silent = False
            self._say(f"{self._url} takes metrics again")
        return True

    def _complain(self, why: str) -> None:
        if not self._silent:
            self._silent = True
            self._say(f"{self._url} {why}; metrics are sent again when it takes them")
