"""Connects the data sets of a script with the agent."""

from __future__ import annotations

import os

from holdfast.errors import DataError, RequestDenied
from holdfast.messages.data import Span
from holdfast.messages.local import DataUsed
from holdfast.messages.requests import DataOpened, OpenData, ShardsTaken, TakeShards
from holdfast.worker.runtime import Runtime


class AgentDataLink:
    def __init__(self, worker: Runtime) -> None:
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.round = worker.round
        self._worker = worker

    @property
    def step(self) -> int:
        return self._worker.step

    def open(self, request: OpenData) -> DataOpened:
        try:
            answer = self._worker.requests.ask(request, None)
        except RequestDenied as denied:
            raise DataError(str(denied)) from None
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
