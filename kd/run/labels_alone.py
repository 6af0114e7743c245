"""``labels_alone=true``: what a teacher's answers have added to a run's student.

The same student is trained from the same start for as many epochs by labels alone, at two learning rates, in processes of
their own below the run's folder. The better one of the two is compared with the run's student, picture by picture.
"""

from pathlib import Path

from kd.errors import UserError
from kd.launch.child import reason_in
from kd.machine import choose_device
from kd.models.own import logits_of
from kd.module.evaluation import look
from kd.module.outcomes import PictureOutcomes
from kd.progress import bar
from kd.proof.certificate import Outcomes, gain_interval
from kd.report.evaluated import labels_alone_table
from kd.report.html import write_explained
from kd.report.metric import less_is_better
from kd.report.tables import write_parts
from kd.report.terminal import print_parts
from kd.run.open import open_run
from kd.run.request import as_word, translate
from kd.run.run import Run
from kd.run.train_first import run_to_end
from kd.settings import teachers_in
from kd.storage.checkpoints import lock_run, newest_whole
from kd.storage.elsewhere import Json, mapping_of
from kd.storage.of_weights import LABELS_ALONE
from kd.storage.run_urls import only_run, words_of_only_run
from kd.storage.writing import appended, make_folder, remove

RATES = (1.0, 1 / 3)
"""Learning rates that are tried, as shares of the run's own."""
BY_LABELS: Json = {
    "labels_alone": False,
    "preflight": "off",
    "data.unlabeled": None,
    "model.distill_losses": {},
    "model.taps": {},
    "model.teacher_of": {},
    "model.task_loss_weight": 1.0,
    "monitor.prometheus_port": None,
    "monitor.actions": None,
    "monitor.max_hours": None,
    "monitor.budget": None,
}
"""Settings of a training by labels alone; its teacher gives its start and no answers, and no rule or limit ends it early."""


def compare_with_labels_alone(run: Run, folder: Path) -> None:
    """Where the settings ask for it: trains by labels alone, prints what the teacher has added, and writes it for page and
    card. What is trained already is taken; a training that was stopped resumes. A run that a rule or a limit has stopped is
    not compared: that is printed.

    Args:
        run: that has ended, now or before; its settings and what it trusts count.
        folder: of the run, with its trained student.

    Raises:
        UserError: a training failed, the folder has no student, a student answers NaN, or another process compares it.
        Stopped: by a signal; the training by labels alone has saved.
    """
    if not run.config["labels_alone"]:
        return
    summary = mapping_of(folder / "summary.json")
    if summary["status"] != "done":
        print("labels alone: not compared, as the run has not come to its end")
        return
    print(
        "labels alone: trains the same student from the same start, without its teacher's answers"
    )
    with lock_run(make_folder(folder / LABELS_ALONE)):
        _compare(run, folder, summary)


def _compare(run: Run, folder: Path, summary: Json) -> None:
    """As :func:`compare_with_labels_alone`, of a run with this ``summary.json``, by one process at a time."""
    metric = summary["primary"]
    students: dict[float, Path] = {}
    bests: dict[float, dict[str, float]] = {}
    for share in RATES:
        rate = share * run.config["optim"]["lr"]
        students[rate] = _train(run, folder, share, summary["epochs"])
        bests[rate] = mapping_of(students[rate] / "summary.json")["student"]["best_val"]
    choose = min if less_is_better(metric) else max
    rate = choose(bests, key=lambda tried: bests[tried][metric])
    alone = _outcomes(students[rate], run)
    distilled = _outcomes(folder, run)
    try:
        gain = gain_interval(alone, distilled, (str(students[rate]), str(folder)))
    except ValueError as error:
        raise UserError(f"labels_alone: {error}") from error
    found = {
        "measure": distilled.measure,
        "pictures": len(distilled.values),
        "metric": metric,
        "rates": {f"{tried:.2g}": best[metric] for tried, best in bests.items()},
        "of_start": not bests[rate]["epoch"] and not summary["student"]["best_val"]["epoch"],
        "gain": gain,
    }
    table = labels_alone_table(found)
    write_parts(folder, LABELS_ALONE, [table])
    print_parts([table])
    if (folder / "records").is_dir():
        write_explained(folder, summary)


def _train(run: Run, folder: Path, share: float, epochs: int) -> Path:
    """Trains a student by labels alone at a share of the run's learning rate, or resumes it; returns its folder.

    Nothing is trained where it is done already, for as many epochs. Its checkpoints are deleted.

    Args:
        run: whose settings count.
        folder: of the run.
        share: of :data:`RATES`.
        epochs: of the run.

    Raises:
        UserError: the training failed.
        Stopped: by a signal; the training has saved.
    """
    changes = {**BY_LABELS, "data.batch_size": run.config["data"]["batch_size"]}
    for name in ("lr", "lr_scratch"):
        own_rate = run.config["optim"][name]
        if own_rate is not None:
            changes[f"optim.{name}"] = share * own_rate
    for key in teachers_in(run.config["model"]):
        changes[f"{key}.cache"] = "off"
    home = folder / LABELS_ALONE / f"lr_{changes['optim.lr']:.2g}"
    make_folder(home)
    trained = only_run(home, run.config["recipe"])
    done = mapping_of(trained / "summary.json")
    if done.get("status") == "done" and done["epochs"] == epochs:
        return trained
    stopped = newest_whole(trained / "checkpoints")[0] is not None
    if stopped and done.get("status") != "done":
        words = [f"resume={trained}"]
    else:
        remove(home)
        make_folder(home)
        changed = [as_word(key, value) for key, value in changes.items()]
        words = [str(folder / "config.yaml"), *changed, *words_of_only_run(home)]
    log = home / "log.txt"
    print(f"labels alone: optim.lr={changes['optim.lr']:.2g} ... (log: {log})", flush=True)
    with appended(log) as output:
        streams = {"stdout": output, "stderr": output}
        what = "the present step by labels alone"
        status = run_to_end([*words, *run.trusted.words], what, streams)
    if status != 0:
        raise UserError(f"labels_alone: the training failed: {reason_in(log)}")
    remove(trained / "checkpoints")
    return trained


def _outcomes(folder: Path, run: Run) -> Outcomes:
    """What the student of a run's folder makes of each validation picture, in this process alone: the others of the run may
    have ended. ``run`` says what is trusted.
    """
    opened = open_run(str(folder), translate(run.trusted.words))
    data = opened.load_data()
    task = opened.task
    task.build(len(opened.classes), data.source.ignore_index)
    device = choose_device()
    model = opened.model.to(device).eval()
    students = {"": lambda images: logits_of(model(opened.preprocess(images)))}
    outcomes = PictureOutcomes(task.to(device))
    for batch in bar(data.eval_dataloader("val"), label="evaluating", unit=" batches"):
        seen = look(batch, task, None, students, device)
        if seen is not None and seen.index is not None:
            outcomes.update(seen.logits[""], None, seen.target, seen.index)
    found = outcomes.of("student")
    assert found is not None, "the settings refuse tasks whose pictures have no outcome"
    return found
