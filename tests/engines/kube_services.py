"""Gives a cluster what add-ons give it: names of services, and volumes for claims.

There is no DNS server and no proxy. The names that DNS would have are kept in one hosts file, which
each pod sees as /etc/hosts: `HOSTNAME.SUBDOMAIN.NAMESPACE.svc` for each running pod with a hostname and
a subdomain, also without `.svc` and with `.svc.cluster.local`. A cluster would ask for a headless
service called SUBDOMAIN as well; here it is not looked at, because the API server refuses Endpoints in
127.0.0.0/8. For the same reason no service has endpoints, and its own name and address do not work.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import urllib3

from .kube_api import Json, KubeApi, Refused

_LOCAL = "127.0.0.1 localhost\n::1 localhost ip6-localhost\n"


def host_line(pod: Json) -> str:
    """Line of a hosts file for one pod; empty if it has no name."""
    spec, status = pod["spec"], pod.get("status", {})
    named = "hostname" in spec and "subdomain" in spec and "podIP" in status
    if not named or status.get("phase") != "Running":
        return ""
    name = f"{spec['hostname']}.{spec['subdomain']}.{pod['metadata']['namespace']}"
    return " ".join([status["podIP"], *_names(name)])


def _names(name: str) -> list[str]:
    return [f"{name}.svc.cluster.local", f"{name}.svc", name]


def write_hosts(path: Path, lines: list[str]) -> None:
    """Replace a hosts file's content in place: pods have this very file mounted."""
    content = (_LOCAL + "".join(line + "\n" for line in lines)).encode()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(fd, content, 0)
        os.ftruncate(fd, len(content))
    finally:
        os.close(fd)


def keep_names(api: KubeApi, hosts: Path, stop: threading.Event) -> None:
    """Keep a hosts file up to date with all pods that have names, until `stop`."""
    lines: dict[str, str] = {}
    for kind, found in api.follow("/api/v1/pods", stop):
        before = dict(lines)
        if kind == "LISTED":
            lines.clear()
        for pod in found["items"] if kind == "LISTED" else [found]:
            line = "" if kind == "DELETED" else host_line(pod)
            lines.pop(pod["metadata"]["uid"], None)
            if line:
                lines[pod["metadata"]["uid"]] = line
        if lines != before:
            write_hosts(hosts, sorted(lines.values()))


def keep_claims(api: KubeApi, folder: Path, stop: threading.Event) -> None:
    """Make a volume (a folder of this machine) for each new claim, until `stop`."""
    for kind, found in api.follow("/api/v1/persistentvolumeclaims", stop):
        for claim in found["items"] if kind == "LISTED" else [found]:
            if kind != "DELETED" and not claim["spec"].get("volumeName"):
                # One that is there already is bound sooner or later.
                with contextlib.suppress(urllib3.exceptions.HTTPError, Refused):
                    api.request("POST", "/api/v1/persistentvolumes", _volume(claim, folder))


def _volume(claim: Json, folder: Path) -> Json:
    meta, spec = claim["metadata"], claim["spec"]
    place = folder / meta["uid"]
    return {
        "metadata": {"name": f"claim-{meta['uid']}"},
        "spec": {
            "capacity": spec["resources"]["requests"],
            "accessModes": spec["accessModes"],
            "hostPath": {"path": str(place), "type": "DirectoryOrCreate"},
            "storageClassName": spec.get("storageClassName", ""),
            "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": {"namespace": meta["namespace"], "name": meta["name"], "uid": meta["uid"]},
        },
    }
