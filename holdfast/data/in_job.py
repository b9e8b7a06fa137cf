"""Connects a loader with the job it runs in: reports what it uses, and heeds the job's settings.

All of it happens for each batch, in the training thread, so what is done there is only counting: see
`holdfast.data.use` and `holdfast.data.tuning`, whose threads do the talking.
"""

from __future__ import annotations

from typing import Literal

from holdfast.data.link import JobLink
from holdfast.data.lockstep import BatchPlan
from holdfast.data.tuning import Tuning
from holdfast.data.use import UseReport
from holdfast.messages.tuning import LoaderConfig


class LoaderInJob:
    """What one loader has to do with its job, in one round."""

    def __init__(self, link: JobLink, report: UseReport) -> None:
        self.report = report
        self.round = link.round
        self._link = link
        self._tuning: Tuning | None = None
        self._steps = 0
        """Steps that were handed out, over all epochs."""
        self._records = 0
        """Records of the step that is being handed out."""

    @property
    def is_tuned(self) -> bool:
        """Whether it knows the job's settings."""
        return self._tuning is not None

    def open_tuning(
        self, name: str, own: LoaderConfig, most: int, tune: Literal["auto"] | None
    ) -> LoaderConfig | None:
        """Return the settings that are in force in the job, if these are not the loader's `own`."""
        self._tuning = Tuning(name, own, most=most, auto=tune == "auto", link=self._link)
        return self._tuning.config if self._tuning.version else None

    def settings_from_here(self) -> LoaderConfig | None:
        """Return other settings, if this boundary between two steps is where all ranks change."""
        return None if self._tuning is None else self._tuning.at_boundary(self._steps)

    def resume_step(self, records: int) -> None:
        """Count records of the step that comes next as handed out: in an earlier round, and kept."""
        self._records = records

    def hand_out(self, plan: BatchPlan, position: int) -> None:
        """Note a batch that the script is given now; raise what the job has against its data."""
        report = self.report
        report.check()
        report.delivered(plan.fresh)
        self._records += plan.fresh
        if plan.ends:
            self._steps += 1
            report.used(plan.info.epoch, position, plan.stop, self._records)
            self._records = 0
