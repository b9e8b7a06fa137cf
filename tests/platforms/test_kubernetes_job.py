"""One job on a fake API server and a real coordinator: what is made, kept going, told and released."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_kubernetes import OWNER, SPEC, FakeApi
from machine import until
from serving import TOKEN, Served, run, served

from holdfast.errors import ApiRefused, PlatformError, UsageError
from holdfast.messages.endnote import EndNote
from holdfast.messages.records import Terms
from holdfast.messages.supply import NodeWish
from holdfast.messages.units import RoundNumber, StepNumber
from holdfast.platforms.kubernetes import crd, operator
from holdfast.platforms.kubernetes import job as jobs
from holdfast.platforms.kubernetes.client import refusal
from holdfast.platforms.kubernetes.job import JobRun, next_step
from holdfast.platforms.kubernetes.kinds import HOLDFAST
from holdfast.platforms.kubernetes.objects import ROLE
from holdfast.platforms.kubernetes.platform import KubernetesPlatform
from holdfast.platforms.kubernetes.pods import CoordinatorPod
from holdfast.platforms.kubernetes.spec import read_spec
from holdfast.platforms.kubernetes.status import SUSPENDED, JobStatus, read_status, to_json

Json = dict[str, Any]

COLLECTION = "/apis/holdfast.dev/v1alpha1/namespaces/space/holdfastjobs"


def note(code: int, reason: str = "why", requeues: int = 0) -> EndNote:
    return EndNote(
        job="llm",
        code=code,
        reason=reason,
        round=RoundNumber(2),
        step=StepNumber(9),
        goodput=0.5,
        requeues=requeues,
    )


@pytest.mark.parametrize(
    ("pod", "suspend", "phase", "step"),
    [
        (CoordinatorPod("absent"), False, "Pending", "start"),
        (CoordinatorPod("absent"), True, "Pending", "hold"),
        (CoordinatorPod("absent"), False, "Running", "start"),
        (CoordinatorPod("absent"), False, "Succeeded", "wait"),
        (CoordinatorPod("absent"), False, "Failed", "wait"),
        (CoordinatorPod("absent"), False, "Suspended", "start"),
        (CoordinatorPod("starting"), False, "Pending", "wait"),
        (CoordinatorPod("leaving"), False, "Running", "wait"),
        (CoordinatorPod("broken"), False, "Running", "replace"),
        (CoordinatorPod("broken"), True, "Suspending", "replace"),
        (CoordinatorPod("up"), False, "Running", "serve"),
        (CoordinatorPod("up"), True, "Running", "serve"),
        (CoordinatorPod("ended", end=note(0)), False, "Running", "finish"),
        (CoordinatorPod("ended", end=note(0)), False, "Suspended", "finish"),
        (CoordinatorPod("ended", end=note(75)), True, "Suspending", "finish"),
        (CoordinatorPod("ended", end=note(75)), False, "Suspended", "resume"),
        (CoordinatorPod("ended", end=note(75)), False, "Failed", "finish"),
        (CoordinatorPod("ended", end=note(75, SUSPENDED)), False, "Running", "resume"),
        (CoordinatorPod("ended", end=note(93)), False, "Suspended", "finish"),
    ],
)
def test_what_is_to_be_done(pod: CoordinatorPod, suspend: bool, phase: Any, step: str) -> None:
    assert next_step(pod, suspend, JobStatus(phase=phase)) == step


def test_a_status_is_read_as_it_was_written() -> None:
    status = JobStatus(phase="Running", requeues=2, scale="1:3+0", goodput="98.0%")
    written = {key: value for key, value in to_json(status).items() if value is not None}
    assert read_status(written) == status
    assert read_status({"phase": "Odd"}) == JobStatus(), "of another version"


# ---- with a coordinator ----


class Scene:
    """A job on a fake server; pods run when they are told to."""

    def __init__(self) -> None:
        self.api = FakeApi()
        body = {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "HoldfastJob",
            "metadata": {"name": "llm", "namespace": "space", "generation": 1},
            "spec": msgspec.json.decode(msgspec.json.encode(SPEC)),
        }
        self.body = self.api._create(COLLECTION, body)
        self.run = JobRun(self.api, HOLDFAST, self.body)
        self.api.seen = self._seen

    def _seen(self, found: Json) -> None:
        if found["kind"] == "Pod":
            self.run.pod_changed(found["metadata"]["labels"][ROLE])

    def change(self, **spec: Any) -> None:
        self.body["spec"] |= spec
        self.run.changed(self.body)

    @property
    def status(self) -> JobStatus:
        return read_status(self.api.objects[COLLECTION]["llm"].get("status"))

    def condition(self, type: str) -> Any:
        return next((one for one in self.status.conditions if one.type == type), None)

    def provided(self) -> str:
        found = self.condition("NodesProvided")
        return found.message if found is not None else ""

    def events(self) -> list[str]:
        found = self.api.objects.get("/api/v1/namespaces/space/events", {})
        return [one["reason"] for one in found.values()]

    @property
    def coordinator(self) -> Json | None:
        return self.api.pods().get("llm-coordinator")

    def workers(self) -> set[str]:
        return {name for name in self.api.pods() if name != "llm-coordinator"}


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    made = Scene()
    task = asyncio.ensure_future(made.run.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.wait([task])


@asynccontextmanager
async def coordinating(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Scene, Served]]:
    """A job whose coordinator's pod runs, and is a real coordinator."""
    monkeypatch.setattr("secrets.token_urlsafe", lambda _: TOKEN)
    monkeypatch.setattr(jobs, "STATUS_EVERY_S", 0.05)
    async with served(folder / "journal.db") as here, scene() as there:
        here.coordinator.open(Terms(max_nodes=3), here.coordinator.clock.now())
        there.change(coordinator={"port": here.port})
        await until(lambda: there.coordinator, "the coordinator's pod")
        assert there.coordinator is not None
        there.api.run(there.coordinator, address="127.0.0.1")
        yield there, here


def test_all_that_a_job_needs_is_made_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scene() as here:
            await until(lambda: here.coordinator, "the coordinator's pod")
            here.run.changed(here.body)
            await until(lambda: here.status.phase == "Pending", "the status")
            kinds = [one["kind"] for kept in here.api.objects.values() for one in kept.values()]
            for kind in ("Secret", "Service", "PersistentVolumeClaim", "PodDisruptionBudget"):
                assert kinds.count(kind) == 1, kind

    run(scenario())


def test_a_server_without_the_new_budgets_gets_the_old_ones(tmp_path: Path) -> None:
    async def scenario() -> None:
        made = Scene()
        made.api.missing.add("/apis/policy/v1/namespaces/space/poddisruptionbudgets")
        task = asyncio.ensure_future(made.run.run())
        old = "/apis/policy/v1beta1/namespaces/space/poddisruptionbudgets"
        await until(lambda: made.api.objects.get(old), "a budget")
        task.cancel()
        await asyncio.wait([task])

    run(scenario())


def test_nodes_are_supplied_as_the_coordinator_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with coordinating(tmp_path, monkeypatch) as (there, _):
            await until(lambda: there.workers() == {"llm-0-1", "llm-1-1", "llm-2-1"}, "three pods")
            for name in there.workers():
                there.api.run(there.api.pods()[name])
            there.api.end(there.api.pods()["llm-1-1"], 137, "Error")
            await until(lambda: "llm-1-2" in there.workers(), "the next attempt")
            await until(lambda: there.condition("CoordinatorReady").status == "True", "an answer")
            assert there.status.scale == "1:3+0"

    run(scenario())


def test_other_numbers_of_nodes_are_told_to_the_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with coordinating(tmp_path, monkeypatch) as (there, here):
            await until(lambda: len(there.workers()) == 3, "three pods")
            there.change(nodes={"min": 2, "max": 5, "spares": 1})
            await until(lambda: len(there.workers()) == 6, "six pods")
            assert (here.job.terms.min_nodes, here.job.terms.spares) == (2, 1)
            await until(lambda: there.status.scale == "2:5+1", "the status")
            assert "Scaled" in there.events()

    run(scenario())


def test_a_spec_that_becomes_invalid_is_refused_and_the_job_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with coordinating(tmp_path, monkeypatch) as (there, here):
            await until(lambda: len(there.workers()) == 3, "three pods")
            there.change(nodes={"min": 4, "max": 3})
            await until(lambda: there.condition("Accepted").status == "False", "the refusal")
            assert "min (4) is more than max (3)" in there.condition("Accepted").message
            assert "Invalid" in there.events()
            assert here.job.terms.max_nodes == 3
            there.api.pods().pop("llm-2-1")
            there.run.pod_changed("worker")
            await until(lambda: "llm-2-2" in there.workers(), "supply goes on")

    run(scenario())


def test_a_suspended_job_is_stopped_and_its_pods_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with coordinating(tmp_path, monkeypatch) as (there, here):
            await until(lambda: len(there.workers()) == 3, "three pods")
            there.change(suspend=True)
            await until(lambda: here.job.result is not None, "the end")
            assert here.job.result is not None
            assert (here.job.result.code, here.job.result.reason) == (75, SUSPENDED)
            await until(lambda: not there.workers(), "no pods")
            assert there.coordinator is not None
            end = msgspec.json.encode(note(75, SUSPENDED)).decode()
            there.api.end(there.coordinator, 0, "Completed", end)
            await until(lambda: there.status.phase == "Suspended", "the phase")
            there.change(suspend=False)
            await until(lambda: there.status.phase == "Pending", "another phase")
            assert there.coordinator is not None
            assert "--requeues=1" in there.coordinator["spec"]["containers"][0]["args"]

    run(scenario())


def test_an_operator_of_another_version_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.platforms.supplier.__version__", "0.0.1")

    async def scenario() -> None:
        async with coordinating(tmp_path, monkeypatch) as (there, _):
            await until(lambda: "run the same version" in there.provided(), "the reason")
            assert there.condition("NodesProvided").reason == "Refused"

    run(scenario())


def test_the_end_of_a_job_is_told_and_its_coordinator_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with coordinating(tmp_path, monkeypatch) as (there, _):
            await until(lambda: len(there.workers()) == 3, "three pods")
            assert there.coordinator is not None
            end = msgspec.json.encode(note(93, "it would fail again")).decode()
            there.api.end(there.coordinator, 0, "Completed", end)
            await until(lambda: there.status.phase == "Failed", "the phase")
            assert (there.status.exit_code, there.status.reason) == (93, "it would fail again")
            assert there.condition("Ended").reason == "WouldFailAgain"
            assert not there.workers(), "released, although no plan said so"
            assert there.coordinator is not None

    run(scenario())


def test_objects_of_others_are_left_alone_and_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        made = Scene()
        stranger = {"kind": "Secret", "metadata": {"name": "llm"}}
        made.api._create("/api/v1/namespaces/space/secrets", stranger)
        with pytest.raises(PlatformError, match="a Secret llm that is not this job's; delete it"):
            await made.run._act()

    run(scenario())


# ---- what is refused ----


def test_a_missing_right_is_named_by_verb_and_resource() -> None:
    path = "/api/v1/namespaces/space/pods/llm-0-1"
    said = refusal("DELETE", path, 403, 'pods "llm-0-1" is forbidden: User "x" cannot delete')
    assert "no permission to delete pods" in said
    assert "rbac.yaml" in said
    status = "/apis/holdfast.dev/v1alpha1/namespaces/space/holdfastjobs/llm/status"
    assert "patch holdfastjobs/status" in refusal("PATCH", status, 403, "no")
    assert "refused to create pods (403): exceeded quota" in refusal(
        "POST", "/api/v1/namespaces/space/pods", 403, "exceeded quota: gpus"
    )


def test_an_operator_without_rights_names_all_that_are_missing() -> None:
    class Reviewing(FakeApi):
        async def request(
            self, method: str, path: str, body: Any = None, *_: Any, **__: Any
        ) -> Json:
            attributes = body["spec"]["resourceAttributes"]
            return {"status": {"allowed": attributes["verb"] != "delete"}}

    async def scenario() -> None:
        with pytest.raises(
            PlatformError, match="to delete pods, delete poddisruptionbudgets; give"
        ):
            await operator.check_rights(Reviewing(), "space")

    run(scenario())


def test_a_cluster_without_our_resource_says_what_to_apply() -> None:
    class Bare(FakeApi):
        async def request(self, method: str, path: str, *_: Any, **__: Any) -> Json:
            return {"groups": [{"name": "apps"}]}

    async def scenario() -> None:
        with pytest.raises(PlatformError, match=r"kubectl apply -f deploy/kubernetes/crd.yaml"):
            await operator.check_resource(Bare())

    run(scenario())


def test_what_is_invalid_for_the_server_is_not_asked_for_again() -> None:
    class Refusing(FakeApi):
        async def request(self, *_: Any, **__: Any) -> Json:
            raise ApiRefused("Pod is invalid: spec.containers[0].image: Required", 422, "Invalid")

    async def scenario() -> None:
        spec = read_spec("llm", SPEC)
        platform = KubernetesPlatform(Refusing(), OWNER, lambda: spec, lambda: "1:3+0")
        with pytest.raises(PlatformError, match="Required") as refused:
            await platform.ask([NodeWish(id="0-1", position=0, attempt=1)], [])
        assert (refused.value.for_good, refused.value.requests) == (True, ("0-1",))

    run(scenario())


def test_the_rights_in_deploy_are_all_that_are_asked_for() -> None:
    yaml = pytest.importorskip("yaml")
    page = Path(__file__).parents[2] / "deploy" / "kubernetes" / "rbac.yaml"
    role = next(one for one in yaml.safe_load_all(page.read_text()) if one["kind"] == "ClusterRole")
    given = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert set(operator.RIGHTS) <= given


def test_the_example_in_deploy_is_a_job(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    page = Path(__file__).parents[2] / "deploy" / "kubernetes" / "example.yaml"
    body = yaml.safe_load(page.read_text())
    assert body["kind"] == crd.KIND
    assert HOLDFAST.read(body)[0].nnodes == "2:4"


# ---- the platform alone ----


def platform(api: FakeApi) -> KubernetesPlatform:
    spec = read_spec("llm", SPEC)
    return KubernetesPlatform(api, OWNER, lambda: spec, lambda: "1:3+0")


def wish(position: int, attempt: int) -> NodeWish:
    return NodeWish(id=f"{position}-{attempt}", position=position, attempt=attempt)


def test_a_request_that_exists_is_left_alone() -> None:
    async def scenario() -> None:
        api = FakeApi()
        for _ in range(2):
            await platform(api).ask([wish(0, 1)], [])
        assert list(api.pods()) == ["llm-0-1"]

    run(scenario())


def test_a_pod_of_the_same_name_that_is_not_the_jobs_is_named() -> None:
    async def scenario() -> None:
        api = FakeApi()
        stranger = {"kind": "Pod", "metadata": {"name": "llm-0-1"}}
        api._create("/api/v1/namespaces/space/pods", stranger)
        with pytest.raises(PlatformError, match="a pod llm-0-1 that is not this job's; delete it"):
            await platform(api).ask([wish(0, 1)], [])
        assert await platform(api).list() == []

    run(scenario())


def test_pods_that_ended_stay_until_their_position_is_replaced_a_second_time() -> None:
    async def scenario() -> None:
        api = FakeApi()
        for attempt in (1, 2, 3):
            await platform(api).ask([wish(0, attempt)], [])
            if attempt == 2:
                assert set(api.pods()) == {"llm-0-1", "llm-0-2"}
            api.end(api.pods()[f"llm-0-{attempt}"], 1)
        assert set(api.pods()) == {"llm-0-2", "llm-0-3"}

    run(scenario())


@pytest.mark.parametrize(("lost", "status"), [(1, "failed"), (2, "running"), (3, "running")])
def test_nodes_that_are_all_said_to_be_lost_are_not_believed_to_be(lost: int, status: str) -> None:
    async def scenario() -> None:
        api = FakeApi()
        await platform(api).ask([wish(number, 1) for number in range(3)], [])
        for number in range(3):
            api.run(api.pods()[f"llm-{number}-1"])
        for number in range(lost):
            api.mark(api.pods()[f"llm-{number}-1"], ready=False)
        found = {one.request: one.status for one in await platform(api).list()}
        assert (found["0-1"], found["2-1"]) == (status, "running")

    run(scenario())


def test_a_gang_without_volcano_says_what_to_do() -> None:
    async def scenario() -> None:
        made = Scene()
        made.body["spec"]["gang"] = {}
        made.api.missing.add("/apis/scheduling.volcano.sh/v1beta1/namespaces/space/podgroups")
        with pytest.raises(PlatformError, match="install Volcano, or leave it out"):
            await made.run._act()

    run(scenario())


def test_without_its_packages_the_operator_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "kopf", None)
    with pytest.raises(UsageError, match=r"pip install 'holdfast\[kubernetes\]'"):
        operator.run_operator("", None, with_dlrover=False)
