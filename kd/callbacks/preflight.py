"""Measures the teacher before the first step: a wrong one costs the whole run.

Every teacher answers the validation pictures once. One that is no better than guessing is *weak*: the run ends, or
warns (``preflight``). What would mend it, another order of classes, is its *remedy*. The answers are kept for the
student's agreement.
"""

import copy
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, SupportsFloat

import numpy as np
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor

from kd.callbacks.class_order import MOST_CLASSES, Confusions, better_order
from kd.callbacks.context import RunContext
from kd.callbacks.host_copies import HostCopies
from kd.clock import part_of_the_start
from kd.errors import UserError
from kd.models import count_parameters
from kd.module.evaluation import look
from kd.processes import total
from kd.progress import bar
from kd.report.metric import format_metric
from kd.storage.writing import write_text
from kd.tasks import Task
from kd.tasks.base import TargetCounts
from kd.tasks.fidelity import MOST_LOGITS, KeptLogits
from kd.teachers import RunTeacher, dtype_for
from kd.teachers.answer import ALL
from kd.teachers.inspect_cache import differing_from_others


@dataclass
class JudgedTeacher:
    """A teacher, or all of several together, and what its answers to the validation pictures are worth."""

    name: str
    """Of the teacher; "" for all together, or the only one."""
    judge: Task
    """Counts its metrics."""
    confusions: Confusions | None
    """By which another order of its classes is found; None where none is searched."""
    metrics: dict[str, float] = field(default_factory=dict)
    """By name, once all pictures are answered."""
    verdict: str = ""
    """How it compares with guessing, for a message; "" where it is better."""
    is_weak: bool = False
    """It is no better than guessing."""
    remedy: str = ""
    """What is off with it, and the key that mends it: the end of a message, from its semicolon on; "" where nothing was
    found."""


class Preflight(Callback):
    """Measures the teacher on the validation set, and keeps its answers for the student's agreement.

    It runs before the student inherits and before the run's folder is made.
    """

    def __init__(self, mode: str | bool = "stop", lists: Path | None = None) -> None:
        """Nothing is measured yet.

        Args:
            mode: the setting ``preflight``: ``stop`` ends the run for a weak teacher, ``warn`` only reports it, ``off``
                (or False, as YAML reads it) measures nothing before training.
            lists: folder for lists of a teacher's classes in a better order, which a remedy names; None: none is
                written, and no order is a remedy.
        """
        self.mode = mode
        self.lists = lists
        self.teacher_val: dict[str, float] = {}
        """Metrics of all teachers together, by name; {} where nothing was measured."""
        self.members: dict[str, dict[str, float]] = {}
        """Likewise of each of several; {} for a single one."""
        self.remedy = ""
        """What mends the teacher, for a message, of several each one's joined by semicolons; "" where nothing is off."""
        self.pictures = 0
        """How many pictures these metrics are of, over all processes; 0 where nothing was measured."""
        self._targets = (
            0  # that were seen: pictures whose class is known, pixels of masks, else pictures
        )
        self._keep_as_it_comes = False  # with ``off``: from the validations, which run the teacher
        self.kept: KeptLogits | None = None
        """The logits of all teachers together, of this process's share, for comparing the student; None: none are kept."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Runs the teacher over this process's share of the validation set before training; all processes must call it.

        The results go to :attr:`teacher_val`, :attr:`members`, :attr:`remedy`, :attr:`kept` and the module's validation,
        which then does not run the teacher again; the first process prints a line for each teacher. Nothing is measured
        without a teacher, a validation or a fit, with ``mode`` off (then the validations fill :attr:`kept`), and of a
        teacher without a classifier.

        Raises:
            UserError: the teacher is too weak to teach, and ``mode`` is ``stop``.
        """
        run = RunContext.of(trainer)
        teacher = run.module.teacher
        if teacher is None or trainer.limit_val_batches == 0 or stage != "fit":
            return
        is_off = self.mode in ("off", False)
        has_data = run.module.data is not None
        if not teacher.has_head:
            is_probed = has_data and run.data.probe is not None
            if trainer.is_global_zero and not is_off and not is_probed:
                why = "has no classifier, so it is not scored; data.probe.root=DIR scores its features"
                print(f"preflight: teacher {teacher.arch} {why}", flush=True)
            return
        if is_off and not has_data:
            return
        self.kept = self._nothing_kept_yet(run)
        self._keep_as_it_comes = is_off
        if is_off:
            return
        # the weights as loaded are kept where the student inherits them afterwards
        keep = not run.module.resumed and run.student.start == "inherited"
        teacher.to(run.device, dtype_for(str(trainer.precision)), keep)
        teachers = self._judge_teachers(trainer, run, self.kept)
        self.teacher_val = next(each.metrics for each in teachers if not each.name)
        self.members = {each.name: each.metrics for each in teachers if each.name}
        remedies = [each.remedy.removeprefix("; ") for each in teachers if each.remedy]
        self.remedy = "; ".join(remedies)
        for each in teachers:
            self._report(trainer, run, each)
        self._report_limit(trainer)

    def _report_limit(self, trainer: Trainer) -> None:
        """The first process prints what a run lacks where the teacher's logits did not fit; else nothing is printed."""
        if self.kept is not None and self.kept.full and trainer.is_global_zero:
            print(
                f"preflight: the teacher's logits of the validation pictures take more than {MOST_LOGITS >> 20} MB in a "
                "process, so val/kl is not measured, nor are the page's agreement and examples (trainer.limit_val_batches "
                "takes fewer pictures)",
                flush=True,
            )

    @staticmethod
    def _nothing_kept_yet(run: RunContext) -> KeptLogits:
        """An empty store of the teacher's logits, with room for this process's share of the validation pictures."""
        dtype = torch.float16
        if run.module.task.answers == "numbers":  # they may exceed what float16 holds
            dtype = torch.float32
        batches = run.data.eval_batches("val")
        pictures_of_rank = math.ceil(batches.length / batches.world_size)
        used_pictures = batches.used * batches.batch_size
        return KeptLogits(MOST_LOGITS, dtype, min(pictures_of_rank, used_pictures))

    def about_teacher(self, teacher: RunTeacher) -> dict[str, Any]:
        """A teacher's entry in a run's records: ``arch``, ``params`` (how many), ``val`` (metrics by name), and, where they
        are known, ``pictures`` (how many these metrics are of) and ``remedy``.
        """
        about = {
            "arch": teacher.arch,
            "params": count_parameters(teacher.model),
            "val": self.teacher_val,
        }
        if self.pictures:
            about["pictures"] = self.pictures
        if self.remedy:
            about["remedy"] = self.remedy
        return about

    def keep_as_it_comes(self, run: RunContext) -> None:
        """Without a preflight (``off``): keeps the teacher's logits of the validation batch that was just measured.

        Students are then compared with them as after a preflight, and the same epoch is the best one. Called after each
        batch of a validation; after :meth:`all_came`, and where a preflight has run, it does nothing.
        """
        taught = run.module.validation.taught
        if self._keep_as_it_comes and self.kept is not None and taught is not None:
            self.kept.add(*taught)

    def all_came(self, trainer: Trainer) -> None:
        """Called after a whole validation: no more of the teacher's logits are kept. Where they did not fit, that is
        reported, once.
        """
        if self._keep_as_it_comes:
            self._report_limit(trainer)
        self._keep_as_it_comes = False

    @part_of_the_start("preflight: teacher on val")
    def _judge_teachers(
        self, trainer: Trainer, run: RunContext, kept: KeptLogits
    ) -> list[JudgedTeacher]:
        """Runs the teachers over the validation pictures, judges each and looks for remedies: all processes must call it.

        A teacher is judged only where at least half of the classes were shown. One that reaches no more than chance is
        weak where so many pictures prove it. The teacher's decisions go to the module's validation, which then does not run
        the teacher; :attr:`pictures` is set.

        Args:
            trainer: for the sums over processes.
            run: its task judges, on copies whose counts are their own.
            kept: takes the logits of all teachers together, of this process's share.

        Returns:
            All together, or the only one, then each of several.
        """
        info = run.student.data
        task = run.module.task
        count = len(info.classes)
        members = run.teacher.members
        searches = task.one_class and count <= MOST_CLASSES
        teachers = []
        for name in {"": None, **members}:
            judge = copy.deepcopy(task).to(run.device)
            judge.reset()
            confusions = None
            if searches and name in members:
                confusions = Confusions(count).to(run.device)
            teachers.append(JudgedTeacher(name, judge, confusions))
        targets = TargetCounts(count, info.ignore_index).to(run.device)
        run.module.validation.known, seen_here = self._measure(
            trainer, run, teachers, targets, kept
        )
        self.pictures = int(total(trainer.strategy, seen_here))

        counts, all_targets = targets.of_all_batches()
        shown = int((counts > 0).sum())
        if task.one_class:  # of the whole split
            ids = torch.as_tensor(run.data.split("val").targets)
            counts = torch.bincount(ids[ids >= 0], minlength=count)
        counts = counts.cpu()
        self._targets = int(all_targets)
        chance = task.chance(counts, self._targets)
        for each in teachers:
            each.metrics = rounded_metrics(each.judge.compute())
            reached = each.metrics[task.primary]
            if each.confusions is not None:
                member = members[each.name]
                each.remedy = self._order_remedy(trainer, member, each.confusions, info.classes)
            if 2 * shown < count:
                each.verdict = f"; they show {shown} of {count} classes, too few to judge it"
            elif reached <= chance:
                each.is_weak = task.shows_bad_teacher(reached, counts, self.pictures)
                may_reach = format_metric(task.primary, chance)
                each.verdict = f", no better than guessing, which may reach {may_reach} by luck"
                if not each.is_weak:
                    each.verdict = f"; {self.pictures} pictures can't tell whether that is better than guessing"
                if task.one_class and not searches and each.name in members:
                    each.remedy = (
                        f"; the order of more than {MOST_CLASSES:,} classes is not searched: a list of the teacher's in "
                        f"its own order goes to {members[each.name].key}.classes"
                    )
        return teachers

    def _order_remedy(
        self, trainer: Trainer, teacher: RunTeacher, confusions: Confusions, classes: list[str]
    ) -> str:
        """The end of a message that names another order of the teacher's classes, in which it is clearly better, and the
        setting for it; "" where none was found, or there is no folder for its list.

        The first process writes the classes in that order to a file in :attr:`lists`. All processes must call it.
        """
        order = better_order(confusions.compute())
        if order is None or self.lists is None:
            return ""
        names = teacher.names_of_its_columns([classes[i] for i in order.classes])
        if names is None:
            return ""
        file = self.lists / f"{teacher.key.split('.')[-1]}_classes.json"
        if trainer.is_global_zero:
            write_text(file, json.dumps(names, indent=1) + "\n")
        reached = f"in the one found it reaches {order.reached:.1%}"
        return f"; its classes are in another order, {reached}: {teacher.key}.classes={file}"

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks that all answers of the next epoch are cached, for teachers that must not run in training (``cache=only``).

        Of each batch it counts the records that are written, by their first bytes; a damaged record is found only when it is
        read. All processes must call it.

        Raises:
            UserError: names the cache's key, and how many answers are missing in all processes together.
        """
        caches = [cache for cache in RunContext.of(trainer).module.caches.values() if cache.only]
        if not caches:
            return
        batches: Any = trainer.train_dataloader.batch_sampler  # type: ignore[union-attr]
        missing_here = dict.fromkeys(caches, 0)
        for batch in islice(batches, int(trainer.num_training_batches)):
            _, view = batch[0]  # the same of the whole batch
            index = np.array([number for number, _ in batch])
            for cache in caches:
                missing_here[cache] += int((~cache.written(view, index)).sum())
        for cache, missing_of_rank in missing_here.items():
            missing = int(total(trainer.strategy, missing_of_rank))
            if missing:
                raise UserError(
                    f"{cache.live.key}.cache: only, but {missing} of an epoch's answers are missing in {cache.place}; "
                    f"kd-cache fills it{differing_from_others(cache)}"
                )

    def _measure(
        self,
        trainer: Trainer,
        run: RunContext,
        teachers: list[JudgedTeacher],
        targets: TargetCounts,
        kept: KeptLogits,
    ) -> tuple[Tensor, int]:
        """Runs the teachers over the validation batches; ``teachers``, ``targets`` and ``kept`` add up what they read.

        Returns:
            The teacher's decisions by the pictures' numbers, ``(pictures of the split, ...)``: 0 but for this process's
            share; and how many pictures this process has seen, without padding.
        """
        data = run.data
        batches = data.eval_batches("val")
        pictures = len(data.split("val").targets)
        shown = bar(
            label="preflight: teacher on val",
            total=batches.pictures,
            disable=not trainer.is_global_zero,
        )
        copies = HostCopies[Tensor]()
        decided: Tensor | None = None
        seen_here = 0
        for batch, _ in zip(data.val_dataloader(), range(batches.used), strict=False):
            of_all_processes = len(batch["index"]) * trainer.world_size  # with padding
            left = batches.pictures - shown.n
            shown.update(min(of_all_processes, left))
            seen = look(batch, run.module.task, run.teacher, {}, run.device)
            if seen is None or seen.index is None or seen.decided is None:
                continue
            seen_here += len(seen.index)
            taught = seen.taught
            targets.update(seen.target)
            copies.add(seen.index, seen.decided, taught[ALL].to(kept.dtype))
            for each in teachers:
                answers = taught[each.name]
                each.judge.update(answers, seen.target, None)
                if each.confusions is not None:
                    each.confusions.update(answers.argmax(1), seen.target, seen.index)
            decided = _keep_arrived(copies.take(), pictures, kept, decided)
        shown.close()
        decided = _keep_arrived(copies.take(wait=True), pictures, kept, decided)
        if decided is None:
            # padding alone: the other processes do not run the teacher again, so nor may this one
            decided = torch.zeros(pictures, dtype=torch.long)
        return decided, seen_here

    def _report(self, trainer: Trainer, run: RunContext, judged: JudgedTeacher) -> None:
        """Reports a teacher's accuracy, or of all together, in a line by the first process.

        Args:
            trainer: says which process prints.
            run: its teachers and task.
            judged: the teacher.

        Raises:
            UserError: it is too weak to teach, and ``mode`` is ``stop``.
        """
        task = run.module.task
        members = run.teacher.members
        name = f"ensemble {run.teacher.arch}"
        if judged.name in members:
            name = members[judged.name].arch
        if judged.name:
            name = f"{judged.name} ({name})"
        value = judged.metrics[task.primary]
        score = task.judged(value, self._targets)
        if judged.is_weak and self.mode == "stop":
            remedy = judged.remedy or " (wrong class order, size or weights?)"
            raise UserError(
                f"model.teacher: {name} {score}{judged.verdict}{remedy}; preflight=warn distils from it all the same"
            )
        if trainer.is_global_zero:
            share = f" ({value:.1%})" if task.one_class else ""
            line = f"preflight: teacher {name} {score}{share}{judged.verdict}{judged.remedy}"
            print(line, flush=True)


def _keep_arrived(
    arrived: Iterator[tuple[Tensor, list[Tensor]]],
    pictures: int,
    kept: KeptLogits,
    decisions: Tensor | None,
) -> Tensor | None:
    """Adds what has come to the host: logits, and decisions by the pictures' numbers.

    Args:
        arrived: of each batch the pictures' numbers ``(N,)``, and [decisions ``(N, ...)``, logits ``(N, C, ...)``].
        pictures: of the validation split.
        kept: takes the logits.
        decisions: so far, ``(pictures, ...)``, changed in place; None before the first batch.

    Returns:
        The decisions with those that have come; None while no batch has.
    """
    for index, (decided, logits) in arrived:
        kept.add(index, logits)
        if decisions is None:
            decisions = torch.zeros(pictures, *decided.shape[1:], dtype=decided.dtype)
        decisions[index] = decided
    return decisions


def rounded_metrics(metrics: Mapping[str, SupportsFloat]) -> dict[str, float]:
    """Metrics as plain numbers with six decimals; whole numbers stay whole."""
    return {
        name: value if isinstance(value, int) else round(float(value), 6)
        for name, value in metrics.items()
    }
