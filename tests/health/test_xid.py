from __future__ import annotations

import os

import pytest
from fakenode import FakeNode
from hypothesis import given
from hypothesis import strategies as st

from holdfast.health.baseline import XidSeen
from holdfast.health.judgement import Judgement
from holdfast.health.xid import LogLine, check_xid, judge_xids, parsed, read_log

FELL = "NVRM: Xid (PCI:0000:4e:00): 79, pid=12, name=python, GPU has fallen off the bus."
FAULT = "NVRM: Xid (PCI:0000:4e:00): 31, pid=12, name=python, MMU Fault: ENGINE GRAPHICS"
RECOVER = "NVRM: Xid (PCI:0000:4e:00): 154, GPU recovery action changed from 0x0 (None) to 0x{} (X)"


def judged(*texts: str, known: int | None = None) -> Judgement:
    return judge_xids([LogLine(i, text) for i, text in enumerate(texts)], known)


def test_a_new_xid_of_broken_hardware_fails() -> None:
    found = judged("usb", FELL, known=0)
    assert found.verdict == "fail"
    assert found.reason == "Xid 79 on GPU 0000:4e:00 (the GPU has fallen off the bus)"
    assert found.seen == XidSeen(1)


def test_a_new_xid_of_a_program_warns() -> None:
    assert judged("usb", FAULT, known=0).verdict == "warn"


def test_what_was_seen_before_is_not_told_again() -> None:
    assert judged("usb", FELL, known=1).verdict == "pass"


def test_at_the_first_look_the_past_is_a_warning_at_most() -> None:
    assert judged(FELL, FELL, FAULT).verdict == "warn"
    assert judged(FAULT).verdict == "pass"
    assert judged("usb").verdict == "pass"


@pytest.mark.parametrize(("to", "verdict"), [("0", "warn"), ("1", "fail"), ("10", "fail")])
def test_a_wish_for_recovery_fails_and_its_end_does_not(to: str, verdict: str) -> None:
    assert judged("usb", RECOVER.format(to), known=0).verdict == verdict


def test_lines_that_were_overwritten_unread_are_unknown() -> None:
    found = judge_xids([LogLine(50, "usb")], 10)
    assert found.verdict == "unknown"
    assert "39 lines" in found.reason


def test_a_log_that_cannot_be_read_is_unknown(fake: FakeNode) -> None:
    fake.write("dev/nvidia0", "")
    assert check_xid(fake.node(), None).verdict == "unknown"


def test_a_machine_without_gpus_is_unknown_whatever_the_log_says(fake: FakeNode) -> None:
    fake.write("dev/kmsg", f"4,1,5,-;{FELL}")
    assert check_xid(fake.node(), None).verdict == "unknown"


def test_the_log_of_a_fake_node_is_a_file(fake: FakeNode) -> None:
    fake.write("dev/nvidia0", "")
    fake.write("dev/kmsg", "6,1,5,-;usb\n SUBSYSTEM=usb")
    first = check_xid(fake.node(), None)
    assert (first.verdict, first.seen) == ("pass", XidSeen(1))
    fake.write("dev/kmsg", f"6,1,5,-;usb\n SUBSYSTEM=usb\n4,2,9,-;{FELL}")
    assert check_xid(fake.node(), first.seen).verdict == "fail"


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="the kernel's log is closed to us")
def test_the_real_log_is_read_to_its_end_and_no_further() -> None:
    try:
        lines = read_log("/dev/kmsg")
    except PermissionError:
        pytest.skip("the kernel's log is closed to us")
    sequences = [line.sequence for line in lines]
    assert sequences == sorted(set(sequences))


@given(st.text())
def test_whatever_stands_in_the_log_can_be_read(text: str) -> None:
    judge_xids(parsed(text), None)
