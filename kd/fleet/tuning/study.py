"""The trials of a search, its samplers and pruners: everything of Optuna that is used."""

import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from kd.errors import UserError, needs_extra, plain
from kd.fleet.tuning.space import Space, suggest
from kd.storage.elsewhere import LARGEST_LOG, json_of, mapping_in, text_of
from kd.storage.writing import file_for

try:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
    from optuna.trial import FixedTrial, FrozenTrial, Trial, TrialState
except ImportError as error:
    raise UserError(f"searching {needs_extra('tune')} ({error})") from error

JOURNAL = "journal.log"
"""Optuna's file of all trials, in a search's folder; several processes append to it."""
MOST_VALUES = 10_000_000
"""Steps between the ends of a trial's range."""
_STATES = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL,
           "running": TrialState.RUNNING}  # fmt: skip

optuna.logging.set_verbosity(optuna.logging.ERROR)
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


class Study:
    """A search in a folder, as an Optuna journal (``optuna-dashboard FOLDER/journal.log``) that survives any kill.

    Args:
        folder: of the search.
        directions: ``maximize`` or ``minimize``, for each objective.
        sampler: one of :data:`SAMPLERS`.
        pruner: one of :data:`PRUNERS`.
        epochs: of a trial that is not stopped early.
        seed: of the search; each trial's sampler has one of its own.
    """

    def __init__(
        self,
        folder: Path,
        directions: Sequence[Literal["maximize", "minimize"]],
        sampler: str,
        pruner: str,
        epochs: int,
        seed: int,
    ) -> None:
        """Opens the journal of a search, or begins it; arguments as of the class."""
        journal = str(file_for(folder / JOURNAL))
        _check_journal(Path(journal), is_grid=sampler == "grid")
        storage = JournalStorage(JournalFileBackend(journal, _WholeLines(journal)))
        self.exhausted = False  # whether a grid has no values left
        self.study: Any = optuna.create_study(
            storage=storage,
            study_name="kd-tune",
            directions=list(directions),
            load_if_exists=True,
        )
        self._sampler = SAMPLERS[sampler]
        self._seed = seed
        self._sow()
        self.study.pruner = PRUNERS[pruner](epochs)
        # the grid's end; Optuna's own wants its own loop
        vars(self.study)["stop"] = partial(setattr, self, "exhausted", True)

    def _sow(self) -> None:
        """Gives the sampler a seed by the number of trials so far, before each draw.

        So neither a resumed search nor one on another machine draws the same values again.
        """
        self.study.sampler = self._sampler(self._seed + len(self.trials()))

    def begun_with(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The settings that the search was begun with.

        A search that begins now stores ``settings`` in its journal and returns them. The caller holds the search's lock.
        """
        if "settings" not in self.study.user_attrs:
            self.study.set_user_attr("settings", settings)
        return self.study.user_attrs["settings"]

    def trials(self, *states: str) -> list[Any]:
        """Trials so far: all, or those in the given states (``running``, ``complete``, ``pruned``, ``failed``)."""
        return self.study.get_trials(
            deepcopy=False, states=tuple(_STATES[s] for s in states) or None
        )

    def ask(self, spaces: Sequence[Space]) -> tuple[Trial, dict[str, Any]]:
        """A new trial, and its values by key as the sampler chooses them.

        The caller holds the search's lock, lest two processes draw the same values.
        """
        self._sow()
        trial = self.study.ask()
        return trial, suggest(spaces, trial)

    def again(self, number: int, spaces: Sequence[Space]) -> tuple[Trial, dict[str, Any]]:
        """A trial that another process has begun, and its values by key.

        Keys that have a value keep it. Those that the process left without one, since it was killed while it drew them, get
        one now.
        """
        trial = Trial(self.study, self.trial(number)._trial_id)
        return trial, suggest(spaces, trial)

    @staticmethod
    def values_in(trial: FrozenTrial, spaces: Sequence[Space]) -> dict[str, Any]:
        """A finished trial's values by key, as the spaces hold them: the journal has labels of choices in their place.

        Raises:
            UserError: it holds a value that the spaces do not have.
        """
        try:
            return suggest(spaces, FixedTrial(trial.params))
        except (KeyError, ValueError, TypeError) as error:
            raise UserError(
                f"name: {JOURNAL} has values in trial {trial.number} that are not this search's: {plain(error)}"
            ) from error

    def trial(self, number: int) -> Any:
        """The trial of a number.

        Raises:
            IndexError: unknown number.
        """
        return self.trials()[number]

    def tell(
        self, trial: Trial, state: str, values: Sequence[float] | None, notes: dict[str, Any]
    ) -> None:
        """Records a trial's end.

        Args:
            trial: the trial.
            state: how it has ended: ``complete``, ``pruned`` or ``failed``.
            values: of the objectives, in their order; None for a trial that was pruned or has failed.
            notes: kept with it as Optuna's ``user_attrs``, by name: ``folder`` (of the run), and ``reason`` of a
                failure.
        """
        for name, value in notes.items():
            trial.set_user_attr(name, value)
        self.study.tell(trial, list(values) if values else None, state=_STATES[state])

    def best(self) -> list[Any]:
        """The best finished trial, and those that equal it; with several objectives the Pareto front; [] before any has
        finished.
        """
        if self.trials("complete"):
            return self.study.best_trials
        return []


def _check_journal(journal: Path, is_grid: bool) -> None:
    """Checks a journal, which may be a stranger's, before Optuna reads it.

    Args:
        journal: the file.
        is_grid: the search lists each value that a trial could have had.

    Raises:
        RefusedFile: it is no regular file, or too large.
        UserError: a whole line is no entry of a journal, or gives a grid a range of more than :data:`MOST_VALUES` steps.
    """
    if not journal.exists():
        return
    *lines, _ = text_of(journal, LARGEST_LOG, errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        try:
            entry = json_of(line)
            ranges = [*mapping_in(entry, "distributions").values()]
            if "distribution" in entry:
                ranges.append(entry["distribution"])
            most = max(map(_steps, ranges), default=0)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            raise UserError(f"{journal}: line {number} is no entry of a search") from error
        if is_grid and not most <= MOST_VALUES:
            raise UserError(
                f"{journal}: line {number}: a grid of {most:.0f} values, at most {MOST_VALUES}"
            )


def _steps(distribution: str) -> float:
    """Steps between the ends of a range that Optuna has written as JSON; 0 for choices and real numbers.

    Raises:
        ValueError, TypeError, KeyError: it is no range.
    """
    range_: Any = optuna.distributions.json_to_distribution(distribution)
    step = getattr(range_, "step", None)
    return (range_.high - range_.low) / step if step else 0


class _WholeLines(JournalFileSymlinkLock):
    """The journal's lock; its holder cuts off the part of a line that a killed process left."""

    def acquire(self) -> bool:
        """Takes the journal's lock, and cuts off a last line without its end, which a killed process has left.

        Called by Optuna before it appends to the journal. Returns what Optuna's lock does: True.
        """
        acquired = super().acquire()
        with Path(self._lock_target_file).open("r+b") as file:
            end = file.seek(0, os.SEEK_END)
            if end == 0:
                return acquired
            file.seek(end - 1)
            if file.read() != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        return acquired


# each of a seed; none unpickles what a journal holds, as Optuna's CmaEsSampler does: a journal may be a stranger's
SAMPLERS: dict[str, Callable[[int], Any]] = {
    "tpe": lambda seed: optuna.samplers.TPESampler(
        seed=seed, multivariate=True, group=True, constant_liar=True
    ),
    "random": lambda seed: optuna.samplers.RandomSampler(seed=seed),
    "grid": lambda seed: optuna.samplers.BruteForceSampler(seed=seed),
}
PRUNERS: dict[str, Callable[[int], Any]] = {  # of the epochs of a whole trial
    "none": lambda epochs: optuna.pruners.NopPruner(),
    "asha": lambda epochs: optuna.pruners.SuccessiveHalvingPruner(
        min_resource=1, reduction_factor=3
    ),
    "median": lambda epochs: optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=1),
}
