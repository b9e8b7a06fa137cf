"""What the status of a pod means: where its node is, how it ended, whose fault that was.

A pod is read from what the API server says of it at this moment, never from how it came to be so.

- A pod with a deletionTimestamp counts as deleted at once: its successor has another name, and need not
  wait until the old one has saved and gone. On a dead machine it never would.
- When a node is NotReady, its pods still say Running. The node controller only takes their condition
  Ready away, while their containers stay ready; nobody else does that to a pod without readiness gates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from holdfast.messages.endnote import EndNote
from holdfast.messages.supply import ExitReason, SeenStatus, Sighting
from holdfast.platforms.kubernetes.objects import REQUEST

Pod = Mapping[str, Any]

_EVICTED = frozenset(
    {"Evicted", "NodeShutdown", "Shutdown", "Terminated", "NodeAffinity", "NodeLost"}
)
_PREEMPTED = frozenset({"Preempting", "Preempted"})
_BY_DISRUPTION: Mapping[str, ExitReason] = {
    "PreemptionByScheduler": "preempted",
    "PreemptionByKubeScheduler": "preempted",
    "DeletionByTaintManager": "evicted",
    "EvictionByEvictionAPI": "evicted",
    "TerminationByKubelet": "evicted",
    "DeletionByPodGC": "lost",
}
"""Reasons of the condition DisruptionTarget."""
_NOT_STARTED = frozenset({"StartError", "ContainerCannotRun", "RunContainerError"})
_NEVER_STARTS = frozenset({"InvalidImageName", "ErrImageNeverPull"})


def sighting(pod: Pod, container: str) -> Sighting:
    """What a worker's pod says of its request; `container` is the one that runs the node."""
    status = pod.get("status") or {}
    found = {
        "request": pod["metadata"]["labels"][REQUEST],
        "host": (pod.get("spec") or {}).get("nodeName", ""),
    }

    def said(what: SeenStatus, reason: ExitReason | None = None, **more: Any) -> Sighting:
        return Sighting(status=what, reason=reason, **found, **more)

    ended = _terminated(status, container)
    if ended is not None:
        code = int(ended.get("exitCode", 1))
        reason = _reason(status, ended)
        succeeded = code == 0 and reason is None
        detail = "" if succeeded else _told(ended, container)
        return said("succeeded" if succeeded else "failed", reason, code=code, detail=detail)
    if status.get("phase") == "Failed":
        word, message = status.get("reason", ""), status.get("message", "")
        reason = _of_disruption(status) or _of_word(word)
        return said("failed", reason, detail=_joined(word, message))
    if status.get("phase") == "Succeeded":
        return said("succeeded", code=0)
    if pod["metadata"].get("deletionTimestamp"):
        return said("deleted", _of_disruption(status), detail="its pod is being deleted")
    if node_is_lost(pod):
        detail = f"node {found['host']} is NotReady"
        return said("failed", "lost", detail=detail)
    waiting = _waiting(status, container)
    if waiting.get("reason") in _NEVER_STARTS:
        return said(
            "failed", "fatal", detail=_joined(waiting["reason"], waiting.get("message", ""))
        )
    if status.get("phase") == "Running" and not waiting:
        return said("running")
    return said("pending", detail=_pending(status, waiting))


def node_is_lost(pod: Pod) -> bool:
    """Whether the node controller says that the pod's node is NotReady."""
    status, spec = pod.get("status") or {}, pod.get("spec") or {}
    conditions = _conditions(status)
    return (
        status.get("phase") == "Running"
        and not spec.get("readinessGates")
        and conditions.get("Ready", {}).get("status") == "False"
        and conditions.get("ContainersReady", {}).get("status") == "True"
    )


def _conditions(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {one["type"]: one for one in status.get("conditions") or ()}


def _state(status: Mapping[str, Any], container: str) -> Mapping[str, Any]:
    for one in status.get("containerStatuses") or ():
        if one["name"] == container:
            return one.get("state") or {}
    return {}


def _terminated(status: Mapping[str, Any], container: str) -> Mapping[str, Any] | None:
    return _state(status, container).get("terminated")


def _waiting(status: Mapping[str, Any], container: str) -> Mapping[str, Any]:
    return _state(status, container).get("waiting") or {}


def _reason(status: Mapping[str, Any], ended: Mapping[str, Any]) -> ExitReason | None:
    """Why a node is over, where the platform says so; else its exit code does."""
    if ended.get("reason") == "OOMKilled":
        return "oom"
    if ended.get("reason") in _NOT_STARTED:
        return "fatal"
    return _of_disruption(status) or _of_word(status.get("reason", ""), known=True)


def _of_disruption(status: Mapping[str, Any]) -> ExitReason | None:
    target = _conditions(status).get("DisruptionTarget", {})
    return _BY_DISRUPTION.get(target.get("reason", "")) if target.get("status") == "True" else None


def _of_word(word: str, known: bool = False) -> ExitReason | None:
    """What the word that a pod's status has for its failure means; `known` words only."""
    if word in _PREEMPTED:
        return "preempted"
    if word in _EVICTED or word.startswith(("OutOf", "UnexpectedAdmission")):
        return "evicted"
    return None if known else "unknown"


def _told(ended: Mapping[str, Any], container: str) -> str:
    """How a container ended, in one line."""
    if ended.get("reason") in _NOT_STARTED:
        return cannot_start(container, str(ended.get("message", "")))
    code, lines = ended.get("exitCode"), str(ended.get("message", "")).strip().splitlines()
    said = f": {lines[-1]}" if lines else ""
    word = ended.get("reason") or "Error"
    return f"{word}, exit code {code}{said}"[:500]


def cannot_start(container: str, message: str) -> str:
    """Say why a container's command could not be run."""
    words = " ".join(message.split())[:300]
    missing = "no such file" in words.lower() or "not found" in words.lower()
    hint = "; install holdfast in its image (pip install holdfast), or correct its command"
    return f"container {container} cannot start: {words}{hint if missing else ''}"


def _pending(status: Mapping[str, Any], waiting: Mapping[str, Any]) -> str:
    """What a pod waits for, in the platform's words."""
    if waiting:
        return _joined(waiting.get("reason", ""), waiting.get("message", ""))
    scheduled = _conditions(status).get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return _joined(scheduled.get("reason", ""), scheduled.get("message", ""))
    return ""


def _joined(word: str, message: str) -> str:
    return ": ".join(filter(None, (word, " ".join(message.split()))))[:500]


# ---- the coordinator's ----


class CoordinatorPod(NamedTuple):
    """What the pod of a coordinator says."""

    state: str
    """absent, starting, up, ended, broken (it is to be replaced) or leaving."""
    address: str = ""
    detail: str = ""
    end: EndNote | None = None


def coordinator(pod: Pod | None) -> CoordinatorPod:
    """Read the pod of a job's coordinator."""
    if pod is None:
        return CoordinatorPod("absent")
    status, meta = pod.get("status") or {}, pod["metadata"]
    container = pod["spec"]["containers"][0]["name"]
    ended = _terminated(status, container)
    if ended is not None:
        note = _end_note(str(ended.get("message", "")))
        if note is not None:
            return CoordinatorPod("ended", end=note)
    if node_is_lost(pod):
        return CoordinatorPod("broken", detail=f"node {pod['spec'].get('nodeName')} is NotReady")
    if meta.get("deletionTimestamp"):
        return CoordinatorPod("leaving", detail="its pod is being deleted")
    if status.get("phase") in ("Failed", "Succeeded"):
        said = _told(ended, container) if ended else ""
        detail = _joined(status.get("reason", ""), status.get("message", "") or said)
        return CoordinatorPod("broken", detail=detail)
    if "running" in _state(status, container) and status.get("podIP"):
        return CoordinatorPod("up", address=status["podIP"])
    return CoordinatorPod("starting", detail=_starting(status, container))


def _starting(status: Mapping[str, Any], container: str) -> str:
    """Why a coordinator does not run yet; how it ended before, if it did."""
    for one in status.get("containerStatuses") or ():
        before = (one.get("lastState") or {}).get("terminated")
        if one["name"] == container and before:
            return _told(before, container)
    waiting = _waiting(status, container)
    if waiting.get("reason") in ("CreateContainerError", "RunContainerError"):
        return cannot_start(container, str(waiting.get("message", "")))
    return _pending(status, waiting)


def _end_note(message: str) -> EndNote | None:
    try:
        return msgspec.json.decode(message, type=EndNote)
    except msgspec.MsgspecError:
        return None
