"""A real Ray cluster on this machine, for tests: a head without CPUs, and nodes that come and go.

`RayCluster` is Ray's own `cluster_utils.Cluster`, held by a process under a keeper (`ray_host`), so
nothing outlives the test process. `AutoscalingRayCluster` has Ray's autoscaler with its fake provider;
Ray's class for that does not work from the wheel (its example.yaml is missing there) and runs
`ray stop --force`, which would end every Ray on this machine.

What this Ray (2.60.0) was seen to do here, with two cores; the tests beside this file hold most of it:

- Head and three nodes are up in 24 to 41 s, another node in 4 to 7 s, all gone in 0.4 s. A node is 30
  MB of raylet and 220 MB of its two agents.
- A node killed with all its processes: a call in flight fails with ActorUnavailableError after 1.2 s,
  also on an actor without restarts; `ray.nodes()` says Alive=False, DeathReason=2 after 13.8 s. Only
  then does Ray restart the node's actors and reschedule bundles.
- Calls to an actor that restarts fail with ActorUnavailableError ("The actor is restarting") until it
  is back (`max_task_retries=0`). With `max_restarts=0` they then fail with ActorDiedError
  ("The actor died because its node has died"). An actor can tell by
  `get_runtime_context().was_current_actor_reconstructed`.
- A STRICT_SPREAD placement group that lost a node and has no other is RESCHEDULING: the lost bundle's
  node is "", other bundles and their actors are untouched (same processes). With a new node it is
  CREATED at once, and the bundle's actor answers there 2 s later.
- An actor with `lifetime="detached"` and a name outlives its driver, restarts on another node, and is
  found by another driver with `ray.get_actor(name, namespace=…)`.
- `NodeAffinitySchedulingStrategy(node, soft=True)` waits for a node that is full; it goes elsewhere
  only if the node is dead or could never hold the actor.
- The autoscaler (fake provider, updates every second) has two nodes up 21 s after actors that do not
  fit were asked for. Idle nodes were still there 40 s after their actors (idle_timeout_minutes=0.1).
- All nodes have the machine's address and host name: tell them apart by node id.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from .keeper import descendants, end_kept, start_kept
from .ports import PortBlock

_HERE = Path(__file__).parent
_PATIENCE_S = 120.0


def missing() -> str | None:
    """Why Ray cannot run here, with what to do; None where it can."""
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed: pip install 'holdfast[ray]'"
    return None


class _Bed:
    """A folder and a process under a keeper, both gone on exit.

    `env` is the environment for drivers: `ray.init()` in it connects to the cluster.
    """

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()
        self._keeper = 0
        self.address = ""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            print(self.story())
        self.close()

    def close(self) -> None:
        """End every process of the cluster and of its jobs, and remove its folder."""
        self._undo.close()

    def _make_folder(self) -> None:
        why = missing()
        if why is not None:
            raise RuntimeError(why)
        self.folder = Path(tempfile.mkdtemp(prefix="ray-"))
        self._undo.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        self.env["RAY_USAGE_STATS_ENABLED"] = "0"

    def _keep(self, *command: str, **env: str) -> None:
        log = self.folder / "host.log"
        keeper, _ = start_kept(list(command), {**self.env, **env}, log, self.folder)
        self._undo.callback(end_kept, keeper)
        self._keeper = keeper.pid

    def story(self) -> str:
        """The end of the log of the process that holds the cluster, for a test that failed."""
        log = self.folder / "host.log"
        return log.read_text(errors="replace")[-6000:] if log.exists() else ""


class RayCluster(_Bed):
    """Nodes that tests add and take away; `nodes` are their ids, without the head's."""

    def __init__(
        self,
        nodes: int = 3,
        *,
        system_config: dict[str, Any] | None = None,
        dashboard: bool = False,
        **each: Any,
    ) -> None:
        """Take `each` as arguments of every node: num_cpus, num_gpus, resources, labels.

        With a dashboard, to which jobs are submitted, `dashboard` is its address.
        """
        super().__init__()
        self._has_dashboard, self.dashboard = dashboard, ""
        self._first_nodes, self._each = nodes, {"num_cpus": 2, **each}
        self._system_config = system_config or {}
        self.nodes: list[str] = []

    def __enter__(self) -> RayCluster:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def _start(self) -> None:
        self._make_folder()
        pipes = [self.folder / name for name in ("replies", "commands")]
        for pipe in pipes:
            os.mkfifo(pipe)
        self._keep(
            *(sys.executable, str(_HERE / "ray_host.py"), *map(str, pipes)),
            *(str(self.folder), json.dumps(self._system_config)),
        )
        # Opened for both directions, so that a host that died is a timeout and not a hang.
        self._replies = os.open(pipes[0], os.O_RDWR)
        self._undo.callback(os.close, self._replies)
        self._commands = os.open(pipes[1], os.O_RDWR)
        self._undo.callback(os.close, self._commands)
        ports = PortBlock()
        self._undo.callback(ports.close)
        extra = {"include_dashboard": True, "dashboard_port": ports.first}
        extra["dashboard_agent_listen_port"] = ports.first + 1
        self.head = str(
            self._ask("add", num_cpus=0, **extra if self._has_dashboard else {})["node"]
        )
        self.dashboard = f"http://127.0.0.1:{ports.first}" if self._has_dashboard else ""
        for _ in range(self._first_nodes):
            self.add_node()

    def _ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        os.write(self._commands, json.dumps({"do": do, **arguments}).encode() + b"\n")
        answer = json.loads(self._read_line(do))
        if "error" in answer:
            raise RuntimeError(f"Ray could not {do} {arguments}: {answer['error']}")
        if "address" in answer:
            self.address = self.env["RAY_ADDRESS"] = answer["address"]
        return dict(answer)

    def _read_line(self, do: str) -> bytes:
        deadline = time.monotonic() + _PATIENCE_S
        os.set_blocking(self._replies, False)
        line = b""
        while not line.endswith(b"\n"):
            try:
                line += os.read(self._replies, 65536)
            except BlockingIOError:
                if time.monotonic() > deadline or not descendants(self._keeper):
                    raise RuntimeError(f"no answer to {do!r}:\n{self.story()}") from None
                time.sleep(0.01)
        return line

    def add_node(self, **arguments: Any) -> str:
        """Add a node, like the others unless the arguments differ; return its id."""
        node = str(self._ask("add", **{**self._each, **arguments})["node"])
        self.nodes.append(node)
        return node

    def kill_node(self, node: str) -> None:
        """Kill a node with all of its processes, as a power cut would."""
        self.nodes.remove(node)
        self._ask("kill", node=node)

    def remove_node(self, node: str) -> None:
        """Stop a node in good order."""
        self.nodes.remove(node)
        self._ask("remove", node=node)

    def processes(self, node: str) -> list[int]:
        """The process ids of a node: raylet, agents, workers."""
        return list(self._ask("pids", node=node)["pids"])


class AutoscalingRayCluster(_Bed):
    """A head whose autoscaler starts and stops nodes of one kind as actors and tasks need them."""

    def __init__(
        self,
        resources: dict[str, float],
        *,
        most: int = 3,
        idle_minutes: float = 0.1,
    ) -> None:
        super().__init__()
        self._resources, self._most, self._idle_minutes = resources, most, idle_minutes

    def __enter__(self) -> AutoscalingRayCluster:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def _start(self) -> None:
        self._make_folder()
        ports = PortBlock()
        self._undo.callback(ports.close)
        self.address = self.env["RAY_ADDRESS"] = f"{_own_address()}:{ports.first}"
        configuration = self.folder / "autoscaler.json"
        configuration.write_text(json.dumps(self._configuration()))
        self._keep(
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
            *(f"--port={ports.first}", "--num-cpus=0", f"--temp-dir={self.folder}"),
            *("--ray-client-server-port", str(ports.first + 1), "--include-dashboard=false"),
            f"--autoscaling-config={configuration}",
            AUTOSCALER_UPDATE_INTERVAL_S="1",
            RAY_FAKE_CLUSTER="1",
        )
        deadline = time.monotonic() + _PATIENCE_S
        while "--block" not in self.story():
            if time.monotonic() > deadline or not descendants(self._keeper):
                raise RuntimeError(f"Ray's head did not start:\n{self.story()}")
            time.sleep(0.05)

    def _configuration(self) -> dict[str, Any]:
        nothing_to_do = (
            *("initialization_commands", "setup_commands", "head_setup_commands"),
            *("worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands"),
            *("cluster_synced_files", "rsync_exclude", "rsync_filter"),
        )
        worker = {"resources": self._resources, "node_config": {}, "min_workers": 0}
        return {
            "cluster_name": "test",
            "max_workers": self._most,
            "upscaling_speed": 10,
            "idle_timeout_minutes": self._idle_minutes,
            "provider": {
                "type": "fake_multinode",
                "gcs_address": self.address,
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
            },
            "available_node_types": {
                "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
                "worker": {**worker, "max_workers": self._most},
            },
            "head_node_type": "ray.head.default",
            **{name: {} for name in ("auth", "docker", "file_mounts")},
            "file_mounts_sync_continuously": False,
            **{name: [] for name in nothing_to_do},
        }


def _own_address() -> str:
    """The address that Ray gives this machine; the fake provider's nodes look for the head there."""
    import ray.util

    return str(ray.util.get_node_ip_address())
