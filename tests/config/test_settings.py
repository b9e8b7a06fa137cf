"""What settings mean, value by value."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli.flags import parse_run
from holdfast.config import values
from holdfast.config.sources import holdfast_home
from holdfast.errors import HoldfastError, JobHomeError, UsageError


def test_the_home_is_where_the_variable_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", "/somewhere/else")
    assert holdfast_home() == Path("/somewhere/else")


def test_the_home_is_a_dot_directory_by_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HOLDFAST_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert holdfast_home() == tmp_path / ".holdfast"


def test_a_home_of_a_user_who_does_not_exist_is_an_error_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", "~no-such-user/x")
    with pytest.raises(JobHomeError, match="HOLDFAST_HOME"):
        holdfast_home()


@pytest.mark.parametrize("name", ["a", "llm-7b_v1.2", "-x", "_", "A" * 100])
def test_plain_words_are_job_names(name: str) -> None:
    assert values.job_name(name, "--job") == name


@pytest.mark.parametrize("name", ["", ".", "..", ".x", "a/b", "a b", "é", "a\n", "A" * 101])
def test_what_is_no_safe_directory_name_is_no_job_name(name: str) -> None:
    with pytest.raises(UsageError, match="a job's name is"):
        values.job_name(name, "--job")


@given(st.integers(1, 10**5), st.integers(0, 10**5))
def test_a_range_of_nodes_reads_back(lowest: int, more: int) -> None:
    highest = lowest + more
    assert values.nodes_range(f"{lowest}:{highest}", "--nnodes") == (lowest, highest)


@given(st.integers(1, 10**6))
def test_one_number_of_nodes_is_both_ends(count: int) -> None:
    assert values.nodes_range(str(count), "--nnodes") == (count, count)


@pytest.mark.parametrize("text", ["", "0", "0:2", "-1", "2:1", "1:2:3", "a", "1:", ":1", "1.5"])
def test_a_senseless_number_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--nnodes "):
        values.nodes_range(text, "--nnodes")


@given(st.integers(1, 16), st.dictionaries(st.integers(0, 20), st.integers(0, 3), min_size=1))
def test_masks_by_rank_cover_exactly_the_local_ranks(nproc: int, named: dict[int, int]) -> None:
    text = ",".join(f"{rank}:{mask}" for rank, mask in named.items())
    masks = parse_run([f"--nproc-per-node={nproc}", f"--tee={text}", __file__]).terminal.tee
    assert masks == {rank: named.get(rank, 0) for rank in range(nproc)}


@given(st.integers(1, 16), st.integers(0, 3))
def test_one_mask_is_for_every_local_rank(nproc: int, mask: int) -> None:
    words = [f"--nproc-per-node={nproc}", f"--redirects={mask}", __file__]
    assert parse_run(words).terminal.redirects == dict.fromkeys(range(nproc), mask)


@pytest.mark.parametrize("text", ["", "4", "-1", "0:4", "0:1,", "a:1", "1,2", "0:1;1:2"])
def test_a_senseless_mask_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"1 .stdout."):
        values.stream_masks(text, "--redirects")


def test_a_number_of_ranks_is_taken_as_it_is() -> None:
    assert values.ranks_per_node("3", "--nproc-per-node") == 3


def test_no_ranks_at_all_is_refused_in_one_line() -> None:
    with pytest.raises(UsageError) as refused:
        values.ranks_per_node("0", "--nproc-per-node")
    assert str(refused.value) == "--nproc-per-node 0: at least one rank per node is needed"


@pytest.mark.parametrize("text", ["", "many", "1.5", "xpu", "-3", "0x2"])
def test_a_senseless_number_of_ranks_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--nproc-per-node "):
        values.ranks_per_node(text, "--nproc-per-node")


def machine(monkeypatch: pytest.MonkeyPatch, *, gpus: int, cpus: int) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("glob.glob", lambda _: [f"/dev/nvidia{n}" for n in range(gpus)])
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cpus)))


@pytest.mark.parametrize(
    ("text", "gpus", "ranks"), [("auto", 2, 2), ("auto", 0, 5), ("gpu", 2, 2), ("cpu", 2, 5)]
)
def test_ranks_are_counted_from_the_machine(
    monkeypatch: pytest.MonkeyPatch, text: str, gpus: int, ranks: int
) -> None:
    machine(monkeypatch, gpus=gpus, cpus=5)
    assert values.ranks_per_node(text, "--nproc-per-node") == ranks


def test_gpu_ranks_without_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpus=0, cpus=5)
    with pytest.raises(UsageError, match="no GPU is visible"):
        values.ranks_per_node("gpu", "--nproc-per-node")


@pytest.mark.parametrize(
    ("visible", "devices", "count"),
    [
        (None, 4, 4),
        ("", 4, 0),
        ("-1", 4, 0),
        ("0,1", 4, 2),
        (" 2 , 3 ", 4, 2),
        ("0,-1,1", 4, 1),
        ("0,1,2,3", 2, 2),
        ("0,1", 0, 2),
        ("0,0", 4, 0),
        ("GPU-1a,GPU-2b", 4, 2),
        ("MIG-1a,MIG-2b,MIG-3c", 1, 3),
        ("NoDevFiles", 4, 0),
    ],
)
def test_gpus_are_counted_by_the_rules_of_cuda(
    visible: str | None, devices: int, count: int
) -> None:
    assert values.gpu_count(visible, devices) == count


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("node0:1234", ("node0", 1234)),
        ("10.0.0.1", ("10.0.0.1", None)),
        ("[::1]:1234", ("::1", 1234)),
        ("[fe80::1]", ("fe80::1", None)),
    ],
)
def test_an_endpoint_may_leave_out_its_port(text: str, parsed: tuple[str, int | None]) -> None:
    assert values.endpoint(text, "--rdzv-endpoint") == parsed


@pytest.mark.parametrize(
    "text", ["", ":1", "node0", "node0:", "node0:70000", "::1", "a b:1", "h:0"]
)
def test_a_coordinator_needs_host_and_port(text: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT is needed"):
        values.address(text, "--coordinator")


def test_two_commas_are_a_comma_within_a_filter() -> None:
    assert values.line_filters("apple,a,,b", "--duplicate-stdout-filters") == ("apple", "a,b")


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [("2.1", 2.1, ""), ("2.10 EUR", 2.1, "EUR"), ("$3", 3.0, "$"), ("0.5 credits", 0.5, "credits")],
)
def test_a_price_may_have_a_unit_on_either_side(text: str, amount: float, unit: str) -> None:
    assert values.price(text, "--price-per-hour") == (amount, unit)


def test_a_cost_is_of_rank_seconds() -> None:
    assert values.Price(2.5, "EUR").of(7200 * 1000) == "5,000.00 EUR"
    assert values.Price(2.5, "").of(36) == "0.03"


Reader = Callable[[str, str], object]


@pytest.mark.parametrize(
    ("reader", "text"),
    [
        (values.whole_number, "-1"),
        (values.whole_number, "one"),
        (values.seconds, "nan"),
        (values.seconds, "inf"),
        (values.seconds, "-1"),
        (values.seconds, "soon"),
        (values.standby_count, "some"),
        (values.auto_or_off, "on"),
        (values.rank_list, "0,a"),
        (values.rank_list, ""),
        (values.signal_names, "SIGNOPE"),
        (values.signal_names, "SIGTERM,SIGKILL"),
        (values.signal_names, ","),
        (values.one_of("node"), "near"),
        (values.directory, __file__),
        (values.port_number, "65536"),
        (values.port_number, "http"),
        (values.key_values, "join_timeout"),
        (values.key_values, "=3"),
        (values.yes_or_no, "maybe"),
        (values.price, "EUR"),
        (values.price, "-1"),
        (values.price, "$2 EUR"),
        (values.price, "1e9"),
        (values.price, "2 \x1b[31m"),
    ],
)
def test_a_senseless_value_is_refused_by_the_name_of_its_flag(reader: Reader, text: str) -> None:
    with pytest.raises(UsageError, match=r"^--flag"):
        reader(text, "--flag")


READERS: list[Reader] = [
    values.whole_number,
    values.seconds,
    values.job_name,
    values.nodes_range,
    values.standby_count,
    values.auto_or_off,
    values.stream_masks,
    values.rank_list,
    values.signal_names,
    values.port_number,
    values.address,
    values.endpoint,
    values.key_values,
    values.line_filters,
    values.price,
]


@given(st.sampled_from(READERS), st.text() | st.from_regex(r"[0-9:,.=\[\]-]{0,12}"))
def test_any_text_gets_a_value_or_an_error_of_usage(reader: Reader, text: str) -> None:
    with suppress(UsageError):
        reader(text, "--flag")


@given(st.text())
def test_an_error_of_usage_is_one_printable_line(text: str) -> None:
    assert str(UsageError(f"--job {text}: no")).isprintable()


def test_errors_end_a_process_with_the_codes_of_the_tree() -> None:
    codes = [error.exit_code for error in (HoldfastError, UsageError, JobHomeError)]
    assert codes == [1, 2, 2]


@pytest.mark.parametrize("text", ["0", "0.0", "-1", "nan", "inf", "", "none"])
def test_a_limit_that_leaves_no_time_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="--rank-heartbeat-timeout"):
        values.time_limit(text, "--rank-heartbeat-timeout")
    with pytest.raises(UsageError, match="--rank-section-timeouts"):
        values.section_timeouts(f"evaluation:{text}", "--rank-section-timeouts")


@pytest.mark.parametrize("text", ["0", "0.9", "-3", "nan", "inf", "x"])
def test_less_than_was_seen_is_no_factor(text: str) -> None:
    with pytest.raises(UsageError, match="1 or more"):
        values.factor(text, "--safety-factor")
