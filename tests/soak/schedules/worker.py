"""Runs schedules by their numbers and judges what differs."""

from __future__ import annotations

from pathlib import Path

from tests.soak.schedules.catalogue import Catalogue
from tests.soak.schedules.engines import Engines, ProcessorsOf
from tests.soak.schedules.findings import Findings, Kind
from tests.soak.schedules.rounding import Rounding
from tests.soak.schedules.run import run_schedule
from tests.soak.schedules.schedule import Schedule
from tests.soak.schedules.tiny_models import write_model


class Worker:
    """Runs schedules of one seed. What it has loaded and computed alone it keeps for the next."""

    def __init__(
        self, root: Path, seed: int, processors_of: ProcessorsOf | None = None, sampled_share: float = 0.0
    ) -> None:
        """`root`: a folder for the models, which others may share once they are written. `processors_of`: see
        `Engines`. `sampled_share`: see `Catalogue`."""
        self.seed, self._root, self._processors_of = seed, root, processors_of
        self._engines, self._sampled_share = Engines(root, processors_of), sampled_share
        self._catalogues: dict[str, Catalogue] = {}
        self._roundings: dict[str, Rounding] = {}

    def close(self) -> None:
        """End what runs besides."""
        self._engines.close()

    def run(self, schedule: Schedule) -> Findings:
        """Run a schedule, drawn or made by hand."""
        model = schedule.settings.model
        if model not in self._catalogues:
            self._catalogues[model] = Catalogue(self._engines, model, self.seed, self._sampled_share)
        catalogue = self._catalogues[model]
        findings = run_schedule(schedule, self._engines, catalogue)
        for one in findings.differences:
            request, alone = catalogue.request(one.request), catalogue.alone(one.request)
            if self._rounding(model).explains(one, request, alone.token_ids):
                findings.near_ties.append(one)
            else:
                findings.add(
                    Kind.TOKEN,
                    f"token {one.position} of request {one.request} is {one.found}, and alone {one.expected}",
                )
        return findings

    def _rounding(self, model: str) -> Rounding:
        if model not in self._roundings:
            self._roundings[model] = Rounding(write_model(model, self._root)[1], self._processors_of)
        return self._roundings[model]
