"""A format that changes gets a new version: see docs/compatibility.md."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import schema_fingerprint as fingerprints
from schema_fingerprint import FORMATS, Format, changed, fingerprint

from holdfast.messages.wire import Hello, Rejected, Visit

REGENERATE = "then run: python tests/schema_fingerprint.py"


@pytest.mark.parametrize("name", FORMATS)
def test_a_changed_schema_has_a_new_version(name: str) -> None:
    each, known = FORMATS[name], fingerprints.read()[name]
    differ = changed(known["types"], fingerprint(each.types))
    if each.version == known["version"]:
        assert not differ, f"{', '.join(differ)} changed: raise {each.version_at}, {REGENERATE}"
    assert each.version == known["version"], (
        f"{each.version_at} is {each.version} now; {REGENERATE}"
    )
    assert not differ


def message(*fields: tuple[str, type], doc: str = "", tag: str = "M") -> type[msgspec.Struct]:
    made = msgspec.defstruct("Message", fields, tag=tag, namespace={"__doc__": doc})
    return made


BEFORE = message(("number", int), ("pair", tuple[int, str]), doc="A message.")
GROWN = message(("number", int), ("pair", tuple[int, str]), ("more", bool))


@pytest.mark.parametrize(
    ("kind", "same"),
    [
        (message(("number", int), ("pair", tuple[int, str]), doc="In other words."), True),
        (GROWN, False),
        (message(("number", int), ("pair", tuple[str, int])), False),
        (message(("number", int), ("pair", tuple[int, str]), tag="N"), False),
    ],
    ids=["described", "grown", "swapped", "retagged"],
)
def test_what_a_decoder_sees_counts_and_docstrings_do_not(
    kind: type[msgspec.Struct], same: bool
) -> None:
    assert (fingerprint((kind,)) == fingerprint((BEFORE,))) is same


def test_nothing_is_written_while_the_version_is_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprints, "FILE", tmp_path / "data" / "schema.json")

    def write(version: int, kind: type[msgspec.Struct]) -> None:
        monkeypatch.setattr(fingerprints, "FORMATS", {"f": Format(version, "the version", (kind,))})
        fingerprints.main()

    write(1, BEFORE)
    write(1, BEFORE)
    with pytest.raises(SystemExit, match="raise the version first"):
        write(1, GROWN)
    assert json.loads(fingerprints.FILE.read_text())["f"]["version"] == 1
    write(2, GROWN)
    assert json.loads(fingerprints.FILE.read_text())["f"]["version"] == 2


@pytest.mark.parametrize("kind", [Hello, Visit])
def test_every_version_can_tell_that_it_meets_another(kind: type[msgspec.Struct]) -> None:
    """Greeting and refusal keep these fields for ever, whatever is added to them."""
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    assert (fields["protocol"], fields["token"]) == (int, str)
    assert kind.__struct_config__.tag == kind.__name__
    refusal = msgspec.msgpack.decode(msgspec.msgpack.encode(Rejected(reason="why")))
    assert (refusal["type"], refusal["reason"]) == ("Rejected", "why")
