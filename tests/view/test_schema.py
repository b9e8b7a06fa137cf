"""The schemas in `docs/schema` are those of the structs."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from schemas import DOCUMENTS, FOLDER, schema, text

from holdfast.messages import reports
from holdfast.messages.chaos import FaultsReport, InjectionReport
from holdfast.messages.records import Cause


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_schema_on_file_is_that_of_the_struct(name: str) -> None:
    written = (FOLDER / f"{name}.json").read_text()
    assert written == text(name), "run `python tests/view/schemas.py`"


def test_there_is_no_schema_of_a_report_that_is_gone() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(DOCUMENTS)


@pytest.mark.parametrize("name", ["status", "incidents", "goodput", "data"])
def test_every_field_of_a_report_is_described(name: str) -> None:
    for struct, described in schema(name)["$defs"].items():
        assert described["description"], struct
        for field, property in described["properties"].items():
            assert property.get("description"), f"{struct}.{field}"


def test_every_cause_of_the_ledger_is_explained_in_its_order() -> None:
    assert tuple(reports.CAUSES) == get_args(Cause)


KEYS = {
    reports.StatusReport: "job state round world_size step steps_per_s wall_s restarts nodes"
    " checkpoints excluded faults last_incident exit_code reason",
    reports.NodeReport: "node host state ranks",
    reports.RankReport: "rank pid step finished score own_score straggler",
    reports.CheckpointerReport: "checkpointer in_memory on_storage writing failures",
    FaultsReport: "pending injected refused",
    InjectionReport: "injection fault rank node step missed line why",
    reports.GoodputReport: "job wall_s ranks seconds goodput",
    reports.IncidentReport: "id kind node rank round step at signature action phases lost_s"
    " lost_steps also detail injected",
}


@pytest.mark.parametrize("struct", KEYS, ids=lambda struct: struct.__name__)
def test_keys_that_tools_rely_on_are_never_renamed(struct: type[msgspec.Struct]) -> None:
    assert set(KEYS[struct].split()) <= {field.name for field in msgspec.structs.fields(struct)}
