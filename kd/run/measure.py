"""What ``kd-eval`` measures: the student of a run, or the model in a weights file, on one split of pictures."""

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from kd.callbacks.fidelity import write_fidelity
from kd.data.datamodule import DistillationDataModule
from kd.data.sources import classes_below, identity, printable, said
from kd.errors import UserError
from kd.machine import choose_device
from kd.models import Prepare, TeacherSpec, count_parameters
from kd.models.weights import about
from kd.module.evaluation import Answers, Listener, look_at, metrics_of_student
from kd.module.outcomes import PictureOutcomes
from kd.progress import bar
from kd.report.evaluated import (
    cascade_parts,
    certificate_table,
    disputed_parts,
    evaluation_parts,
    pays_parts,
)
from kd.report.tables import Parts, Result, write_parts
from kd.run.build import data_of, student_in, task_in, task_of, teacher_specs
from kd.run.cascade import Sureness, cascade_of
from kd.run.certify import (
    add_looks,
    cautions_about,
    certificates,
    count_look,
    usual_split,
)
from kd.run.disputes import TABLE as DISPUTED_LABELS
from kd.run.disputes import Disputes
from kd.run.eval_options import EvalOptions, needs_one_class, no_teacher
from kd.run.open import open_run
from kd.run.pays import measure_pays
from kd.run.request import Request
from kd.run.run import Run
from kd.run.subject import Subject
from kd.ship.finished import FinishedRun, check_classes, measurable, teacher_of
from kd.storage.elsewhere import Json
from kd.storage.of_weights import EVALUATION, write_of_weights
from kd.storage.run_urls import names_run, run_at
from kd.storage.shown import csv_text
from kd.storage.student_metadata import is_student, student_metadata_in
from kd.storage.weights_files import read_metadata, weights_file
from kd.storage.writing import json_text, write_text
from kd.tasks import Task
from kd.tasks.features import rank_of_gram
from kd.teachers import FrozenTeacher, attach_answers, build_teacher

Models = dict[str, Callable[[Tensor], Tensor]]
"""By name, what gives features ``(N, D)`` of pictures."""
SAME_PICTURES = ("data.batch_size=", "data.num_workers=", "trainer.")
"""What a setting of ``kd-eval`` begins with that changes neither the pictures nor the teacher."""
WEIGHTS_KEY = re.compile(r"(?<![\w./-])weights\.")
"""Before a key in a message about a weights file, whose settings are typed without it."""
OUTER_KEY = re.compile(r"(?<![\w./-])model\.teacher\.")
"""What comes before a setting of a weights file in messages of a run's settings; in a path it is no such thing."""


def _written(
    results: list[Json],
    runs: Sequence[Path | None],
    options: EvalOptions,
    notes: Iterable[str] = (),
) -> Result:
    """Writes each model's figures into its run's folder, certificates also as tables of page and card.

    All figures go to ``options.out``, too, where that is JSON. A CSV there is written by the caller; the result lists its
    file in either case.

    Args:
        results: of each model.
        runs: folder of each; None for a bare weights file, which has none.
        options: of the command.
        notes: of the sources; each is printed once.

    Returns:
        The result, which the caller gives its tables: the content of ``eval_*.json`` (:func:`measure`), with ``pays=``
        the figures of its starts; of several models a list.
    """
    content = results[0] if len(results) == 1 else results
    result = Result(content, notes=[*dict.fromkeys(notes)])
    for figures, run in zip(results, runs, strict=True):
        if run is None:
            continue
        result.files.append(write_of_weights(run, options.file, figures))
        certificate = figures.get("certificate")
        if certificate:
            pictures = options.file.removesuffix(".json").removeprefix(EVALUATION)
            table = certificate_table(certificate, certificate["pictures_of"])
            write_parts(run, f"certificate_{pictures}", [table])
    if options.out is not None:
        result.files.append(options.out)
        if options.out.suffix == ".json":
            options.out.write_text(json_text(content))
    left_out = said(results[0].get("left_out", {}))
    if left_out:
        result.notes.append(left_out.removeprefix("; "))
    return result


def subjects(request: Request, options: EvalOptions) -> list[Subject]:
    """The models that the words of a command line name: runs and weights files.

    Raises:
        UserError: no finished run, no weights file, no pictures to measure one on, or a recipe beside a run.
    """
    runs = [word for word in request.rest if names_run(word)]
    first_run = runs[0] if runs else None
    if first_run is not None and request.recipe is not None:
        raise UserError(
            f"recipe: can't be given with the run {first_run}, which has its own; data.key=value changes it"
        )
    found = []
    for word in request.rest:
        if word in runs:
            found.append(_of_run(word, request, options))
        else:
            found.append(_of_file(word, first_run, request, options))
    return found


def _of_run(word: str, request: Request, options: EvalOptions) -> Subject:
    """The student of a run's folder or URL (``word``), with its teacher and the pictures of the command line.

    Raises:
        UserError: as of :func:`kd.run.open.open_run` and :func:`_data`, or a teacher that can't be built.
    """
    run = open_run(word, request)
    data = _data(run.load_data(), options, run.classes)
    run.task.build(len(run.classes), data.source.ignore_index)
    return Subject(
        name=str(run.folder),
        run=run.folder,
        model=run.model,
        prepare=run.preprocess,
        classes=run.classes,
        data=data,
        task=run.task,
        teacher=run.teacher(),
    )


def _of_file(word: str, run: str | None, request: Request, options: EvalOptions) -> Subject:
    """The model of a weights file, with the teacher of the command line's first run, if that can be measured.

    Views have the size of the model's input, unless a run, a recipe or ``data.img_size`` is given.

    Args:
        word: names the file.
        run: the first run of the command line, whose pictures and teacher count; None: there is no run.
        request: the command line.
        options: of the command.

    Raises:
        UserError: no pictures are named, a student's file without a trained classifier, or as of :func:`_foreign`.
    """
    file = weights_file(Path(word), "weights")
    overridden = {item.split("=", 1)[0] for item in request.overrides}
    if not (run or request.recipe or options.folder or "data.source" in overridden):
        raise UserError(
            f"{word}: needs pictures: folder=DIR (DIR/<class>/*.jpg), recipe=NAME, or "
            "data.source=ImageFolder data.source.root=DIR"
        )
    config, trusted = Run.settings(run_at(run) / "config.yaml" if run else None, request)
    data = data_of(config, trusted, request.listed)
    if not (file.suffix == ".safetensors" and is_student(read_metadata(file))):
        if run:
            task = task_in(trusted.of(run_at(run) / "student.safetensors"))
        else:
            task = task_of(config, trusted)
        spec = _file_settings(word, request, options)
        model, prepare, classes, data = _foreign(spec, data, options, task)
    elif student_metadata_in(file).gives_features:
        raise UserError(
            f"{file}: the student has no trained classifier (kd-predict writes its features)"
        )
    else:
        model, prepare, classes = student_in(trusted.of(file))
        task = task_in(trusted.of(file))
        data = _data(data, options, classes)
    if not (run or request.recipe) and "data.img_size" not in overridden:
        data.size = prepare.size  # views as large as the model's input
    task.build(len(classes), data.source.ignore_index)
    specs = teacher_specs(config, trusted) if run else {}
    teacher = teacher_of(specs, classes, task) if measurable(specs) else None
    return Subject(word, None, model, prepare, classes, data, task, teacher)


def _file_settings(word: str, request: Request, options: EvalOptions) -> TeacherSpec:
    """The settings of the model in a weights file (``word``), as the command line describes it.

    They are read as those of a teacher, ``model.teacher.*``; messages name the command's own keys, ``arch`` and its like.

    Raises:
        UserError: an unknown key or a wrong value.
    """
    words = [f"model.teacher.{item}" for item in (*options.of_files, f"checkpoint={word}")]
    try:
        config, trusted = Run.settings(None, replace(request, recipe=None, overrides=words))
        return teacher_specs(config, trusted)[""]
    except UserError as error:
        raise UserError(OUTER_KEY.sub("", str(error))) from error


def _foreign(
    spec: TeacherSpec, all_data: DistillationDataModule, options: EvalOptions, task: Task
) -> tuple[nn.Module, Prepare, list[str], DistillationDataModule]:
    """A model that kd has not trained: itself, its input, its classes, and the data with the split loaded.

    Args:
        spec: its settings.
        all_data: the data of the command line, with no split loaded.
        options: name the split, or a folder, whose classes count where the file names none.
        task: what the labels mean.

    Raises:
        UserError: neither file nor settings name the model, or it can't be built.
    """
    file = str(spec.checkpoint)
    contents = about(file)
    if not (contents.arch or spec.arch or spec.builder):
        raise UserError(
            f"arch: {file} does not say which model it is; give the name of one of timm's: arch=NAME"
        )
    known_classes = None
    if options.folder:
        known_classes = contents.classes or classes_below(options.folder, "folder")
    data = _data(all_data, options, known_classes)
    classes = list(data.source.classes)
    try:
        built = build_teacher(spec, len(classes), classes, "weights", task.dense)
    except UserError as error:
        raise UserError(WEIGHTS_KEY.sub("", str(error))) from error
    assert isinstance(built, FrozenTeacher)
    return built.in_the_datas_classes(), built.prepare, classes, data


def _data(
    data: DistillationDataModule, options: EvalOptions, classes: list[str] | None
) -> DistillationDataModule:
    """The data with the pictures of the command loaded: those of its folder, or of a split.

    Args:
        data: is changed.
        options: of the command.
        classes: of the model, which must be the data's; None: they are not known.

    Raises:
        UserError: the pictures can't be found or read, or have other classes.
    """
    if options.folder:
        data.splits.list_folder(options.folder, classes or [])
    data.split(options.place)
    if classes is not None:
        check_classes(data, classes)
    return data


def evaluate_models(request: Request, options: EvalOptions) -> Result:
    """Measures all models of a command line on the same pictures, and writes the figures.

    The pictures are those of ``folder=`` or ``split=``; by default of ``train`` for disputed labels, of :func:`usual_split`
    for a certificate or a cascade, else of ``val``. Runs without a classifier are measured by their features.

    Returns:
        As of :func:`_written`, a model for each word of the command line, in their order.

    Raises:
        UserError: see :func:`subjects`; models with other pictures or classes; ``out`` where there is no table; pictures or
            models that can't prove what is asked.
    """
    if options.disputed and not (options.split or options.folder):
        options = replace(options, split="train")
    if any(_gives_features(word) for word in request.rest):
        return _evaluate_features(request, replace(options, split=options.split or "val"))
    measured = subjects(request, options)
    first = measured[0]
    if options.proves and not options.split:
        options = replace(options, split=usual_split(first.data.splits))
    options = replace(options, split=options.split or "val")
    _check_same_pictures(measured, options)
    task = first.task
    to_table = options.out is not None and options.out.suffix == ".csv"
    if to_table and not task.in_rows:
        raise UserError("out: is not available for segmentation; kd-predict writes the masks")
    for subject in measured:
        _find_answers(subject, options)
    listeners = _listeners(measured, options)
    cautions = [_cautions(subject, options) for subject in measured]
    same_pictures = all(item.startswith(SAME_PICTURES) for item in request.overrides)
    own_data = same_pictures and not request.overlays
    # of each model, where the task's answers are rows of a table
    answers = [Answers(task, subject.classes) for subject in measured] if task.in_rows else []
    results = []
    for number, subject in enumerate(measured):
        readers = [*answers[number : number + 1], listeners[number]]
        taken = [reader for reader in readers if reader is not None]
        results.append(measure(subject, options, taken, own_data))
    parts = _add_proofs(results, measured, listeners, options, cautions)
    runs = [subject.run for subject in measured]
    notes = [note for subject in measured for note in subject.data.source.notes]
    result = _written(results, runs, options, notes)
    if options.disputed and first.run is not None:
        result.files.append(first.run / DISPUTED_LABELS)
    if to_table and options.out is not None:
        _write_answers(options.out, measured, answers, options)
    # for each model but the first: on how many pictures the first alone is right, and on how many it alone
    pairs = []
    if answers and answers[0].are_names:
        pairs = [answers[0].beside(other) for other in answers[1:]]
    result.parts = evaluation_parts(results, pairs, parts)
    return result


def evaluate_pays(request: Request, options: EvalOptions) -> Result:
    """Measures whether a run's backbone pays, and writes the figures.

    Raises:
        UserError: see :func:`kd.run.pays.measure_pays`.
    """
    figures = measure_pays(request, options)
    run = Path(figures["run"])
    result = _written([figures], [run], options)
    parts = pays_parts(figures["probe"])
    write_parts(run, "pays", parts)
    result.parts = evaluation_parts([figures], [], parts)
    return result


def _find_answers(subject: Subject, options: EvalOptions) -> None:
    """Looks up the pictures in a teacher's stored answers; where it lacks some, the student alone is measured:
    ``subject.teacher`` becomes None, with a line on standard error.

    Raises:
        UserError: it lacks some, and a certificate or a cascade needs them.
    """
    try:
        attach_answers(subject.teacher, subject.data, options.place)
    except UserError as error:
        if options.proves:
            raise
        print(f"{error}: only the student is measured", file=sys.stderr)
        subject.teacher = None


def _listeners(measured: Sequence[Subject], options: EvalOptions) -> Sequence[Listener | None]:
    """What takes in the batches of each model, for certificates, the cascade or the disputed labels; None: nothing does.

    A cascade and disputed labels are of one model alone, so there is one listener.

    Raises:
        UserError: models that can't prove what is asked: a task without one class a picture, or without a certificate, or no
            teacher to compare with.
    """
    first = measured[0]
    key = options.classifier_key
    if key in ("cascade", "disputed") and (not first.task.one_class or len(first.classes) < 2):
        raise needs_one_class(key)
    if key == "margin" and first.task.certified is None:
        raise UserError("margin: needs a classifier, masks or numbers to compare")
    if key in ("cascade", "margin") and len(measured) == 1 and first.teacher is None:
        raise no_teacher(key, first.name)
    if key == "cascade":
        return [Sureness()]
    if key == "disputed":
        return [Disputes.of(first)]
    return [PictureOutcomes(one.task) if key == "margin" else None for one in measured]


def _cautions(subject: Subject, options: EvalOptions) -> list[str]:
    """What speaks against the pictures of a certificate or a cascade (:func:`cautions_about`); [] of other figures.

    The command may have found the cautions before torch was imported: then those are returned.
    """
    if not options.proves:
        return []
    if subject.run in options.cautions:
        return options.cautions[subject.run]
    return cautions_about(subject.data.splits, subject.run, options)


def _add_proofs(
    results: list[Json],
    measured: Sequence[Subject],
    listeners: Sequence[Listener | None],
    options: EvalOptions,
    cautions: Sequence[Sequence[str]],
) -> Parts:
    """Puts certificates, the cascade and disputed labels into the models' figures, and counts the looks at these pictures,
    also where nothing is to be proven.

    Args:
        results: the figures of each model; changed.
        measured: the models, in the same order.
        listeners: of :func:`_listeners`, which have taken in all batches.
        options: of the command.
        cautions: what speaks against the pictures, a list of lines a model.

    Returns:
        What is printed of the first model's cascade or its disputed labels; [] without either.

    Raises:
        UserError: as of :func:`cascade_of`, :meth:`Disputes.found` or :func:`certificates`.
    """
    parts: Parts = []
    first = measured[0]
    listener = listeners[0]
    if isinstance(listener, Sureness):
        cascade = cascade_of(first, listener, options, cautions[0])
        results[0]["cascade"], parts = cascade, cascade_parts(cascade)
    elif isinstance(listener, Disputes):
        disputed = listener.found(first, options.place)
        results[0]["disputed"], parts = disputed, disputed_parts(disputed)
    looks = [count_look(one, options.place, "kd-eval") for one in measured]
    if options.claim is None:
        return parts
    outcomes = [one for one in listeners if isinstance(one, PictureOutcomes)]
    certified = certificates(measured, outcomes, options.claim, options.place)
    for number, certificate in certified.items():
        certificate["pictures_of"] = options.pictures_of
        certificate["text"] += cautions[number]
        # of the first model, which it is compared with, too
        for one in sorted({0, number}):
            whose = f"for {measured[one].name}" if len(measured) > 1 else "for this run"
            add_looks(certificate, looks[one], whose)
        results[number]["certificate"] = certificate
    return parts


def _check_same_pictures(measured: Sequence[Subject], options: EvalOptions) -> None:
    """Refuses to compare models that would be measured on other pictures, labels or classes than the first.

    Raises:
        UserError: names the first model and the one that differs.
    """
    first = measured[0]
    pictures = first.data.split(options.place)
    for subject in measured[1:]:
        others = subject.data.split(options.place)
        same = len(others.targets) == len(pictures.targets) and subject.classes == first.classes
        if not same or identity(others) != identity(pictures):
            raise UserError(
                f"{first.name} and {subject.name} have other pictures or labels to validate with "
                f"({len(pictures.targets):,} and {len(others.targets):,}); name the same for all: folder=DIR or "
                "data.source.root=DIR"
            )


def measure(
    subject: Subject, options: EvalOptions, listeners: Sequence[Listener], own_data: bool
) -> Json:
    """Measures a model, and its teacher where it has one: metrics and fidelity.

    Args:
        subject: the model and its pictures.
        options: of the command.
        listeners: take in each batch's answers.
        own_data: pictures and teacher are the run's own, so ``fidelity.json``, which the report shows, is written too, of
            the split ``val``.

    Returns:
        The content of ``eval_*.json``, but for what :func:`_add_proofs` adds: ``run``, ``data``, ``pictures`` (how many),
        ``identity`` (of pictures and labels), ``left_out`` (how many files beside the pictures are none, by the ending of
        their names), ``student`` and ``teacher`` (``params`` and the task's metrics) and ``fidelity``; what does not apply
        is missing.
    """
    device = choose_device()
    data = subject.data
    task = subject.task
    classes = subject.classes
    task.name_metrics(classes)
    fidelity = task.fidelity(len(classes))
    readers = listeners if fidelity is None else [fidelity, *listeners]
    batches = data.eval_dataloader(options.place)
    metrics = metrics_of_student(
        subject.model, subject.prepare, batches, task, subject.teacher, device, readers
    )
    if fidelity is not None and options.place == "val" and own_data and subject.run is not None:
        write_fidelity(subject.run, fidelity, data, "val", classes)

    pictures = data.split(options.place)
    result: Json = {
        "run": subject.name,
        "data": options.folder or f"{data.source.describe()} ({options.split})",
        "pictures": len(pictures.targets),
        "identity": identity(pictures),
        "student": {"params": count_parameters(subject.model), **metrics["student"]},
    }
    if data.splits.left_out:
        result["left_out"] = data.splits.left_out
    if subject.teacher:
        teacher_params = count_parameters(subject.teacher.model)
        result["teacher"] = {"params": teacher_params, **metrics["teacher"]}
    if fidelity is not None:
        result["fidelity"] = fidelity.result(classes)
    return result


def _write_answers(
    file: Path, measured: Sequence[Subject], answers: Sequence[Answers], options: EvalOptions
) -> None:
    """Writes a table: a row a picture, its name, its label, then the columns of each model (by its name, if several).

    Args:
        file: CSV.
        measured: the models.
        answers: of each, with the same pictures.
        options: name the split.
    """
    split = measured[0].data.split(options.place)
    rows = answers[0].rows
    keys = next(iter(rows.values()), {"label": ""})
    labels = [key for key in keys if key.startswith("label")]
    headings = ["picture", *labels]
    columns = []  # a model's rows, key
    for subject, of_model in zip(measured, answers, strict=True):
        whose = ""
        if len(measured) > 1:
            whose = f"{subject.name} "
        for key in next(iter(of_model.rows.values()), {}):
            if key in labels:
                continue
            headings.append(f"{whose}{key}")
            columns.append((of_model.rows, key))
    table = [headings]
    for i in sorted(rows):
        name = split.name(i)
        cells = [printable(name)]
        for key in labels:
            cells.append(rows[i][key])
        for of_model_rows, key in columns:
            cells.append(of_model_rows[i][key])
        table.append(cells)
    content = csv_text(table, "\n")
    write_text(file, content)


def _gives_features(word: str) -> bool:
    """Whether a word of the command line names a run whose student has no classifier, or one that nothing trained."""
    if not names_run(word):
        return False
    file = run_at(word) / "student.safetensors"
    return file.is_file() and student_metadata_in(file).gives_features


def _evaluate_features(request: Request, options: EvalOptions) -> Result:
    """Measures runs without classifiers by their features: ranks, and accuracies by labelled pictures where given.

    Raises:
        UserError: a word names a model with a classifier, or an option needs one.
    """
    without = [word for word in request.rest if _gives_features(word)]
    for other in request.rest:
        if other not in without:
            raise UserError(
                f"{without[0]} has no classifier and {other} has one: they can't be compared by one measure"
            )
    to_table = options.out is not None and options.out.suffix == ".csv"
    key_of_figures = options.classifier_key
    for key, value in (
        ("folder", options.folder),
        ("out", to_table),
        (key_of_figures, key_of_figures),
    ):
        if value:
            raise UserError(
                f"{key}: needs a classifier, and {without[0]} has none; data.probe.root=DIR measures features "
                "by labelled pictures"
            )
    results = []
    notes: list[str] = []
    for word in request.rest:
        opened = open_run(word, request)
        results.append(_features_of_run(opened, options))
        notes += opened.data.source.notes
    runs = [Path(result["run"]) for result in results]
    result = _written(results, runs, options, notes)
    result.parts = evaluation_parts(results, [], [])
    return result


def _features_of_run(opened: FinishedRun, options: EvalOptions) -> Json:
    """The figures of a run without a classifier.

    They are ``run``, ``data``, ``pictures`` (how many), ``probe`` (its folder, where ``data.probe`` is given), and by
    model (``student``, ``teacher`` or ``teacher NAME``) ``params``, ``rankme``, and with ``data.probe`` accuracies in 0..1.

    Raises:
        UserError: the pictures are gone, or a teacher can't be built.
    """
    device = choose_device()
    data = opened.data
    prepare = opened.preprocess
    student = opened.model.to(device)
    models: Models = {"student": lambda images: student(prepare(images))}
    params = {"student": count_parameters(student)}
    for name, teacher in opened.feature_teachers().items():
        shown_name = f"teacher {name}".strip()
        teacher.to(device)
        models[shown_name] = teacher
        params[shown_name] = count_parameters(teacher.model)

    ranks = _ranks(models, data, options.split, device)
    figures: dict[str, dict[str, float]] = {}
    for name in models:
        figures[name] = {"params": params[name], "rankme": ranks[name]}
    result: Json = {
        "run": str(opened.folder),
        "data": f"{data.source.describe()} ({options.split})",
        "pictures": len(data.split(options.split).targets),
    }
    if data.probe is not None:
        result["probe"] = data.probe.root
        batches = bar(data.eval_dataloader("probe"), label="labelled pictures", unit=" batches")
        labelled = look_at(models, data, batches, device)
        for name in models:
            figures[name] |= labelled.accuracy(name)
    return {**result, **figures}


@torch.inference_mode()
def _ranks(
    models: Models, data: DistillationDataModule, split: str, device: torch.device
) -> dict[str, float]:
    """RankMe (:func:`kd.tasks.features.rank_of_gram`) of each model's features on a split.

    It needs the sum of ``X^T X`` alone, ``(D, D)`` in float64, with the features ``X`` ``(N, D)`` of each batch.
    """
    grams: dict[str, Tensor] = {}
    for batch in bar(data.eval_dataloader(split), label="evaluating", unit=" batches"):
        is_real = batch["index"] >= 0  # not padding
        images = batch["image"][is_real].to(device)
        for name, model in models.items():
            features_ND = model(images).double()
            gram_DD = features_ND.T @ features_ND
            if name in grams:
                gram_DD = grams[name] + gram_DD
            grams[name] = gram_DD
    ranks = {}
    for name, gram in grams.items():
        rank = rank_of_gram(gram)
        ranks[name] = round(rank, 4)
    return ranks
