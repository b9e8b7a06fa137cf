"""Decides whether whoever greets may come in.

The token comes first, then the version. A node that joins must also have been started for the same
job: what would make one world inconsistent is refused, what nodes may legitimately differ in is
accepted, and what has no effect on a node that joins later is accepted with a line in the log:

    another protocol or version of Holdfast             refused
    another --nnodes, --node-unit, --segment,           refused
      --node-check, or another script by name
    another content of the script, other arguments,     accepted and logged: a file may have been edited
      other terms of the job (--max-restarts, ...)      since, arguments may name paths of one node,
                                                        and the terms that opened the job hold
    --nproc-per-node, --node-rank, log directory, ...   accepted: nodes differ

A node that was in the job before is never refused by the second part: it has workers, or had.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable

import msgspec
from msgspec import Struct

from holdfast import __version__
from holdfast.core.job import Job
from holdfast.errors import BadFrame, WireError, WrongProtocol, WrongToken
from holdfast.messages.records import Terms
from holdfast.messages.units import RoundNumber
from holdfast.messages.wire import PROTOCOL, Hello, SupplierHello, Visit

MAX_LOST_ROUNDS = 10_000
"""A node may know rounds that the journal lost, but not more than this."""

SAME_VERSION = "run the same version on all nodes"


class _Greeting(Struct):
    """What every version of a greeting has."""

    protocol: int
    token: str


_greetings = msgspec.msgpack.Decoder(_Greeting)


def check_caller(greeting: Hello | Visit | SupplierHello | _Greeting, token: str) -> None:
    """Raise unless the caller has the job's token and speaks our protocol."""
    if not hmac.compare_digest(greeting.token.encode(), token.encode()):
        raise WrongToken("wrong token for this job")
    if greeting.protocol != PROTOCOL:
        raise WrongProtocol(
            f"this coordinator (holdfast {__version__}) speaks protocol {PROTOCOL}, not"
            f" {greeting.protocol}; {SAME_VERSION}"
        )


def unreadable(body: bytes, error: BadFrame, token: str) -> WireError:
    """Say what is wrong with a first frame that does not decode: of another version, or no hello."""
    try:
        check_caller(_greetings.decode(body), token)
    except WireError as wrong:
        return wrong
    except (msgspec.DecodeError, ValueError, RecursionError):
        pass
    return error


def refusal(hello: Hello, job: Job | None, known: bool) -> str | None:
    """Say why a node may not join; None if it may. `known` if it was in the job before."""
    if not hello.node.isprintable() or not hello.node:
        return "its name is empty or not printable"
    if _impossible(hello.terms):
        return "its --nnodes are impossible"
    round = job.membership.round if job is not None else RoundNumber(0)
    if hello.round > round + MAX_LOST_ROUNDS:
        return f"it says that it was in round {hello.round}; this job is in round {round}"
    if known or hello.round > 0 or hello.busy:
        return None
    if hello.version != __version__:
        return f"the coordinator is of holdfast {__version__}, not {hello.version}; {SAME_VERSION}"
    if job is None:
        return None
    # Nodes that were started before the job was scaled, or are started as it was once, may join.
    return _difference(hello.terms, job.terms) and _difference(hello.terms, job.opened_terms)


def _impossible(terms: Terms) -> bool:
    return not 1 <= terms.min_nodes <= terms.max_nodes or terms.node_unit < 1 or terms.segment < 1


def _difference(theirs: Terms, ours: Terms) -> str | None:
    """Name what a node was started with that the job was not."""
    for flag, said in _MUST_MATCH.items():
        if said(theirs) != said(ours):
            return (
                f"it was started with {flag} {said(theirs)}, the job with {flag} {said(ours)};"
                " start all nodes alike"
            )
    if theirs.script is None or ours.script is None or theirs.script.name == ours.script.name:
        return None
    return f"it was started with {theirs.script.name}, the job with {ours.script.name}"


_MUST_MATCH: dict[str, Callable[[Terms], object]] = {
    "--nnodes": lambda terms: f"{terms.min_nodes}:{terms.max_nodes}",
    "--node-unit": lambda terms: terms.node_unit,
    "--segment": lambda terms: terms.segment,
    "--node-check": lambda terms: "yes" if terms.node_check else "no",
}


def remarks(theirs: Terms, ours: Terms) -> list[str]:
    """Name what a node that joins was started with and the job was not, and that may be as it is."""
    found = []
    if theirs.script is not None and ours.script is not None:
        if theirs.script.content != ours.script.content:
            found.append(f"its {theirs.script.name} has another content than that of the job")
        if theirs.script.arguments != ours.script.arguments:
            found.append("its script has other arguments than that of the job")
    named = [name for name in _TERMS if getattr(theirs, name) != getattr(ours, name)]
    if named:
        found.append(f"it was started with other terms ({', '.join(named)}); those of the job hold")
    return found


_TERMS = tuple(
    name
    for name in Terms.__struct_fields__
    if name not in ("min_nodes", "max_nodes", "node_unit", "segment", "node_check", "script")
)
