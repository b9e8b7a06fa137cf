"""Connects the data sets of a script with the agent."""

from __future__ import annotations

import os
from collections import Counter

from holdfast.errors import DataError, RequestDenied
from holdfast.messages.data import Span
from holdfast.messages.local import DataUsed
from holdfast.messages.requests import (
    AnyAnswer,
    DataOpened,
    OpenData,
    ScriptRequest,
    ShardsTaken,
    TakeShards,
)
from holdfast.messages.tuning import MemoryRoom
from holdfast.worker import memory_room
from holdfast.worker.runtime import Runtime


class AgentDataLink:
    def __init__(self, worker: Runtime) -> None:
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.round = worker.round
        self._worker = worker
        self._openings: Counter[str] = Counter()

    @property
    def step(self) -> int:
        return self._worker.step

    def open(self, request: OpenData) -> DataOpened:
        try:
            answer = self._worker.requests.ask(request, None)
        except RequestDenied as denied:
            raise DataError(str(denied).removeprefix("data set: ")) from None
        assert isinstance(answer, DataOpened)
        return answer

    def take(self, dataset: str, count: int) -> tuple[Span, ...]:
        answer = self._worker.requests.ask(TakeShards(dataset=dataset, count=count), None)
        assert isinstance(answer, ShardsTaken)
        return answer.spans

    def delivered(self, records: int) -> None:
        self._worker.used(records)

    def tell(self, message: DataUsed) -> None:
        self._worker.channel.send(message)

    def ask(self, request: ScriptRequest, timeout_s: float | None) -> AnyAnswer:
        return self._worker.requests.ask(request, timeout_s)

    def count_opening(self, dataset: str) -> int:
        self._openings[dataset] += 1
        return self._openings[dataset]

    def memory(self) -> MemoryRoom:
        return memory_room.measured(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
