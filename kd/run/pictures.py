"""The pictures that settings name, listed before torch is imported: what folders and lists alone show to be wrong.

The messages are those of :mod:`kd.data`, which lists them.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any, cast

from kd.config.parts import class_of
from kd.data.class_facts import read_class_facts
from kd.data.sources import Source, class_at, classes_below
from kd.data.sources.folder import labelled_folder
from kd.data.sources.places import expanded, joined
from kd.data.splits import PROBE, DataSpec, Splits, check_global_batch, load_probe
from kd.data.targets import TASKS, other_targets
from kd.errors import UserError
from kd.launch.cluster import is_rank_zero
from kd.run.batch_size import may_shrink
from kd.run.checks import make_object
from kd.run.request import Request
from kd.settings import Probe
from kd.storage.objects import is_url

SLOW_S = 2.0
"""Seconds; a list of pictures that takes longer is announced."""


def list_to_train(config: Mapping[str, Any], typed: Iterable[str] = ()) -> Splits | None:
    """The pictures of a training, which are listed once: :func:`kd.run.build.build` takes them over.

    Args:
        config: the resolved settings.
        typed: ``key=value`` items of the command line.

    Returns:
        The splits; None for sources that are not :attr:`~kd.data.sources.Source.listed_early`, and where some of the
        pictures are in a store: these are listed once torch is there.

    Raises:
        UserError: a folder without pictures, a list without the column, one class alone, augmentations that labels do
            not allow, ...
    """
    data = config["data"]
    for key, folder in (
        ("data.unlabeled", data["unlabeled"]),
        (PROBE, (data["probe"] or {}).get("root")),
    ):
        if folder and not is_url(folder) and not Path(folder).expanduser().is_dir():
            raise UserError(f"{key}: folder {folder} not found")
    _check_task(config)
    splits = list_splits(config, ["train", "val"])
    if splits is None:
        return None
    info = splits.info()
    size = data["batch_size"]
    if size != "auto" and not may_shrink(config, typed):
        # how many processes there will be is not known yet: one at least
        check_global_batch(size, 1, info.train, f"the {info.train} training pictures")
    if data["class_facts"] is not None:
        read_class_facts(data["class_facts"], info)
    return splits


def _check_task(config: Mapping[str, Any]) -> None:
    """Refuses one of kd's tasks whose targets the source never has, before a picture is listed."""
    model = config["model"]
    if not model["student"]["head"]:  # features need no targets
        return
    task = class_of(model["task"])
    needs = TASKS.get(task)
    source = _source_of(config["data"]["source"])
    if needs is not None and source is not None and source.kind.name != needs:
        raise other_targets(task, needs, source.kind.name)


def list_splits(config: Mapping[str, Any], names: Sequence[str]) -> Splits | None:
    """The splits of these names, listed, and the probe's pictures where ``train`` is among them; None as of
    :func:`list_to_train`.

    Raises:
        UserError: no such split, or no pictures in it.
    """
    data = config["data"]
    source = _source_of(data["source"])
    given = DataSpec(**{**data, "source": source, "seed": config["seed"]})
    probe = given.probe or Probe()
    if source is None or is_url(f"{given.unlabeled} {probe.root}"):
        return None
    splits = Splits(source, given)
    if splits.probe is not None and "train" in names:
        names = [*names, "probe"]
    with said_when_slow(str(config["recipe"])):
        for name in names:
            splits.listed(name)
    return splits


def list_once(request: Request, config: Mapping[str, Any], names: Sequence[str]) -> Splits | None:
    """The splits of :func:`list_splits`, whose source the request keeps: these pictures are not listed again.

    Args:
        request: of a command for finished runs.
        config: the settings of one of its runs.
        names: of the splits.
    """
    splits = list_splits(config, names)
    if splits is not None:
        request.listed[source_key(config)] = splits.source
    return splits


def source_key(config: Mapping[str, Any]) -> str:
    """The settings of the data's source, as a key of :attr:`kd.run.request.Request.listed`."""
    return json.dumps(config["data"]["source"], sort_keys=True)


@contextmanager
def said_when_slow(recipe: str) -> Iterator[None]:
    """The first process says that pictures are being listed, once that has taken :data:`SLOW_S` seconds."""
    line = f"{recipe}: listing the pictures ..."
    timer = Timer(SLOW_S, print, [line], {"flush": True})
    timer.daemon = True
    if is_rank_zero():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def list_whole(config: Mapping[str, Any]) -> Source | None:
    """Lists ``train`` and ``val`` as far as the source itself has them: nothing is held out, ``test`` is not listed.

    Returns:
        The source; None as of :func:`list_to_train`.

    Raises:
        UserError: no pictures in one of them.
    """
    source = _source_of(config["data"]["source"])
    if source is not None:
        source.load("train")
        if source.has("val"):
            source.load("val")
    return source


def list_folder(folder: str) -> None:
    """Refuses a folder that does not have ``<class>/*.jpg``; one in a store passes.

    Raises:
        UserError: names it.
    """
    if not is_url(folder):
        labelled_folder(joined(expanded(folder)), classes_below(folder, "folder"), "folder")


def list_to_compare(folder: str) -> None:
    """Refuses a folder of ``pays=`` without ``train/<class>/*.jpg`` and ``val/<class>/*.jpg``; one in a store passes.

    Raises:
        UserError: names ``pays``.
    """
    if is_url(folder):
        return
    try:
        load_probe(Probe(folder))
    except UserError as error:
        raise UserError(str(error).replace(PROBE, "pays")) from error


def _source_of(spec: Mapping[str, Any] | None) -> Source | None:
    """A source whose pictures are on this disk and can be listed early; None for any other, of which only what it needs is
    looked for (:meth:`~kd.data.sources.Source.check_there`).
    """
    kind = class_at((spec or {}).get("class_path"))
    if spec is None or kind is None:
        return None
    arguments = spec["init_args"]
    is_checked = kind.listed_early or kind.check_there is not Source.check_there
    if not is_checked or any(is_url(str(value)) for value in arguments.values()):
        return None
    source = cast(Source, make_object(kind, arguments, "data.source"))
    if source.listed_early:
        return source
    source.check_there()
    return None
