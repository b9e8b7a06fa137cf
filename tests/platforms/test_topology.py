"""Where the infrastructure says that a node stands."""

from __future__ import annotations

import pytest

from holdfast.errors import UsageError
from holdfast.platforms.topology import infra_rank, labels

ALL = {
    "HOLDFAST_INFRA_RANK": "1",
    "HOLDFAST_RANK_FROM_NODENAME": "1",
    "SLURMD_NODENAME": "gpu-rack3-0042",
    "CROSS_SLURM_PROCID": "3",
    "SLURM_TOPOLOGY_ADDR": "block7.switch2.node19",
    "SLURM_ARRAY_TASK_ID": "2",
    "SLURM_NNODES": "8",
    "SLURM_PROCID": "5",
    "GROUP_RANK": "9",
}


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in ALL.items() if name not in names}


ORDER = [
    ((), 1),
    (("HOLDFAST_INFRA_RANK",), 42),
    (("HOLDFAST_RANK_FROM_NODENAME",), 3),
    (("CROSS_SLURM_PROCID",), 7 * 10**10 + 19),
    (("SLURM_TOPOLOGY_ADDR",), 2 * 8 + 5),
    (("SLURM_ARRAY_TASK_ID",), 5),
    (("SLURM_PROCID",), 9),
]


@pytest.mark.parametrize("step", range(len(ORDER)))
def test_the_first_source_that_is_set_wins(step: int) -> None:
    dropped = [name for names, _ in ORDER[: step + 1] for name in names]
    assert infra_rank(without(*dropped), "host") == ORDER[step][1]


def test_nobody_says_means_unknown() -> None:
    assert infra_rank({}, "host") is None


def test_digits_of_the_host_name_stand_in_for_slurms_name() -> None:
    assert infra_rank({"HOLDFAST_RANK_FROM_NODENAME": "1"}, "trainer-17") == 17


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_PROCID": "first"},
        {"HOLDFAST_INFRA_RANK": ""},
        {"SLURM_ARRAY_TASK_ID": "1", "SLURM_PROCID": "0"},
        {"HOLDFAST_RANK_FROM_NODENAME": "1"},
    ],
)
def test_a_source_that_makes_no_sense_is_named(environ: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        infra_rank(environ, "nodigits")


def test_labels_come_from_slurms_topology_unless_given() -> None:
    slurm = {"SLURM_TOPOLOGY_ADDR": "block7.switch2.node19"}
    assert labels(slurm) == ("block7.switch2", "block7", "")
    assert labels({**slurm, "HOLDFAST_SWITCH": "s", "HOLDFAST_BLOCK": "b"}) == ("s", "b", "")
    assert labels({"HOLDFAST_DOMAIN": "nvl72-3"}) == ("", "", "nvl72-3")
