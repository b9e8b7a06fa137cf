"""A real Prometheus collects the metrics, loads the rules, and answers every query of the dashboard."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from journals import home_with, simulated
from test_metrics import DEPLOY, expressions

from holdfast.view.follower import Follower
from holdfast.view.metrics.text import metrics_text

pytestmark = [
    pytest.mark.platform,
    pytest.mark.skipif(
        shutil.which("prometheus") is None or shutil.which("promtool") is None,
        reason="prometheus is not installed: apt-get install --no-install-recommends prometheus",
    ),
]

PATIENCE_S = 120


def until(found: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            if value := found():
                return value
        except OSError:
            pass
        time.sleep(0.2)
    raise TimeoutError(what)


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    """A Prometheus that collects from `holdfast metrics`; called with a path of its API."""
    home_with(simulated())
    started = []

    def start(*words: str, **how: Any) -> subprocess.Popen[str]:
        started.append(subprocess.Popen(words, text=True, cwd=tmp_path, **how))
        return started[-1]

    try:
        command = (sys.executable, "-m", "holdfast", "metrics", "j", "--listen", "127.0.0.1:0")
        serving = start(*command, stdout=subprocess.PIPE)
        assert serving.stdout is not None
        target = serving.stdout.readline().strip().removeprefix("http://").partition("/")[0]
        config = (DEPLOY / "prometheus.yml").read_text().replace("127.0.0.1:9464", target)
        config = config.replace("scrape_interval: 15s", "scrape_interval: 1s")
        (tmp_path / "prometheus.yml").write_text(config)
        shutil.copy(DEPLOY / "alerts.yml", tmp_path)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        flags = ("--config.file=prometheus.yml", f"--web.listen-address=127.0.0.1:{port}")
        start("prometheus", *flags, "--storage.tsdb.path=data", stderr=subprocess.DEVNULL)

        def ask(path: str) -> Any:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
                return json.load(answer)["data"]

        until(lambda: ask("/api/v1/status/buildinfo"), "Prometheus to start")
        yield ask
    finally:
        for process in started:
            process.kill()
            process.wait()


def query(ask: Callable[[str], Any], text: str) -> list[Any]:
    return ask("/api/v1/query?" + urllib.parse.urlencode({"query": text}))["result"]


def test_promtool_finds_nothing_wrong(tmp_path) -> None:
    for words in (["rules", "alerts.yml"], ["config", "prometheus.yml"]):
        done = subprocess.run(
            ["promtool", "check", *words], cwd=DEPLOY, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    text = metrics_text(Follower.open(home_with(simulated())), openmetrics=False)
    check = ["promtool", "check", "metrics"]
    checked = subprocess.run(check, input=text, capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_it_collects_and_every_query_is_sound(prometheus) -> None:
    until(lambda: query(prometheus, "holdfast_goodput_ratio"), "the first metrics")
    (target,) = prometheus("/api/v1/targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    (step,) = query(prometheus, "holdfast_step")
    assert step["metric"]["job"] == "j", "the job's own name"
    for expression in expressions():
        if not expression.startswith("label_values"):
            query(prometheus, expression.replace("$job", ".*"))
    assert query(prometheus, 'sum by (cause) (holdfast_rank_seconds_total{job=~".*"})')
    rules: list[Any] = []

    def all_evaluated() -> bool:
        groups = prometheus("/api/v1/rules")["groups"]
        rules[:] = [rule for group in groups for rule in group["rules"]]
        return all(rule["health"] != "unknown" for rule in rules)

    until(all_evaluated, "the rules to be evaluated")
    assert all(rule["health"] == "ok" for rule in rules), rules
    assert len(rules) == (DEPLOY / "alerts.yml").read_text().count("- alert:")
