"""Parses requests for faults: `holdfast chaos`, `--chaos` and HOLDFAST_CHAOS.

    kill@step=50,rank=1; stop@step=80,rank=any; hang@every=100,seed=7

A fault, an @, and words with values between commas; semicolons between faults. Each becomes an
`Injection`; what makes no sense raises a `UsageError`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from holdfast.config.values import whole_number
from holdfast.errors import UsageError
from holdfast.messages.chaos import FAULT_NAMES, MAX_SCHEDULED, Injection, complaint

WORDS = ("rank", "node", "step", "every", "seed", "value", "force")
ANY = "any"


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
        if word not in WORDS or not value:
            raise UsageError(
                f"{flag} {piece}: {pair} is not understood; words are {', '.join(WORDS)}, as in"
                " kill@step=50,rank=1"
            )
        said.setdefault(word, []).append(value)
    if not said.keys() & {"step", "every"}:
        raise UsageError(f"{flag} {piece}: say when, as in {name}@step=50")
    return injection(name, said, f"{flag} {piece}")


def injection(name: str, said: Mapping[str, Sequence[str]], where: str) -> Injection:
    """Make one injection of words; `where` tells the user where they stood."""
    if name not in FAULT_NAMES:
        near = get_close_matches(name, FAULT_NAMES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(FAULT_NAMES)}"
        raise UsageError(f"{where}: no fault is called {name}; {hint}")
    for word, texts in said.items():
        if len(texts) > 1 and word != "rank":
            raise UsageError(f"{where}: {word} is given twice")
    once = {word: texts[-1] for word, texts in said.items()}
    asked = Injection(
        kind=name,
        ranks=_ranks(said.get("rank", [ANY]), where),
        node="" if once.get("node") == ANY else once.get("node", ""),
        at_step=_whole(once, "step", where, 1),
        every=_whole(once, "every", where, 1),
        seed=_whole(once, "seed", where, 0),
        value=_number(once.get("value"), where),
        force="force" in once,
    )
    wrong = complaint(asked)
    if wrong:
        raise UsageError(f"{where}: {wrong}")
    return asked


def _ranks(texts: Sequence[str], where: str) -> tuple[int, ...]:
    words = [word.strip() for text in texts for word in text.split(",")]
    if words == [ANY]:
        return ()
    if not all(re.fullmatch(r"[0-9]{1,9}", word) for word in words):
        raise UsageError(f"{where}: a rank is a number, or any")
    return tuple(map(int, words))


def _whole(once: Mapping[str, str], word: str, where: str, least: int) -> int | None:
    if word not in once:
        return None
    number = whole_number(once[word], f"{where}: {word}")
    if number < least:
        raise UsageError(f"{where}: {word} {number}: a whole number from {least} on is needed")
    return number


def _number(text: str | None, where: str) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1e9:
        raise UsageError(f"{where}: value {text}: a number, 0 or more, is needed")
    return value
