"""Parses requests for faults: `holdfast chaos`, `--chaos` and HOLDFAST_CHAOS.

    kill@step=50,rank=1; stop@step=80,rank=any; hang@every=100,seed=7

A fault, an @, and words with values between commas; semicolons between faults. Each becomes an
`Injection`; what makes no sense raises a `UsageError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from holdfast.config.sources import nearest
from holdfast.errors import UsageError
from holdfast.messages.chaos import FAULT_NAMES, MAX_RANKS, MAX_SCHEDULED, Injection, complaint


class Word(NamedTuple):
    """A word of a request, and its flag of `holdfast chaos`."""

    field: str
    flag: str
    metavar: str
    help: str
    needed: str = ""
    """What its value must be."""


WORDS: Final = {
    "rank": Word("ranks", "--rank", "R[,R]|any", "ranks to strike; default any",
        f"a rank is a number, or any; {MAX_RANKS} is the most"),
    "node": Word("node", "--node", "N", "node to strike: its index in the round, its name or its"
        " host's name"),
    "step": Word("at_step", "--at-step", "S", "strike when the rank has finished step S",
        "a whole number from 1 on is needed"),
    "every": Word("every", "--every", "K", "strike once in K steps, repeatedly",
        "a whole number from 1 on is needed"),
    "seed": Word("seed", "--seed", "X", "selects which rank `any` is, and with --every which step",
        "a whole number, 0 or more, is needed"),
    "value": Word("value", "--value", "V", "see below", "a number, 0 or more, is needed"),
    "force": Word("force", "--force", "1", "accept harm to the whole machine", "say 1 or 0"),
}  # fmt: skip
ANY: Final = "any"
EXAMPLE: Final = "kill@step=50,rank=1"


def schedule(text: str, flag: str) -> tuple[Injection, ...]:
    """Parse the faults of a job that is about to start; each has to say when."""
    found = [_scheduled(piece.strip(), flag) for piece in text.split(";") if piece.strip()]
    if len(found) > MAX_SCHEDULED:
        raise UsageError(f"{flag}: {len(found)} faults; {MAX_SCHEDULED} is the most")
    return tuple(found)


def _scheduled(piece: str, flag: str) -> Injection:
    name, _, rest = (part.strip() for part in piece.partition("@"))
    said: dict[str, list[str]] = {}
    for pair in filter(None, (word.strip() for word in rest.split(","))):
        word, _, value = (part.strip() for part in pair.partition("="))
        if word not in WORDS:
            raise UsageError(f"{flag} {piece}: {pair} is not understood; {_meant(word, WORDS)}")
        if not value:
            raise UsageError(f"{flag} {piece}: {word} needs a value, as in {EXAMPLE}")
        said.setdefault(word, []).append(value)
    if not said.keys() & {"step", "every"}:
        raise UsageError(f"{flag} {piece}: say when, as in {name}@step=50")
    return injection(name, said, f"{flag} {piece}")


def injection(name: str, said: Mapping[str, Sequence[str]], where: str) -> Injection:
    """Make one injection of words; `where` tells the user where they stood."""
    if name not in FAULT_NAMES:
        hint = _meant(name, FAULT_NAMES)
        raise UsageError(f"{where}: no fault is called {name}; {hint}")
    fields: dict[str, Any] = {"kind": name}
    for word, texts in said.items():
        if len(texts) > 1 and word != "rank":
            raise UsageError(f"{where}: {word} is given twice")
        if list(texts) != [ANY]:
            ranks = ",".join(texts).split(",")
            fields[WORDS[word].field] = ranks if word == "rank" else texts[0]
    try:
        asked = msgspec.convert(fields, Injection, strict=False)
    except msgspec.ValidationError as error:
        wrong = next(word for word in said if f"$.{WORDS[word].field}" in str(error))
        text = f"{wrong} {','.join(said[wrong])}: {WORDS[wrong].needed}"
        raise UsageError(f"{where}: {text}") from None
    if complaint(asked):
        raise UsageError(f"{where}: {complaint(asked)}")
    return asked


def _meant(word: str, known: Iterable[str]) -> str:
    """Say which word of these was meant, or all of them."""
    near = nearest(word, known)
    return f"did you mean {near}?" if near is not None else f"known are: {', '.join(known)}"
