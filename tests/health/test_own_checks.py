from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
from fakenode import FakeNode
from hypothesis import given
from hypothesis import strategies as st

from holdfast.health import own_checks
from holdfast.health.catalogue import checks_of, chosen
from holdfast.health.judgement import SEVERITY
from holdfast.health.own_checks import check_own, installed_checks, understood
from holdfast.messages.health import HealthResult

MODULE = """
import sys
def nothing(): pass
def raises(): raise RuntimeError("fan 3 is slow")
def asserts(): assert 1 == 2
def leaves(): sys.exit(3)
def leaves_well(): sys.exit(0)
class fans:
    @staticmethod
    def slow(): return "warn", "slow"
number = 3
"""


@pytest.fixture
def place(tmp_path: Path, fake: FakeNode) -> Path:
    (tmp_path / "my_node_checks.py").write_text(MODULE)
    (tmp_path / "my_broken_checks.py").write_text("import no_such_module_anywhere")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "verdict", "words"),
    [
        ("my_node_checks:nothing", "pass", "passed"),
        ("my_node_checks:raises", "fail", "RuntimeError: fan 3 is slow"),
        ("my_node_checks:asserts", "fail", "AssertionError"),
        ("my_node_checks:leaves", "fail", "SystemExit: 3"),
        ("my_node_checks:leaves_well", "pass", "passed"),
        ("my_node_checks:fans.slow", "warn", "slow"),
        ("my_node_checks:fans.slow [extra]", "warn", "slow"),
        ("my_node_checks:number", "unknown", "not a function"),
        ("my_node_checks:missing", "unknown", "missing"),
        ("my_broken_checks:any", "unknown", "no_such_module_anywhere"),
    ],
)
def test_a_check_says_what_it_means(
    place: Path,
    fake: FakeNode,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    verdict: str,
    words: str,
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(own_checks.sys, "path", list(own_checks.sys.path))
        found = check_own(fake.node(import_path=(str(place),)), name, None)
    assert found.verdict == verdict
    assert words in found.reason


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (None, "pass"),
        (True, "pass"),
        (False, "fail"),
        (("unknown", "no fan"), "unknown"),
        (("fail", "slow"), "fail"),
        (HealthResult("x", "warn", "slow", 0.0, {"rpm": 3}), "warn"),
        (0, "unknown"),
        ("fail", "unknown"),
        (("broken", "x"), "unknown"),
        (("fail", 3), "unknown"),
    ],
)
def test_an_answer_is_a_verdict_or_unknown(answer: object, verdict: str) -> None:
    assert understood(answer).verdict == verdict


@given(st.recursive(st.none() | st.booleans() | st.text() | st.integers(), st.tuples))
def test_any_answer_is_understood_somehow(answer: object) -> None:
    assert understood(answer).verdict in SEVERITY


def test_a_fact_that_no_message_can_carry_is_told_in_words() -> None:
    facts = {"share": float("nan"), "rate": float("inf"), "big": 1 << 70, "rpm": 3, "t": 0.5}
    told = understood(HealthResult("x", "fail", "slow", 0.0, facts)).facts
    assert told == {"share": "nan", "rate": "inf", "big": str(1 << 70), "rpm": 3, "t": 0.5}


def test_installed_packages_offer_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    point = metadata.EntryPoint("fan", "vendor.checks:fan", own_checks.GROUP)

    def entry_points(group: str) -> list[metadata.EntryPoint]:
        assert group == "holdfast.checks"
        return [point]

    with monkeypatch.context() as patched:
        patched.setattr(metadata, "entry_points", entry_points)
        found = installed_checks()
    assert found == {"fan": "vendor.checks:fan"}


def test_no_name_of_ours_can_be_taken(fake: FakeNode) -> None:
    installed = {"gpu": "a:b", "memory": "a:c", "storage:x": "a:d", "fan": "a:e"}
    checks = checks_of(fake.settings(user_checks=("my.mod:f",)), installed)
    own = [check.name for check in checks if check.kind == "own"]
    assert own == ["own:gpu", "own:memory", "own:storage:x", "fan", "my.mod:f"]
    assert all(check.kind != "own" for check in chosen(checks, ["gpu", "memory"]))
    assert len(chosen(checks, ["own"])) == 5
