"""The settings of one `holdfast run`, checked against each other before anything is started.

`config/sources.py` collects what the user said; this module resolves it into `RunSettings`, in which
counts are numbers, masks cover every local rank and the script exists. A contradiction is a
`UsageError`: one line that says what is wrong and what to do. Nothing downstream checks a setting
again, reads a `PET_*` variable or knows torchrun's rules.

Torch is never imported: GPUs are counted from CUDA_VISIBLE_DEVICES and the device files.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from holdfast.config.modules import check_runnable, top_level_found
from holdfast.config.rendezvous import Rendezvous, rendezvous, timeouts
from holdfast.config.schema import OfTheMachine, Settings, WithoutEffect, settings_of
from holdfast.errors import UsageError
from holdfast.messages.hangs import HangTerms
from holdfast.messages.local import Entry
from holdfast.messages.records import Script, Terms
from holdfast.messages.supply import SupplyTerms
from holdfast.wire.tls import TlsFiles, check_files


class Terminal(Struct, frozen=True, kw_only=True):
    """Which of the ranks' output is shown; the logs have all of it.

    Masks hold torchrun's values for each local rank: 0 neither stream, 1 stdout, 2 stderr, 3 both.
    A redirected stream goes to the log only, unless it is also teed.
    """

    redirects: dict[int, int]
    tee: dict[int, int]
    local_ranks_filter: tuple[int, ...] | None  # None: all ranks
    stdout_filters: tuple[str, ...]  # lines with one of these are copied to a separate file
    stderr_filters: tuple[str, ...]
    log_line_prefix_template: str
    quiet: bool
    status_line: bool  # whether a terminal shows one


class RunSettings(Struct, frozen=True, kw_only=True):
    """One `holdfast run`, resolved and checked."""

    script: str  # path, module or command, as `entry` says
    script_args: tuple[str, ...]
    entry: Entry
    job: str | None
    requeued: bool  # whether it continues a job that had to stop
    drain: bool  # whether hosts that the job blames are taken out of service
    nproc: int
    node_rank: int | None
    save_deadline_s: float  # for the newest snapshot to reach storage when the node must stop
    image_dir: str | None  # None: in shared memory
    role: str
    standby: int | None  # None: as many as fit
    standby_gpu: bool  # whether standbys may hold the GPUs of their ranks
    preload: tuple[str, ...]
    signals_to_handle: tuple[str, ...]
    virtual_local_rank: bool
    numa_binding: str | None
    log_dir: str | None
    terminal: Terminal
    rendezvous: Rendezvous
    token_file: str | None  # file with the job's token; None: in the job's home
    tls: TlsFiles | None
    terms: Terms  # what holds for the whole job
    notify: tuple[str, ...]  # URLs and commands; secrets, which no message may show
    warnings: tuple[str, ...]  # one line each, for the user: accepted, but without effect

    @property
    def places(self) -> int:
        """The most nodes that can join."""
        return self.terms.max_nodes + self.terms.spares


def run_settings(given: Settings, command: Sequence[str]) -> RunSettings:
    """Resolve and check what was said. `command` is the script and its own arguments."""
    if not command:
        raise UsageError("no script given; try `holdfast run train.py`")
    warnings = [*given.warnings, *_without_effect(given)]
    script, *script_args = command
    entry = _entry(given)
    _check_launchable(script, entry)
    terms = replace(job_terms(given), script=identity(script, script_args, entry))
    _check_machine_settings(given)
    nproc = given.nproc_per_node
    return RunSettings(
        script=script,
        script_args=tuple(script_args),
        entry=entry,
        job=given.job,
        requeued=given.requeued,
        drain=given.drain,
        nproc=nproc,
        node_rank=_node_rank(given, terms.max_nodes + terms.spares),
        save_deadline_s=given.save_deadline,
        image_dir=given.image_dir,
        role=given.role,
        standby=_standby(given, entry),
        standby_gpu=given.standby_gpu,
        preload=_preload(given, entry, script, warnings),
        signals_to_handle=given.signals_to_handle,
        virtual_local_rank=_virtual_local_rank(given, nproc),
        numa_binding=given.numa_binding,
        log_dir=given.log_dir,
        terminal=_terminal(given, nproc),
        rendezvous=rendezvous(given, terms.max_nodes, warnings),
        token_file=given.token_file,
        tls=tls_files(given),
        terms=terms,
        notify=given.notify,
        warnings=tuple(warnings),
    )


def job_terms(given: Settings) -> Terms:
    """What the user asks of the job as a whole."""
    min_nodes, max_nodes = _nodes(given)
    _check_units(given, min_nodes, max_nodes)
    join_timeout_s, last_call_timeout_s = timeouts(given)
    return Terms(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        node_unit=given.node_unit,
        segment=given.segment,
        spares=given.spares,
        copies=given.copies,
        node_check=given.node_check,
        exclude_stragglers=given.exclude_stragglers,
        hangs=HangTerms(
            detect=not given.no_hang_detection,
            hang_after=given.hang_after,
            initial_rank_heartbeat_timeout=given.initial_rank_heartbeat_timeout,
            rank_heartbeat_timeout=given.rank_heartbeat_timeout,
            rank_out_of_section_timeout=given.rank_out_of_section_timeout,
            rank_section_timeouts=given.rank_section_timeouts,
            safety_factor=given.safety_factor,
        ),
        max_restarts=given.max_restarts,
        grace_s=given.shutdown_timeout,
        last_call_s=last_call_timeout_s,
        join_limit_s=join_timeout_s,
        chaos=given.chaos,
        supply=_supply(given, max_nodes),
    )


def _supply(given: Settings, max_nodes: int) -> SupplyTerms:
    """What the user asks of a platform."""
    memory, limit = given.memory, given.memory_limit
    if memory > limit:
        raise UsageError(
            f"{given.shown('memory')}: is more than --memory-limit ({limit} MiB); raise that, too"
        )
    if max_nodes % max(1, given.group):
        raise UsageError(
            f"{given.shown('group')}: --nnodes ({max_nodes}) is no multiple of it; change one of them"
        )
    critical = given.critical
    if critical is None:
        critical = tuple(range(max_nodes))
    elif critical and max(critical) >= max_nodes + given.spares:
        raise UsageError(
            f"{given.shown('critical')}: positions go from 0 to {max_nodes + given.spares - 1}"
        )
    return SupplyTerms(
        memory_mib=memory,
        memory_limit_mib=limit,
        relaunches=given.relaunches,
        critical=critical,
        group=given.group,
        priority=given.priority,
        pending_s=given.pending_limit,
    )


def tls_files(given: Settings) -> TlsFiles | None:
    """The certificates to show and to trust."""
    cert, key, ca = given.tls_cert, given.tls_key, given.tls_ca
    if not (cert or key or ca):
        return None
    if not (cert and key and ca):
        raise UsageError("--tls-cert, --tls-key and --tls-ca go together: both sides are checked")
    files = TlsFiles(cert=cert, key=key, ca=ca)
    check_files(files)
    return files


def _without_effect(given: Settings) -> Iterator[str]:
    """Check settings that only torchrun has a use for; say which is missed."""
    for setting in settings_of(WithoutEffect):
        getattr(given, setting.name)
    name = given.logs_specs
    if name is not None:
        from importlib.metadata import entry_points

        if not entry_points(group="torchrun.logs_specs", name=name):
            raise UsageError(f"{given.shown('logs_specs')}: no installed package provides it")
        yield f"{given.shown('logs_specs')} has no effect here; see --log-dir"


# What runs


def identity(script: str, arguments: Sequence[str], entry: Entry) -> Script:
    """What nodes of one job compare: paths may differ between them, names may not."""
    file = entry != "module" and os.path.isfile(script)
    return Script(
        name=script if entry == "module" else os.path.basename(os.path.abspath(script)),
        content=_digest(Path(script).read_bytes()) if file else "",
        arguments=_digest("\0".join(arguments).encode(errors="surrogateescape")),
    )


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()[:16]


def _entry(given: Settings) -> Entry:
    """How the script is started. As in torchrun, --run-path wins over the others."""
    if given.run_path:
        return "path"
    if given.module and given.no_python:
        flags = f"{given.said['module'].source} and {given.said['no_python'].source}"
        raise UsageError(f"{flags}: a module needs python; leave one of them out")
    if given.module:
        return "module"
    return "command" if given.no_python else "script"


def _check_launchable(script: str, entry: Entry) -> None:
    """Refuse a script that could not be started."""
    if entry == "module":
        check_runnable(script)
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


def _check_machine_settings(given: Settings) -> None:
    """Read what only the agent and the launcher will need, while it can still be one line."""
    for setting in settings_of(OfTheMachine):
        getattr(given, setting.name)


def _standby(given: Settings, entry: Entry) -> int | None:
    if entry != "command":
        return given.standby
    if given.standby:
        raise UsageError(
            f"{given.shown('standby')}: a command started with --no-python cannot be handed to a "
            "standby; leave --standby out"
        )
    return 0


def _preload(given: Settings, entry: Entry, script: str, warnings: list[str]) -> tuple[str, ...]:
    if given.preload and entry == "command":
        warnings.append("--preload has no effect with --no-python")
        return ()
    near = os.path.dirname(os.path.abspath(script)) if entry != "module" else os.getcwd()
    for name in given.preload:
        if not top_level_found(name, near, os.getcwd()):
            raise UsageError(
                f"{given.said['preload'].source} {name}: no such module here or in this Python"
            )
    return given.preload


# Nodes


def _nodes(given: Settings) -> tuple[int, int]:
    min_nodes, max_nodes = given.nnodes
    if not given.standalone:
        return min_nodes, max_nodes
    if min_nodes > 1:
        raise UsageError(
            f"{given.said['standalone'].source} means one node, but {given.shown('nnodes')} asks for "
            "more; leave one of them out"
        )
    return 1, 1  # no other node could join


def _node_rank(given: Settings, places: int) -> int | None:
    rank = given.node_rank
    if rank is None or given.standalone:
        return None
    if rank >= places:
        last = f"up to {places - 1}" if places > 1 else "0 only, since there is one node"
        raise UsageError(f"{given.shown('node_rank')}: node ranks go {last}")
    return rank


def _check_units(given: Settings, min_nodes: int, max_nodes: int) -> None:
    """Check the numbers of nodes that the size of a world is a multiple of."""
    for name, number in (("node_unit", given.node_unit), ("segment", given.segment)):
        if not 1 <= number <= max_nodes:
            raise UsageError(
                f"{given.shown(name)}: a number from 1 to --nnodes ({max_nodes}) is needed"
            )
    unit = math.lcm(given.node_unit, given.segment)
    if max_nodes // unit * unit < min_nodes:
        units = [name for name in ("node_unit", "segment") if name in given.said]
        said = " and ".join(map(given.shown, units))
        raise UsageError(
            f"{said}: no number of nodes from {min_nodes} to {max_nodes} is a multiple of {unit}; "
            "change it or --nnodes"
        )


def _virtual_local_rank(given: Settings, nproc: int) -> bool:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given.virtual_local_rank and visible is not None and visible.count(",") + 1 < nproc:
        raise UsageError(
            f"{given.said['virtual_local_rank'].source}: {nproc} ranks need as many GPUs, and "
            f"CUDA_VISIBLE_DEVICES={visible} names fewer"
        )
    return given.virtual_local_rank


# What is shown


def _terminal(given: Settings, nproc: int) -> Terminal:
    return Terminal(
        redirects=_by_local_rank(given.redirects, nproc),
        tee=_by_local_rank(given.tee, nproc),
        local_ranks_filter=given.local_ranks_filter,
        stdout_filters=given.duplicate_stdout_filters,
        stderr_filters=given.duplicate_stderr_filters,
        log_line_prefix_template=given.log_line_prefix_template,
        quiet=given.quiet,
        status_line=not (given.quiet or given.no_status_line),
    )


def _by_local_rank(masks: int | dict[int, int], nproc: int) -> dict[int, int]:
    """A mask for each local rank: 0 for one that is not named.

    A named rank that this node does not have is ignored, as in torchrun, so that one command line
    fits nodes of different sizes.
    """
    if isinstance(masks, int):
        return dict.fromkeys(range(nproc), masks)
    return {rank: masks.get(rank, 0) for rank in range(nproc)}
