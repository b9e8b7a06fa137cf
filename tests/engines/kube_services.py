"""Gives a cluster what add-ons give it: names of services, and volumes for claims.

There is no DNS server and no proxy. The names that DNS would have are kept in one hosts file, which
each pod sees as /etc/hosts: `SERVICE.NAMESPACE.svc` with the addresses of the ready pods, and for a
headless service `HOSTNAME.SERVICE.NAMESPACE.svc` for each pod with a hostname and that subdomain; also
without `.svc` and with `.svc.cluster.local`. A service's own virtual address does not work; its name
leads straight to a pod, so its port and target port must be the same.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import urllib3

from .kube_api import Json, KubeApi, Refused

_LOCAL = "127.0.0.1 localhost\n::1 localhost ip6-localhost\n"


def host_lines(endpoints: Json) -> list[str]:
    """Lines of a hosts file for one Endpoints object."""
    meta = endpoints["metadata"]
    service, space = meta["name"], meta["namespace"]
    lines = []
    for subset in endpoints.get("subsets") or ():
        for address in subset.get("addresses") or ():
            names = _names(f"{service}.{space}")
            if "hostname" in address:
                names = [*_names(f"{address['hostname']}.{service}.{space}"), *names]
            lines.append(" ".join([address["ip"], *names]))
    return lines


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
    """Keep a hosts file up to date with all services, until `stop`."""
    lines: dict[tuple[str, str], list[str]] = {}
    for kind, found in api.follow("/api/v1/endpoints", stop):
        objects = found["items"] if kind == "LISTED" else [found]
        if kind == "LISTED":
            lines.clear()
        for endpoints in objects:
            key = endpoints["metadata"]["namespace"], endpoints["metadata"]["name"]
            lines[key] = [] if kind == "DELETED" else host_lines(endpoints)
        write_hosts(hosts, [line for key in sorted(lines) for line in lines[key]])


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
