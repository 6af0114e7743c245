"""The two ways to a run: :meth:`Run.of` settings, to train it; :meth:`Run.open` a folder, to use its student."""

import atexit
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kd.launch import sagemaker
from kd.launch.child import PARENT
from kd.launch.cluster import Cluster, is_rank_zero, recognise
from kd.machine import cache_dir, log_nccl
from kd.run.keys import arguments
from kd.run.place import Place, check_start, place_of, resumed_by
from kd.run.request import Request, merge, translate
from kd.storage.mirror import Mirror
from kd.storage.objects import is_url
from kd.storage.run_urls import finished_at

if TYPE_CHECKING:
    from kd.ship.finished import FinishedRun

DRAW = """\
import contextlib, pathlib, sys
from kd.launch.child import end_with_parent
end_with_parent()
with contextlib.suppress(Exception):  # the run itself builds the set too, and reports what fails
    from kd.data.foodtag import build
    build(pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:]))
"""


class Run:
    """A run of a command line's settings. They are parsed; ``cli.build`` makes data, module and trainer."""

    place: Place

    def __init__(self, args: list[str], overrides: Sequence[str] = ()) -> None:
        from kd.run.parser import KDCLI
        from kd.run.streams import quiet_libraries

        quiet_libraries()
        self._overrides, self.cli = overrides, KDCLI(args)
        self.config = self.cli.as_dict()

    @classmethod
    def of(cls, request: Request) -> "Run":
        """The run of a command line: settings are resolved and checked; nothing is written.

        Raises:
            UserError: a mistake in them.
        """
        return cls(request.parser_args(), request.overrides)

    def with_teacher(self) -> list[str]:
        """Adds what the teachers' files say of themselves, and the teacher that is trained first."""
        from kd.run.train_first import teacher_settings, what_files_say

        self.cli.change(what_files_say(self.config, self._overrides))
        trained = teacher_settings(
            self.cli.as_dict(), self._overrides, settings_of, self.cli.trusted
        )
        self.cli.change(trained)
        self.config = self.cli.as_dict()
        return [f"{key}={value or 'null'}" for key, value in trained.items()]

    @classmethod
    def to_train(cls, request: Request) -> "Run":
        """The run that a command line describes, in its place, with all objects; :func:`kd.run.fit.fit` trains it."""
        cluster = join_cluster(request)
        machines = request.value_of("trainer.num_nodes") or ""
        together = (machines.isdigit() and int(machines) > 1) or (
            cluster is not None and cluster.num_nodes > 1
        )
        given = resumed_by(request, together)
        args = request.parser_args()
        if request.check_read().get("data.source") == "FoodTagMini" and is_rank_zero():
            _draw_ahead(cache_dir())
        run = cls(args, request.overrides)
        by_url = is_url(run.config["runs_dir"]) or bool(given and given.url)
        # a later job of SageMaker's may get its folder
        job = (
            "checkpoints"
            if sagemaker.container() and not by_url
            else cluster.job
            if cluster
            else None
        )
        run.place = place_of(vars(run.cli.config), given, job, request.overrides, together)
        if run.place.folder:
            check_start(run.place.folder, run.config)
        run.with_teacher()
        mirror = Mirror(run.place.runs_dir) if is_url(run.place.runs_dir) else None
        run.cli.change({"resume": str(run.place.folder) if run.place.folder else None})
        run.cli.recipe_lr = request.recipe_lr()
        run.cli.build(cluster, run.place.marker)
        run.cli.folder.mirror = mirror
        return run

    @staticmethod
    def settings(file: Path | None, request: Request) -> tuple[dict[str, Any], list[str]]:
        """A run folder's settings with a command line's put in, as plain values; without a file, of its recipe.

        Returns:
            The settings, and the names that the user trusts in them beside the list of classes.
        """
        own = replace(request, overrides=[*request.overrides], cluster=[], here=True)
        config = (
            Run.of(own).config if file is None and request.recipe is not None else own.over(file)
        )
        return config, own.vouched

    @staticmethod
    def open(place: str, request: Request | None = None) -> "FinishedRun":
        """A finished run. Its student's file says what the student and its task are.

        Of ``config.yaml`` nothing is built but the data's source, and the settings of teachers where one is measured.
        """
        from kd.run.build import data_of, student_in, task_in, teacher_specs
        from kd.run.streams import quiet_libraries
        from kd.ship.export.student import read_metadata
        from kd.ship.finished import FinishedRun

        quiet_libraries()
        given = request or Request()
        folder = finished_at(place, "config.yaml")
        file = folder / "student.safetensors"
        config, trusted = Run.settings(folder / "config.yaml", given)
        model, preprocess, classes = student_in(file, trusted)
        if classes and read_metadata(file).get("classifies") == "false":
            model.reset_classifier(0)  # type: ignore[operator]
            classes = []
        return FinishedRun(
            folder,
            config,
            model,
            preprocess,
            classes,
            task=task_in(file, trusted),
            load_teachers=lambda: teacher_specs(config, trusted),
            load_data=lambda: data_of(config, trusted),
        )


def settings_of(items: list[str]) -> dict[str, Any]:
    """The resolved settings of a command line's words.

    Raises:
        UserError: a mistake in them.
    """
    return Run.of(translate(items)).config


def take_over(container: sagemaker.Container, request: Request) -> None:
    """Changes a command line that SageMaker has started: hyperparameters become settings, channels become folders.

    Raises:
        UserError: a setting is on the command line too, or a channel is missing.
    """
    if request.rest == ["train"]:  # what SageMaker starts an image with that names no command
        request.rest = []
    merge(request, container.settings, "SageMaker's hyperparameters")
    request.overlays = [sagemaker.folder_of(name) for name in request.overlays]
    request.recipe = sagemaker.folder_of(request.recipe) if request.recipe else None
    if request.value_of("runs_dir") is None:
        request.overrides.append(f"runs_dir={container.runs_dir}")


def join_cluster(request: Request) -> Cluster | None:
    """The launcher's job; where it starts one process on each machine, unless the settings say how many there are."""
    cluster = recognise()
    if cluster is None:
        return None
    if request.value_of("trainer.num_nodes") is None:
        request.cluster = cluster.arguments()
    elif not cluster.starts_each_process:
        return None
    for name, value in cluster.variables.items():
        os.environ.setdefault(name, value)
    if cluster.num_nodes > 1:
        log_nccl()
    return cluster


def _draw_ahead(folder: Path) -> None:
    """Begins to draw FoodTag's pictures beside the imports, where they are missing; the run waits for the rest."""
    sizes = [argument.default for argument in arguments("FoodTagMini").values()]
    if not any(folder.glob(f"foodtag-mini-*-{'x'.join(sizes)}")):
        command = [sys.executable, "-c", DRAW, str(folder), *sizes]
        drawing = subprocess.Popen(
            command, env={**os.environ, PARENT: str(os.getpid())}, start_new_session=True
        )
        atexit.register(drawing.terminate)
