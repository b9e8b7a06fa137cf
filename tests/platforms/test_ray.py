"""The Ray platform over a fake cluster, and the actor of a node as an ordinary object."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_ray import KILLED, NODE_DIED, OOM, PREEMPTED, FakeRay
from machine import DEAF, SETTINGS, SPINS, WAITS, avoid, wish

from holdfast import __version__
from holdfast.errors import PlatformError, UsageError
from holdfast.messages.supply import Sighting
from holdfast.platforms import ray_engine, ray_job, ray_node
from holdfast.platforms.ray import RayPlatform, actor_terms, namespace_of, reason_of_death
from holdfast.platforms.ray_engine import ActorTerms, Death, HostView, may_scale
from holdfast.platforms.ray_node import NodeState, RayNode, RayNodeStart


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


async def seen(platform: RayPlatform) -> dict[str, Sighting]:
    await asyncio.sleep(0)  # Those who wait for actors hear of what has happened.
    return {one.request: one for one in await platform.list()}


async def seen_as(platform: RayPlatform, request: str, status: str) -> Sighting:
    """Wait, woken by the platform alone, until a request has a status."""
    while True:
        found = (await seen(platform)).get(request)
        if found is not None and found.status == status:
            return found
        await asyncio.wait_for(platform.changed(), 30)


# ---- requests ------------------------------------------------------------------------------------


def test_a_request_is_an_actor_with_its_name_that_runs_on_a_host() -> None:
    async def scenario() -> None:
        cluster = FakeRay(HostView("a", {"CPU": 2, "spot": 1}))
        platform = cluster.platform(ActorTerms(cpus=2, resources={"spot": 1}))
        await platform.ask([wish("0-1"), wish("3-1")], [])
        found = await seen_as(platform, "3-1", "running")
        assert found.host == cluster.actors["test/3-1"].host
        actor = cluster.actors["test/0-1"]
        assert actor.terms.needs() == {"CPU": 2, "spot": 1}
        assert actor.start.command == ("-m", "holdfast", "run", "--coordinator=10.0.0.1:29400",
                                       "train.py")  # fmt: skip
        assert actor.start.lifeline == ("10.0.0.1", 29400)
        assert actor.start.environ == {"HOLDFAST_TOKEN": "a-token"}, "not all of the driver's"

    run(scenario())


def test_an_actor_that_is_asked_for_twice_is_made_once() -> None:
    async def scenario() -> None:
        cluster = FakeRay()
        await cluster.platform().ask([wish("0-1")], [])
        first = cluster.actors["test/0-1"]
        await cluster.platform().ask([wish("0-1")], [])
        assert cluster.actors["test/0-1"] is first

    run(scenario())


def test_a_supplier_that_was_started_again_finds_the_actors_of_the_one_before() -> None:
    async def scenario() -> None:
        cluster = FakeRay()
        await cluster.platform().ask([wish("0-1"), wish("1-1")], [])
        cluster.end("test/1-1", 7)
        again = cluster.platform()
        assert (await seen_as(again, "1-1", "failed")).code == 7
        assert (await seen_as(again, "0-1", "running")).host == cluster.actors["test/0-1"].host

    run(scenario())


def test_a_request_that_ray_has_no_room_for_is_pending_and_says_what_it_waits_for() -> None:
    async def scenario() -> None:
        cluster = FakeRay(HostView("a", {"GPU": 8}), HostView("head", {"CPU": 4}), autoscales=True)
        cluster.places = False
        platform = cluster.platform(ActorTerms(gpus=8))
        await platform.ask([wish("0-1")], [])
        found = (await seen(platform))["0-1"]
        assert found.status == "pending"
        assert found.detail == "waits until GPU 8 is free on one of 1 nodes of the Ray cluster"
        cluster.fixed_hosts = [HostView("head", {"CPU": 4})]
        assert (await seen(platform))["0-1"].detail == (
            "no node of the Ray cluster has GPU 8 (the most is 0)"
        )
        cluster.place("test/0-1")
        await seen_as(platform, "0-1", "running")

    run(scenario())


@pytest.mark.parametrize("autoscales", [False, True])
def test_what_no_host_can_hold_is_refused_for_good_unless_the_cluster_scales(
    autoscales: bool,
) -> None:
    async def scenario() -> None:
        cluster = FakeRay(HostView("a", {"CPU": 4, "GPU": 2}), autoscales=autoscales)
        platform = cluster.platform(ActorTerms(cpus=4, gpus=8))
        if autoscales:
            await platform.ask([wish("0-1")], [])
            return
        with pytest.raises(PlatformError, match=r"GPU 8 \(the most is 2\).*ask for less") as why:
            await platform.ask([wish("0-1"), wish("1-1")], [])
        assert (why.value.requests, why.value.for_good) == (("0-1", "1-1"), True)
        assert not cluster.actors

    run(scenario())


def test_a_job_that_had_nodes_waits_for_hosts_that_are_away_however_few_there_are() -> None:
    async def scenario() -> None:
        cluster = FakeRay(HostView("a", {"CPU": 1}))
        platform = cluster.platform()
        await platform.ask([wish("0-1")], [])
        await seen_as(platform, "0-1", "running")
        cluster.fixed_hosts = [HostView("head", {})]
        await platform.ask([wish("0-2")], [])
        assert "test/0-2" in cluster.actors

    run(scenario())


def test_hosts_to_avoid_are_named_to_ray_as_long_as_the_cluster_has_them() -> None:
    async def scenario() -> None:
        cluster = FakeRay(HostView("a", {"CPU": 1}), HostView("b", {"CPU": 1}))
        platform = cluster.platform()
        await platform.ask([wish("0-1")], avoid("b", "long gone"))
        assert cluster.actors["test/0-1"].terms.avoid == ("b",)

    run(scenario())


def test_memory_that_is_asked_for_is_asked_of_ray() -> None:
    async def scenario() -> None:
        cluster = FakeRay(autoscales=True)
        larger = msgspec.structs.replace(wish("0-2"), memory_mib=2048)
        await cluster.platform().ask([larger], [])
        assert cluster.actors["test/0-2"].terms.memory_bytes == 2 << 30

    run(scenario())


def test_a_call_that_fails_names_the_requests_that_were_not_made() -> None:
    async def scenario() -> None:
        cluster = FakeRay()
        cluster.half = True
        with pytest.raises(PlatformError, match="does not answer") as why:
            await cluster.platform().ask([wish("0-1"), wish("1-1")], [])
        assert why.value.requests == ("0-1", "1-1")
        assert not why.value.for_good

    run(scenario())


# ---- ends ----------------------------------------------------------------------------------------


def test_what_has_ended_is_told_and_then_removed() -> None:
    async def scenario() -> None:
        cluster = FakeRay()
        platform = cluster.platform()
        await platform.ask([wish("0-1"), wish("1-1")], [])
        await seen_as(platform, "0-1", "running")
        cluster.end("test/0-1", 7)
        found = await seen_as(platform, "0-1", "failed")
        assert (found.code, found.detail) == (
            7, f"its launcher ended with exit code 7 on Ray node {found.host}"
        )  # fmt: skip
        assert "test/0-1" in cluster.actors, "it keeps the code until it was told"
        assert "0-1" not in await seen(platform)
        assert cluster.removed == ["test/0-1"]

    run(scenario())


def test_the_actor_of_an_attempt_that_is_over_makes_room_for_the_next_one() -> None:
    async def scenario() -> None:
        cluster = FakeRay()
        platform = cluster.platform()
        await platform.ask([wish("0-1"), wish("10-1")], [])
        await seen_as(platform, "10-1", "running")
        cluster.end("test/0-1", 1)
        await seen_as(platform, "0-1", "failed")
        await platform.ask([wish("0-2")], [])
        assert cluster.removed == ["test/0-1"]
        assert sorted(cluster.actors) == ["test/0-2", "test/10-1"]

    run(scenario())


def test_a_host_that_cannot_be_reached_is_not_gone_before_ray_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("holdfast.platforms.ray.AWAY_PAUSE_S", 0.01)

    async def scenario() -> None:
        cluster = FakeRay()
        platform = cluster.platform()
        await platform.ask([wish("0-1")], [])
        await seen_as(platform, "0-1", "running")
        cluster.actors["test/0-1"].reachable = False
        cluster.news()
        for _ in range(5):
            await asyncio.sleep(0.02)
            assert (await seen(platform))["0-1"].status == "running"
        cluster.die("test/0-1", NODE_DIED)
        found = await seen_as(platform, "0-1", "failed")
        assert (found.reason, found.detail) == ("lost", "The actor's node has died.")

    run(scenario())


def test_an_actor_that_cannot_be_reached_for_a_while_goes_on_to_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("holdfast.platforms.ray.AWAY_PAUSE_S", 0.01)

    async def scenario() -> None:
        cluster = FakeRay()
        platform = cluster.platform()
        await platform.ask([wish("0-1")], [])
        await seen_as(platform, "0-1", "running")
        cluster.actors["test/0-1"].reachable = False
        cluster.news()
        await asyncio.sleep(0.02)
        cluster.actors["test/0-1"].reachable = True
        cluster.end("test/0-1", 143)
        assert (await seen_as(platform, "0-1", "failed")).code == 143

    run(scenario())


def test_a_head_that_does_not_answer_says_nothing_about_nodes() -> None:
    async def scenario() -> None:
        cluster = FakeRay()
        platform = cluster.platform()
        await platform.ask([wish("0-1")], [])
        await seen_as(platform, "0-1", "running")
        cluster.refusals = 1
        with pytest.raises(PlatformError, match="no connection to the head"):
            await platform.list()
        assert (await seen(platform))["0-1"].status == "running"

    run(scenario())


def test_a_node_that_is_released_is_told_to_leave_and_one_that_was_never_placed_is_removed() -> (
    None
):
    async def scenario() -> None:
        cluster = FakeRay()
        platform = cluster.platform()
        await platform.ask([wish("0-1")], [])
        await seen_as(platform, "0-1", "running")
        cluster.places = False
        await platform.ask([wish("1-1")], [])
        await platform.release(["0-1", "1-1", "9-9"])
        assert cluster.actors["test/0-1"].told == 1
        assert cluster.removed == ["test/1-1"]

    run(scenario())


IMPORT = """The actor died because of an error raised in its creation task
  File "cloudpickle.py"
ModuleNotFoundError: No module named 'holdfast'"""


@pytest.mark.parametrize(
    ("death", "reason", "words"),
    [
        (NODE_DIED, "lost", "The actor's node has died."),
        (PREEMPTED, "preempted", "The actor's node has died."),
        (KILLED, "deleted", "killed by `ray.kill`"),
        (OOM, "oom", "running low on memory"),
        (Death("ActorDiedError", IMPORT), "fatal", "install it there, or name it in the runtime"),
        (Death("RuntimeEnvSetupError", "Failed to set up runtime environment."), "fatal", "set up"),
        (Death("ActorDiedError", "The actor died because of an error raised in its creation task"),
         "fatal", "creation task"),
        (Death("ActorDiedError", "The actor died unexpectedly before finishing this task.\n"
               "Worker exit type: SYSTEM_ERROR"), "killed", "died unexpectedly"),
        (Death("unknown", ""), "killed", "unknown"),
    ],
)  # fmt: skip
def test_how_an_actor_died_becomes_a_reason(death: Death, reason: str, words: str) -> None:
    found, detail = reason_of_death(death)
    assert found == reason
    assert words in detail
    assert "\n" not in detail


# ---- settings ------------------------------------------------------------------------------------


def test_a_node_gets_a_cpu_for_each_rank_unless_somebody_says_otherwise() -> None:
    two = (
        msgspec.structs.replace(SETTINGS, nproc=2) if isinstance(SETTINGS, msgspec.Struct) else None
    )
    settings = two or SETTINGS
    assert actor_terms(settings, {}).needs() == {"CPU": 2}
    said = ray_job.variables({"CPU": 4, "GPU": 0.5, "spot": 1, "tpu": 2}, "pack")
    terms = actor_terms(settings, said)
    assert terms.needs() == {"CPU": 4, "GPU": 0.5, "spot": 1, "tpu": 2}
    assert terms.strategy == "pack"


@pytest.mark.parametrize(
    ("variable", "text", "words"),
    [
        ("HOLDFAST_RAY_CPUS", "many", "a number, 0 or more, is needed"),
        ("HOLDFAST_RAY_GPUS", "-1", "a number, 0 or more, is needed"),
        ("HOLDFAST_RAY_RESOURCES", "spot", "NAME=N is needed"),
        ("HOLDFAST_RAY_RESOURCES", "GPU=1", "has a variable of its own"),
        ("HOLDFAST_RAY_STRATEGY", "random", "one of spread, pack is needed"),
    ],
)
def test_what_is_no_amount_is_refused_in_one_line(variable: str, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as why:
        actor_terms(SETTINGS, {variable: text})
    assert variable in str(why.value)


def test_jobs_of_the_same_name_do_not_share_a_namespace() -> None:
    assert namespace_of("train", "one") == namespace_of("train", "one")
    assert namespace_of("train", "one") != namespace_of("train", "another")
    assert "one" not in namespace_of("train", "one").removeprefix("holdfast-train-")


def test_an_autoscaler_without_node_types_of_its_own_adds_nothing() -> None:
    def status(**types: str) -> bytes:
        return json.dumps({"autoscaler_report": {"node_type_mapping": types}}).encode()

    assert not may_scale(status(abc="node_abc"))
    assert may_scale(status(abc="ray.head.default"))
    assert may_scale(None), "nobody knows yet"


def test_ray_that_is_not_installed_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'holdfast\[ray\]'"):
        ray_engine.require_ray()


def test_an_address_at_which_nobody_listens_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(UsageError, match=rf"at {address} .*RAY_ADDRESS"):
            ray_engine._reach(address)
    ray_engine._reach("auto")


def test_versions_of_ray_that_differ_are_told_in_one_line() -> None:
    error = RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.60.0\n")
    told = ray_engine._not_connected("auto", error)
    assert "\n" not in told
    assert "start the driver with the Ray and Python of the cluster" in told


def test_the_command_of_a_job_is_that_of_holdfast_up() -> None:
    words = ray_job.command_of("train.py", ["--lr", "1"], (2, 4), 1, 8, "llm", ["--node-check"])
    assert words[1:] == [
        *("-m", "holdfast", "up", "--on", "ray", "--nodes=2:4", "--spares=1"),
        *("--nproc-per-node=8", "--job=llm", "--node-check", "train.py", "--lr", "1"),
    ]
    with pytest.raises(UsageError, match="the fewest and the most"):
        ray_job.command_of("train.py", [], (4, 2), 0, 1, "llm", [])


# ---- the actor, from inside ----------------------------------------------------------------------


class Node:
    """An actor without Ray; its processes end with it."""

    def __init__(self, folder: Path, script: str, **more: Any) -> None:
        order = {"lifeline": None, "limit_s": 30.0, "kept_s": 0.0, **more}
        self.out = folder / "out"
        start = RayNodeStart(
            request="3-2",
            command=("-c", f"import os; os.execv('/bin/sh', ['sh', '-c', {script!r}])"),
            environ={"OUT": str(self.out), "HOLDFAST_JOB": "try"},
            directory=str(folder),
            **order,
        )
        self.gone = threading.Event()
        self.actor = RayNode(msgspec.json.encode(start), host="f00", leave=self.gone.set)

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.actor._guard.pid, signal.SIGKILL)
        self.actor._guard.wait(30)

    async def ended(self) -> NodeState:
        answer = await asyncio.wait_for(self.actor.ended(), 30)
        return msgspec.json.decode(answer, type=NodeState)

    async def started(self) -> None:
        while not self.out.exists():
            await asyncio.sleep(0.01)


STARTED = 'echo "$HOLDFAST_REQUEST $HOLDFAST_NODE_NAME $HOLDFAST_JOB $(pwd)" > "$OUT"; '


def test_a_node_knows_its_request_and_its_host_and_its_code_is_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        with Node(tmp_path, STARTED + "exit 7") as node:
            assert await node.ended() == NodeState(host="f00", code=7)
            assert node.out.read_text() == f"3-2 f00 try {tmp_path}\n"
            assert node.gone.wait(30), "an actor that nobody removes ends by itself"

    run(scenario())


def test_a_node_that_is_told_to_leave_leaves_and_a_deaf_one_is_killed(tmp_path: Path) -> None:
    async def scenario() -> None:
        with Node(tmp_path, STARTED + WAITS) as node:
            await node.started()
            await node.actor.leave()
            await node.actor.leave()
            assert (await node.ended()).code == 143
        node.out.unlink()
        with Node(tmp_path, DEAF + STARTED + SPINS, limit_s=0.2) as deaf:
            await deaf.started()
            await deaf.actor.leave()
            assert (await deaf.ended()).code == 137

    run(scenario())


def test_a_node_ends_when_the_launcher_of_its_job_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_node, "LOOK_S", 0.05)

    async def scenario() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        with Node(tmp_path, DEAF + STARTED + SPINS, lifeline=listener.getsockname()[:2]) as node:
            await node.started()
            knocks = 0
            while knocks < 5:  # As often as it likes, while somebody listens.
                (await asyncio.to_thread(listener.accept))[0].close()
                knocks += 1
            assert not node.gone.is_set()
            listener.close()
            assert (await node.ended()).code == 137
            assert node.gone.wait(30)

    run(scenario())


def test_a_node_with_another_version_of_holdfast_says_so_and_runs_nothing() -> None:
    order = {"request": "0-1", "version": "0.0.1", "what": "a later version may know"}

    async def scenario() -> None:
        actor = RayNode(json.dumps(order).encode(), host="f00")
        state = msgspec.json.decode(await actor.ended(), type=NodeState)
        assert state.code == 93
        assert f"Ray node f00 has Holdfast {__version__}, the job's driver 0.0.1" in state.detail

    run(scenario())
