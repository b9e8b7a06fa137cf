"""Holds the nodes of one Ray cluster in a process of its own, and adds and removes them on command.

It reads one JSON object a line from a named pipe, does what it says and answers with one line in
another. `ray_cluster` runs it under a keeper, so every process of the cluster ends with it. It is a
process of its own because drivers must be able to come and go while the nodes stay.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from keeper import descendants
from ray.cluster_utils import Cluster


class Host:
    """The cluster, with its nodes by Ray's node id."""

    def __init__(self, folder: str, system_config: dict[str, Any]) -> None:
        os.makedirs("/tmp/ray", exist_ok=True)  # Ray writes the head's address there, unasked.
        self._cluster = Cluster()
        self._nodes: dict[str, Any] = {}
        self._head = {
            "temp_dir": folder,
            "include_dashboard": False,
            "_system_config": system_config,
        }

    def add(self, **arguments: Any) -> dict[str, Any]:
        """Start a node, the first one as head; answer when it is registered."""
        if not self._nodes:
            arguments = {**self._head, **arguments}
        node = self._cluster.add_node(**arguments)
        self._nodes[node.node_id] = node
        return {"node": node.node_id, "address": self._cluster.address}

    def kill(self, node: str) -> dict[str, Any]:
        """Kill a node with all of its processes, as a power cut would."""
        lost = self._nodes.pop(node)
        for pid in _pids(lost):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self._cluster.remove_node(lost, allow_graceful=False)
        return {}

    def remove(self, node: str) -> dict[str, Any]:
        """Stop a node in good order."""
        self._cluster.remove_node(self._nodes.pop(node), allow_graceful=True)
        return {}

    def pids(self, node: str) -> dict[str, Any]:
        return {"pids": _pids(self._nodes[node])}


def _pids(node: Any) -> list[int]:
    roots = [info.process.pid for infos in node.all_processes.values() for info in infos]
    return [pid for root in roots for pid in (root, *descendants(root))]


def main(replies_path: str, commands_path: str, folder: str, system_config: str) -> None:
    with Path(replies_path).open("w") as replies, Path(commands_path).open() as commands:
        host = Host(folder, json.loads(system_config))
        for line in commands:
            request = json.loads(line)
            try:
                answer = getattr(host, request.pop("do"))(**request)
            except Exception as error:  # the test process must hear of it, whatever it is
                answer = {"error": f"{type(error).__name__}: {error}"}
            replies.write(json.dumps(answer) + "\n")
            replies.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
