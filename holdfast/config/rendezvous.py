"""The rendezvous settings say where nodes and ranks meet, by torchrun's rules.

torchrun has two ways: with c10d, nodes meet at --rdzv-endpoint, where one of them runs a store; here
it runs the coordinator. With static, node 0 is at MASTER_ADDR:MASTER_PORT and everyone knows it.
--coordinator names a coordinator that runs already, and --standalone rules out all of these.
"""

from __future__ import annotations

from msgspec import Struct

from holdfast.config.schema import Settings
from holdfast.config.values import joined, seconds, yes_or_no
from holdfast.errors import UsageError

C10D_PORT = 29400  # torchrun's defaults
STATIC_PORT = 29500

KEYS = ("join_timeout", "last_call_timeout", "is_host")
"""The keys of --rdzv-conf that have an effect."""


class Rendezvous(Struct, frozen=True, kw_only=True):
    """Where nodes and ranks meet. All None: one node, and Holdfast chooses everything."""

    coordinator: str | None = None  # "HOST:PORT"; None: embedded, on loopback
    # True: this node runs it there, False: it runs already, None: run it if HOST is this machine
    hosts_coordinator: bool | None = None
    master_addr: str | None = None  # MASTER_ADDR and MASTER_PORT as demanded; None: chosen for you
    master_port: int | None = None
    local_addr: str | None = None  # the address at which other nodes reach this one
    run_id: str | None = None  # TORCHELASTIC_RUN_ID; None: generated


def rendezvous(given: Settings, max_nodes: int, warnings: list[str]) -> Rendezvous:
    """Resolve where this node meets the others."""
    warnings += [
        f"--rdzv-conf {key} has no effect here (these have: {', '.join(KEYS)})"
        for key in given.rdzv_conf
        if key not in KEYS
    ]
    coordinator, hosts = _coordinator(given, max_nodes, warnings)
    is_host = given.rdzv_conf.get("is_host")
    if coordinator is not None and hosts is None and is_host is not None:
        hosts = yes_or_no(is_host, "--rdzv-conf is_host")
    master_addr, master_port = _master(given, max_nodes, warnings)
    return Rendezvous(
        coordinator=coordinator,
        hosts_coordinator=hosts,
        master_addr=master_addr,
        master_port=master_port,
        local_addr=given.local_addr,
        run_id=None if given.standalone or given.rdzv_id == "none" else given.rdzv_id,
    )


def timeouts(given: Settings) -> tuple[float | None, float | None]:
    """Seconds until min_nodes have joined, and from then on for more to join. None: learnt."""
    join, last_call = (
        seconds(given.rdzv_conf[key], f"--rdzv-conf {key}") if key in given.rdzv_conf else None
        for key in KEYS[:2]
    )
    return join, last_call


def _coordinator(
    given: Settings, max_nodes: int, warnings: list[str]
) -> tuple[str | None, bool | None]:
    """The coordinator's address, and whether this node runs it (see `Rendezvous`)."""
    if given.standalone:
        if given.coordinator is not None:
            raise UsageError(
                f"{given.said['standalone'].source} runs its own coordinator; leave out "
                f"{given.shown('coordinator')} or --standalone"
            )
        return None, None
    if given.coordinator is not None:
        if "rdzv_endpoint" in given.said:
            warnings.append(f"{given.shown('rdzv_endpoint')} ignored: --coordinator is set")
        return joined(*given.coordinator), False
    if _backend(given) == "static" or (given.rdzv_endpoint is None and max_nodes == 1):
        return None, None
    host, port = given.rdzv_endpoint or ("localhost", None)
    if port == 0 and max_nodes > 1:
        raise UsageError(
            f"{given.shown('rdzv_endpoint')}: port 0 (any free port) is for a single node; "
            "name a port that the other nodes can use too"
        )
    return (None, None) if port == 0 else (joined(host, port or C10D_PORT), None)


def _backend(given: Settings) -> str:
    if given.rdzv_backend not in ("static", "c10d"):
        raise UsageError(
            f"{given.shown('rdzv_backend')}: Holdfast's coordinator takes the place of this backend; "
            "leave the flag out, or give --coordinator HOST:PORT"
        )
    return given.rdzv_backend


def _master(given: Settings, max_nodes: int, warnings: list[str]) -> tuple[str | None, int | None]:
    """MASTER_ADDR and MASTER_PORT, where torchrun's rules let the user choose them."""
    asked = [given.shown(name) for name in ("master_addr", "master_port") if name in given.said]
    if given.standalone or given.coordinator is not None or _backend(given) != "static":
        if asked:
            warnings.append(f"{' and '.join(asked)} ignored: the coordinator chooses it")
        return None, None
    if given.rdzv_endpoint is not None:
        host, endpoint_port = given.rdzv_endpoint
        return host, (STATIC_PORT if endpoint_port is None else endpoint_port) or None
    if max_nodes == 1 and given.master_port is None:
        if given.master_addr is not None:
            warnings.append(f"{asked[0]} ignored: without --master-port one node needs none")
        return None, None
    port = STATIC_PORT if given.master_port is None else given.master_port
    return (given.master_addr or "127.0.0.1").strip("[]"), port or None
