"""Platforms come through hundreds of faults, and the harness that says so can fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from chaos import endure
from fake_kubernetes import FakeCluster
from local_engine import LocalEngine
from machine import Machine
from model import ModelEngine, ModelPlatform

from holdfast.core.supply import rules
from holdfast.messages.supply import RequestId, Sighting, SupplyPlan
from holdfast.platforms.supplier import Supplier


@pytest.mark.parametrize("seed", range(4))
def test_a_model_of_an_engine_comes_through_500_faults(seed: int) -> None:
    counts = endure(ModelEngine(), seed)
    assert counts.total() >= 500
    assert min(counts.values()) > 5


@pytest.mark.parametrize("seed", range(4))
def test_kubernetes_comes_through_500_faults(seed: int) -> None:
    counts = endure(FakeCluster(), seed)
    assert counts.total() >= 500
    assert min(counts.values()) > 5


def test_the_local_platform_comes_through_faults_with_real_processes(tmp_path: Path) -> None:
    with Machine(tmp_path) as machine:
        counts = endure(LocalEngine(machine), seed=1, faults=100)
    assert counts.total() >= 100


# ---- the harness finds what is broken ----


class Leaky(ModelPlatform):
    """It says that it stops nodes, and does not."""

    async def release(self, requests: Sequence[RequestId]) -> None: ...


class Inattentive(ModelPlatform):
    """It lists what ran when it was opened, and nothing that happened since."""

    async def list(self) -> Sequence[Sighting]:
        if not hasattr(self, "_first"):
            self._first = await super().list()
        return self._first


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (Leaky, "exist, and nobody wants them"),
        (Inattentive, "wanted, and do not exist|not in the job|nobody wants them"),
    ],
)
def test_a_broken_platform_is_found(kind: type[ModelPlatform], found: str) -> None:
    engine = ModelEngine()
    engine.client = kind
    with pytest.raises(AssertionError, match=found):
        endure(engine, seed=1)


def without_memory_of_lists(monkeypatch: pytest.MonkeyPatch) -> str:
    forgets = property(lambda self: set(), lambda *_: None)
    monkeypatch.setattr(Supplier, "_seen", forgets, raising=False)
    return "made again after they were gone"


def without_whole_plans(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(rules, "whole_plan", lambda s, avoid: SupplyPlan(number=s.plans))
    return "not exist|not in the job|nobody wants them"


def without_new_names(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(rules, "drop", lambda s, number: s.positions.pop(number))
    return "made again after they were gone"


def without_a_limit_for_leaving(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(rules, "LEAVE_S", 1e6)
    return "exist, and nobody wants them"


@pytest.mark.parametrize(
    ("without", "only"),
    [
        (without_memory_of_lists, None),
        (without_whole_plans, None),
        (without_new_names, None),
        (without_a_limit_for_leaving, ("silence", "scale")),
    ],
)
def test_a_broken_supplier_or_core_is_found(
    without: Callable[[pytest.MonkeyPatch], str],
    only: Sequence[str] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = without(monkeypatch)
    with pytest.raises(AssertionError, match=found):
        endure(ModelEngine(), seed=0, faults=2000, only=only)
