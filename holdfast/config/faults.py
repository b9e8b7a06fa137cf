"""What a user writes to ask for faults: `holdfast chaos`, `--chaos` and HOLDFAST_CHAOS.

    kill@step=50,rank=1; stop@step=80,rank=any; hang@every=100,seed=7

A fault, an @, and what is to be said about it, with commas between; semicolons between faults. Each
word becomes part of an `Injection`; what makes no sense ends here as a `UsageError`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from holdfast.errors import UsageError
from holdfast.messages.chaos import FAULT_NAMES, MOST_AT_ONCE, FaultName, Injection, complaint

WORDS = ("rank", "node", "step", "every", "seed", "value", "force")
ANY = "any"
_MOST = 1 << 53


def schedule(text: str, flag: str) -> tuple[Injection, ...]:
    """Faults for a job that is about to start; each has to say when."""
    found = [_scheduled(piece.strip(), flag) for piece in text.split(";") if piece.strip()]
    if len(found) > MOST_AT_ONCE:
        raise UsageError(f"{flag}: {len(found)} faults; {MOST_AT_ONCE} is the most")
    return tuple(found)


def _scheduled(piece: str, flag: str) -> Injection:
    name, at, rest = piece.partition("@")
    said: dict[str, list[str]] = {}
    for pair in filter(None, (word.strip() for word in rest.split(","))):
        word, equals, value = (part.strip() for part in pair.partition("="))
        if word not in WORDS or not equals or not value:
            raise UsageError(
                f"{flag} {piece}: {pair} is not understood; words are {', '.join(WORDS)}, as in"
                " kill@step=50,rank=1"
            )
        said.setdefault(word, []).append(value)
    if not at or not said.keys() & {"step", "every"}:
        raise UsageError(f"{flag} {piece}: say when, as in {name.strip()}@step=50")
    return injection(name.strip(), said, f"{flag} {piece}")


def injection(name: str, said: Mapping[str, Sequence[str]], where: str) -> Injection:
    """One fault, from words; `where` says where they stood."""
    once = {word: texts[-1] for word, texts in said.items() if texts}
    for word, texts in said.items():
        if len(texts) > 1 and word != "rank":
            raise UsageError(f"{where}: {word} is said twice")
    asked = Injection(
        kind=fault_name(name, where),
        ranks=_ranks(said.get("rank", ()), where),
        node="" if once.get("node", ANY) == ANY else once["node"],
        at_step=_whole(once.get("step"), "step", where, 1),
        every=_whole(once.get("every"), "every", where, 1),
        seed=_whole(once.get("seed"), "seed", where, 0),
        value=_number(once.get("value"), where),
        force="force" in once,
    )
    wrong = complaint(asked)
    if wrong:
        raise UsageError(f"{where}: {wrong}")
    return asked


def fault_name(text: str, where: str) -> FaultName:
    for name in FAULT_NAMES:
        if text == name:
            return name
    near = get_close_matches(text, FAULT_NAMES, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(FAULT_NAMES)}"
    raise UsageError(f"{where}: no fault is called {text}; {hint}")


def _ranks(texts: Sequence[str], where: str) -> tuple[int, ...]:
    words = [word.strip() for text in texts for word in text.split(",")]
    if not words or words == [ANY]:
        return ()
    if not all(re.fullmatch(r"[0-9]{1,9}", word) for word in words):
        raise UsageError(f"{where}: a rank is a number, or any")
    return tuple(map(int, words))


def _whole(text: str | None, word: str, where: str, least: int) -> int | None:
    if text is None:
        return None
    if re.fullmatch(r"[0-9]{1,17}", text) is None or not least <= int(text) <= _MOST:
        raise UsageError(f"{where}: {word} {text}: a whole number from {least} on is needed")
    return int(text)


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
