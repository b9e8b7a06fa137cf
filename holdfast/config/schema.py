"""The schema defines every setting once: name, reader, default, help and the variables it honours.

From it come the flags of `holdfast run`, the HOLDFAST_* variables, the keys of `holdfast.toml`,
the tables in `docs/configuration.md` and what `holdfast config` shows. Each setting is an attribute:

    Settings.nnodes           the definition: its flag, its variables, its help
    Settings(said).nnodes     the value: what the user said, read, or the default

A value is read when it is asked for: a setting without effect on this job is never an error.
`config/sources.py` collects what the user said; `config/settings.py` checks settings against each
other. This module imports nothing heavy, because `holdfast run --help` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar, overload

from holdfast.config import values

if TYPE_CHECKING:
    from holdfast.messages.chaos import Injection

T_co = TypeVar("T_co", covariant=True)


class Said(NamedTuple):
    """A setting's text and its source: "--nnodes", "PET_NNODES" or "holdfast.toml:3: nnodes"."""

    text: str
    source: str


class Setting(Generic[T_co]):
    """The definition of one setting; on an instance of `Settings`, its value."""

    name: str  # "nproc_per_node"

    def __init__(
        self,
        read: Callable[[str, str], T_co],
        default: T_co,
        takes: str,
        help: str,
        *,
        otherwise: str = "",
        short: str = "",
        torchrun: bool = False,
        variable: str = "",
        separator: str = "",
        pair: str = "",
    ) -> None:
        self.read = read
        self.default = default
        self.takes = takes  # the value's name in the help; empty for a switch
        self.help = help
        self.otherwise = otherwise or str(default).lower().removesuffix(".0")  # default in words
        self.short = short
        self.torchrun = torchrun  # torchrun reads PET_<NAME> for it
        self._variable = variable  # another variable that torchrun reads for it
        self.separator = separator  # between values, where several can be given
        self.pair = pair  # between key and value, where it is a table in holdfast.toml

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, given: None, owner: type) -> Setting[T_co]: ...
    @overload
    def __get__(self, given: Settings, owner: type) -> T_co: ...
    def __get__(self, given: Settings | None, owner: type) -> Setting[T_co] | T_co:
        if given is None:
            return self
        said = given.said.get(self.name)
        return self.default if said is None else self.read(*said)

    @property
    def key(self) -> str:
        """The key in holdfast.toml."""
        return self.name.replace("_", "-")

    @property
    def flag(self) -> str:
        return f"--{self.key}"

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment variables that set it, strongest first."""
        pet = f"PET_{self.name.upper()}" if self.torchrun else ""
        return tuple(filter(None, (f"HOLDFAST_{self.name.upper()}", pet, self._variable)))

    @property
    def repeatable(self) -> bool:
        """Whether the flag may be repeated. Of torchrun's flags the last one wins, as there."""
        return bool(self.separator) and not self.torchrun

    @property
    def secret(self) -> bool:
        """Whether its value is never shown."""
        return self.name in ("token", "notify")

    @property
    def in_file(self) -> bool:
        return self.name not in NOT_IN_FILE


def _switch(help: str, *, short: str = "", torchrun: bool = False) -> Setting[bool]:
    return Setting(values.yes_or_no, False, "", help, short=short, torchrun=torchrun)


def _faults(text: str, flag: str) -> tuple[Injection, ...]:
    from holdfast.config.faults import schedule  # imports msgspec

    return schedule(text, flag)


# fmt: off
class MostUsed:
    nproc_per_node = Setting(values.ranks_per_node, 1, "N",
        "ranks on each node: a number, gpu, cpu, or auto (one per GPU if there are any, else one "
        "per CPU)", torchrun=True)
    nnodes = Setting(values.nodes_range, (1, 1), "N|MIN:MAX",
        "number of nodes, or the fewest and the most to train with", otherwise="1", torchrun=True)
    job = Setting(values.job_name, None, "NAME",
        "name of the job, for status, incidents, goodput", otherwise="generated")
    config = Setting(values.any_text, None, "FILE",
        "file to read settings from",
        otherwise="holdfast.toml in the working directory, if there is one")
    max_restarts = Setting(values.whole_number, None, "N",
        "give up after this many restarts",
        otherwise="no limit while training advances", torchrun=True)
    standby = Setting(values.standby_count, None, "auto|N",
        "processes that have imported torch and wait to replace a dead rank; auto: one per rank, "
        "fewer if memory is short, 0 with --no-python", otherwise="auto")
    standby_gpu = Setting(values.auto_or_off, True, "auto|off",
        "whether standbys also hold the GPU of the rank they would replace, with CUDA started, "
        "libraries loaded and a step rehearsed; auto: where enough of its memory is free",
        otherwise="auto")
    preload: Setting[tuple[str, ...]] = Setting(values.comma_list, (), "MODULE",
        "also import this module in standbys; repeat the flag or use commas",
        otherwise="none", separator=",")
    coordinator = Setting(values.address, None, "HOST:PORT",
        "address of the job's coordinator", otherwise="embedded in this process, on loopback")
    spares = Setting(values.node_count, 0, "N",
        "nodes beyond --nnodes that join and wait for a place")
    hang_after = Setting(values.time_limit, None, "SECONDS",
        "how long a rank that others wait for may show no sign of life: its line, CPU time, I/O, "
        "sockets, children and loader workers all unmoved. A place that was seen to pause for longer "
        "gets more; a proven hang is repaired at once", otherwise="60")
    rank_heartbeat_timeout = Setting(values.time_limit, None, "SECONDS",
        "hard limit between two marks of a step, whatever the rank does", otherwise="none")
    initial_rank_heartbeat_timeout = Setting(values.time_limit, None, "SECONDS",
        "the same, before its first step", otherwise="none")
    rank_out_of_section_timeout = Setting(values.time_limit, None, "SECONDS",
        "the same, outside of holdfast.section()", otherwise="none")
    rank_section_timeouts: Setting[dict[str, float]] = Setting(
        values.section_timeouts, {}, "NAME:SECONDS,...",
        "the same, within these sections", otherwise="none", separator=",", pair=":")
    safety_factor = Setting(values.factor, None, "X",
        "a place is left alone for this many times the longest pause seen there",
        otherwise="5")
    no_hang_detection = _switch("never end a rank because it makes no progress")
    exclude_stragglers = _switch(
        "replace the node of a rank that slows the others down with a spare")
    copies = Setting(values.node_count, 1, "N",
        "other nodes that keep a copy of each snapshot in memory")
    image_dir = Setting(values.directory, None, "DIR",
        "directory for snapshots in memory, on each node; one on disk is slower",
        otherwise="/dev/shm")
    save_deadline = Setting(values.seconds, 25.0, "SECONDS",
        "how long the newest snapshot may take to reach storage when the node is told to stop "
        "(Slurm and Kubernetes wait 30)")
    node_unit = Setting(values.whole_number, 1, "N",
        "train with multiples of this many nodes")
    segment = Setting(values.whole_number, 1, "N",
        "place nodes only in groups of N that share a fast interconnect")
    token_file = Setting(values.any_text, None, "FILE",
        "file with the job's token, if the job's home is on another machine",
        otherwise="HOLDFAST_TOKEN, or the token in the job's job.json")
    tls_cert = Setting(values.any_text, None, "FILE",
        "with --tls-key and --tls-ca: mutual TLS between nodes and coordinator", otherwise="no TLS")
    tls_key = Setting(values.any_text, None, "FILE",
        "see --tls-cert", otherwise="no TLS")
    tls_ca = Setting(values.any_text, None, "FILE",
        "see --tls-cert", otherwise="no TLS")
    node_check = _switch("check each node's health before it gets ranks")
    chaos: Setting[tuple[Injection, ...]] = Setting(_faults, (), "FAULTS",
        "inject these faults, as in kill@step=50,rank=1; see holdfast chaos --help",
        otherwise="none", separator=";")
    quiet = _switch("print nothing but errors of Holdfast's own")
    no_status_line = _switch(
        "no line at the bottom of the terminal with step, speed, goodput and the last incident")
    notify: Setting[tuple[str, ...]] = Setting(values.notice_targets, (), "URL|COMMAND",
        "post a notice to this webhook, or run this command with it, when there was an incident and "
        "when the job ends; repeat the flag for several. A URL is a secret: rather set it in "
        "HOLDFAST_NOTIFY (one a line) or holdfast.toml", otherwise="none", separator="\n")
    module = _switch("SCRIPT is a module, as in python -m", short="-m", torchrun=True)
    standalone = _switch(
        "one node that shares nothing with others, which is the default", torchrun=True)


class AsInTorchrun:
    no_python = _switch("SCRIPT is a command, not Python", torchrun=True)
    run_path = _switch(
        "run SCRIPT with runpy.run_path; wins over -m and --no-python", torchrun=True)
    role = Setting(values.any_text, "default", "NAME",
        "ROLE_NAME of the ranks", torchrun=True)
    log_dir = Setting(values.log_directory, None, "DIR",
        "directory for the ranks' logs; /dev/null for none", otherwise="logs/ in the job's home",
        torchrun=True)
    redirects: Setting[int | dict[int, int]] = Setting(values.stream_masks, 0, "MASK",
        "streams to keep off the terminal (1 stdout, 2 stderr, 3 both), for all ranks or by local "
        "rank, as in 0:1,1:2; each has a file of its own in torchrun's layout", short="-r",
        torchrun=True, pair=":")
    tee: Setting[int | dict[int, int]] = Setting(values.stream_masks, 0, "MASK",
        "streams to show although they have a file of their own", short="-t", torchrun=True, pair=":")
    local_ranks_filter = Setting(values.rank_list, None, "RANKS",
        "show only these local ranks, as in 0,1", otherwise="all", torchrun=True, separator=",")
    duplicate_stdout_filters: Setting[tuple[str, ...]] = Setting(values.line_filters, (), "TEXTS",
        "copy stdout lines with one of these texts that are shown to a separate file (separated by "
        "commas; ,, is a comma)", otherwise="none", torchrun=True, separator=",")
    duplicate_stderr_filters: Setting[tuple[str, ...]] = Setting(values.line_filters, (), "TEXTS",
        "the same for stderr", otherwise="none", torchrun=True, separator=",")
    log_line_prefix_template = Setting(values.any_text, "[${role_name}${local_rank}]:", "TEXT",
        "prefix of a rank's lines on the terminal; may use ${role_name} ${rank} ${local_rank}",
        variable="TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
    node_rank = Setting(values.whole_number, None, "N",
        "place of this node among the nodes", otherwise="in the order they join", torchrun=True)
    master_addr = Setting(values.host, None, "HOST",
        "MASTER_ADDR for the ranks", otherwise="chosen by the coordinator", torchrun=True)
    master_port = Setting(values.port_number, None, "PORT",
        "MASTER_PORT for the ranks",
        otherwise="a free one, 29500 with more than one node", torchrun=True)
    local_addr = Setting(values.host, None, "HOST",
        "address at which other nodes reach this one", otherwise="detected", torchrun=True)
    rdzv_backend = Setting(values.any_text, "static", "NAME",
        "c10d: --rdzv-endpoint is the coordinator's address; static: it is "
        "MASTER_ADDR:MASTER_PORT; others are not supported", torchrun=True)
    rdzv_endpoint = Setting(values.endpoint, None, "HOST:PORT",
        "see --rdzv-backend; without a port 29400 (c10d) or 29500 (static)",
        otherwise="localhost with c10d and several nodes", torchrun=True)
    rdzv_id = Setting(values.run_id, None, "ID",
        "TORCHELASTIC_RUN_ID for the ranks", otherwise="generated", torchrun=True)
    rdzv_conf: Setting[dict[str, str]] = Setting(values.key_values, {}, "KEY=VALUE,...",
        "join_timeout, last_call_timeout (seconds) and is_host; torchrun's other keys have no "
        "effect", otherwise="none", torchrun=True, separator=",", pair="=")
    shutdown_timeout = Setting(values.seconds, None, "SECONDS",
        "time from SIGTERM to SIGKILL for a rank",
        otherwise="learnt", torchrun=True, variable="TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    signals_to_handle: Setting[tuple[str, ...]] = Setting(
        values.signal_names, ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"), "NAMES",
        "signals passed on to the ranks",
        otherwise="SIGTERM,SIGINT,SIGHUP,SIGQUIT", torchrun=True, separator=",")
    virtual_local_rank = _switch("each rank sees LOCAL_RANK 0 and one GPU", torchrun=True)


class WithoutEffect:
    monitor_interval = Setting(values.seconds, None, "SECONDS",
        "a dead rank is noticed at once, without polling", otherwise="none", torchrun=True)
    start_method = Setting(values.one_of(*values.START_METHODS), None, "NAME",
        "ranks are always new processes or standbys", otherwise="none", torchrun=True)
    event_log_handler = Setting(values.one_of(*values.EVENT_HANDLERS), None, "NAME",
        "see holdfast incidents and trace.json", otherwise="none", torchrun=True)
    logs_specs = Setting(values.any_text, None, "NAME",
        "see --log-dir", otherwise="none")
    numa_binding = Setting(values.one_of(*values.NUMA_BINDINGS), None, "MODE",
        "ranks are not bound to CPUs", otherwise="none")


class OfThePlatform:
    relaunches = Setting(values.whole_number, 3, "N",
        "how often a position is filled again after a failure of its node; preemption and kills do "
        "not count")
    memory = Setting(values.memory, 0, "SIZE",
        "memory that a node is asked for, such as 16GiB; it is doubled when it runs out",
        otherwise="as the platform's own settings say")
    memory_limit = Setting(values.memory, 65_536, "SIZE",
        "what --memory is raised to at most", otherwise="64GiB")
    critical: Setting[tuple[int, ...] | None] = Setting(values.positions, (), "all|none|N,...",
        "positions whose loss for good ends the job", otherwise="none")
    group = Setting(values.whole_number, 1, "N",
        "nodes that the platform provides only together: a rack, a slice")
    priority = Setting(values.any_text, "", "NAME|SHARE",
        "priority of the nodes, by the platform's name for it; or the share of them, from 0 to 1, "
        "that get its high one", otherwise="the platform's own")
    pending_limit = Setting(values.time_limit, None, "SECONDS",
        "how long a node may be asked for in vain", otherwise="learnt, at least 900")
    drain = _switch(
        "have the platform take hosts that the job blames out of service, where it lets this user: "
        "Slurm drains them, with the reason")
    requeued = _switch(
        "this start continues the job of the same name, which had to stop (exit code 75)")


class OfTheMachine:
    home = Setting(values.any_text, "~/.holdfast", "DIR",
        "directory of all jobs")
    token = Setting(values.any_text, None, "TOKEN",
        "the job's token; prefer --token-file where others can see this process's environment",
        otherwise="the token in the job's job.json")
    infra_rank = Setting(values.whole_number, None, "N",
        "place of this node in the infrastructure's order",
        otherwise="derived from Slurm's variables")
    rank_from_nodename = _switch("take infra-rank from the digits in the node's name")
    switch = Setting(values.any_text, "", "NAME",
        "network switch of this node", otherwise="from SLURM_TOPOLOGY_ADDR")
    block = Setting(values.any_text, "", "NAME",
        "topology block of this node", otherwise="from SLURM_TOPOLOGY_ADDR")
    domain = Setting(values.any_text, "", "NAME",
        "fast interconnect that --segment groups by", otherwise="none")
    node_name = Setting(values.any_text, None, "NAME",
        "the platform's name for this node, by which it can be avoided",
        otherwise="SLURMD_NODENAME, or the host's name")
    request = Setting(values.any_text, "", "ID",
        "set by a supplier: the request that this node was started for", otherwise="none")
    stopped_limit = Setting(values.seconds, 15.0, "SECONDS",
        "how long an agent or coordinator may stay stopped (SIGSTOP) before it is killed; for "
        "tests")
    fake_node = Setting(values.any_text, None, "DIR",
        "directory with sys/, proc/, dev/ and nvml.json that health checks read instead of this "
        "machine's; for tests", otherwise="none")


class OfViewers:
    price_per_hour = Setting(values.price, None, "PRICE",
        "what one rank costs in an hour, as in 2.10 or '2.10 EUR': what lost time cost is then shown",
        otherwise="no cost is shown")


class OfRay:
    ray_cpus: Setting[float | None] = Setting(values.amount, None, "N",
        "CPUs that Ray reserves for each node", otherwise="one a rank")
    ray_gpus = Setting(values.amount, 0.0, "N",
        "GPUs that Ray reserves for each node")
    ray_resources: Setting[dict[str, float]] = Setting(values.amounts, {}, "NAME=N,...",
        "custom resources of Ray for each node", otherwise="none")
    ray_strategy = Setting(values.one_of("spread", "pack"), "spread", "spread|pack",
        "whether nodes are spread over the hosts of the Ray cluster, or packed on few")
# fmt: on


class Settings(
    MostUsed, OfThePlatform, AsInTorchrun, WithoutEffect, OfTheMachine, OfViewers, OfRay
):
    """What the user said; as attributes, the values of all settings."""

    def __init__(self, said: Mapping[str, Said], warnings: tuple[str, ...] = ()) -> None:
        self.said = said
        self.warnings = warnings  # one line each, for the user

    def shown(self, name: str) -> str:
        """A value as the user wrote it, for messages."""
        said = self.said[name]
        return f"{said.source} {said.text}"


WITH_FLAGS: dict[str, type] = {
    "most used": MostUsed,
    "of a platform that provides the nodes": OfThePlatform,
    "as in torchrun": AsInTorchrun,
    "accepted for torchrun's sake, without effect": WithoutEffect,
}

GROUPS: dict[str, type] = {
    **WITH_FLAGS,
    "of this machine, by variable only": OfTheMachine,
    "of `holdfast web`, `top` and `report`, also flags of these": OfViewers,
    "of nodes on Ray, by variable only": OfRay,
}

NOT_IN_FILE = {"config", *vars(OfTheMachine), *vars(OfRay)}
"""Settings that say where to look, or that differ between machines which share a file."""

SET_FOR_WORKERS = {"HOLDFAST_WORKER", "HOLDFAST_FIRST_PATH", "HOLDFAST_NURSERY_PRELOAD"}
"""Variables that an agent sets for the processes it starts; they are no settings."""


def settings_of(*groups: type) -> Iterator[Setting[object]]:
    """The settings of these groups, in the order of their definition."""
    for group in groups:
        yield from (value for value in vars(group).values() if isinstance(value, Setting))


def all_settings() -> Iterator[Setting[object]]:
    return settings_of(*GROUPS.values())
