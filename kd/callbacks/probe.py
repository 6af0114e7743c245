"""k nearest neighbours and a ridge probe: how good features are, on labelled pictures that nothing is trained with."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from kd.callbacks.context import RunContext, is_trial_validation
from kd.callbacks.preflight import Preflight
from kd.module.evaluation import Labelled, look_at
from kd.progress import bar
from kd.report.metric import format_metric
from kd.teachers import dtype_for
from kd.teachers.answer import ALL


class FeatureProbe(Callback):
    """Measures the teachers once, and the student in each validation, on the pictures of ``data.probe``.

    All processes take part: each runs its share of the pictures. Without ``data.probe`` nothing happens. Students have no
    classifier here: what their ``logits`` gives is their features.

    Args:
        preflight: keeps what is measured of teachers, as ``teacher_val`` and ``members``.
    """

    def __init__(self, preflight: Preflight) -> None:
        self.preflight = preflight
        self._loader: DataLoader | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Measures each teacher and, of several, their features side by side, each scaled to length 1.

        The results replace the preflight's. Only of a fit, and after the preflight's own ``setup``; all processes must call
        it. The first one prints a line for each.
        """
        run = RunContext.of(trainer)
        if (
            stage != "fit"
            or run.module.data is None
            or run.data.probe is None
            or run.module.teacher is None
        ):
            return
        keep = not run.module.resumed and run.student.start == "inherited"
        run.teacher.to(run.device, dtype_for(str(trainer.precision)), keep)
        members = dict(run.teacher.members)
        seen = self._look(run, members)
        if ALL not in members:
            seen.features[ALL] = torch.cat(
                [F.normalize(x, dim=1) for x in seen.features.values()], dim=1
            )
        accuracies = {name: seen.accuracy(name) for name in seen.features}
        several = len(members) > 1
        self.preflight.teacher_val = accuracies[ALL]
        self.preflight.members = {name: accuracies[name] for name in members} if several else {}
        if not trainer.is_global_zero:
            return
        classified = len(seen.class_ids) - seen.bank
        shown = accuracies
        if not several:
            shown = {next(iter(members)): accuracies[ALL]}
        for name, values in shown.items():
            who = "the teachers together"
            if name or not several:
                who = f"teacher {name}".strip()
            knn, ridge = (format_metric(metric, value) for metric, value in values.items())
            print(
                f"probe: {who}: k-NN {knn}, ridge probe {ridge} of {classified} pictures",
                flush=True,
            )

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measures the student, and logs ``val/knn1`` and ``val/probe1``, shares in 0..1.

        Not in Lightning's trial validation of a few batches.
        """
        run = RunContext.of(trainer)
        if is_trial_validation(trainer) or run.data.probe is None:
            return
        seen = self._look(run, {"": run.student.logits})
        values = {}
        for metric, value in seen.accuracy("").items():
            values[f"val/{metric}"] = value
        pl_module.log_dict(values, rank_zero_only=False, sync_dist=False)

    def _look(self, run: RunContext, models: Mapping[str, Callable[[Tensor], Tensor]]) -> Labelled:
        """The features that models, by name, give for the labelled pictures; all processes must call it.

        Each process runs the models on its share, and all get the features of all pictures. The first one shows a bar.
        """
        # once: it may have processes of its own
        self._loader = self._loader or run.data.eval_dataloader("probe")
        hidden = not run.trainer.is_global_zero
        batches = bar(self._loader, label="labelled pictures", unit=" batches", disable=hidden)
        return look_at(models, run.data, batches, run.device)
