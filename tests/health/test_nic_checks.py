from __future__ import annotations

from pathlib import Path

import pytest
from fakenode import FakeNode
from hypothesis import given
from hypothesis import strategies as st

from holdfast.health.baseline import NicSeen, PortSeen, Seen
from holdfast.health.judgement import Judgement
from holdfast.health.nic import Port, address, check_nic, find_near, judge_ports, nearest

LEFT, RIGHT = "pci0000:3a/0000:3a:00.0", "pci0000:b0/0000:b0:00.0"


@pytest.fixture
def pair(fake: FakeNode) -> FakeNode:
    """Two GPUs, each with an InfiniBand device behind the same bridge, and an Ethernet device."""
    for bridge, gpu, nic, name in (
        (LEFT, "0000:3b:00.0", "0000:3c:00.0", "mlx5_0"),
        (RIGHT, "0000:b1:00.0", "0000:b2:00.0", "mlx5_1"),
    ):
        fake.pci_gpu(f"{bridge}/{gpu}")
        fake.infiniband(name, f"{bridge}/{nic}")
    fake.ethernet("eth0", "pci0000:00/0000:00:05.0")
    return fake


def set_port(fake: FakeNode, name: str, file: str, content: object) -> None:
    fake.write(f"sys/class/infiniband/{name}/ports/1/{file}", content)


def look(fake: FakeNode, before: Seen | None = None, **settings: object) -> Judgement:
    return check_nic(fake.node(**settings), before)


# ---- changes ----


def test_a_machine_without_network_devices_is_unknown(fake: FakeNode) -> None:
    assert look(fake).verdict == "unknown"


def test_the_first_look_passes_and_notes_the_counters(pair: FakeNode) -> None:
    set_port(pair, "mlx5_0", "counters/link_downed", 7)
    found = look(pair)
    assert found.verdict == "pass"
    assert "first look" in found.reason
    assert isinstance(found.seen, NicSeen)
    assert found.seen.ports["mlx5_0/1"] == PortSeen(up=True, downs=7)


def test_one_more_link_down_fails_once(pair: FakeNode) -> None:
    first = look(pair)
    set_port(pair, "mlx5_0", "counters/link_downed", 1)
    second = look(pair, first.seen)
    assert second.verdict == "fail"
    assert second.reason == "mlx5_0/1 went down 1 time since the last look"
    assert look(pair, second.seen).verdict == "pass"


def test_a_link_that_is_down_fails_until_it_is_up(pair: FakeNode) -> None:
    first = look(pair)
    set_port(pair, "mlx5_1", "state", "1: DOWN")
    set_port(pair, "mlx5_1", "phys_state", "3: Disabled")
    second = look(pair, first.seen)
    assert second.verdict == "fail"
    assert "mlx5_1/1 was up and is DOWN (Disabled)" in second.reason
    assert look(pair, second.seen).verdict == "fail"
    set_port(pair, "mlx5_1", "state", "4: ACTIVE")
    assert look(pair, second.seen).verdict == "pass"


def test_a_counter_that_went_back_was_reset_and_blames_nobody(pair: FakeNode) -> None:
    set_port(pair, "mlx5_0", "counters/link_downed", 9)
    first = look(pair)
    set_port(pair, "mlx5_0", "counters/link_downed", 0)
    assert look(pair, first.seen).verdict == "pass"


def test_a_device_that_is_gone_fails(pair: FakeNode) -> None:
    first = look(pair)
    (pair.root / "sys/class/infiniband/mlx5_0").unlink()
    found = look(pair, first.seen)
    assert found.verdict == "fail"
    assert "mlx5_0/1 was up at an earlier look and is gone" in found.reason


def test_the_link_nearest_to_a_gpu_should_be_up(pair: FakeNode) -> None:
    set_port(pair, "mlx5_0", "state", "1: DOWN")
    assert look(pair).verdict == "warn"


def test_an_ethernet_link_far_from_the_gpus_only_warns(pair: FakeNode) -> None:
    first = look(pair)
    pair.write("sys/class/net/eth0/carrier_changes", 3)
    assert look(pair, first.seen).verdict == "warn"
    pair.write("sys/class/net/eth0/operstate", "down")
    assert look(pair, first.seen).verdict == "warn"


def test_without_gpus_every_link_counts(fake: FakeNode) -> None:
    fake.ethernet("eth0", "pci0000:00/0000:00:05.0")
    fake.ethernet("eth1", "pci0000:00/0000:00:06.0", state="down", changes=0)
    first = look(fake)
    assert first.verdict == "pass"
    fake.write("sys/class/net/eth0/operstate", "down")
    found = look(fake, first.seen)
    assert found.verdict == "fail"
    assert "eth1" not in found.reason


def test_virtual_interfaces_are_not_looked_at(fake: FakeNode) -> None:
    fake.ethernet("eth0", "pci0000:00/0000:00:05.0")
    fake.write("sys/class/net/docker0/operstate", "down")
    assert look(fake).facts["links"] == 1


def test_a_counter_that_cannot_be_read_is_no_change(pair: FakeNode) -> None:
    set_port(pair, "mlx5_0", "counters/link_downed", 4)
    first = look(pair)
    (pair.root / "sys/class/infiniband/mlx5_0/ports/1/counters/link_downed").unlink()
    second = look(pair, first.seen)
    assert second.verdict == "pass"
    set_port(pair, "mlx5_0", "counters/link_downed", 5)
    assert look(pair, second.seen).verdict == "fail"


PORTS = st.dictionaries(
    st.sampled_from(["a", "b", "c"]),
    st.builds(
        Port,
        state=st.just("x"),
        up=st.sampled_from([True, False, None]),
        downs=st.none() | st.integers(0, 5),
        device=st.sampled_from(["", "1", "2"]),
    ),
)


@given(st.lists(PORTS, max_size=5), st.none() | st.sets(st.sampled_from(["1", "2"])))
def test_a_failure_always_has_a_link_that_was_up_or_a_counter_that_grew(
    history: list[dict[str, Port]], carrying: set[str] | None
) -> None:
    before: NicSeen | None = None
    ever_up: set[str] = set()
    highest: dict[str, int] = {}
    for ports in history:
        found = judge_ports(ports, before, carrying)
        lost = {name for name in ever_up if name not in ports or ports[name].up is False}
        grew = {
            name
            for name, port in ports.items()
            if port.downs is not None and name in highest and port.downs > highest[name]
        }
        assert found.verdict != "fail" or lost | grew
        if carrying is None and lost | grew:
            assert found.verdict == "fail"
        ever_up |= {name for name, port in ports.items() if port.up}
        for name, port in ports.items():
            highest[name] = highest.get(name, 0) if port.downs is None else port.downs
        assert isinstance(found.seen, NicSeen)
        before = found.seen


# ---- which is near which ----


def test_each_gpu_has_the_device_behind_its_own_bridge(pair: FakeNode) -> None:
    near = find_near(pair.node())
    assert near.by_gpu == {"0000:3b:00.0": ["mlx5_0"], "0000:b1:00.0": ["mlx5_1"]}
    assert near.addresses == {"0000:3c:00.0", "0000:b2:00.0"}
    assert look(pair).facts["near gpu 0000:3b:00.0"] == "mlx5_0"


def test_devices_that_are_equally_near_all_count(fake: FakeNode) -> None:
    fake.pci_gpu(f"{LEFT}/0000:3b:00.0")
    fake.infiniband("mlx5_0", f"{LEFT}/0000:3c:00.0")
    fake.infiniband("mlx5_1", f"{LEFT}/0000:3d:00.0")
    fake.infiniband("mlx5_2", f"{RIGHT}/0000:b2:00.0")
    assert find_near(fake.node()).by_gpu["0000:3b:00.0"] == ["mlx5_0", "mlx5_1"]


TOPOLOGY = """<system version="1"><cpu numaid="0">
  <pci busid="ffff:ff:01.0" class="0x060400">
    <pci busid="00000000:3B:00.0" class="0x030200"/>
    <pci busid="0000:b2:00.0" class="0x020700"/>
  </pci>
  <pci busid="ffff:ff:02.0" class="0x060400">
    <pci busid="0000:b1:00.0"><gpu dev="1"/></pci>
    <pci busid="0000:3c:00.0"><nic><net name="mlx5_0"/></nic></pci>
  </pci></cpu></system>"""


def test_a_topology_file_overrules_what_the_machine_shows(pair: FakeNode, tmp_path: Path) -> None:
    file = tmp_path / "topology.xml"
    file.write_text(TOPOLOGY)
    near = find_near(pair.node(topology=str(file)))
    assert near.by_gpu == {"0000:3b:00.0": ["mlx5_1"], "0000:b1:00.0": ["mlx5_0"]}


@pytest.mark.parametrize("content", [None, "<system>", ""])
def test_a_topology_file_that_cannot_be_used_is_said_and_not_fatal(
    pair: FakeNode, tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "topology.xml"
    if content is not None:
        file.write_text(content)
    found = look(pair, topology=str(file))
    assert found.verdict == "unknown"
    assert "cannot be used" in found.reason
    assert found.facts["near gpu 0000:3b:00.0"] == "mlx5_0"


@pytest.mark.parametrize("text", ["00000000:3B:00.0", "0000:3b:00.0", "0:3b:00.0"])
def test_addresses_are_written_as_the_machine_writes_them(text: str) -> None:
    assert address(text) == "0000:3b:00.0"


PLACES = st.lists(st.sampled_from("ab"), max_size=4).map(tuple)


@given(PLACES, st.dictionaries(st.text(max_size=2), PLACES))
def test_nobody_is_nearer_than_the_nearest(
    gpu: tuple[str, ...], nics: dict[str, tuple[str, ...]]
) -> None:
    def shared(place: tuple[str, ...]) -> int:
        return max(n for n in range(len(gpu) + 1) if gpu[:n] == place[:n])

    found = nearest(gpu, nics)
    for name in found:
        assert shared(nics[name]) == max(map(shared, nics.values())) > 0
