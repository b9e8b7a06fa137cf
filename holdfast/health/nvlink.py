"""NVLinks: is one off that should be on, does one keep erring?

A board decides which links are wired, so a link that is off means something only beside others: it
was on before, or the same GPU next to it has more of them on. A GPU whose links are all off is not
wired. Links correct their errors by replaying; a few now and then are life, a link whose counters
grow at more than half of the last thirty looks is wearing out.
"""

from __future__ import annotations

from holdfast.health.baseline import LinkSeen, NvlinkSeen, Seen
from holdfast.health.finding import Finding, Remark, summed, unknown
from holdfast.health.gpu import none_to_ask, verdict_of
from holdfast.health.node import Node
from holdfast.health.nvml import ABSENT, Gpu, Gpus, Link, NoNvml, Refused
from holdfast.messages.health import Fact

WINDOWS = 30


def check_nvlink(node: Node, before: Seen | None) -> Finding:
    gpus = node.gpus
    if isinstance(gpus, NoNvml):
        return none_to_ask(node, gpus)
    known = before if isinstance(before, NvlinkSeen) else None
    return judge_links(gpus, known, node.settings.limits.nvlink_bad_windows)


def judge_links(gpus: Gpus, before: NvlinkSeen | None, bad_windows: int) -> Finding:
    known = before.links if before else {}
    seen, remarks = dict(known), []
    most = _most_on(gpus)
    for gpu in gpus.gpus:
        if gpu.handle is not None:
            remarks.append(Remark(verdict_of(gpu.handle), f"{gpu}: {gpu.handle}"))
        for link in gpu.links:
            name = f"{gpu.uuid}/{link.number}"
            was, seen[name] = known.get(name), _noted(link, known.get(name))
            remarks += _link(gpu, link, was, seen[name], bad_windows)
        remarks += _fewer(gpu, most.get(gpu.name, 0), known)
    on = sum(map(_on, gpus.gpus))
    if not on and not remarks:
        return unknown("no NVLink is on here")
    facts: dict[str, Fact] = {"links": sum(len(gpu.links) for gpu in gpus.gpus), "links_on": on}
    fine = f"{on} of {facts['links']} links on" + ("" if before else "; first look, counters noted")
    return summed(remarks, fine, facts, NvlinkSeen(seen))


def _most_on(gpus: Gpus) -> dict[str, int]:
    """By kind of GPU, how many links the best wired one has on."""
    most: dict[str, int] = {}
    for gpu in gpus.gpus:
        most[gpu.name] = max(most.get(gpu.name, 0), _on(gpu))
    return most


def _on(gpu: Gpu) -> int:
    return sum(link.enabled is True for link in gpu.links)


def _fewer(gpu: Gpu, most: int, known: dict[str, LinkSeen]) -> list[Remark]:
    """A GPU with some links on, but fewer than its like; what was on before is told elsewhere."""
    on, off = _on(gpu), [link.number for link in gpu.links if link.enabled is False]
    missed = any(_was_on(known.get(f"{gpu.uuid}/{number}")) for number in off)
    if off and 0 < on < most and not missed:
        return [Remark("fail", f"{gpu} has {on} NVLinks on, its like {most}: {off} are off")]
    return []


def _was_on(was: LinkSeen | None) -> bool:
    return was is not None and was.enabled


def _link(gpu: Gpu, link: Link, was: LinkSeen | None, now: LinkSeen, most: int) -> list[Remark]:
    if _was_on(was) and link.enabled is False:
        return [Remark("fail", f"{gpu}: NVLink {link.number} was on and is off")]
    bad = bin(now.windows).count("1")
    if bad > most:
        text = f"{gpu}: NVLink {link.number} had errors at {bad} of the last {WINDOWS} looks"
        return [Remark("fail", text)]
    for told in (link.enabled, link.recoveries):
        if isinstance(told, Refused) and told.error not in ABSENT:
            return [Remark(verdict_of(told), f"{gpu}: NVLink {link.number}: {told}")]
    return []


def _noted(link: Link, was: LinkSeen | None) -> LinkSeen:
    """What is not told is taken to be as it was."""
    if was is None:
        was = LinkSeen(False, _told(link.replays, 0), _told(link.recoveries, 0))
    replays, recoveries = _told(link.replays, was.replays), _told(link.recoveries, was.recoveries)
    grew = replays > was.replays or recoveries > was.recoveries
    windows = (was.windows << 1 | grew) & ((1 << WINDOWS) - 1)
    return LinkSeen(link.enabled is True or was.enabled, replays, recoveries, windows)


def _told(value: int | Refused, otherwise: int) -> int:
    return otherwise if isinstance(value, Refused) else value
