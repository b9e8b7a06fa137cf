"""`holdfast ckpt`: looking at checkpoints, verifying them, and taking one file out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from msgspec.structs import replace
from torch import Tensor

from holdfast.checkpoint.state.capture import Captured, Position, capture
from holdfast.checkpoint.state.layout import ByteSpan, Contents, FileRecord
from holdfast.checkpoint.storage import plain_directory as plain
from holdfast.checkpoint.storage.backends import MANIFEST, Storage, rank_file_name, step_directory
from holdfast.checkpoint.storage.commit import commit
from holdfast.checkpoint.storage.export import ExportTarget, _save_tensors
from holdfast.checkpoint.storage.manifest import refuse
from holdfast.checkpoint.storage.posix import PosixStorage
from holdfast.checkpoint.storage.rank_file import RankFile, extents_of, write_file
from holdfast.cli.main import main

SHARED = torch.arange(100_000, dtype=torch.float32).reshape(100, 1000)


def state_of(step: int) -> dict[str, Any]:
    tied = torch.full((3, 5), float(step), dtype=torch.bfloat16)
    return {
        "model": OrderedDict(
            weight=SHARED + step, embedding=tied, head=tied, turned=torch.arange(12).view(3, 4).t()
        ),
        "optim": {"state": {0: {"step": torch.tensor(step), "betas": (0.9, 0.999)}}, "groups": []},
        "step": step,
    }


def body_of(captured: Captured) -> bytearray:
    """What a copier would have put into an image."""
    body = bytearray(captured.layout.tail_at)
    for at, header in captured.layout.headers.items():
        body[at : at + len(header)] = header
    for item, local in zip(captured.layout.items, captured.locals, strict=True):
        raw = local.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        body[item.raw.at : item.raw.end] = raw
    return body + captured.tail


def as_shards(body: bytearray, span: ByteSpan) -> ByteSpan:
    """Make the rows of `weight` that a rank has a part of a tensor with twice as many."""
    contents = msgspec.msgpack.decode(body[span.at : span.end], type=Contents)
    items = list(contents.items)
    at = next(index for index, item in enumerate(items) if item.name == "model.weight")
    rows, columns = items[at].sizes
    whole, offsets = (2 * rows, columns), (rows * contents.rank, 0)
    items[at] = replace(items[at], kind="shard", shape=whole, offsets=offsets)
    # The shared part, which it was all of, becomes part of what is the rank's own.
    own = ByteSpan(0, contents.shared.end)
    shared = ByteSpan(own.end, 0)
    encoded = msgspec.msgpack.encode(replace(contents, items=tuple(items), own=own, shared=shared))
    body[span.at : span.at + len(encoded)] = encoded
    return ByteSpan(span.at, len(encoded))


def write(
    storage: Storage,
    step: int,
    rank: int,
    world_size: int = 2,
    sharded: bool = False,
    directory: str = "",
) -> FileRecord:
    state = state_of(step)
    if sharded:
        state["model"]["weight"] = state["model"]["weight"].chunk(world_size)[rank]
    captured = capture(state, None, Position(step, 1, rank, world_size))
    body = body_of(captured)
    span = as_shards(body, captured.contents) if sharded else captured.contents
    contents = msgspec.msgpack.decode(body[span.at : span.end], type=Contents)
    extents = extents_of(contents, rank, world_size, "slice")
    where = (directory or step_directory(step), rank_file_name(rank, 1))
    whose = (step, 1, rank, world_size)
    view = memoryview(body)
    return write_file(storage, *where, view, extents, span, *whose, lambda size: None)


def save(storage: Storage, step: int) -> None:
    records = [write(storage, step, rank) for rank in range(2)]
    commit(storage, step, 1, 2, records, job="llm", saved_at=1e9)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two checkpoints, one refused, one that was never finished."""
    storage = PosixStorage(tmp_path / "ckpt")
    for step in (100, 200, 300):
        save(storage, step)
    refuse(storage, 100)
    write(storage, 400, 0)
    return tmp_path / "ckpt"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


Output = pytest.CaptureFixture[str]


# ---- ls ----


def test_ls_shows_every_step(root: Path, capsys: Output) -> None:
    assert main(["ckpt", "ls", str(root)]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert lines[0][0].startswith(f"{root}: 4 steps, ")
    assert [line[:2] for line in lines[2:]] == [
        ["400", "partial"],
        ["300", "complete"],
        ["200", "complete"],
        ["100", "refused"],
    ]
    assert lines[3][2] == "2001-09-09 01:46:40 UTC"
    assert lines[3][3] == "2"
    assert lines[3][4].endswith("kB")
    assert lines[2][-1] == "not committed; rank files there: 1"


def test_ls_for_programs(root: Path, capsys: Output) -> None:
    assert main(["ckpt", "ls", str(root), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in rows] == [400, 300, 200, 100]
    assert rows[1] == {
        "step": 300,
        "state": "complete",
        "why": "",
        "saved_at": "2001-09-09T01:46:40+00:00",
        "world_size": 2,
        "round": 1,
        "job": "llm",
        "bytes": sum(p.stat().st_size for p in (root / "step_000000300").iterdir())
        - (root / "step_000000300" / MANIFEST).stat().st_size,
    }
    assert rows[0]["bytes"] is None


def test_ls_of_nothing(tmp_path: Path, capsys: Output) -> None:
    assert main(["ckpt", "ls", str(tmp_path / "none")]) == 0
    assert "no checkpoints in" in capsys.readouterr().out


def test_urls_work_too(root: Path, capsys: Output) -> None:
    assert main(["ckpt", "ls", f"file://{root}", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 4
    pytest.importorskip("fsspec")
    assert main(["ckpt", "ls", "memory://nothing/here", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


# ---- verify ----


def test_verify_reads_what_is_committed(root: Path, capsys: Output) -> None:
    assert main(["ckpt", "verify", str(root), "--step", "300"]) == 0
    assert capsys.readouterr().out.startswith("step 300: verified, ")
    assert main(["ckpt", "verify", str(root)]) == 1  # One is refused already.
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines[:2]] == [
        "step 300: verified",
        "step 200: verified",
    ]
    assert lines[2].startswith("step 100: refused: holdfast.json: ")


def test_verify_says_file_block_and_why(root: Path, capsys: Output) -> None:
    flip(root / "step_000000300" / "__1_1.distcp", 5000)
    assert main(["ckpt", "verify", str(root), "--step", "300"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("step 300: refused: __1_1.distcp, block 0: ")
    assert "is not what its digest says" in line
    assert main(["ckpt", "verify", str(root), "--step", "300", "--json"]) == 1
    (result,) = json.loads(capsys.readouterr().out)
    assert (result["refusals"][0]["file"], result["refusals"][0]["block"]) == ("__1_1.distcp", 0)


@pytest.mark.parametrize("step", ["400", "999"])
def test_verify_of_what_is_no_checkpoint(root: Path, capsys: Output, step: str) -> None:
    assert main(["ckpt", "verify", str(root), "--step", step]) == 1
    assert f"there is no checkpoint of step {step}" in capsys.readouterr().err


def test_long_work_tells_how_far_it_is(
    root: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter(range(0, 10_000, 20))
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    assert main(["ckpt", "verify", str(root), "--step", "300"]) == 0
    assert capsys.readouterr().err.endswith("step 300: 411 kB of 412 kB\n")


def test_on_a_terminal_there_is_a_bar(
    root: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["ckpt", "verify", str(root), "--step", "300"]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("step 300: verified")
    assert "step 300" in told.err


# ---- export ----


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    else:
        assert found == expected


def test_export_gives_the_state_as_it_was(root: Path, tmp_path: Path, capsys: Output) -> None:
    target = tmp_path / "state.pt"
    assert main(["ckpt", "export", str(root), "--step", "200", "--to", str(target)]) == 0
    assert "5 tensors" in capsys.readouterr().out
    state = torch.load(target, weights_only=True)
    assert_same(dict(sorted(state.items())), state_of(200))
    assert state["model"]["embedding"].data_ptr() == state["model"]["head"].data_ptr()
    assert sorted(os.listdir(tmp_path)) == ["ckpt", "state.pt"]


def test_export_makes_whole_tensors_of_shards(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path / "ckpt")
    records = [write(storage, 700, rank, sharded=True) for rank in range(2)]
    commit(storage, 700, 1, 2, records)
    for name in ("state.pt", "state.safetensors"):
        target = tmp_path / name
        assert main(["ckpt", "export", str(tmp_path / "ckpt"), "--to", str(target)]) == 0
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert_same(dict(sorted(state.items())), state_of(700))
    tensors = pytest.importorskip("safetensors.torch").load_file(tmp_path / "state.safetensors")
    assert_same(tensors["model.weight"], SHARED + 700)


def test_export_of_the_newest_for_programs(root: Path, tmp_path: Path, capsys: Output) -> None:
    target = tmp_path / "model.pt"
    argv = ["ckpt", "export", str(root), "--only", "model", "--to", str(target), "--json"]
    assert main(argv) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {
        "step": 300,
        "file": str(target),
        "bytes": target.stat().st_size,
        "tensors": 4,
        "left_out": 0,
    }
    assert_same(torch.load(target, weights_only=True), state_of(300)["model"])


def test_tensors_whose_dotted_names_are_the_same_are_all_exported(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, 1: torch.ones(2), "1": SHARED}
    _save_tensors({"x": tensors}, tmp_path / "all.safetensors", 1)
    found = safetensors.load_file(tmp_path / "all.safetensors")
    assert sorted(tensor.numel() for tensor in found.values()) == [1, 1, 2, SHARED.numel()]


def test_the_keys_of_a_wrapped_module_are_exported_as_those_of_the_plain_one(
    tmp_path: Path,
) -> None:
    wrapped = {"module._orig_mod.weight": torch.ones(2), "module._orig_mod.bias": torch.ones(1)}
    for only, read in ((None, lambda found: found["model"]), ("model", lambda found: found)):
        target = ExportTarget(tmp_path / "model.pt", only, force=True)
        target.write({"model": wrapped, "epoch": 3}, 1)
        assert list(read(torch.load(target.path))) == ["weight", "bias"]


def test_export_to_safetensors(root: Path, tmp_path: Path, capsys: Output) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    target = tmp_path / "all.safetensors"
    assert main(["ckpt", "export", str(root), "--to", str(target)]) == 0
    assert "3 values are no tensors" in capsys.readouterr().out
    found = safetensors.load_file(target)
    state = state_of(300)
    expected = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    expected["optim.state.0.step"] = state["optim"]["state"][0]["step"]
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same(found[name], tensor)


def test_export_of_one_entry_has_its_own_names(root: Path, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    target = tmp_path / "model.safetensors"
    assert main(["ckpt", "export", str(root), "--only", "model", "--to", str(target)]) == 0
    assert set(safetensors.load_file(target)) == {"weight", "embedding", "head", "turned"}


def test_export_verifies_what_it_reads(root: Path, tmp_path: Path, capsys: Output) -> None:
    flip(root / "step_000000300" / "__1_1.distcp", 5000)
    target = tmp_path / "state.pt"
    assert main(["ckpt", "export", str(root), "--to", str(target)]) == 1
    error = capsys.readouterr().err
    assert "__1_1.distcp: block 0" in error
    assert error.count("\n") == 1
    assert not target.exists()
    assert len(os.listdir(tmp_path)) == 1


def test_a_file_of_another_save_is_not_exported(root: Path, tmp_path: Path, capsys: Output) -> None:
    other = root / "step_000000200" / "__1_1.distcp"
    (root / "step_000000300" / "__1_1.distcp").write_bytes(other.read_bytes())
    assert main(["ckpt", "export", str(root), "--to", str(tmp_path / "x.pt")]) == 1
    assert "another file than the one that was committed" in capsys.readouterr().err


def test_export_replaces_nothing_unless_told_to(root: Path, tmp_path: Path, capsys: Output) -> None:
    target = tmp_path / "state.pt"
    target.write_bytes(b"precious")
    argv = ["ckpt", "export", str(root), "--to", str(target)]
    assert main(argv) == 2
    assert "--force" in capsys.readouterr().err
    assert target.read_bytes() == b"precious"
    assert main([*argv, "--force"]) == 0
    assert torch.load(target, weights_only=True)["step"] == 300


def test_a_failed_export_leaves_the_old_file(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "state.pt"
    target.write_bytes(b"precious")
    real = RankFile.read_into

    def fails(self: RankFile, at: int, views: Any) -> None:
        real(self, at, views)
        views[0][0] ^= 1

    monkeypatch.setattr(RankFile, "read_into", fails)
    assert main(["ckpt", "export", str(root), "--to", str(target), "--force"]) == 1
    assert target.read_bytes() == b"precious"
    assert len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--to", "x.zip"], "ends in .pt or .safetensors"),
        (["--to", "none/x.pt"], "there is no directory"),
        (["--to", "x.pt", "--only", "modle"], "it has 'model', 'optim', 'step'"),
        (["--to", "x.pt", "--step", "400"], "no complete checkpoint of step 400"),
        ([], "--to"),
    ],
)
def test_what_makes_no_sense_is_said_in_one_line(
    root: Path,
    tmp_path: Path,
    capsys: Output,
    monkeypatch: pytest.MonkeyPatch,
    argv: list[str],
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["ckpt", "export", str(root), *argv]) in (1, 2)
    error = capsys.readouterr().err
    assert why in error
    assert error.count("\n") == 1


# ---- the command itself ----


def test_help_teaches(capsys: Output) -> None:
    assert main(["ckpt", "--help"]) == 0
    assert "holdfast ckpt verify" in capsys.readouterr().out
    assert main(["ckpt"]) == 2
    assert main(["ckpt", "rm"]) == 2
    assert "no command 'rm'" in capsys.readouterr().err
    for command in ("ls", "verify", "export"):
        with pytest.raises(SystemExit) as ended:
            main(["ckpt", command, "--help"])
        assert ended.value.code == 0


# ---- one checkpoint by itself ----


def test_one_step_is_looked_at_by_itself(root: Path, tmp_path: Path, capsys: Output) -> None:
    alone = str(root / step_directory(300))
    target = tmp_path / "state.pt"
    assert main(["ckpt", "ls", alone, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["step"], row["state"], row["world_size"]) == (300, "complete", 2)
    assert main(["ckpt", "verify", alone]) == 0
    assert main(["ckpt", "export", alone, "--to", str(target)]) == 0
    assert torch.load(target)["step"] == 300


def test_what_async_writer_wrote_is_verified_wherever_it_is_moved(
    tmp_path: Path, capsys: Output
) -> None:
    there = str(tmp_path / "there")
    storage, directory = plain.opened(there)
    record = write(storage, 7, 0, world_size=1, directory=directory)
    plain.replace(storage, directory, (7, 1, 1), [record])
    moved = tmp_path / "moved"
    Path(there).rename(moved)
    assert main(["ckpt", "verify", str(moved)]) == 0
    flip(moved / record.name, 5000)
    assert main(["ckpt", "verify", str(moved)]) == 1
    assert record.name in capsys.readouterr().out


def test_looking_and_verifying_import_no_torch(root: Path) -> None:
    code = f"""
import sys
from holdfast.cli.main import main
assert main(["ckpt", "ls", {str(root)!r}]) == 0
assert main(["ckpt", "verify", {str(root)!r}, "--step", "300"]) == 0
import holdfast.checkpoint.storage.retention, holdfast.checkpoint.storage.rank_file
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


# ---- what plain torch.distributed.checkpoint saved ----


@pytest.fixture
def plain_root(tmp_path: Path) -> Path:
    state = {"model": {"w": torch.arange(6.0).view(2, 3)}, "epoch": 3}
    dcp.save(state, checkpoint_id=tmp_path / "old" / "step-40", no_dist=True)
    return tmp_path / "old"


@pytest.mark.parametrize("where", [".", "step-40"])
def test_a_plain_checkpoint_is_listed_as_unverified(
    plain_root: Path, capsys: Output, where: str
) -> None:
    assert main(["ckpt", "ls", str(plain_root / where), "--json"]) == 0
    (row,) = msgspec.json.decode(capsys.readouterr().out)
    assert (row["step"], row["state"], row["saved_at"]) == (40, "unverified", None)
    assert row["bytes"] > 24
    assert main(["ckpt", "ls", str(plain_root / where)]) == 0
    assert "40\tunverified\t-\t-" in capsys.readouterr().out


def test_a_plain_checkpoint_cannot_be_verified(plain_root: Path, capsys: Output) -> None:
    assert main(["ckpt", "verify", str(plain_root)]) == 1
    assert "cannot be verified: saved by plain torch.distributed.checkpoint" in (
        capsys.readouterr().out
    )


def test_a_plain_checkpoint_is_exported_and_said_not_to_be_verified(
    plain_root: Path, tmp_path: Path, capsys: Output
) -> None:
    target = tmp_path / "out.pt"
    assert main(["ckpt", "export", str(plain_root), "--to", str(target)]) == 0
    assert "not verified" in capsys.readouterr().out
    found = torch.load(target)
    assert found["epoch"] == 3
    assert torch.equal(found["model"]["w"], torch.arange(6.0).view(2, 3))
