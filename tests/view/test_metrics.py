"""Metrics are valid OpenMetrics, never fall where they must not, and are all that deploy/ asks for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import metrics_page
import pytest
from journals import home_with, simulated

from holdfast.cli.main import main
from holdfast.core.replay import Entry
from holdfast.jobhome import JobHome
from holdfast.view.follower import Follower
from holdfast.view.metrics import catalogue, otlp
from holdfast.view.metrics.families import families, names
from holdfast.view.metrics.otlp import Pusher, encoded, target
from holdfast.view.metrics.text import metrics_text

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
LINE = re.compile(r"(\w+)\{(.*)\} (\S+)")


@pytest.fixture
def home(monkeypatch) -> JobHome:
    monkeypatch.setattr(JobHome, "alive", lambda self: False)
    return home_with(simulated())


def values(text: str) -> dict[str, float]:
    """Every series of a text with its value."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_openmetrics_own_parser_takes_it(home) -> None:
    parser = pytest.importorskip(
        "prometheus_client.openmetrics.parser", reason="prometheus_client is not installed"
    )
    text = metrics_text(Follower.open(home))
    found = list(parser.text_string_to_metric_families(text))
    assert {one.name for one in found} >= {"holdfast_goodput_ratio", "holdfast_recovery_seconds"}
    plain = pytest.importorskip("prometheus_client.parser")
    older = metrics_text(Follower.open(home), openmetrics=False)
    assert "# EOF" not in older
    names_of = {s.name for one in plain.text_string_to_metric_families(older) for s in one.samples}
    assert names_of == {s.name for one in found for s in one.samples}


def test_every_series_is_one_that_the_catalogue_names(home) -> None:
    for line in metrics_text(Follower.open(home)).splitlines():
        if line.startswith("#"):
            continue
        match = LINE.fullmatch(line)
        assert match is not None, line
        labels = set(re.findall(r'(\w+)="', match[2]))
        assert labels == names()[match[1]], line


def test_the_numbers_are_those_of_the_reports(home) -> None:
    follower = Follower.open(home)
    found = values(metrics_text(follower))
    status, goodput, incidents = follower.status(), follower.goodput(), follower.incidents()
    assert found['holdfast_goodput_ratio{job="j"}'] == pytest.approx(goodput.goodput, abs=1e-6)
    assert found['holdfast_step{job="j"}'] == status.step
    assert found['holdfast_restarts_total{job="j"}'] == status.restarts
    counted = sum(v for k, v in found.items() if k.startswith("holdfast_incidents_total"))
    assert counted + found['holdfast_incidents_open{job="j"}'] == len(incidents)
    booked = sum(v for k, v in found.items() if k.startswith("holdfast_rank_seconds_total"))
    booked += found['holdfast_rank_unbooked_seconds{job="j"}']
    assert booked == pytest.approx(goodput.wall_s * goodput.ranks, rel=1e-3)
    took = [one.lost_s for one in incidents if one.rung and one.lost_s is not None]
    assert found['holdfast_recovery_seconds_count{job="j"}'] == len(took)
    assert found['holdfast_recovery_seconds_sum{job="j"}'] == pytest.approx(sum(took), abs=1e-4)
    within = sum(seconds <= 10 for seconds in took)
    assert found['holdfast_recovery_seconds_bucket{job="j",le="10.0"}'] == within


class Growing:
    """A journal that is read event by event."""

    def __init__(self, entries: tuple[Entry, ...]) -> None:
        self.name = "j"
        self._entries = entries
        self.until = 1

    def entries(self, after: int, limit: int) -> list[Entry]:
        return list(self._entries[after : self.until])

    def replaced(self) -> bool:
        return False

    def alive(self) -> bool:
        return False

    def last(self) -> int:
        return len(self._entries)

    async def changed(self) -> None: ...
    def close(self) -> None: ...


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_counter_ever_falls(seed: int) -> None:
    entries = simulated(seed, hours=0.1)
    source = Growing(entries)
    follower = Follower(source)
    before: dict[str, float] = {}
    for until in range(2, len(entries) + 1, 7):
        source.until = until
        follower.catch_up()
        found = values(metrics_text(follower))
        for name, value in found.items():
            if re.search(r"_total\{|_bucket\{|_count\{|_sum\{", name):
                assert value >= before.get(name, 0.0) - 1e-6, (name, until)
        before = found


def test_a_large_job_has_no_series_for_each_rank(home, monkeypatch) -> None:
    small = metrics_text(Follower.open(home))
    running = Follower(Growing(simulated()))
    running.source.until = 200
    running.catch_up()
    assert "holdfast_rank_step{" in metrics_text(running)
    monkeypatch.setattr(catalogue, "MOST_RANKS", 1)
    monkeypatch.setattr(catalogue, "MOST_NODES", 1)
    large = metrics_text(running)
    assert "holdfast_rank_step{" not in large
    assert "holdfast_node_" not in large
    assert "holdfast_goodput_ratio" in small


def test_words_of_users_cannot_break_a_line(home, monkeypatch) -> None:
    follower = Follower.open(home)
    follower.name = 'a"b\\c\nd\udc80'
    text = metrics_text(follower)
    assert 'job="a\\"b\\\\c\\nd?"' in text
    text.encode()


def test_several_jobs_share_each_metric(home) -> None:
    one, other = Follower.open(home), Follower.open(home)
    other.name = "k"
    text = metrics_text(one, other)
    assert text.count("# TYPE holdfast_step gauge") == 1
    assert 'holdfast_step{job="j"}' in text
    assert 'holdfast_step{job="k"}' in text


# ---- what deploy/ asks for ----


def expressions() -> list[str]:
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    marks = [one["expr"] for one in dashboard["annotations"]["list"]]
    lists = [one["definition"] for one in dashboard["templating"]["list"] if "definition" in one]
    rules = re.findall(r"expr: (?:\|\n)?((?:.|\n)*?)\n        (?:for|labels):", alerts())
    assert len(rules) == alerts().count("- alert:")
    return [*panels, *marks, *lists, *rules]


def alerts() -> str:
    return (DEPLOY / "alerts.yml").read_text()


def test_every_metric_and_label_that_deploy_asks_for_exists() -> None:
    known = names()
    for expression in expressions():
        asked = re.findall(r"(holdfast_\w+)(\{[^}]*\})?", expression)
        assert asked, expression
        for name, labels in asked:
            assert name in known, f"{name} in {expression}"
            for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", labels or ""):
                assert label in known[name], f"{label} of {name} in {expression}"
    for shown in re.findall(r"\{\{ \$labels\.(\w+)", alerts()):
        assert any(shown in labels for labels in known.values()), shown


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = json.loads((DEPLOY / "grafana-dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


# ---- pushing ----


class Collector:
    """An OpenTelemetry collector that refuses the first requests."""

    def __init__(self, *answers: int) -> None:
        self.bodies: list[bytes] = []
        self.got = threading.Event()
        collector, left = self, list(answers)

        class Request(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = left.pop(0) if left else 200
                if status == 200:
                    assert self.path == "/v1/metrics"
                    assert self.headers["Content-Type"] == "application/json"
                    collector.bodies.append(body)
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()
                if status == 200:
                    collector.got.set()

            def log_message(self, *_: object) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Request)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def test_a_push_conforms_to_otlp(home) -> None:
    follower = Follower.open(home)
    body = encoded(families([follower]), follower.now, follower.job.opened_at)
    service = pytest.importorskip(
        "opentelemetry.proto.collector.metrics.v1.metrics_service_pb2",
        reason="opentelemetry-proto is not installed",
    )
    from google.protobuf import json_format

    request = json_format.Parse(body, service.ExportMetricsServiceRequest())
    metrics = request.resource_metrics[0].scope_metrics[0].metrics
    by_name = {one.name: one for one in metrics}
    assert by_name["holdfast_rank_seconds"].sum.is_monotonic
    assert by_name["holdfast_rank_seconds"].unit == "s"
    (repairs,) = by_name["holdfast_recovery_seconds"].histogram.data_points
    assert len(repairs.bucket_counts) == len(repairs.explicit_bounds) + 1
    assert repairs.count == sum(repairs.bucket_counts)


def test_a_collector_that_is_away_gets_the_newest_state_when_it_is_back(monkeypatch) -> None:
    monkeypatch.setattr(otlp, "FIRST_PAUSE_S", 0.01)
    said: list[str] = []
    collector = Collector(503, 429)
    pusher = Pusher(target(collector.url), said.append)
    try:
        pusher.put(b'{"resourceMetrics": []}')
        assert collector.got.wait(60)
    finally:
        pusher.close()
        collector.close()
    assert pusher.sent == 1
    assert len(said) == 2, "away, and back"


def test_what_a_collector_refuses_for_good_is_not_sent_again() -> None:
    collector = Collector(400)
    pusher = Pusher(target(collector.url), lambda text: None)
    try:
        pusher.put(b"bad")
        pusher.close(limit_s=60)
        assert (pusher.sent, pusher.dropped) == (0, 1)
    finally:
        collector.close()


@pytest.mark.parametrize("url", ["localhost:4318", "ftp://x", "http://"])
def test_a_url_that_is_none_is_named(url) -> None:
    with pytest.raises(Exception, match="give the collector's URL"):
        target(url)


# ---- the command ----


def test_without_options_they_are_printed_once(home, capsys) -> None:
    assert main(["metrics", "j"]) == 0
    assert capsys.readouterr().out.endswith("# EOF\n")
    assert main(["metrics", "j", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {one["name"] for one in printed} >= {"holdfast_step", "holdfast_recovery_seconds"}


@pytest.fixture
def served(home, tmp_path) -> Iterator[tuple[str, str]]:
    """`holdfast metrics` in a process of its own, with a token: its URL and the token."""
    (tmp_path / "token").write_text("secret\n")
    words = ["metrics", "j", "--listen", "127.0.0.1:0", "--token-file", str(tmp_path / "token")]
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast", *words], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), "secret"
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def get(url: str, token: str, accept: str = "") -> tuple[str, str]:
    headers = {"Authorization": f"Bearer {token}", "Accept": accept}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def when_read(url: str, token: str) -> tuple[str, str]:
    """The metrics, once the journal has been read."""
    for _ in range(600):
        try:
            return get(url, token, "application/openmetrics-text;version=1.0.0")
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            threading.Event().wait(0.1)
    raise TimeoutError(url)


def test_they_are_served_to_who_has_the_token(served) -> None:
    url, token = served
    kind, text = when_read(url, token)
    assert kind.startswith("application/openmetrics-text")
    assert text.endswith("# EOF\n")
    assert get(url, token)[0].startswith("text/plain; version=0.0.4")
    for wrong, where, code in (("", url, 401), ("other", url, 401), (token, url + "/x", 404)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(where, wrong)
        assert refused.value.code == code


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--listen", "nonsense:x"], "HOST or HOST:PORT is needed"),
        (["--otlp", "collector"], "give the collector's URL"),
        (["--listen", "127.0.0.1:0", "--json"], "--json prints the metrics once"),
        (["--listen", "127.0.0.1:0", "--token-file", "/nowhere"], "No such file"),
    ],
)
def test_bad_options_are_one_line(home, capsys, words, why) -> None:
    assert main(["metrics", "j", *words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert why in said


def test_the_page_lists_them_all() -> None:
    assert metrics_page.PAGE.read_text() == metrics_page.page(), "python tests/view/metrics_page.py"
