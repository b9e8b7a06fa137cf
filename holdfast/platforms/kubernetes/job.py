"""Keeps one job going: its coordinator's pod, the supplier of its nodes, and its status.

The loop is level-triggered: whatever wakes it (the resource, a pod, the clock), it reads the spec and
the coordinator's pod, decides what to do next (`next_step`), and does that one thing.

    no pod, suspended                    hold: nothing is made
    no pod                               start: service, secret, claim, budget, gang, then the pod
    pod failed or its node is lost       replace: delete it; the next one goes on from the journal
    pod up                               serve: supply nodes, scale, stop if suspended, tell the status
    job ended                            finish: release the worker pods that are left
    job stood still, suspended no more   resume: replace the pod by one that goes on

The token is in a Secret that is made once and never read by anybody but the pods and this loop.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from holdfast.errors import ApiRefused, HoldfastError, JobError, PlatformError, UsageError
from holdfast.messages.endnote import EndNote
from holdfast.messages.exits import EXIT_TRY_AGAIN
from holdfast.messages.wire import (
    AskScale,
    AskStatus,
    AskStop,
    Question,
    ScaleTaken,
    StatusTold,
    StopTaken,
)
from holdfast.platforms.kubernetes import objects, pods
from holdfast.platforms.kubernetes import status as statuses
from holdfast.platforms.kubernetes.client import MERGE, KubeApi, find
from holdfast.platforms.kubernetes.kinds import Body, ResourceKind
from holdfast.platforms.kubernetes.making import JobObjects
from holdfast.platforms.kubernetes.objects import Owner, coordinator_name
from holdfast.platforms.kubernetes.platform import KubernetesPlatform
from holdfast.platforms.kubernetes.pods import CoordinatorPod
from holdfast.platforms.kubernetes.spec import JobSpec, Json
from holdfast.platforms.kubernetes.status import JobStatus
from holdfast.platforms.supplier import Endpoint, Supplier
from holdfast.wire.visitors import Coordinates, ask_at

log = logging.getLogger("holdfast.operator")

T = TypeVar("T", bound=msgspec.Struct)
Step = Literal["hold", "start", "wait", "replace", "serve", "finish", "resume"]

STATUS_EVERY_S = 3.0
IDLE_S = 30.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0


def next_step(pod: CoordinatorPod, suspend: bool, status: JobStatus) -> Step:
    """Decide what to do for a job."""
    if pod.state == "ended":
        assert pod.end is not None
        stood = status.phase in ("Suspended", "Suspending") or pod.end.reason == statuses.SUSPENDED
        if stood and not suspend and pod.end.code == EXIT_TRY_AGAIN:
            return "resume"
        return "finish"
    if pod.state == "absent":
        if suspend:
            return "hold"
        return "wait" if status.phase in ("Succeeded", "Failed") else "start"
    if pod.state == "broken":
        return "replace"
    return "serve" if pod.state == "up" else "wait"


class JobRun:
    """One job, as long as its resource is there."""

    def __init__(self, api: KubeApi, kind: ResourceKind, body: Body) -> None:
        self.owner = Owner.of(body)
        self._api, self._kind = api, kind
        self._objects = JobObjects(api, self.owner)
        self._body = body
        self._spec: JobSpec | None = None
        self._status = kind.recall(body.get("status"))
        self._written: Json | None = None
        self._pod = CoordinatorPod("absent")
        self._token = self._opened = ""
        self._platform = KubernetesPlatform(api, self.owner, self._known_spec, lambda: self._opened)
        self._supplier: Supplier | None = None
        self._supplying: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._pause_s = 0.0

    # ---- what the operator tells ----

    def changed(self, body: Body) -> None:
        """Take in the newest state of the resource."""
        self._body = body
        self._wake.set()

    def pod_changed(self, role: str) -> None:
        """Look again: a pod of the job has changed, or changes were missed."""
        if role != "coordinator":
            self._platform.wake()
        if role != "worker":
            self._wake.set()

    async def run(self) -> None:
        """Keep the job going until this task is cancelled."""
        try:
            while True:
                self._wake.clear()
                limit_s = await self._look()
                waking = asyncio.ensure_future(self._wake.wait())
                try:
                    await asyncio.wait([waking], timeout=limit_s)
                finally:
                    waking.cancel()
        finally:
            self._stop_supplying()

    # ---- one look ----

    async def _look(self) -> float:
        """Do what is to be done now; how long to wait for the next look, if nothing happens."""
        try:
            limit_s = await self._act()
            await self._tell()
            self._pause_s = 0.0
            return limit_s
        except PlatformError as error:
            log.warning("job %s/%s: %s", self.owner.namespace, self.owner.name, error)
            self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s or FIRST_PAUSE_S)
            self._condition("CoordinatorReady", None, "ApiServer", str(error))
            with suppress(PlatformError):  # It may be the API server itself that failed.
                await self._tell()
            return self._pause_s

    async def _act(self) -> float:
        generation = self._body["metadata"].get("generation", 0)
        self._status = replace(
            self._status, observed_generation=generation, selector=self.owner.selector
        )
        try:
            self._spec, warnings = self._kind.read(self._body)
        except UsageError as error:
            await self._refuse(str(error))
            if self._spec is None:  # It was never understood: there is nothing to keep going.
                return IDLE_S
        else:
            await self._accept("; ".join(warnings))
        found = await find(self._api, self._pod_path)
        if found is not None and not self.owner.owns(found):
            raise PlatformError(
                f"there is a pod {coordinator_name(self.owner.name)} that is not this job's; delete"
                " it, or rename the job"
            )
        self._pod = pods.coordinator(found)
        assert self._spec is not None
        step = next_step(self._pod, self._spec.suspend, self._status)
        return await {
            "hold": self._hold,
            "start": self._start,
            "wait": self._wait,
            "replace": self._replace,
            "serve": self._serve,
            "finish": self._finish,
            "resume": self._resume,
        }[step]()

    async def _refuse(self, why: str) -> None:
        before = statuses.condition(self._status, "Accepted")
        self._condition("Accepted", False, "Invalid", why)
        if before is None or before.message != why:
            await self._event("Warning", "Invalid", why)

    async def _accept(self, warning: str) -> None:
        if warning and warning != self._status.warning:
            await self._event("Warning", "LeftOut", warning)
        self._set(warning=warning)
        message = f"the spec is understood, but {warning}" if warning else "the spec is understood"
        self._condition("Accepted", True, "LeftOut" if warning else "Valid", message)

    async def _hold(self) -> float:
        self._set(phase="Suspended")
        self._condition("Training", False, "Suspended", "spec.suspend is true; no pods are made")
        return IDLE_S

    async def _wait(self) -> float:
        if self._pod.state == "absent":  # Somebody deleted the pod of a job that has ended.
            return IDLE_S
        detail = self._pod.detail or "its pod is starting"
        self._condition("CoordinatorReady", False, "Starting", f"the coordinator: {detail}")
        return IDLE_S

    async def _start(self) -> float:
        self._token, self._opened = await self._objects.make(self._known_spec())
        spec = self._known_spec()
        if not self._status.scale:
            self._set(scale=self._opened)
        pod = objects.coordinator_pod(self.owner, spec, self._opened, self._status.requeues)
        await self._objects.one(self.owner.path("pods"), pod)
        self._set(phase="Pending" if not self._status.round else self._status.phase)
        if self._status.phase in ("Suspended", "Suspending"):
            self._set(phase="Pending")
        self._condition("CoordinatorReady", False, "Starting", "the coordinator: its pod is made")
        await self._event("Normal", "CoordinatorStarted", f"made pod {pod['metadata']['name']}")
        return IDLE_S

    async def _replace(self) -> float:
        """Replace a pod that is over without an end of the job; the journal has all of it."""
        why = self._pod.detail
        await self._objects.delete(self._pod_path, now=True)
        await self._event("Warning", "CoordinatorLost", f"the coordinator: {why}; it is replaced")
        return await self._start()

    async def _resume(self) -> float:
        assert self._pod.end is not None
        self._stop_supplying()
        await self._release()
        self._set(requeues=self._pod.end.requeues + 1, phase="Pending", exit_code=None, reason="")
        await self._tell()  # Before the pod goes: its end is what says that the job may be resumed.
        await self._objects.delete(self._pod_path, now=True)
        await self._event("Normal", "Resumed", "the job goes on")
        return await self._start()

    async def _finish(self) -> float:
        end = self._pod.end
        assert end is not None
        self._stop_supplying()
        await self._release()
        before = self._status.phase
        suspends = self._known_spec().suspend
        self._status = statuses.of_ended(self._status, end, suspends, now())
        if self._status.phase != before:
            await self._tell_end(end)
        return IDLE_S

    async def _tell_end(self, end: EndNote) -> None:
        phase = self._status.phase
        kind = "Warning" if phase == "Failed" else "Normal"
        await self._event(kind, phase, f"exit code {end.code}: {end.reason}")

    # ---- while it runs ----

    async def _serve(self) -> float:
        spec = self._known_spec()
        if not self._token:
            self._token, self._opened = await self._objects.make(self._known_spec())
        if self._supplying is None or self._supplying.done():
            self._supplying = asyncio.ensure_future(self._supply())
        try:
            told = await self._ask(AskStatus(), StatusTold)
        except JobError as error:
            self._condition("CoordinatorReady", False, "NoAnswer", str(error))
            return STATUS_EVERY_S
        self._condition("CoordinatorReady", True, "Answers", "the coordinator answers")
        before = self._status
        self._status = statuses.of_running(before, told, spec.suspend, now())
        if self._supplier is not None and self._supplier.refusal:
            why = f"the coordinator refuses the operator: {self._supplier.refusal}"
            self._condition("NodesProvided", False, "Refused", why)
        await self._tell_news(before)
        if spec.suspend:
            await self._ask_to_stop(told)
        elif spec.scale != self._status.scale:
            await self._ask_to_scale(spec)
        return STATUS_EVERY_S

    async def _tell_news(self, before: JobStatus) -> None:
        """Put what has changed into events."""
        if self._status.last_incident and self._status.last_incident != before.last_incident:
            await self._event("Warning", "Incident", self._status.last_incident)
        if self._status.phase == "Running" and before.phase != "Running":
            await self._event("Normal", "Training", f"round {self._status.round} has begun")
        provided = statuses.condition(self._status, "NodesProvided")
        was = statuses.condition(before, "NodesProvided")
        refused = provided is not None and provided.reason in ("Refused", "GivenUp")
        if refused and provided is not None and (was is None or was.message != provided.message):
            await self._event("Warning", provided.reason, provided.message)

    async def _ask_to_stop(self, told: StatusTold) -> None:
        if told.status.exit_code is not None:  # It is ending already.
            return
        stop = AskStop(code=EXIT_TRY_AGAIN, reason=statuses.SUSPENDED, by="the operator")
        try:
            await self._ask(stop, StopTaken)
            await self._event("Normal", "Suspending", "the job saves and stops")
        except JobError as error:
            self._condition("Training", None, "NotStopped", str(error))

    async def _ask_to_scale(self, spec: JobSpec) -> None:
        nodes = spec.nodes
        question = AskScale(
            min_nodes=nodes.min, max_nodes=nodes.max, spares=nodes.spares, by="the operator"
        )
        try:
            taken = await self._ask(question, ScaleTaken)
        except JobError as error:
            self._condition("Accepted", False, "NotScaled", f"spec.nodes: {error}")
            return
        self._set(scale=spec.scale)
        await self._event("Normal", "Scaled", taken.line)
        await self._objects.make_budget(spec)

    async def _ask(self, question: Question, answer: type[T]) -> T:
        port = self._known_spec().coordinator.port
        where = Coordinates(self.owner.name, self._pod.address, port, self._token)
        asking = partial(ask_at, where, question, answer)
        return await asyncio.get_running_loop().run_in_executor(None, asking)

    async def _supply(self) -> None:
        """Supply nodes until the job is over."""
        self._supplier = Supplier(self._platform, self._endpoint)
        try:
            await self._supplier.run()
        except HoldfastError as error:
            log.error("job %s/%s: %s", self.owner.namespace, self.owner.name, error)
        self._wake.set()

    def _endpoint(self) -> Endpoint | None:
        if self._pod.state != "up" or not self._token:
            return None
        return Endpoint(self._pod.address, self._known_spec().coordinator.port, self._token)

    def _stop_supplying(self) -> None:
        if self._supplying is not None:
            self._supplying.cancel()
            self._supplying = None

    async def _release(self) -> None:
        """Release the worker pods that still run."""
        found = await self._platform.list()
        await self._platform.release(
            [one.request for one in found if one.status in ("pending", "running")]
        )

    # ---- what the user reads ----

    def _set(self, **changes: Any) -> None:
        self._status = replace(self._status, **changes)

    def _condition(
        self, type: statuses.ConditionType, is_so: bool | None, reason: str, message: str
    ) -> None:
        self._status = statuses.with_condition(self._status, type, is_so, reason, message, now())

    async def _tell(self) -> None:
        """Write the status, if it has changed."""
        written = self._kind.write(self._status)
        if written == self._written:
            return
        try:
            path = f"{self._kind.path(self.owner)}/status"
            await self._api.request("PATCH", path, {"status": written}, MERGE)
        except ApiRefused as refused:
            if refused.code != 404:  # The resource is gone; the operator hears of it.
                raise
        self._written = written

    async def _event(self, kind: str, reason: str, message: str) -> None:
        """Post an event; one that is refused is only logged, for nothing depends on it."""
        log.info("job %s/%s: %s: %s", self.owner.namespace, self.owner.name, reason, message)
        posted = objects.event(self.owner, kind, reason, message, now())
        try:
            await self._api.request("POST", self.owner.path("events"), posted)
        except PlatformError as error:
            log.warning("%s", error)

    def _known_spec(self) -> JobSpec:
        assert self._spec is not None, "nothing is made of a spec that was not understood"
        return self._spec

    @property
    def _pod_path(self) -> str:
        return self.owner.path("pods", coordinator_name(self.owner.name))


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
