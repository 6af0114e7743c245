"""The two ways to a run: :meth:`Run.of` settings, to train it; :meth:`Run.open` a folder, to use its student."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kd.launch.cluster import Cluster
from kd.run.checks import check_values
from kd.run.files import as_yaml
from kd.run.place import FinishedBefore, Place
from kd.run.request import Request, translate
from kd.run.resolve import Tree, change
from kd.run.trust import check_machines
from kd.storage.run_urls import finished_at

if TYPE_CHECKING:
    from pytorch_lightning import Trainer
    from pytorch_lightning.loggers import Logger

    from kd.callbacks.rank_watch import RankWatch
    from kd.callbacks.run_folder import RunFolder
    from kd.callbacks.summary import Summary
    from kd.data.datamodule import DistillationDataModule
    from kd.data.splits import Splits
    from kd.module.distillation import DistillationModule
    from kd.ship.finished import FinishedRun


class Run:
    """A run: its settings, and once it is built its data, module, trainer and folder.

    Args:
        config: resolved settings (:mod:`kd.run.resolve`).
        trusted: what the user trusts beside the list of classes.
        overrides: ``key=value`` items of the command line.
    """

    place: Place
    data: "DistillationDataModule"
    module: "DistillationModule"
    trainer: "Trainer"
    folder: "RunFolder"
    summary: "Summary"
    rank_watch: "RankWatch"
    finished: FinishedBefore | None = None
    """Of a resumed run that has no step left to make: then nothing else is built."""
    splits: "Splits | None" = None
    """The pictures, where they were listed before torch was imported."""
    trainer_arguments: dict[str, Any]
    loggers: list[dict[str, Any]]

    def __init__(
        self, config: Tree, trusted: Sequence[str] = (), overrides: Sequence[str] = ()
    ) -> None:
        """Checks the values; nothing is built.

        Args:
            config: all settings, typed.
            trusted: classes that the user trusts.
            overrides: words ``KEY=VALUE`` of the command line.
        """
        check_values(config)
        self.config = config
        self.trusted = list(trusted)
        self.overrides = overrides
        self.cluster: Cluster | None = None
        self.marker: Path | None = None
        self.student_configs: dict[str, str] = {}
        self.recipe_lr: float | None = None  # the learning rate of the recipe's file
        self.precision_note = ""

    @classmethod
    def of(cls, request: Request) -> "Run":
        """The run of a command line: settings are resolved and checked; nothing heavy is imported, nothing written.

        Raises:
            UserError: a mistake in them.
        """
        config = request.resolved()
        check_machines(config, request.vouched)
        return cls(config, request.vouched, request.overrides)

    def change(self, settings: Mapping[str, Any]) -> None:
        """Sets values in the resolved settings, by dotted keys; built objects do not follow."""
        self.config = change(self.config, [settings], self.trusted)

    def build_loggers(self, specs: list[dict[str, Any]]) -> "list[Logger]":
        """Loggers with arguments, once the run has a folder."""
        from kd.run.build import built

        return [built(Any, spec, "trainer.logger", self.trusted) for spec in specs]

    @property
    def written(self) -> Tree:
        """The settings as the run's folder has them: its name and place are its own."""
        return {**self.config, "name": None, "resume": None}

    def as_yaml(self, config: Tree | None = None) -> str:
        """The resolved settings (or those of one of several students); ``kd-train FILE`` repeats the run."""
        if config is None:
            tree = self.written
        else:
            tree = {**config, "name": None, "resume": None}
        return as_yaml(tree)

    def with_teacher(self) -> list[str]:
        """Adds to the settings what the teachers' files say of themselves; trains a teacher now where one is to be first.

        Returns:
            The settings that name the trained teacher, as ``key=value`` words of another run's command line.

        Raises:
            UserError: no such file, or the teacher's training failed.
        """
        from kd.run.train_first import teacher_settings, what_files_say

        from_files = what_files_say(self.config, self.overrides)
        self.change(from_files)
        source = None if self.splits is None else self.splits.source
        trained = teacher_settings(
            self.config, self.overrides, settings_of, self.trusted, source=source
        )
        self.change(trained)
        words = []
        for key, value in trained.items():
            words.append(f"{key}={value or 'null'}")
        return words

    @staticmethod
    def settings(file: Path | None, request: Request) -> tuple[dict[str, Any], list[str]]:
        """A run folder's settings with a command line's put in, as plain values; without a file, of its recipe.

        Returns:
            The settings, and the names that the user trusts in them beside the list of classes.
        """
        settings = replace(request, overrides=[*request.overrides], cluster={}, here=True)
        if file is not None:
            settings.recipe = str(file)
        config = settings.resolved()
        if file is None and request.recipe is not None:
            check_values(config)
        return config, settings.vouched

    @staticmethod
    def open(place: str, request: Request | None = None) -> "FinishedRun":
        """A finished run. Its student's file says what the student and its task are.

        Of ``config.yaml`` nothing is built but the data's source, and the settings of teachers where one is measured.
        """
        folder = finished_at(place, "config.yaml")
        from kd.run.build import data_of, student_in, task_in, teacher_specs
        from kd.run.streams import quiet_libraries
        from kd.ship.finished import FinishedRun
        from kd.storage.student_metadata import student_metadata_in

        quiet_libraries()
        given = request or Request()
        file = folder / "student.safetensors"
        config, trusted = Run.settings(folder / "config.yaml", given)
        model, preprocess, classes = student_in(file, trusted)
        if classes and student_metadata_in(file).gives_features:
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
            load_data=lambda: data_of(config, trusted, given.listed),
        )


def settings_of(items: list[str]) -> dict[str, Any]:
    """The resolved settings of a command line's words.

    Raises:
        UserError: a mistake in them.
    """
    return Run.of(translate(items)).config
