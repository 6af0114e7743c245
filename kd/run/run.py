"""A run to train: its settings, and what is built of them. :mod:`kd.run.open` opens a finished one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kd.launch.cluster import Cluster
from kd.run.checks import check_values
from kd.run.files import as_yaml
from kd.run.place import FinishedBefore, Place
from kd.run.request import Request, translate
from kd.run.resolve import Tree, change
from kd.run.trust import Trust
from kd.storage.shown import remember_secrets

if TYPE_CHECKING:
    from pytorch_lightning import Trainer
    from pytorch_lightning.loggers import Logger

    from kd.callbacks.run_folder import RunFolder
    from kd.callbacks.summary import Summary
    from kd.data.datamodule import DistillationDataModule
    from kd.data.splits import Splits
    from kd.module.distillation import DistillationModule
    from kd.monitor.keys import MonitorSpec


class Run:
    """A run: its settings, and once it is built its data, module, trainer and folder.

    Args:
        config: resolved settings (:mod:`kd.run.resolve`).
        trusted: what the user trusts beside the list of classes.
        overrides: ``key=value`` items of the command line.
    """

    place: Place
    """Set by ``kd-train`` alone, before it is built."""
    # set by kd.run.build.build
    data: "DistillationDataModule"
    module: "DistillationModule"
    monitor: "MonitorSpec"
    trainer: "Trainer"
    folder: "RunFolder"
    summary: "Summary"
    finished: FinishedBefore | None = None
    """Of a resumed run that has no step left to make: then nothing else is built."""
    splits: "Splits | None" = None
    """The pictures, where they were listed before torch was imported; :func:`kd.run.build.build` takes them over, once."""
    trainer_arguments: dict[str, Any]
    """Of Lightning's Trainer, by name, without kd's own callbacks; likewise set by the build."""
    loggers: list[dict[str, Any]]
    """Of ``trainer.logger`` those that are classes, each ``{"class_path", "init_args"}``: they are built once the run has a
    folder."""
    build_loggers: "Callable[[list[dict[str, Any]]], list[Logger]]"
    """Builds them, with the folder in their arguments."""

    def __init__(self, config: Tree, trusted: Trust, overrides: Sequence[str] = ()) -> None:
        """Checks the values; nothing is built.

        Args:
            config: all settings, typed.
            trusted: classes that the user trusts.
            overrides: words ``KEY=VALUE`` of the command line.

        Raises:
            UserError: values that do not fit each other (:func:`kd.run.checks.check_values`).
        """
        remember_secrets(config)  # from here on nothing prints them
        check_values(config)
        self.config = config
        self.trusted = trusted
        self.overrides = overrides
        self.cluster: Cluster | None = None  # the launcher's job; None: this machine alone
        self.marker: Path | None = None  # file that names the run's folder for a restarted job
        # a line about the precision that kd has chosen; "": it was set, or the choice is the usual one
        self.precision_note = ""

    @classmethod
    def of(cls, request: Request) -> "Run":
        """The run of a command line: settings are resolved and checked; nothing heavy is imported, nothing written.

        Raises:
            UserError: a mistake in them.
        """
        config = request.resolved(trains=True)
        return cls(config, request.vouched, request.overrides)

    def change(self, settings: Mapping[str, Any]) -> None:
        """Sets values in the resolved settings, by dotted keys; built objects do not follow.

        The tree in :attr:`config` is replaced, not changed.

        Raises:
            UserError: a wrong key or value.
        """
        self.config = change(self.config, [settings], self.trusted)

    @property
    def written(self) -> Tree:
        """The settings as the run's folder has them: ``name`` and ``resume``, which are of one start, are null."""
        return {**self.config, "name": None, "resume": None}

    def as_yaml(self) -> str:
        """The resolved settings as the text of a ``config.yaml``; ``kd-train FILE`` repeats the run."""
        return as_yaml(self.written)

    @staticmethod
    def settings(file: Path | None, request: Request) -> tuple[dict[str, Any], Trust]:
        """A run folder's settings with a command line's put in, as plain values; without a file, of its recipe.

        Args:
            file: the run's ``config.yaml``; None: the request's recipe counts, or the defaults without one.
            request: is not changed; what its launcher sets does not count.

        Returns:
            The settings, and what the user trusts in them; in other files (:meth:`kd.run.trust.Trust.of`).

        Raises:
            UserError: a mistake in them, or code that is not trusted.
        """
        settings = replace(
            request, overrides=[*request.overrides], notes=[*request.notes], cluster={}, here=True
        )
        if file is not None:
            settings.recipe = str(file)
        config = settings.resolved()
        if file is None and request.recipe is not None:
            check_values(config)
        return config, settings.vouched


def settings_of(items: list[str]) -> dict[str, Any]:
    """The resolved settings of a command line's words.

    Raises:
        UserError: a mistake in them.
    """
    return Run.of(translate(items)).config
