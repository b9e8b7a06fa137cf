"""`holdfast config`: every setting, its value and its source."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.main import main
from holdfast.config.schema import all_settings


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "holdfast.toml").write_text('# ours\njob = "llm"\nnnodes = 2\n')
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith(("PET_", "TORCH", "HOLDFAST_"))]:
        monkeypatch.delenv(name)
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, Any]]:
    assert main(["config", "--json", *words]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["setting"] for row in rows] == [setting.key for setting in all_settings()]
    return {row["setting"]: row for row in rows}


def test_every_value_is_shown_with_its_source(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_ROLE", "trainer")
    monkeypatch.setenv("HOLDFAST_COPIES", "2")
    rows = shown(capsys, "--spares", "1")
    found = {key: (rows[key]["value"], rows[key]["source"]) for key in rows}
    assert found["job"] == ("llm", "holdfast.toml:2: job")
    assert found["nnodes"] == ("2", "holdfast.toml:3: nnodes")
    assert found["role"] == ("trainer", "PET_ROLE")
    assert found["copies"] == ("2", "HOLDFAST_COPIES")
    assert found["spares"] == ("1", "--spares")
    assert found["standby"] == ("auto", "default")


def test_the_table_has_what_json_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("nnodes\t2\tholdfast.toml:3: nnodes\t") for line in lines)
    assert all(any(line.startswith(f"{s.key}\t") for line in lines) for s in all_settings())


@pytest.mark.parametrize("words", [["--nnodes", "7"], ["--", "--nnodes", "7"]])
def test_the_flags_of_run_are_taken(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert shown(capsys, *words)["nnodes"]["value"] == "7"


def test_a_token_is_not_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", "secret-word")
    assert main(["config", "--json"]) == 0
    text = capsys.readouterr().out
    assert "secret-word" not in text
    assert '"HOLDFAST_TOKEN"' in text


def test_every_wrong_value_is_reported_and_all_are_shown(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    (folder / "holdfast.toml").write_text('nnodes = "few"\ncopies = -1\nrole = "x"\n')
    assert main(["config"]) == 2
    out, err = capsys.readouterr()
    assert "role\tx\t" in out
    lines = err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("holdfast config: holdfast.toml:1: nnodes few: ")
    assert lines[1].startswith("holdfast config: holdfast.toml:2: copies -1: ")


def test_with_a_script_what_run_would_refuse_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["config", "--standalone", "train.py"]) == 2
    assert "holdfast.toml:3: nnodes 2 asks for more" in capsys.readouterr().err
    assert main(["config", "train.py"]) == 0


def test_the_help_teaches_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["config", "--help"])
    text = capsys.readouterr().out
    assert "holdfast.toml" in text
    assert "[rank-section-timeouts]" in text
