"""Runs `holdfast metrics`: a job's numbers for Prometheus and OpenTelemetry."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from holdfast.cli.view import Parser, print_json
from holdfast.config.values import endpoint, joined, time_limit
from holdfast.errors import UsageError
from holdfast.jobhome import find
from holdfast.view.follower import Follower
from holdfast.view.metrics.families import families
from holdfast.view.metrics.otlp import Pusher, target
from holdfast.view.metrics.server import MetricsOfJob, MetricsServer, keep_up
from holdfast.view.metrics.text import metrics_text

ABOUT = """\
Serve the metrics of a job for Prometheus, push them to an OpenTelemetry collector, or print them once.
The job does not notice: its journal is read, and the coordinator is not asked.

  holdfast metrics                                    print those of the newest job
  holdfast metrics big-run --listen 127.0.0.1:9464    serve http://127.0.0.1:9464/metrics
  holdfast metrics --otlp http://127.0.0.1:4318       push to a collector, every 15 s
  holdfast metrics --listen 0.0.0.0:9464 --token-file t     only for who has the token

docs/metrics.md lists them all; deploy/ has alert rules and a Grafana dashboard.
"""


def main(argv: Sequence[str]) -> int:
    parser = Parser("holdfast metrics", ABOUT, raw=True)
    parser.add_argument("job", nargs="?", metavar="JOB", help="its name; the newest when left out")
    parser.add_argument("--listen", metavar="HOST:PORT", help="serve them there, at /metrics")
    parser.add_argument("--otlp", metavar="URL", help="push them to this collector")
    parser.add_argument("--every", metavar="S", default="15", help="seconds between two pushes")
    parser.add_argument(
        "--token-file", metavar="FILE", help="file with the bearer token that requests must have"
    )
    parser.add_argument("--json", action="store_true", help="print them once, as JSON")
    arguments = parser.parse_args(argv)
    home = find(arguments.job)
    if arguments.listen is None and arguments.otlp is None:
        follower = Follower.open(home)
        if arguments.json:
            print_json([one._asdict() for one in families([follower])])
        else:
            sys.stdout.write(metrics_text(follower))
        follower.close()
        return 0
    if arguments.json:
        raise UsageError("--json prints the metrics once; leave --listen and --otlp out")
    metrics = MetricsOfJob(Follower.resumed(home))
    every_s = time_limit(arguments.every, "--every")
    pusher = Pusher(target(arguments.otlp), _say) if arguments.otlp is not None else None
    server = _listen(arguments.listen, metrics, _token(arguments.token_file))
    end = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: end.set())
    try:
        keep_up(metrics, pusher, every_s, end)
    finally:
        if server is not None:
            server.shutdown()
            server.server_close()
        if pusher is not None:
            pusher.close()
    return 0


def _listen(where: str | None, metrics: MetricsOfJob, token: str) -> MetricsServer | None:
    if where is None:
        return None
    host, port = endpoint(where, "--listen")
    try:
        server = MetricsServer(host, port or 0, metrics, token)
    except OSError as error:
        raise UsageError(f"--listen {where}: {os.strerror(error.errno or 0)}") from None
    threading.Thread(target=server.serve_forever, name="holdfast-metrics", daemon=True).start()
    print(f"http://{joined(host, server.server_address[1])}/metrics", flush=True)
    return server


def _token(path: str | None) -> str:
    if path is None:
        return ""
    try:
        token = Path(path).read_text().strip()
    except OSError as error:
        raise UsageError(f"--token-file {path}: {error.strerror}") from None
    if not token:
        raise UsageError(f"--token-file {path}: the file is empty")
    return token


def _say(text: str) -> None:
    print(f"holdfast metrics: {text}", file=sys.stderr, flush=True)
