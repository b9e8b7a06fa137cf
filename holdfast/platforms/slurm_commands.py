"""Slurm's own commands, and what they print: the only way in which Holdfast speaks with Slurm.

`Commands` has one method, so a test can put a Slurm of its own in its place; the functions below it
read what the commands print. A command that fails is a `PlatformError` with Slurm's own words, and says
nothing about jobs or nodes:

    refused for what it asks (partition, account, limits)     for good: asking again is in vain
    no answer, controller away, anything else                 for now
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from holdfast.errors import PlatformError, UsageError
from holdfast.messages.supply import ExitReason, SeenStatus

NEEDED = ("srun", "sbatch", "squeue", "scontrol", "scancel")
LIMIT_S = 30.0
"""How long a command may take; a busy controller answers within seconds."""

_VAIN = re.compile(
    r"invalid (partition|account|qos|user|reservation|feature|job array)|access/permission denied|"
    r"invalid generic resource|violates|not permitted|node count specification invalid|"
    r"node configuration is not available|user's group|unrecognized option|invalid option",
    re.IGNORECASE,
)
"""What Slurm says of requests that it will refuse again."""
_AWAY = re.compile(
    r"contact slurm controller|connection refused|timed out|try again", re.IGNORECASE
)
_FIELD = re.compile(r"(\S+?)=(.*?)(?=\s+[A-Z][\w:/]*=|\s*$)")
_NOBODY = frozenset({"", "(null)", "None", "N/A", "Unknown", "UNLIMITED"})


class Commands(Protocol):
    """Runs one of Slurm's commands."""

    async def run(self, *words: str, environ: Mapping[str, str] | None = None) -> str:
        """Return what it printed; PlatformError if it failed."""


class SlurmCommands:
    """The commands in PATH."""

    async def run(self, *words: str, environ: Mapping[str, str] | None = None) -> str:
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=None if environ is None else dict(environ),
            )
        except OSError as error:
            raise PlatformError(f"{words[0]}: {error.strerror}") from error
        try:
            out, err = await asyncio.wait_for(process.communicate(), LIMIT_S)
        except asyncio.TimeoutError:
            raise PlatformError(f"{shown(words)}: no answer from Slurm in {LIMIT_S:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode:
            raise failure(words, err.decode(errors="replace"))
        return out.decode(errors="replace")


def run_now(*words: str, text: str = "") -> str:
    """Run a command where no loop is yet; `text` is its input."""
    try:
        done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=LIMIT_S)
    except OSError as error:
        raise PlatformError(f"{words[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise PlatformError(f"{shown(words)}: no answer from Slurm in {LIMIT_S:g} s") from None
    if done.returncode:
        raise failure(words, done.stderr)
    return done.stdout


def require_commands() -> None:
    """Refuse to begin where Slurm's commands are not to be found."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        raise UsageError(
            f"Slurm's commands are not in PATH ({', '.join(missing)}); "
            "start this on a node of a Slurm cluster, or add their directory to PATH"
        )


def failure(words: Sequence[str], stderr: str) -> PlatformError:
    """Put what a command complained of into one line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    said = lines[-1] if lines else "it failed without a word"
    for line in lines:
        if _AWAY.search(line) or _VAIN.search(line):
            said = line
            break
    said = re.sub(r"^\w+: (error: )?", "", said)
    if _AWAY.search(said):
        return PlatformError(f"{words[0]}: Slurm's controller does not answer ({said})")
    return PlatformError(f"{words[0]}: {said}", for_good=bool(_VAIN.search(said)))


def shown(words: Sequence[str]) -> str:
    return " ".join(words[:3])


# ---- what they print -----------------------------------------------------------------------------


def records(text: str) -> Iterator[dict[str, str]]:
    """Read `scontrol show --oneliner`: the fields of each line; those that say nothing are left out."""
    for line in text.splitlines():
        found = {name: value for name, value in _FIELD.findall(line) if value not in _NOBODY}
        if found:
            yield found


class QueuedJob(NamedTuple):
    """One line of `squeue`."""

    id: str
    state: str
    why: str
    """What a pending one waits for."""
    hosts: str
    name: str


SQUEUE_FORMAT = "--format=%i|%T|%r|%N|%j"


def queue(text: str) -> Iterator[QueuedJob]:
    """Read what `squeue` prints with `SQUEUE_FORMAT`; lines of another shape are passed over."""
    for line in text.splitlines():
        parts = line.strip().split("|", 4)
        if len(parts) == 5 and parts[0]:
            yield QueuedJob(*parts)


UNUSABLE = frozenset(
    {"DOWN", "FAIL", "FAILING", "DRAIN", "DRAINING", "DRAINED", "NOT_RESPONDING", "ERROR"}
    | {"POWERING_DOWN", "POWERED_DOWN", "POWER_DOWN", "REBOOT_ISSUED", "UNKNOWN", "FUTURE"}
)
BROKEN = frozenset({"DOWN", "FAIL", "FAILING", "ERROR", "NOT_RESPONDING"})


def flags(state: str) -> set[str]:
    """Split a node's state, such as "MIXED+DRAIN" or "DOWN*", into its words."""
    words = set(re.findall(r"\w+", state.upper()))
    return words | ({"NOT_RESPONDING"} if "*" in state else set())


class Meaning(NamedTuple):
    """What a job's state means for the request that it was made for."""

    status: SeenStatus
    reason: ExitReason | None = None


MEANINGS: Mapping[str, Meaning] = {
    "PENDING": Meaning("pending"),
    "CONFIGURING": Meaning("pending"),
    "REQUEUED": Meaning("pending"),
    "REQUEUE_FED": Meaning("pending"),
    "REQUEUE_HOLD": Meaning("pending"),
    "SPECIAL_EXIT": Meaning("pending"),
    "RESV_DEL_HOLD": Meaning("pending"),
    "RUNNING": Meaning("running"),
    "COMPLETING": Meaning("running"),
    "SUSPENDED": Meaning("running"),
    "STOPPED": Meaning("running"),
    "SIGNALING": Meaning("running"),
    "RESIZING": Meaning("running"),
    "STAGE_OUT": Meaning("running"),
    "COMPLETED": Meaning("succeeded"),
    "FAILED": Meaning("failed"),
    "TIMEOUT": Meaning("failed", "preempted"),
    "DEADLINE": Meaning("failed", "preempted"),
    "PREEMPTED": Meaning("failed", "preempted"),
    "NODE_FAIL": Meaning("failed", "hardware"),
    "BOOT_FAIL": Meaning("failed", "hardware"),
    "LAUNCH_FAILED": Meaning("failed", "hardware"),
    "RECONFIG_FAIL": Meaning("failed", "hardware"),
    "OUT_OF_MEMORY": Meaning("failed", "oom"),
    "CANCELLED": Meaning("deleted"),
    "REVOKED": Meaning("deleted"),
}
"""States of jobs. A state that is not here is one that a job is in while it runs."""


def meaning(state: str) -> Meaning:
    """Say what a state means; "CANCELLED by 0" and a truncated "CANCELLED+" are CANCELLED."""
    return MEANINGS.get(re.split(r"[ +]", state.upper())[0], Meaning("running"))


def exit_code(text: str) -> int | None:
    """Read "75:0", an exit code and a signal, as one number; None if it is neither."""
    code, _, number = text.partition(":")
    if not code.isdecimal():
        return None
    return 128 + int(number) if number.isdecimal() and int(number) else int(code)
