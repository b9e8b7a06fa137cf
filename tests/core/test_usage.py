"""A node's newest sample is in the report for as long as the node is a member."""

from __future__ import annotations

from driver import Driver

from holdfast.core import report
from holdfast.messages.events import NodeSampled
from holdfast.messages.units import NodeId
from holdfast.messages.usage import NodeUsage

BUSY = NodeUsage(cpu=0.9, cpus=8.0, memory_used_bytes=6, memory_bytes=8)


def sampled(driver: Driver, node: str, usage: NodeUsage) -> None:
    driver.take(NodeSampled(at=driver.at, node=NodeId(node), usage=usage))


def usages(driver: Driver) -> dict[str, NodeUsage | None]:
    status = report.status(driver.job, driver.at, alive=True)
    return {node.node: node.usage for node in status.nodes}


def test_the_newest_sample_of_each_node_is_reported() -> None:
    driver = Driver(min_nodes=2, max_nodes=2)
    driver.join("a")
    driver.join("b")
    sampled(driver, "a", NodeUsage(cpu=0.1))
    sampled(driver, "a", BUSY)
    assert usages(driver) == {"a": BUSY, "b": None}


def test_the_sample_of_a_lost_node_is_forgotten() -> None:
    driver = Driver(min_nodes=1, max_nodes=2)
    driver.join("a")
    driver.join("b")
    sampled(driver, "a", BUSY)
    driver.lose("a")
    sampled(driver, "a", BUSY)
    assert usages(driver) == {"b": None}
    assert any("NodeSampled" in refused for refused in driver.job.refused)
