# SPDX-License-Identifier: Apache-2.0
"""What a report is of: run folders and files of results, in any mix.

Invariant: what is not one of them is named in an error, before anything is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from geojax.config import ConfigError, require
from geojax.config.folder import require_local
from geojax.report.plans import plan_blocks
from geojax.report.results import read_results
from geojax.track.report import Comparison, compare, sections_of
from geojax.track.section import Section
from geojax.track.summary import NoResultsError, Run, load_run


@dataclass(frozen=True)
class Inputs:
    """As they are at one moment."""

    compared: tuple[Comparison, ...]
    results: tuple[Section, ...]
    """Of files."""
    waiting: tuple[str, ...]
    """Why runs that have nothing to show yet are left out."""

    @property
    def runs(self) -> list[tuple[str, Run]]:
        """With the names that the report has for them."""
        return [
            pair for group in self.compared for pair in zip(group.names, group.runs, strict=True)
        ]

    @property
    def live(self) -> bool:
        """Whether any run may go on."""
        return bool(self.waiting) or any(run.end is None for _, run in self.runs)

    def sections(self) -> list[Section]:
        """Runs, then files."""
        return [*sections_of(self.compared, plan_blocks), *self.results]


def read_inputs(paths: Sequence[str], target: float | None, wait: bool) -> Inputs:
    """`wait`: a run that has nothing to show yet is waited for, and no error."""
    require(paths, "there is nothing to report; give at least one run folder or file of results")
    runs, results, waiting = [], [], []
    for path in map(Path, paths):
        require_local(path)
        if path.is_file():
            results.append(read_results(path))
            continue
        try:
            runs.append(load_run(path))
        except NoResultsError as error:
            if not wait:
                raise
            waiting.append(str(error))
        except ConfigError as error:
            inside = sorted(p.parent.name for p in path.glob("*/config.json"))
            if inside and not (path / "config.json").exists():
                raise ConfigError(
                    f"{path} is not a run folder, but has some in it ({', '.join(inside[:4])}); "
                    f"give those: {path}/*/"
                ) from error
            raise
    return Inputs(tuple(compare(runs, target)), tuple(results), tuple(waiting))
