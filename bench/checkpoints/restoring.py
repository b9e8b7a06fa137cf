"""Back from memory: a node's own, and a peer's.

After a fault a rank is a fresh process with a model that was just made; its images are in shared
memory, where an earlier process left them. So each try is a fresh process, whose first restore is what
counts after a fault; later ones, warm, say what of that is the process's own doing.

From a peer the image comes over the network, here the loopback, straight into the tensors.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from checkpoints import fresh, states
from checkpoints.contestants import Torch
from checkpoints.lines import Line, Seconds, medians, speed
from checkpoints.links import TOKEN, OwnMemory, PeersMemory
from checkpoints.saving import BOTH_IMAGES, TENSORS
from checkpoints.setting import Setting
from checkpoints.timing import alternate, took, wait_for_shared_memory
from checkpoints.yardsticks import Memory, receive_bytes
from holdfast.checkpoint.checkpointer import LinkedCheckpointer
from holdfast.checkpoint.memory.images import Images
from holdfast.checkpoint.replicas.server import ReplicaServer

WARM = 3
STREAMS = (1, 4)


class NotRestoredError(RuntimeError):
    """A restore that is to be timed must bring back what was saved."""


# ---- own memory ---------------------------------------------------------------------------------


def own(told: dict[str, Any]) -> list[dict[str, Any]]:
    setting = Setting(**told)
    plain, trained = setting.in_memory / "plain", setting.in_memory / "trained"
    parts: list[dict[str, list[Seconds]]] = []
    plain.mkdir()
    fresh.call("checkpoints.restoring:leave_images", told, str(plain))
    for turn in range(_processes(setting)):
        parts.append(fresh.call("checkpoints.restoring:restore_own", told, str(plain), turn == 0))
    shutil.rmtree(plain)
    trained.mkdir()
    fresh.call("checkpoints.restoring:leave_images", told, str(trained), True)
    for _ in range(_processes(setting)):
        parts.append(fresh.call("checkpoints.restoring:restore_trained", told, str(trained)))
    samples: dict[str, list[Seconds]] = {}
    for name, times in ((name, times) for part in parts for name, times in part.items()):
        samples.setdefault(name, []).extend(times)
    size = states.bytes_of_weights(setting.size, TENSORS)
    return [
        asdict(_line_of_own(samples, size, "fresh", "fresh process", 70.0)),
        asdict(_line_of_own(samples, size, "warm", "warm", 70.0)),
        asdict(_line_of_own(samples, size, "trained", "2/3 of it AdamW's that is made anew", None)),
    ]


def _processes(setting: Setting) -> int:
    return max(2, setting.tries // 2 + 1)


def _line_of_own(
    samples: dict[str, list[Seconds]], size: int, key: str, how: str, goal: float | None
) -> Line:
    found = medians(samples)
    return Line(
        f"restore {size / 1e9:.2g} GB from own memory, {how}, of memcpy",
        100 * found["memcpy"] / found[key],
        "%",
        at_least=goal,
        torchs=100 * found["memcpy"] / found["dcp.load"] if key == "warm" else None,
        seen=f"{speed(size, found[key])}, memcpy {speed(size, found['memcpy'])}, dcp.load from"
        f" /dev/shm {speed(size, found['dcp.load'])}",
        samples={name: samples[name] for name in (key, "memcpy", "dcp.load")},
    )


def leave_images(told: dict[str, Any], folder: str, trained: bool = False) -> int:
    """What an earlier process of the rank left: both of its images; the newest step."""
    model, state = _made(Setting(**told), trained)
    if trained:
        states.step(state["optim"])
    checkpointer = LinkedCheckpointer(None, state, link=OwnMemory(Path(folder)))
    for step in range(1, 1 + BOTH_IMAGES):
        with torch.no_grad():
            for number, weight in enumerate(model.weights):
                weight.fill_(_marked(step, number))
        checkpointer.save(step, block=True)
    return BOTH_IMAGES


def _made(setting: Setting, trained: bool) -> tuple[states.Weights, dict[str, Any]]:
    if not trained:
        model = states.Weights(setting.size, TENSORS)
        return model, {"model": model}
    model, optimizer = states.trained(setting.size, TENSORS)
    return model, {"model": model, "optim": optimizer}


def restore_own(told: dict[str, Any], folder: str, with_torchs: bool) -> dict[str, list[Seconds]]:
    setting = Setting(**told)
    model, state = _made(setting, trained=False)
    checkpointer = LinkedCheckpointer(None, state, link=OwnMemory(Path(folder)))
    samples: dict[str, list[Seconds]] = {"fresh": [_restore(checkpointer, model)]}
    size = states.bytes_of(model)
    wait_for_shared_memory(BOTH_IMAGES * size)  # It gets ready for the next save.
    memory = Memory(size)
    warm = {"memcpy": memory.memcpy, "warm": lambda: _restore(checkpointer, model)}
    samples |= alternate(WARM, warm)
    if with_torchs:
        torchs = Torch(state, setting.in_memory)
        torchs.save()
        samples["dcp.load"] = [torchs.load() for _ in range(WARM)]
        torchs.remove()
    return samples


def restore_trained(told: dict[str, Any], folder: str) -> dict[str, list[Seconds]]:
    """With an optimizer that took no step, as after a restart: its state has yet to be made."""
    model, state = _made(Setting(**told), trained=True)
    checkpointer = LinkedCheckpointer(None, state, link=OwnMemory(Path(folder)))
    seconds = _restore(checkpointer, model)
    if len(state["optim"].state) != len(model.weights):
        raise NotRestoredError("the optimizer has no state")
    return {"trained": [seconds]}


def _restore(checkpointer: LinkedCheckpointer, model: states.Weights) -> Seconds:
    with torch.no_grad():
        for weight in model.weights:
            weight.fill_(0.0)
    seconds = took(checkpointer.restore)
    wrong = [
        number
        for number, weight in enumerate(model.weights)
        if weight[0, 0] != _marked(BOTH_IMAGES, number) or weight[-1, -1] != weight[0, 0]
    ]
    if wrong:
        raise NotRestoredError(f"tensors {wrong[:5]} are not what was saved")
    return seconds


def _marked(step: int, number: int) -> float:
    return float(1000 * step + number)


# ---- a peer's -----------------------------------------------------------------------------------


def peer(told: dict[str, Any]) -> list[dict[str, Any]]:
    setting = Setting(**told)
    theirs = setting.in_memory / "peer"
    theirs.mkdir()
    parts: list[dict[str, list[Seconds]]] = []
    newest = fresh.call("checkpoints.restoring:leave_images", told, str(theirs))
    with (
        fresh.serving("checkpoints.restoring:serve_images", str(theirs)) as port,
        fresh.serving("checkpoints.yardsticks:serve_bytes") as plain_port,
    ):
        for turn in range(_processes(setting)):
            ours = setting.in_memory / f"own-{turn}"
            ours.mkdir()
            where = (str(ours), newest, port, plain_port)
            parts.append(fresh.call("checkpoints.restoring:restore_peers", told, *where))
            shutil.rmtree(ours)
    samples = {key: [s for part in parts for s in part[key]] for key in parts[0]}
    found = medians(samples)
    size = states.bytes_of_weights(setting.size, TENSORS)
    raw = found["tcp x1"]  # As `iperf` measures it.
    tcp = ", ".join(f"{speed(size, found[f'tcp x{n}'])} by {n}" for n in STREAMS)
    line = Line(
        f"restore {size / 1e9:.2g} GB from a peer, of raw TCP",
        100 * raw / found["restore"],
        "%",
        at_least=60.0,
        seen=f"{speed(size, found['restore'])}, TCP {tcp}",
        samples=samples,
    )
    return [asdict(line)]


def serve_images(folder: str) -> Iterator[int]:
    """A peer's keeper, as far as it gives away images; its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = ReplicaServer(listener, TOKEN, Images(Path(folder)))
    server.start()
    yield int(listener.getsockname()[1])
    os._exit(0)


def restore_peers(
    told: dict[str, Any], folder: str, newest: int, port: int, plain_port: int
) -> dict[str, list[Seconds]]:
    setting = Setting(**told)
    model = states.Weights(setting.size, TENSORS)
    size = states.bytes_of(model)
    samples: dict[str, list[Seconds]] = {
        f"tcp x{streams}": [receive_bytes(plain_port, size, streams) for _ in range(2)]
        for streams in STREAMS
    }
    link = PeersMemory(Path(folder), port, newest)
    checkpointer = LinkedCheckpointer(None, {"model": model}, link=link)
    samples["restore"] = [_restore(checkpointer, model)]
    return samples
