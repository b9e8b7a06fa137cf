"""One fixture: `run`, a fresh `holdfast run` that is ended after the test and must leave nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .harness import Run

_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.when == "call":
        item.stash[_failed] = report.failed
    return report


@pytest.fixture
def make_run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[], Run]]:
    """Runs that share the test's directory, for tests that need more than one."""
    runs: list[Run] = []

    def make() -> Run:
        runs.append(Run(tmp_path))
        return runs[-1]

    yield make
    failed = request.node.stash.get(_failed, True)
    if failed:
        print(*[run.story() for run in runs], sep="\n\n")
    try:
        for run in runs:
            if not failed and run.process is not None and run.process.poll() is not None:
                run.assert_nobody_left()
    finally:
        for run in runs:
            run.close()


@pytest.fixture
def run(make_run: Callable[[], Run]) -> Run:
    return make_run()
