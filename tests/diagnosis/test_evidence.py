"""Evidence of any size can be sent, and what is cut says so."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from holdfast.messages.evidence import (
    MAX_EVIDENCE_BYTES,
    Collective,
    Frame,
    RankEvidence,
    ThreadStack,
    cut,
    fit,
)
from holdfast.messages.units import NodeId, Rank, RoundNumber


def frames(count: int, text: str = "f") -> tuple[Frame, ...]:
    return tuple(Frame(file=f"/{text}.py", line=n, function=f"{text}{n}") for n in range(count))


def evidence(**more: object) -> RankEvidence:
    return RankEvidence(
        node=NodeId("n"),
        round=RoundNumber(1),
        rank=Rank(0),
        pid=1,
        **more,  # type: ignore[arg-type]
    )


def test_a_deep_stack_keeps_both_ends_and_says_what_is_left_out() -> None:
    short = cut(frames(5000), 100)
    assert len(short) == 100
    assert (short[0].line, short[-1].line) == (0, 4999)
    assert [f.function for f in short if not f.file] == ["... 4901 frames left out ..."]


def test_a_stack_that_is_not_deep_is_left_alone() -> None:
    assert cut(frames(100), 100) == frames(100)


@given(
    threads=st.integers(0, 200),
    depth=st.integers(0, 400),
    width=st.sampled_from([1, 100, 5000]),
    letter=st.sampled_from("aé🏖"),
    log=st.sampled_from([0, 10, 1 << 20]),
    members=st.sampled_from([0, 8, 20_000]),
)
def test_whatever_was_gathered_fits_and_decodes(
    threads: int, depth: int, width: int, letter: str, log: int, members: int
) -> None:
    deep = frames(depth, letter * width)
    noted = Collective(
        group=letter * width,
        number=1,
        op="x" * width,
        state="started",
        ranks=tuple(range(members)),
        sizes=letter * width,
    )
    fitted = fit(
        evidence(
            stacks=tuple(ThreadStack(name=f"t{n}", frames=deep) for n in range(threads)),
            collectives=(noted,) * 50,
            log_tail=letter * log,
            missing=(letter * width,) * 40,
            sections=(letter * width,) * 40,
        )
    )
    encoded = msgspec.msgpack.encode(fitted)
    assert len(encoded) <= MAX_EVIDENCE_BYTES
    assert msgspec.msgpack.decode(encoded, type=RankEvidence) == fitted


def test_the_main_thread_is_the_last_to_go() -> None:
    many = tuple(ThreadStack(name=f"t{n}", frames=frames(128, "x" * 500)) for n in range(64))
    main = ThreadStack(name="MainThread", frames=frames(10))
    assert fit(evidence(stacks=(*many, main))).stacks[0].name == "MainThread"
