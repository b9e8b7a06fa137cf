"""Readers turn the text of one setting into its value.

Each takes the text and where it came from (a flag, a variable or a line of `holdfast.toml`), and
returns the value or raises a `UsageError`: one line that says what is wrong and what to do.
"""

from __future__ import annotations

import glob
import math
import os
import re
import shlex
import signal
from collections.abc import Callable, Sequence
from string import Template
from typing import NamedTuple

from holdfast.errors import UsageError

MOST_NODES = 1_000_000
MOST_RANKS = 4096
"""Ranks, or standbys, of one node."""
MOST_SECONDS = 1e9
NUMA_BINDINGS = ("node", "socket", "exclusive", "core-complex")
START_METHODS = ("spawn", "fork", "forkserver")
EVENT_HANDLERS = ("null", "console", "dynamic_rendezvous")


def any_text(text: str, flag: str) -> str:
    return text


def whole_number(text: str, flag: str) -> int:
    if re.fullmatch(r"[0-9]{1,9}", text.strip()) is None:
        raise UsageError(f"{flag} {text}: a whole number, 0 or more, is needed")
    return int(text)


def _at_most(number: int, most: int, flag: str) -> int:
    if number > most:
        raise UsageError(f"{flag} {number}: {most} is the most; give a smaller number")
    return number


def node_count(text: str, flag: str) -> int:
    return _at_most(whole_number(text, flag), MOST_NODES, flag)


def seconds(text: str, flag: str) -> float:
    return _number(text, flag, 0, "a number of seconds")


def time_limit(text: str, flag: str) -> float:
    """Read a positive number of seconds."""
    value = seconds(text, flag)
    if value == 0:
        raise UsageError(f"{flag} {text}: more than 0 seconds are needed")
    return value


def factor(text: str, flag: str) -> float:
    """Read a multiplier of at least 1."""
    return _number(text, flag, 1, "a number")


def _number(text: str, flag: str, least: int, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:
        raise UsageError(f"{flag} {text}: {what}, {least} or more, is needed")
    if value > MOST_SECONDS:
        raise UsageError(f"{flag} {text}: {what}, {MOST_SECONDS:.0e} or less, is needed")
    return value


def yes_or_no(text: str, flag: str) -> bool:
    word = text.strip().lower()
    if word in ("1", "true", "t", "yes", "y"):
        return True
    if word in ("0", "false", "f", "no", "n"):
        return False
    raise UsageError(f"{flag} {text}: 1 or 0 is needed")


def job_name(text: str, flag: str) -> str:
    """Read a name that is safe as a directory: letters, digits and ._- only, no leading dot."""
    if re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", text) is None:
        raise UsageError(
            f"{flag} {text[:120]}: a job's name is 1 to 100 of A-Z a-z 0-9 . _ - "
            "and does not begin with a dot"
        )
    return text


def run_id(text: str, flag: str) -> str:
    """Read an id as torchrun takes them, unless it could not be the name of a directory."""
    size = len(text.encode(errors="replace"))
    if not 1 <= size <= 100 or "/" in text or text[0] == "." or not text.isprintable():
        raise UsageError(
            f"{flag} {text[:120]}: a name is needed, not a path: 1 to 100 printable characters "
            "without /, the first one not a dot"
        )
    return text


def nodes_range(text: str, flag: str) -> tuple[int, int]:
    """Read N or MIN:MAX as (min, max)."""
    match = re.fullmatch(r"\s*([0-9]{1,9})\s*(?::\s*([0-9]{1,9})\s*)?", text)
    if match is None:
        raise UsageError(f"{flag} {text}: a number of nodes or MIN:MAX is needed")
    lowest = int(match[1])
    highest = int(match[2] or match[1])
    if lowest < 1:
        raise UsageError(f"{flag} {text}: at least one node is needed")
    if highest < lowest:
        raise UsageError(f"{flag} {text}: MIN is above MAX; did you mean {highest}:{lowest}?")
    return lowest, _at_most(highest, MOST_NODES, flag)


def ranks_per_node(text: str, flag: str) -> int:
    """Read a number of ranks: auto, cpu, gpu or a number."""
    if text == "xpu":
        raise UsageError(
            f"{flag} xpu: Holdfast cannot count XPUs; give their number, as in {flag} 4"
        )
    if text in ("auto", "gpu"):
        gpus = gpu_count(os.environ.get("CUDA_VISIBLE_DEVICES"), len(_gpu_devices()))
        if text == "gpu" and gpus == 0:
            raise UsageError(f"{flag} gpu: no GPU is visible here; use cpu, auto or a number")
        return gpus or _cpu_count()
    if text == "cpu":
        return _cpu_count()
    if re.fullmatch(r"\s*-?[0-9]{1,18}\s*", text) is None:
        raise UsageError(f"{flag} {text}: auto, cpu, gpu or a number is needed")
    if int(text) < 1:
        raise UsageError(f"{flag} {text}: at least one rank per node is needed")
    return _at_most(int(text), MOST_RANKS, flag)


def gpu_count(visible: str | None, devices: int) -> int:
    """Count the GPUs that CUDA would show, given CUDA_VISIBLE_DEVICES and the device files.

    CUDA's rules: the first entry that names no device ends the list, a repeated one empties it.
    """
    if visible is None:
        return devices
    seen: list[str] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry in seen:
            return 0
        beyond = entry.isdecimal() and 0 < devices <= int(entry)
        if beyond or not (entry.isdecimal() or entry.startswith(("GPU-", "MIG-"))):
            break
        seen.append(entry)
    return len(seen)


def _gpu_devices() -> list[str]:
    return glob.glob("/dev/nvidia[0-9]*")


def _cpu_count() -> int:
    return len(os.sched_getaffinity(0))


def standby_count(text: str, flag: str) -> int | None:
    """Read auto (None) or a number."""
    if text == "auto":
        return None
    if re.fullmatch(r"[0-9]{1,9}", text) is None:
        raise UsageError(f"{flag} {text}: auto or a number of standbys (0 for none) is needed")
    return _at_most(int(text), MOST_RANKS, flag)


def auto_or_off(text: str, flag: str) -> bool:
    """Read auto (True) or off."""
    if text not in ("auto", "off"):
        raise UsageError(f"{flag} {text}: auto or off is needed")
    return text == "auto"


def stream_masks(text: str, flag: str) -> int | dict[int, int]:
    """Read torchrun's stream masks: "3" for all local ranks, or "0:1,1:2" by local rank."""
    if re.fullmatch(r"[0-3]", text):
        return int(text)
    if not re.fullmatch(r"[0-9]{1,9}:[0-3](,[0-9]{1,9}:[0-3])*", text):
        raise UsageError(
            f"{flag} {text}: 0 (none), 1 (stdout), 2 (stderr) or 3 (both) is needed, "
            "for all ranks or by local rank, as in 0:1,1:2"
        )
    return {int(rank): int(mask) for rank, mask in (m.split(":") for m in text.split(","))}


def rank_list(text: str, flag: str) -> tuple[int, ...]:
    if re.fullmatch(r"\s*[0-9]{1,9}\s*(,\s*[0-9]{1,9}\s*)*", text) is None:
        raise UsageError(f"{flag} {text}: local ranks separated by commas are needed, as in 0,1")
    return tuple(sorted({int(rank) for rank in text.split(",")}))


def section_timeouts(text: str, flag: str) -> dict[str, float]:
    """Read "step:10,checkpointing:600" as seconds by section."""
    found = {}
    for pair in text.split(","):
        name, colon, limit = pair.rpartition(":")
        if not colon or not name:
            raise UsageError(f"{flag} {text}: NAME:SECONDS is needed, several separated by commas")
        found[name.strip()] = time_limit(limit, flag)
    return found


def comma_list(text: str, flag: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def line_filters(text: str, flag: str) -> tuple[str, ...]:
    """Read texts separated by commas; two commas stand for one within a text."""
    return tuple(part.replace("\0", ",") for part in text.replace(",,", "\0").split(","))


def signal_names(text: str, flag: str) -> tuple[str, ...]:
    names = comma_list(text, flag)
    if not names:
        raise UsageError(f"{flag}: name at least one signal, as in SIGTERM,SIGUSR1")
    for name in names:
        if name not in signal.Signals.__members__:
            raise UsageError(f"{flag} {name}: no such signal; names look like SIGTERM,SIGUSR1")
        if name in ("SIGKILL", "SIGSTOP"):
            raise UsageError(f"{flag} {name}: no process can handle this signal; leave it out")
    return names


def one_of(*names: str) -> Callable[[str, str], str]:
    """Return a reader of one of these names."""

    def read(text: str, flag: str) -> str:
        if text not in names:
            raise UsageError(f"{flag} {text}: one of {', '.join(names)} is needed")
        return text

    return read


def is_url(target: str) -> bool:
    """Return whether a target of notices is posted to, and not run."""
    return re.match(r"(?i)https?://", target) is not None


def notice_targets(text: str, flag: str) -> tuple[str, ...]:
    """Read URLs and commands, one a line; the message never shows them."""
    targets = tuple(line.strip() for line in text.splitlines() if line.strip())
    for target in targets:
        if is_url(target):
            if re.fullmatch(r"(?i)https?://[^\s/?#@:]+[^\s]*", target) is None:
                raise UsageError(f"{flag}: a URL in it has no host or has white space in it")
            continue
        if re.match(r"(?i)[a-z][a-z0-9+.-]*://", target):
            raise UsageError(f"{flag}: only http:// and https:// URLs can be posted to")
        try:
            shlex.split(target)
        except ValueError as error:
            raise UsageError(f"{flag}: a command in it cannot be read ({error})") from None
    return targets


def directory(text: str, flag: str) -> str:
    if os.path.exists(text) and not os.path.isdir(text):
        raise UsageError(f"{flag} {text}: is a file; name a directory, which is created if missing")
    return text


def log_directory(text: str, flag: str) -> str:
    """Read a directory, or /dev/null for no logs."""
    return text if text == os.devnull else directory(text, flag)


def port_number(text: str, flag: str) -> int:
    if re.fullmatch(r"[0-9]{1,5}", text.strip()) is None or int(text) > 65535:
        raise UsageError(f"{flag} {text}: a port from 0 to 65535 is needed")
    return int(text)


def address(text: str, flag: str) -> tuple[str, int]:
    """Read HOST:PORT."""
    host, port = endpoint(text, flag, needs_port=True)
    return host, port or 0


def endpoint(text: str, flag: str, *, needs_port: bool = False) -> tuple[str, int | None]:
    """Read HOST or HOST:PORT; the port is None if the text has none."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[\w.-]+)(?::([0-9]{1,5}))?", text.strip())
    port = None if match is None or match[2] is None else int(match[2])
    if match is None or (port or 0) > 65535 or (needs_port and not port):
        wanted = "HOST:PORT" if needs_port else "HOST or HOST:PORT"
        raise UsageError(f"{flag} {text}: {wanted} is needed, as in node0:29400 or [::1]:29400")
    return match[1].strip("[]"), port


def host(text: str, flag: str) -> str:
    """Read a host's name or address; IPv6 without brackets."""
    if re.fullmatch(r"[\w.:%-]+", text) is None:
        raise UsageError(f"{flag} {text}: a host is needed, as in node0, 10.0.0.1 or fd00::1")
    return text


def joined(host: str, port: int) -> str:
    """Write an address as HOST:PORT."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def with_local_rank(words: Sequence[str], local_rank: int) -> list[str]:
    """Replace ${local_rank} in a script's arguments, as torchrun does."""
    return [Template(word).safe_substitute(local_rank=local_rank) for word in words]


def key_values(text: str, flag: str) -> dict[str, str]:
    """Read KEY=VALUE pairs separated by commas."""
    pairs: dict[str, str] = {}
    for pair in comma_list(text, flag):
        key, _, value = (part.strip() for part in pair.partition("="))
        if not key or not value:
            raise UsageError(f"{flag} {pair}: KEY=VALUE is needed, as in join_timeout=600")
        pairs[key] = value
    return pairs


def amount(text: str, flag: str) -> float:
    """Read a number that need not be whole, 0 or more."""
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,4})?", text.strip()) is None:
        raise UsageError(f"{flag} {text}: a number, 0 or more, is needed")
    return float(text)


class Price(NamedTuple):
    """What one rank costs in an hour."""

    amount: float
    unit: str
    """A currency or what else is paid with; may be empty."""

    def of(self, rank_seconds: float) -> str:
        """Write what this much time of ranks costs."""
        return f"{rank_seconds / 3600 * self.amount:,.2f} {self.unit}".rstrip()


def price(text: str, flag: str) -> Price:
    """Read a number with a unit before or after it, or without one."""
    unit, number = r"([^\d\s.,-]{0,16})", r"([0-9]{1,9}(?:\.[0-9]{1,6})?)"
    match = re.fullmatch(f"{unit} ?{number} ?{unit}", text.strip())
    if match is None or (match[1] and match[3]) or not text.isprintable():
        raise UsageError(f"{flag} {text}: a price is needed, as in 2.10 or '2.10 EUR'")
    return Price(float(match[2]), match[1] or match[3])


def amounts(text: str, flag: str) -> dict[str, float]:
    """Read NAME=N pairs separated by commas."""
    found: dict[str, float] = {}
    for pair in comma_list(text, flag):
        name, _, number = (part.strip() for part in pair.partition("="))
        if not name or not number:
            raise UsageError(f"{flag} {pair}: NAME=N is needed, as in spot=1")
        found[name] = amount(number, flag)
    return found


def memory(text: str, source: str) -> int:
    """Read an amount of memory, in MiB: "16GiB", "512MiB", "1TiB"; a plain number is MiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(MiB|GiB|TiB|M|G|T)?", text.strip(), re.IGNORECASE)
    unit = {"M": 1, "G": 1024, "T": 1024 * 1024}[(match[2] or "M")[0].upper()] if match else 0
    found = round(float(match[1]) * unit) if match else 0
    if not 0 < found <= 1 << 40:
        raise UsageError(f"{source} {text}: an amount of memory is needed, such as 16GiB or 512MiB")
    return found


def positions(text: str, source: str) -> tuple[int, ...] | None:
    """Read which positions are meant: None for all of them."""
    if text == "all":
        return None
    if text in ("none", ""):
        return ()
    try:
        return tuple(sorted({int(part.removeprefix("idx:")) for part in text.split(",")}))
    except ValueError:
        raise UsageError(f"{source} {text}: all, none or numbers such as 0,3 are needed") from None
