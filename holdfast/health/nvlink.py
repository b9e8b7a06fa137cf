"""Checks the NVLinks: is one off that should be on, does one keep failing?

A board decides which links are wired, so a link that is off means something only by comparison: it was
on before, or another GPU of the same kind has more of them on. A GPU whose links are all off is not
wired. Links correct their errors by replaying. A few now and then are normal; a link whose counters
grow at more than half of the last thirty looks is wearing out.
"""

from __future__ import annotations

from holdfast.health.baseline import LinkSeen, NvlinkSeen
from holdfast.health.gpu import judge_gpus, verdict_of
from holdfast.health.judgement import Judgement, Remark, summed, unknown
from holdfast.health.node import Node
from holdfast.health.nvml import ABSENT, Gpu, Gpus, NvLink, NvmlRefusal
from holdfast.messages.health import Fact

WINDOWS = 30


def check_nvlink(node: Node, before: NvlinkSeen | None) -> Judgement:
    limit = node.settings.limits.nvlink_bad_windows
    return judge_gpus(node.gpus, node, lambda gpus: judge_links(gpus, before, limit))


def judge_links(gpus: Gpus, before: NvlinkSeen | None, bad_windows: int) -> Judgement:
    known = before.links if before else {}
    seen, remarks = dict(known), []
    most: dict[str, int] = {}
    for gpu in gpus.gpus:
        most[gpu.name] = max(most.get(gpu.name, 0), _on(gpu))
    for gpu in gpus.gpus:
        if gpu.handle is not None:
            remarks.append(Remark(verdict_of(gpu.handle), f"{gpu}: {gpu.handle}"))
        for link in gpu.links:
            name = f"{gpu.uuid}/{link.number}"
            was, seen[name] = known.get(name), _noted(link, known.get(name))
            remarks += _link(gpu, link, was, seen[name], bad_windows)
        remarks += _fewer(gpu, most[gpu.name], known)
    on = sum(map(_on, gpus.gpus))
    if not on and not remarks:
        return unknown("no NVLink is on here")
    facts: dict[str, Fact] = {"links": sum(len(gpu.links) for gpu in gpus.gpus), "links_on": on}
    fine = f"{on} of {facts['links']} links on" + ("" if before else "; first look, counters noted")
    return summed(remarks, fine, facts, NvlinkSeen(seen))


def _on(gpu: Gpu) -> int:
    return sum(link.enabled is True for link in gpu.links)


def _fewer(gpu: Gpu, most: int, known: dict[str, LinkSeen]) -> list[Remark]:
    """Remark on a GPU with fewer links on than its like, unless one of them was on before."""
    on, off = _on(gpu), [link.number for link in gpu.links if link.enabled is False]
    missed = any(_was_on(known.get(f"{gpu.uuid}/{number}")) for number in off)
    if off and 0 < on < most and not missed:
        return [Remark("fail", f"{gpu} has {on} NVLinks on, its like {most}: {off} are off")]
    return []


def _was_on(was: LinkSeen | None) -> bool:
    return was is not None and was.enabled


def _link(gpu: Gpu, link: NvLink, was: LinkSeen | None, now: LinkSeen, most: int) -> list[Remark]:
    if _was_on(was) and link.enabled is False:
        return [Remark("fail", f"{gpu}: NVLink {link.number} was on and is off")]
    bad = bin(now.windows).count("1")
    if bad > most:
        text = f"{gpu}: NVLink {link.number} had errors at {bad} of the last {WINDOWS} looks"
        return [Remark("fail", text)]
    for told in (link.enabled, link.recoveries):
        if isinstance(told, NvmlRefusal) and told.error not in ABSENT:
            return [Remark(verdict_of(told), f"{gpu}: NVLink {link.number}: {told}")]
    return []


def _noted(link: NvLink, was: LinkSeen | None) -> LinkSeen:
    """Note a link; a value that NVML refuses is taken to be as it was."""
    if was is None:
        was = LinkSeen(False, _told(link.replays, 0), _told(link.recoveries, 0))
    replays, recoveries = _told(link.replays, was.replays), _told(link.recoveries, was.recoveries)
    grew = replays > was.replays or recoveries > was.recoveries
    windows = (was.windows << 1 | grew) & ((1 << WINDOWS) - 1)
    return LinkSeen(link.enabled is True or was.enabled, replays, recoveries, windows)


def _told(value: int | NvmlRefusal, otherwise: int) -> int:
    return otherwise if isinstance(value, NvmlRefusal) else value
