"""``kd-cache``: computes the teacher's answers ahead, or stores those of a file or an address."""

import re
from pathlib import Path

from kd.errors import UserError
from kd.run.needs import check_present
from kd.run.options import CommandOptions, names_of, options_of, refuse_words, take, take_options
from kd.run.request import Request
from kd.run.run import Run
from kd.settings import AskSettings, teachers_in

HELP = """\
  kd-cache recipe=NAME [config=OVERLAY ...] [key=value ...]
  kd-cache recipe=NAME from=FILE_OR_ADDRESS [from.budget=N ...]
  kd-cache --describe FOLDER_OR_URL [recipe=NAME ...]

  Takes kd-train's settings: data, augmentation, seed, teacher and precision must be those of the run to come.
  model.teacher.cache_views=N   views of a picture (default 4)
  model.teacher.cache_topk=K    keep the K largest logits and the mass of the rest, instead of all
  model.teacher.cache_dir=DIR   where; default: a folder in the user's cache folder
  of several teachers           model.teachers.NAME.cache_views=N ..., for each
{options}
  from=FILE                     stores the answers in a .csv, .parquet or .safetensors, of any program
  from=http://HOST:PORT         asks a server of KServe v2, or a chat endpoint (https://HOST/v1/chat/completions), for them
  from.views=4 from.rate=N from.budget=N from.price=N from.retries=8 from.timeout_s=60 from.batch=16 from.output=logits
  from.model=NAME from.key=VARIABLE from.prompt=TEXT (of a chat endpoint)
  --describe FOLDER             what a cache holds; with a recipe also whether it fits (else what differs, and status 1)

Stored answers are kept: run the same command again to resume. config=ddp_8gpu shares the work. kd/teachers/README.md has
the rest.
"""
FLAGS = ("--describe",)
"""Options that take no value."""


class CacheOptions(CommandOptions):
    """What ``kd-cache`` is given beside the settings of a run."""

    OTHERS = "run"
    out: str | None = None
    """FOLDER_OR_URL: writes them beside a pack as well (kd-pack), for any number of machines."""


class FromOptions(AskSettings, CommandOptions):
    """What stands after ``from.``."""


OPTIONS = CacheOptions


def run(request: Request) -> int | None:
    """Fills the caches of a recipe's teachers, or with ``--describe`` says what a folder of caches holds; ``out=`` also
    writes them beside a packed data set.

    What is stored already is not computed again. On several processes, those of ``trainer.devices``, each takes a share.

    Returns:
        The exit status, 1 where a described cache does not fit the recipe that was given; None without either.

    Raises:
        UserError: a mistake in the command line or the settings, or a recipe without answers to store.
    """
    if "describe" in request.flags:
        return _describe(request)
    if not request.recipe:
        return None
    refuse_words(request)
    out = take_options(CacheOptions, request).out
    place = None if out is None else out.rstrip("/")
    asked = take(request, "from", *(f"from.{name}" for name in names_of(FromOptions)))
    if asked:
        return _fill_from(request, asked, place)
    run = Run.of(request)
    _build(run)
    from kd.run.fill import fill

    fill(run.module, run.data, run.trainer, place)
    return 0


def _fill_from(request: Request, asked: dict[str, str], out: str | None) -> int:
    """Stores the answers of a file or an address to the recipe's pictures; its own teacher is not built.

    Args:
        request: the recipe and the data's settings.
        asked: ``from`` and its settings.
        out: folder or URL of a packed data set; None: this machine's cache alone.

    Returns:
        The exit status.

    Raises:
        UserError: a mistake in the settings, or as of :func:`kd.run.fill_from.fill_from`.
    """
    place = asked.pop("from", "")
    settings = None
    if place.startswith(("http://", "https://")):
        texts = {key.removeprefix("from."): text for key, text in asked.items()}
        try:
            settings = options_of(FromOptions, texts)
        except UserError as error:
            raise UserError(f"from.{error}") from error
    elif not Path(place).is_file():
        raise UserError(f"from: file {place} not found; an address begins with http:// or https://")
    elif asked:
        raise UserError(f"{next(iter(asked))}: is of an address, and {place} is a file")
    run = Run.of(request)
    for key in (item.partition("=")[0] for item in request.overrides):
        if re.fullmatch(r"model\.teacher.*\.cache\w*", key):
            raise UserError(
                f"{key}: has no effect with from=, which stores all logits (from.views=N)"
            )
    from kd.run.pictures import list_whole

    list_whole(run.config)
    from kd.run.build import data_of, task_of
    from kd.run.fill_from import fill_from

    data = data_of(run.config, run.trusted)
    task = task_of(run.config, run.trusted)
    fill_from(place, settings, data, task, out)
    return 0


def _describe(request: Request) -> int:
    """Prints what a folder of caches holds, and with a recipe whether that could use it.

    Returns:
        The exit status: 1 where the recipe could not, 0 otherwise, and without a recipe.

    Raises:
        UserError: no cache there, a recipe without a teacher, or settings without a recipe, which would change nothing.
    """
    if len(request.rest) != 1:
        raise UserError(f"--describe: needs one folder, got {', '.join(request.rest) or 'none'}")
    if not request.recipe and (request.overrides or request.overlays):
        raise UserError("--describe: takes settings with a recipe alone (recipe=NAME)")
    import torch

    from kd.teachers import dtype_for
    from kd.teachers.inspect_cache import compare_with_recipe, held_in

    caches = held_in(request.rest[0])
    for cache in caches:
        print(*cache.lines(), sep="\n", flush=True)
    if not request.recipe:
        return 0
    run = Run.of(request)
    if not teachers_in(run.config["model"]):
        raise UserError(
            f"model.teacher: the recipe has none; model.teacher.answers={request.rest[0]} reads stored answers"
        )
    _build(run, trains=False)
    teacher = run.module.teacher
    assert teacher is not None
    run.data.prepare_data()
    teacher.to(torch.device("cpu"), dtype_for(str(run.trainer.precision)))
    fits, lines = compare_with_recipe(
        caches, teacher, run.data, run.module.student.objective.wanted
    )
    print(lines)
    return 0 if fits else 1


def _build(run: Run, trains: bool = True) -> None:
    """Builds a run, with its teacher trained first where it has no weights; a UserError where ``trains`` forbids that.

    This run gets no folder, and nothing trains its student.
    """
    run.splits = check_present(run.config)
    from kd.run.build import build
    from kd.run.train_first import train_teacher_if_missing

    train_teacher_if_missing(run, trains)
    build(run)
