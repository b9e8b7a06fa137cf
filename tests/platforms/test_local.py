"""The local platform: what was asked for runs once, is seen, and ends, whoever is killed meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from machine import DEAF, SPINS, Machine, all_started, avoid, ended, quoted, sightings, until, wish

from holdfast import proc
from holdfast.errors import PlatformError
from holdfast.platforms.local_node import NodeRecord, claim, started_at


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


def test_each_request_is_a_session_of_its_own_that_knows_its_request_and_its_host(
    tmp_path: Path,
) -> None:
    async def scenario(machine: Machine) -> None:
        platform = machine.platform()
        await platform.ask([wish("0-1"), wish("3-2")], [])
        seen = await sightings(platform)
        assert {name: (one.status, one.host) for name, one in seen.items()} == {
            "0-1": ("running", "node-0"),
            "3-2": ("running", "node-3"),
        }
        await all_started(machine, 2)
        assert {(name, host) for name, host, _ in machine.started()} == {
            ("0-1", "node-0"),
            ("3-2", "node-3"),
        }
        sessions = {os.getsid(pid) for _, _, pid in machine.started()}
        assert sessions == {machine.guard("0-1"), machine.guard("3-2")}

    with Machine(tmp_path) as machine:
        run(scenario(machine))


def test_a_request_that_is_asked_for_by_two_suppliers_is_started_once(tmp_path: Path) -> None:
    """One that was killed right after it had asked, and the one after it."""

    async def scenario(machine: Machine) -> None:
        platforms = [machine.platform() for _ in range(3)]
        for platform in platforms:
            await platform.ask([wish("0-1")], [])
        await all_started(machine, 1)
        guards = [platform._guards["0-1"][0] for platform in platforms]
        await until(lambda: [one.poll() for one in guards].count(0) == 2, "two guards to give way")
        assert len(machine.started()) == 1
        for platform in platforms:
            assert (await sightings(platform))["0-1"].status == "running"

    with Machine(tmp_path) as machine:
        run(scenario(machine))


@pytest.mark.parametrize(
    ("script", "status", "code"),
    [
        ("exit 0", "succeeded", 0),
        ("exit 7", "failed", 7),
        ("kill -9 $$", "failed", 137),
        ("kill -TERM $$", "failed", 143),
    ],
)
def test_how_a_node_ended_is_known_to_its_supplier_and_to_the_next_one(
    tmp_path: Path, script: str, status: str, code: int
) -> None:
    async def scenario(machine: Machine) -> None:
        platform = machine.platform(script)
        await platform.ask([wish("0-1")], [])
        seen = (await ended(platform, ["0-1"]))["0-1"]
        assert (seen.status, seen.code, seen.host) == (status, code, "node-0")
        assert (await sightings(machine.platform()))["0-1"] == seen

    with Machine(tmp_path) as machine:
        run(scenario(machine))


@pytest.mark.parametrize("restarted", [False, True])
def test_a_node_that_is_killed_with_its_guard_is_seen_at_once_as_killed(
    tmp_path: Path, restarted: bool
) -> None:
    async def scenario(machine: Machine) -> None:
        platform = machine.platform()
        await platform.ask([wish("0-1")], [])
        await all_started(machine, 1)
        if restarted:
            platform = machine.platform()
        assert (await sightings(platform))["0-1"].status == "running"
        changed = asyncio.ensure_future(platform.changed())
        guard = machine.guard("0-1")
        for pid in [guard, *proc.descendants(guard)]:
            os.kill(pid, signal.SIGKILL)
        await changed
        seen = (await sightings(platform))["0-1"]
        assert (seen.status, seen.code) == ("failed", 137)

    with Machine(tmp_path) as machine:
        run(scenario(machine))


def test_a_node_dies_with_its_guard(tmp_path: Path) -> None:
    async def scenario(machine: Machine) -> None:
        platform = machine.platform()
        await platform.ask([wish("0-1")], [])
        await all_started(machine, 1)
        ((_, _, pid),) = machine.started()
        os.kill(machine.guard("0-1"), signal.SIGKILL)
        await until(lambda: not started_at(pid), "the node to die")

    with Machine(tmp_path) as machine:
        run(scenario(machine))


def test_another_process_with_the_pid_of_a_guard_is_not_taken_for_it(tmp_path: Path) -> None:
    async def scenario(machine: Machine) -> None:
        mine = NodeRecord(pid=os.getpid(), started=started_at(os.getpid()) - 1, host="node-0")
        assert claim(machine.records / "0-1.json", mine)
        platform = machine.platform()
        got: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
        try:
            await platform.release(["0-1"])
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        assert not got
        assert (await sightings(platform))["0-1"].code == 137

    with Machine(tmp_path) as machine:
        run(scenario(machine))


def test_a_node_that_is_released_again_and_again_is_told_once(tmp_path: Path) -> None:
    told = tmp_path / "told"
    trap = f"trap 'echo told >> {quoted(told)}' TERM; "
    loop = f"while [ ! -e {quoted(told)}.end ]; do sleep 0.01; done"

    async def scenario(machine: Machine) -> None:
        platform = machine.platform(loop, trap)
        await platform.ask([wish("0-1")], [])
        await all_started(machine, 1)
        for _ in range(3):
            await platform.release(["0-1"])
            await until(told.exists, "the first to be told")
        Path(f"{told}.end").touch()
        await ended(platform, ["0-1"])
        assert told.read_text() == "told\n"
        await platform.release(["0-1"])  # It is gone: no error.

    with Machine(tmp_path) as machine:
        run(scenario(machine))


def test_a_node_that_does_not_leave_in_time_is_killed(tmp_path: Path) -> None:
    async def scenario(machine: Machine) -> None:
        platform = machine.platform(SPINS, DEAF, limit_s=0.2)
        await platform.ask([wish("0-1")], [])
        await all_started(machine, 1)
        await platform.release(["0-1"])
        assert (await ended(platform, ["0-1"]))["0-1"].code == 137

    with Machine(tmp_path) as machine:
        run(scenario(machine))


@pytest.mark.parametrize(
    ("command", "environ", "code"),
    [
        (["/no/such/launcher"], {}, 127),
        (["/bin/sh"], {"PYTHONHOME": "/nowhere"}, 1),
    ],
    ids=["no launcher", "no guard"],
)
def test_a_node_that_cannot_even_start_is_seen_as_failed_with_its_code(
    tmp_path: Path, command: list[str], environ: dict[str, str], code: int
) -> None:
    async def scenario(machine: Machine) -> None:
        platform = machine.platform_of(command, **environ)
        await platform.ask([wish("0-1")], [])
        seen = (await ended(platform, ["0-1"]))["0-1"]
        assert (seen.status, seen.code) == ("failed", code)
        assert f"exit code {code} on node-0" in seen.detail
        assert (await sightings(machine.platform()))["0-1"] == seen

    with Machine(tmp_path) as machine:
        run(scenario(machine))


def test_a_machine_that_cannot_start_processes_refuses_and_says_why(tmp_path: Path) -> None:
    async def scenario(machine: Machine) -> None:
        platform = machine.platform(TOO_LARGE="x" * (1 << 20))
        with pytest.raises(PlatformError, match="no process can be started") as refused:
            await platform.ask([wish("0-1"), wish("1-1")], [])
        assert (refused.value.requests, refused.value.for_good) == (("0-1", "1-1"), False)
        assert await platform.list() == []

    with Machine(tmp_path) as machine:
        run(scenario(machine))


def test_a_host_that_is_avoided_or_in_use_is_not_given_to_a_node(tmp_path: Path) -> None:
    async def scenario(machine: Machine) -> None:
        await machine.platform().ask([wish("0-1"), wish("1-1")], avoid("node-1"))
        await all_started(machine, 2)
        again = machine.platform()
        await again.ask([wish("2-1"), wish("1-2")], avoid("node-1"))
        hosts = {name: one.host for name, one in (await sightings(again)).items()}
        assert hosts == {"0-1": "node-0", "1-1": "node-2", "2-1": "node-3", "1-2": "node-4"}

    with Machine(tmp_path) as machine:
        run(scenario(machine))


def test_a_position_has_the_same_host_again_once_its_node_is_gone(tmp_path: Path) -> None:
    async def scenario(machine: Machine) -> None:
        platform = machine.platform("exit 7")
        await platform.ask([wish("1-1")], [])
        await ended(platform, ["1-1"])
        await platform.ask([wish("1-2")], [])
        seen = await sightings(platform)
        assert seen["1-2"].host == "node-1"
        assert "1-1" not in seen, "what is over is forgotten once its position has another"

    with Machine(tmp_path) as machine:
        run(scenario(machine))


def test_nodes_end_at_once_when_the_lifeline_is_cut_even_those_that_are_deaf(
    tmp_path: Path,
) -> None:
    async def scenario(machine: Machine) -> None:
        platform = machine.platform(SPINS, DEAF)
        await platform.ask([wish("0-1"), wish("1-1")], [])
        await all_started(machine, 2)
        machine.cut_lifeline()
        await ended(platform, ["0-1", "1-1"])
        assert not any(started_at(pid) for _, _, pid in machine.started())

    with Machine(tmp_path) as machine:
        run(scenario(machine))
