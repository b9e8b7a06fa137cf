"""What `holdfast run` was asked to do, checked once, before anything is started.

`cli/flags.py` knows how flags are spelt; this module knows what they mean. It takes what was said
(`Given`: texts, each with the flag or variable it came from) and answers with `RunSettings`, in
which everything is resolved: counts are numbers, masks cover every local rank, the script exists.
Whatever makes no sense ends here as a `UsageError`: one line that says what is wrong and what to
do. Nothing downstream checks a setting again, reads a `PET_*` variable or knows torchrun's rules.

Torch is never imported: GPUs are counted from CUDA_VISIBLE_DEVICES and the device files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from msgspec import Struct

from holdfast.config.faults import schedule
from holdfast.config.values import (
    _joined,
    address,
    as_said,
    comma_list,
    directory,
    factor,
    job_name,
    key_values,
    line_filters,
    nodes_range,
    numa_binding,
    port_number,
    rank_list,
    ranks_per_node,
    seconds,
    section_timeouts,
    signal_names,
    standby_count,
    stream_masks,
    time_limit,
    whole_number,
    yes_or_no,
)
from holdfast.errors import JobHomeError, UsageError
from holdfast.messages.chaos import Injection
from holdfast.messages.local import Entry
from holdfast.wire.tls import TlsFiles

T = TypeVar("T")

PREFIX_TEMPLATE = "[${role_name}${local_rank}]:"
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")

C10D_PORT = 29400  # torchrun's defaults
STATIC_PORT = 29500


class Terminal(Struct, frozen=True, kw_only=True):
    """What of the ranks' output is shown. All of it is kept in the logs, whatever stands here.

    Masks hold torchrun's values for each local rank: 0 neither stream, 1 stdout, 2 stderr, 3 both.
    A redirected stream goes to the log only; one that is also teed is shown after all.
    """

    redirects: dict[int, int]
    tee: dict[int, int]
    local_ranks_filter: tuple[int, ...] | None = None  # None: all ranks
    stdout_filters: tuple[str, ...] = ()  # lines with one of these also go to a file of their own
    stderr_filters: tuple[str, ...] = ()
    log_line_prefix_template: str = PREFIX_TEMPLATE  # also knows ${rank}
    quiet: bool = False


class Rendezvous(Struct, frozen=True, kw_only=True):
    """Where nodes and ranks meet. All None: one node, and everything is picked here."""

    coordinator: str | None = None  # "HOST:PORT"; None: embedded, on loopback
    # True: this node runs it there, False: it runs already, None: run it if HOST is this machine
    hosts_coordinator: bool | None = None
    master_addr: str | None = None  # MASTER_ADDR and MASTER_PORT as demanded; None: ours to pick
    master_port: int | None = None
    local_addr: str | None = None  # this node's address as others reach it
    run_id: str | None = None  # TORCHELASTIC_RUN_ID; None: ours to pick
    join_timeout_s: float | None = None  # until min_nodes have joined; None: learnt
    last_call_timeout_s: float | None = None  # from min_nodes on, for more to come; None: learnt


SAVE_DEADLINE_S = 25.0
"""Kubernetes and Slurm give 30 s between SIGTERM and SIGKILL unless told otherwise."""


class HangSettings(Struct, frozen=True, kw_only=True):
    """Deadlines for ranks that stand still, as the user says. None: learnt."""

    detect: bool = True
    initial_rank_heartbeat_timeout: float | None = None
    rank_heartbeat_timeout: float | None = None
    rank_out_of_section_timeout: float | None = None
    rank_section_timeouts: dict[str, float] = {}
    safety_factor: float | None = None


class RunSettings(Struct, frozen=True, kw_only=True):
    """One `holdfast run`, as meant. `warnings` are lines for the user: taken, but of no effect."""

    script: str  # path, module or command, as `entry` says
    script_args: tuple[str, ...]
    entry: Entry
    job: str | None
    nproc: int
    min_nodes: int
    max_nodes: int
    node_rank: int | None
    node_unit: int
    segment: int  # nodes of one interconnect domain that only count together
    spares: int
    exclude_stragglers: bool
    hangs: HangSettings  # deadlines that the user wants
    copies: int  # nodes that keep a copy of each snapshot
    save_deadline_s: float  # for the newest snapshot to be written when a node is told to stop
    node_check: bool
    role: str
    max_restarts: int | None  # None: as long as training advances
    standby: int | None  # None: as many as fit
    preload: tuple[str, ...]
    shutdown_timeout_s: float | None  # None: learnt
    signals_to_handle: tuple[str, ...]
    virtual_local_rank: bool
    numa_binding: str | None
    log_dir: str | None
    terminal: Terminal
    rendezvous: Rendezvous
    token_file: str | None  # where the job's token is kept; None: in the job's home
    tls: TlsFiles | None
    chaos: tuple[Injection, ...]  # faults to inject
    warnings: tuple[str, ...]


class Said(NamedTuple):
    """A value as it was given, and by what: "--nnodes" or "PET_NNODES"."""

    text: str
    source: str


class Given(Struct, frozen=True):
    """Everything said, by name ("nnodes"). What was not said is not in it."""

    words: Mapping[str, Said]

    def __contains__(self, name: str) -> bool:
        return name in self.words

    def take(self, name: str, meaning: Callable[[str, str], T], default: T) -> T:
        """What a value means, or the default where none was given."""
        said = self.words.get(name)
        return default if said is None else meaning(said.text, said.source)

    def source(self, name: str) -> str:
        return self.words[name].source

    def shown(self, name: str) -> str:
        """A value as the user would recognise it, for messages."""
        said = self.words[name]
        return f"{said.source} {said.text}"


def home() -> Path:
    """Where jobs live: $HOLDFAST_HOME, or ~/.holdfast."""
    chosen = os.environ.get("HOLDFAST_HOME")
    try:
        return Path(chosen or "~/.holdfast").expanduser().absolute()
    except (RuntimeError, OSError) as error:
        raise JobHomeError(
            f"no home for jobs: {error}; set HOLDFAST_HOME to a directory"
        ) from error


def run_settings(given: Given, command: Sequence[str]) -> RunSettings:
    """What was said, resolved and checked. `command` is the script and its own arguments."""
    if not command:
        raise UsageError("no script given; try `holdfast run train.py`")
    warnings: list[str] = []
    script, *script_args = command
    entry = entry_of(given)
    check_launchable(script, entry)
    min_nodes, max_nodes = _nodes(given)
    spares = given.take("spares", whole_number, 0)
    nproc = given.take("nproc_per_node", ranks_per_node, 1)
    return RunSettings(
        script=script,
        script_args=tuple(script_args),
        entry=entry,
        job=given.take("job", job_name, None),
        nproc=nproc,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        node_rank=_node_rank(given, max_nodes + spares),
        node_unit=_divisor(given, "node_unit", max_nodes),
        segment=_divisor(given, "segment", max_nodes),
        spares=spares,
        exclude_stragglers="exclude_stragglers" in given,
        hangs=_hangs(given),
        copies=given.take("copies", whole_number, 1),
        save_deadline_s=given.take("save_deadline", seconds, SAVE_DEADLINE_S),
        node_check="node_check" in given,
        role=given.take("role", as_said, "default"),
        max_restarts=given.take("max_restarts", whole_number, None),
        standby=_standby(given, entry),
        preload=_preload(given, entry, script, warnings),
        shutdown_timeout_s=given.take("shutdown_timeout", seconds, None),
        signals_to_handle=given.take("signals_to_handle", signal_names, SIGNALS),
        virtual_local_rank="virtual_local_rank" in given,
        numa_binding=given.take("numa_binding", numa_binding, None),
        log_dir=given.take("log_dir", directory, None),
        terminal=_terminal(given, nproc),
        rendezvous=_rendezvous(given, max_nodes, warnings),
        token_file=given.take("token_file", as_said, None),
        tls=_tls(given),
        chaos=given.take("chaos", schedule, ()),
        warnings=tuple(warnings),
    )


# What runs


def _hangs(given: Given) -> HangSettings:
    return HangSettings(
        detect="no_hang_detection" not in given,
        initial_rank_heartbeat_timeout=given.take(
            "initial_rank_heartbeat_timeout", time_limit, None
        ),
        rank_heartbeat_timeout=given.take("rank_heartbeat_timeout", time_limit, None),
        rank_out_of_section_timeout=given.take("rank_out_of_section_timeout", time_limit, None),
        rank_section_timeouts=given.take("rank_section_timeouts", section_timeouts, {}),
        safety_factor=given.take("safety_factor", factor, None),
    )


def entry_of(given: Given) -> Entry:
    """How the script is started. As in torchrun, --run-path wins over the others."""
    if "run_path" in given:
        return "path"
    if "module" in given and "no_python" in given:
        flags = f"{given.source('module')} and {given.source('no_python')}"
        raise UsageError(f"{flags}: a module needs python; leave one of them out")
    if "module" in given:
        return "module"
    return "command" if "no_python" in given else "script"


def check_launchable(script: str, entry: Entry) -> None:
    """Refuse what could not even be started."""
    if entry == "module":
        if not _module_found(script, os.getcwd()):
            raise UsageError(f"-m {script}: no such module here or in this Python")
    elif entry == "command":
        if shutil.which(script) is None:
            there = os.path.isfile(script) and os.sep in script
            raise UsageError(f"{script}: {'not executable' if there else 'no such command'}")
    elif not os.path.exists(script):
        raise UsageError(f"{script}: no such file")
    elif os.path.isdir(script) and not os.path.exists(os.path.join(script, "__main__.py")):
        raise UsageError(f"{script}: is a directory without a __main__.py; name the script in it")
    elif not os.access(script, os.R_OK):
        raise UsageError(f"{script}: not readable by this user")


def _module_found(name: str, *directories: str) -> bool:
    """Whether the top-level package of a module can be found, without importing anything."""
    from importlib.machinery import PathFinder
    from importlib.util import find_spec

    if not all(part.isidentifier() for part in name.split(".")):
        return False
    top = name.partition(".")[0]
    try:
        return bool(PathFinder.find_spec(top, list(directories)) or find_spec(top))
    except ValueError:  # loaded without a spec, as __main__ is: it is there
        return True


def _standby(given: Given, entry: Entry) -> int | None:
    count = given.take("standby", standby_count, None)
    if entry != "command":
        return count
    if count:
        raise UsageError(
            f"{given.shown('standby')}: a command started with --no-python cannot be handed to a "
            "standby; leave --standby out"
        )
    return 0


def _preload(given: Given, entry: Entry, script: str, warnings: list[str]) -> tuple[str, ...]:
    names: tuple[str, ...] = given.take("preload", comma_list, ())
    if names and entry == "command":
        warnings.append("--preload has no effect with --no-python")
        return ()
    near = os.path.dirname(os.path.abspath(script)) if entry != "module" else os.getcwd()
    for name in names:
        if not _module_found(name, near, os.getcwd()):
            raise UsageError(f"--preload {name}: no such module here or in this Python")
    return names


# Nodes, and where they meet


def _nodes(given: Given) -> tuple[int, int]:
    lowest, highest = given.take("nnodes", nodes_range, (1, 1))
    if "standalone" not in given:
        return lowest, highest
    if lowest > 1:
        raise UsageError(
            f"{given.source('standalone')} is one node, but {given.shown('nnodes')} asks for more; "
            "leave one of them out"
        )
    return 1, 1  # nobody else could join


def _node_rank(given: Given, places: int) -> int | None:
    rank = given.take("node_rank", whole_number, None)
    if rank is None or "standalone" in given:
        return None
    if rank >= places:
        last = f"up to {places - 1}" if places > 1 else "0 only, since there is one node"
        raise UsageError(f"{given.shown('node_rank')}: node ranks go {last}")
    return rank


def _divisor(given: Given, name: str, max_nodes: int) -> int:
    """A number of nodes that worlds are multiples of."""
    number = given.take(name, whole_number, 1)
    if not 1 <= number <= max_nodes:
        raise UsageError(
            f"{given.shown(name)}: a number from 1 to --nnodes ({max_nodes}) is needed"
        )
    return number


def _tls(given: Given) -> TlsFiles | None:
    names = ("tls_cert", "tls_key", "tls_ca")
    said = [name for name in names if name in given]
    if not said:
        return None
    if len(said) < len(names):
        raise UsageError("--tls-cert, --tls-key and --tls-ca go together: both sides are checked")
    cert, key, ca = (given.take(name, as_said, "") for name in names)
    return TlsFiles(cert=cert, key=key, ca=ca)


def _rendezvous(given: Given, max_nodes: int, warnings: list[str]) -> Rendezvous:
    conf: dict[str, str] = given.take("rdzv_conf", key_values, {})
    warnings.extend(_conf_warnings(conf))
    coordinator, hosts = _coordinator(given, max_nodes, warnings)
    if coordinator is not None and hosts is None and "is_host" in conf:
        hosts = yes_or_no(conf["is_host"], "--rdzv-conf is_host")
    master_addr, master_port = _master(given, max_nodes, warnings)
    run_id = given.take("rdzv_id", as_said, "none")
    timeouts = {
        key: seconds(conf[key], f"--rdzv-conf {key}") if key in conf else None
        for key in ("join_timeout", "last_call_timeout")
    }
    return Rendezvous(
        coordinator=coordinator,
        hosts_coordinator=hosts,
        master_addr=master_addr,
        master_port=master_port,
        local_addr=given.take("local_addr", as_said, None),
        run_id=None if run_id == "none" or "standalone" in given else run_id,
        join_timeout_s=timeouts["join_timeout"],
        last_call_timeout_s=timeouts["last_call_timeout"],
    )


def _coordinator(
    given: Given, max_nodes: int, warnings: list[str]
) -> tuple[str | None, bool | None]:
    """The coordinator's address, and whether this node runs it (see `Rendezvous`)."""
    if "standalone" in given:
        if "coordinator" in given:
            raise UsageError(
                f"{given.source('standalone')} runs its own coordinator; leave out "
                f"{given.shown('coordinator')} or --standalone"
            )
        return None, None
    if "coordinator" in given:
        if "rdzv_endpoint" in given:
            warnings.append(f"{given.shown('rdzv_endpoint')} ignored: --coordinator says where")
        host, port = given.take("coordinator", address(None), ("", 0))
        return _joined(host, port), False
    if _backend(given) == "static":
        return None, None
    if "rdzv_endpoint" not in given and max_nodes == 1:
        return None, None
    host, port = given.take("rdzv_endpoint", address(C10D_PORT), ("localhost", C10D_PORT))
    if port == 0 and max_nodes > 1:
        raise UsageError(
            f"{given.shown('rdzv_endpoint')}: port 0 (any free one) is for a single node; "
            "name a port that the other nodes can use too"
        )
    return (None, None) if port == 0 else (_joined(host, port), None)


def _backend(given: Given) -> str:
    name = given.take("rdzv_backend", as_said, "static")
    if name not in ("static", "c10d"):
        raise UsageError(
            f"{given.shown('rdzv_backend')}: holdfast has its own coordinator in its place; "
            "leave the flag out, or give --coordinator HOST:PORT"
        )
    return name


def _master(given: Given, max_nodes: int, warnings: list[str]) -> tuple[str | None, int | None]:
    """MASTER_ADDR and MASTER_PORT, where torchrun's rules let the user choose them."""
    asked = [given.shown(name) for name in ("master_addr", "master_port") if name in given]
    free = "standalone" in given or "coordinator" in given
    if free or _backend(given) != "static":
        if asked:
            warnings.append(f"{' and '.join(asked)} ignored: the coordinator picks it")
        return None, None
    if "rdzv_endpoint" in given:
        host, endpoint_port = given.take("rdzv_endpoint", address(STATIC_PORT), ("", 0))
        return host, endpoint_port or None
    host_only = given.take("master_addr", as_said, None)
    port = given.take("master_port", port_number, None)
    if max_nodes == 1 and port is None:
        if host_only is not None:
            warnings.append(f"{asked[0]} ignored: without --master-port one node needs none")
        return None, None
    return host_only or "127.0.0.1", STATIC_PORT if port is None else port or None


MEANT = ("join_timeout", "last_call_timeout", "is_host")


def _conf_warnings(conf: Mapping[str, str]) -> list[str]:
    useful = ", ".join(MEANT)
    return [
        f"--rdzv-conf {key} has no effect here (those that have: {useful})"
        for key in conf
        if key not in MEANT
    ]


# What is shown


def _terminal(given: Given, nproc: int) -> Terminal:
    masks = stream_masks(nproc)
    silent = dict.fromkeys(range(nproc), 0)
    return Terminal(
        redirects=given.take("redirects", masks, silent),
        tee=given.take("tee", masks, silent),
        local_ranks_filter=given.take("local_ranks_filter", rank_list, None),
        stdout_filters=given.take("duplicate_stdout_filters", line_filters, ()),
        stderr_filters=given.take("duplicate_stderr_filters", line_filters, ()),
        log_line_prefix_template=given.take("log_line_prefix_template", as_said, PREFIX_TEMPLATE),
        quiet="quiet" in given,
    )
