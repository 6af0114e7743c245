"""Where a run is and what it resumes. Only the check of a checkpoint needs torch."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kd.config.trees import flatten
from kd.errors import UserError
from kd.launch.cluster import is_rank_zero
from kd.launch.cluster import marker as job_marker
from kd.run.files import check_whole
from kd.run.request import Request
from kd.storage.checkpoints import (
    LAST,
    PREVIOUS,
    check_writable,
    damage,
    holder_of,
    in_training,
    newest_whole,
    run_folder,
)
from kd.storage.elsewhere import mapping_of, text_of
from kd.storage.objects import is_url
from kd.storage.run_urls import fetched_marker, fetched_run, folder_of_recipe, on_disk
from kd.storage.writing import guard

START = ("model.student.checkpoint", "model.student.pretrained", "model.student.inherit")
"""Settings that say where the student's first weights come from."""


@dataclass(frozen=True)
class Resumed:
    """A run that is to be resumed."""

    folder: Path
    """Folder of the run on this machine."""
    url: str = ""
    """URL of the run, or of ``latest`` beside it, by which it was named; "" for a folder."""

    @classmethod
    def named(cls, name: str, together: bool = False) -> "Resumed":
        """The run of a folder, a recipe's ``latest``, a checkpoint in a run, or the URL of one, which is fetched. What the
        folder holds is checked (:func:`kd.storage.writing.guard`).

        Args:
            name: as in ``resume=``.
            together: several machines resume the run: what one of them has alone does not count.

        Raises:
            UserError: no such folder, one without a checkpoint, or a checkpoint of weights alone.
            RefusedFile: as of the guard.
        """
        path = Path(name)
        url = ""
        if is_url(name):
            run, slash, file = name.rpartition("/checkpoints/")
            is_file = slash and file.endswith(".ckpt")
            url = run if is_file else name
            path = fetched_run(url, "resume", together=together)
            if is_file:
                path = path / "checkpoints" / file
        folder = run_folder(_run_of(path))
        if not folder.is_dir():
            raise UserError(f"resume: {folder} not found")
        checkpoints = folder / "checkpoints"
        if not any((checkpoints / file).is_file() for file in (LAST, PREVIOUS)):
            raise UserError(
                f"resume: {folder} has no checkpoints/{LAST}: it ended before its first one, so start it again"
            )
        guard(folder)
        return cls(folder, url)


def resumed_by(request: Request, together: bool = False) -> Resumed | None:
    """The run that the command line resumes, None without ``resume=``; its settings become the request's recipe unless
    one is given.

    Args:
        request: its ``recipe`` may be set.
        together: as of :meth:`Resumed.named`.

    Raises:
        UserError: as of :meth:`Resumed.named`, and for settings that were cut short.
    """
    if request.resume is None:
        return None
    resumed = Resumed.named(request.resume, together)
    if request.recipe is None:
        file = resumed.folder / "config.yaml"
        request.recipe = str(file)
        if file.is_file():
            check_whole(file)
    return resumed


@dataclass(frozen=True)
class Place:
    """Where a run's folder is, and what it resumes from."""

    runs_dir: str
    """Folder or URL of all runs."""
    runs: Path
    """The folder of the recipe's runs on this machine."""
    folder: Path | None = None
    """The run that is resumed; None: a new run."""
    checkpoint: Path | None = None
    """Checkpoint to resume from."""
    marker: Path | None = None
    """File that names the run's folder for a restarted job."""


def place_of(
    config: Mapping[str, Any],
    resumed: Resumed | None,
    job: str | None,
    command: Sequence[str],
    together: bool = False,
) -> Place:
    """Where the run goes, and what it resumes. The first process checks that it can write there. Nothing is
    created but the local copy of a run in a store, which is fetched.

    Args:
        config: the settings.
        resumed: the run that the command line resumes; None: the one that the settings name, or that this job began.
        job: name of the launcher's job; None: it has none.
        command: the command line, by which a restarted job finds its run.
        together: whether several machines resume the run together.

    Raises:
        UserError: as of :meth:`Resumed.named`; a folder that can't be written, a name that is taken, a run that another
            process trains, or none of its checkpoints is whole.
    """
    runs_dir = str(config["runs_dir"])
    if resumed is None and config["resume"]:
        resumed = Resumed.named(str(config["resume"]), together)
    if resumed is not None and (resumed.url or is_url(runs_dir)):
        runs_dir = _kept_in(resumed, runs_dir)
        if not resumed.url:  # the store may have more of it than this disk
            run = "/".join(resumed.folder.parts[-2:])
            resumed = Resumed.named(f"{runs_dir.rstrip('/')}/{run}", together)
    runs = folder_of_recipe(runs_dir, config["recipe"])
    if is_rank_zero():
        check_writable(resumed.folder if resumed else runs)
        if config["name"] and resumed is None and job is None and (runs / config["name"]).exists():
            raise UserError(f"name: there is a run {runs / config['name']} already")
    # a restarted job resumes the run that its first start has begun
    marker = job_marker(job, runs, command)
    if marker and resumed is None:
        fetched_marker(runs_dir, marker, together)
        resumed = _begun_before(marker)
    if resumed is None:
        return Place(runs_dir, runs, marker=marker)
    # the job's other processes would meet their own rank 0
    holder = holder_of(resumed.folder) if is_rank_zero() else ""
    if holder:
        raise in_training(resumed.folder, holder)
    return Place(runs_dir, runs, resumed.folder, _checkpoint(resumed.folder), marker)


class FinishedBefore(NamedTuple):
    """A resumed run that has no step left to make."""

    folder: Path
    """Folder of the run."""
    summary: dict[str, Any]
    """Content of its ``summary.json``."""
    message: str
    """What is reported of it, in a line."""


def finished_before(folder: Path, trainer: Mapping[str, Any]) -> FinishedBefore | None:
    """What a run's own files say of a resumed run that has no step left to make; None where it has one.

    Args:
        folder: of the run.
        trainer: the settings with ``max_epochs`` and ``max_steps``; None or -1: no limit.

    Raises:
        UserError: fewer epochs than a run has trained that is not done.
    """
    # a run writes a missing or damaged one again
    summary = mapping_of(folder / "summary.json")
    is_done = summary.get("status") == "done" and any(folder.glob("**/student.safetensors"))
    last = folder / "checkpoints" / LAST
    for kind in ("epochs", "steps"):
        limit = trainer[f"max_{kind}"]
        count = summary.get(kind)
        if limit is None or not isinstance(count, int) or not 0 < limit <= count:
            continue
        # with a damaged one, resuming continues from the checkpoint before, and writes this one anew
        if is_done and not (last.is_file() and damage(last, loads=False)):
            done = f"kd-train: all {count} {kind} of {folder} are done"
            more = f"trainer.max_{kind}={2 * count} trains on"
            return FinishedBefore(folder, summary, f"{done}; {more}")
        if kind == "epochs" and limit < count:
            raise UserError(
                f"trainer.max_epochs: {limit} are fewer than the {count} epochs that {folder} has trained"
            )
    return None


def _run_of(path: Path) -> Path:
    """The run's folder where a checkpoint inside it is named; any other path as it is.

    Raises:
        UserError: a checkpoint of weights alone, or one that is not there.
    """
    if path.suffix != ".ckpt" or path.parent.name != "checkpoints":
        return path
    run = path.parent.parent
    if path.name in (LAST, PREVIOUS):
        return run
    if not path.is_file():
        raise UserError(f"resume: {path} not found")
    raise UserError(
        f"resume: {path.name} holds weights alone; resume={run} resumes from {LAST}, and "
        f"model.student.checkpoint={path} starts a new run with these weights"
    )


def _kept_in(resumed: Resumed, runs_dir: str) -> str:
    """The URL of the folder of all runs in the store that holds a resumed run.

    Args:
        resumed: the run.
        runs_dir: the setting, which counts where the run was named by its folder.

    Raises:
        UserError: the folder is no copy of a run in ``runs_dir``.
    """
    if resumed.url:
        return resumed.url.rstrip("/").rsplit("/", 2)[0]
    if on_disk(runs_dir, "runs_dir").resolve() != resumed.folder.parent.parent.resolve():
        raise UserError(
            f"runs_dir: {runs_dir} has no run {resumed.folder}; give its URL (resume=), or runs_dir=FOLDER"
        )
    return runs_dir


def _begun_before(marker: Path) -> Resumed | None:
    """The run that this command of the launcher's job has begun, where it has a whole checkpoint to resume from, which the
    first process reports; else None.
    """
    if not marker.is_file():
        return None
    run = marker.parent / text_of(marker).strip()
    if newest_whole(run / "checkpoints")[0] is None:
        return None
    if is_rank_zero():
        print(f"kd-train: this job has run before: resuming {run}", flush=True)
    return Resumed(run)


def _checkpoint(folder: Path) -> Path:
    """The newest whole checkpoint of a run's folder; the first process warns of damaged ones.

    Raises:
        UserError: none is whole.
    """
    checkpoint, damaged = newest_whole(folder / "checkpoints")
    problems = "; ".join(f"{file} can't be loaded: {problem}" for file, problem in damaged.items())
    if checkpoint is None:
        raise UserError(f"resume: {problems}")
    if is_rank_zero() and (damaged or checkpoint.name != LAST):
        print(
            f"kd-train: warning: {problems or 'last.ckpt is gone'}; resuming from {checkpoint}",
            file=sys.stderr,
        )
    return checkpoint.resolve()


def check_start(run: Path, config: Mapping[str, Any]) -> None:
    """Refuses to turn the weights' average on or off in a resumed run, and to give its student another start.

    A setting of the start that was or is ``auto`` is not compared.

    Args:
        run: folder of the run that is resumed; a missing or damaged configuration there is not checked.
        config: of this run.

    Raises:
        UserError: names ``model.ema_decay``, or a setting of :data:`START`.
    """
    before = flatten(mapping_of(run / "config.yaml"))  # it may be damaged
    if not {"model.ema_decay", "model.student.arch"} <= before.keys():
        return
    settings = flatten(config)
    decays = [each["model.ema_decay"] for each in (before, settings)]
    if None in decays and decays != [None, None]:  # the average is what was validated
        raise UserError(
            f"model.ema_decay: can't be turned on or off in a resumed run ({decays[0]} before), got {decays[1]}"
        )
    for key in START:
        then = before.get(key)
        now = settings[key]
        if then != now and "auto" not in (then, now):
            raise UserError(
                f"{key}: has no effect on a resumed run: it starts from its checkpoint ({then} before), got {now}"
            )
