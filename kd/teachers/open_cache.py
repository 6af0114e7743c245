"""Opens, or makes, the caches that the teachers' settings name.

``cache=on`` reads answers and stores those that are missing; ``only`` ends a run for one that is missing; ``auto``
counts here as ``on``: the caller has measured before that a cache pays, else it opens none. *Filling* is what
``kd-cache`` does: all answers are computed ahead, and nothing is trained.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from kd.data.datamodule import DistillationDataModule
from kd.errors import UserError
from kd.losses import PixelKDLoss
from kd.models import Preprocess
from kd.models.taps import TRIAL
from kd.progress import bar
from kd.storage.elsewhere import text_of
from kd.teachers.answer import ALL, Wanted
from kd.teachers.answer_codec import described
from kd.teachers.answer_store import (
    FINGERPRINT,
    AnswerStore,
    check_room,
    compare,
    free_bytes,
    missing_bytes,
)
from kd.teachers.base import Ensemble, RunTeacher
from kd.teachers.cache_layout import Kind, Layout, Parts, logit_losses, topk_temperature
from kd.teachers.cached import CachedTeacher, CacheEntry
from kd.teachers.published import PublishedStore
from kd.teachers.reading import Store

MEASURED_ON = 256
"""Training pictures (or all, if there are fewer) for the error of rounding that a cache states."""
EACH_TIME = 64
"""Of these, how many the teacher sees at once."""

DISK_SHARE = 0.5
"""Largest share of the free disk that answers (``cache=auto``) or pixels (``cache_pixels=auto``) take unasked."""

KEPT = "they are kept already"


def open_cache(
    teacher: RunTeacher,
    data: DistillationDataModule,
    wanted: Wanted,
    announce: bool = False,
    filling: bool = False,
    auto_pixels: bool = False,
) -> RunTeacher:
    """The teacher, or each of several, behind the cache that its settings name.

    Each process calls it; the first one begins a cache that is missing, while the others wait for its lock. A teacher
    with ``cache=off``, or whose answers no loss reads, is returned as it is.

    Args:
        teacher: on its device, in its precision.
        data: the training pictures and views.
        wanted: what losses read.
        announce: print the size before anything is written.
        filling: compute all answers that are missing, whatever ``cache`` is (``kd-cache``).
        auto_pixels: whether ``cache_pixels=auto`` stores pixels. Of several teachers that want them the first stores
            them for all.

    Raises:
        UserError: the losses or the data need more than a cache can give, the disk lacks room, or a folder holds
            something else.
    """
    check_cacheable(teacher, data, wanted, filling)
    layout = Layout(data)
    members = _cached_members(teacher, wanted, filling)
    kinds_by_teacher = {
        name: layout.kinds(member, wanted.of(name)) for name, member in members.items()
    }

    # the first teacher that wants pixels stores them for all
    with_pixels = None
    for name, member in members.items():
        pixels = member.spec.cache_pixels
        if with_pixels is None and (pixels is True or (pixels == "auto" and auto_pixels)):
            with_pixels = name

    # nothing is written before all have been checked
    for name, kinds in kinds_by_teacher.items():
        _check(members[name], kinds, layout, name == with_pixels)
    if announce:
        for name, kinds in kinds_by_teacher.items():
            _announce(members[name], name, kinds, layout, name == with_pixels)
    opened = {}
    for name, kinds in kinds_by_teacher.items():
        opened[name] = _open(members[name], kinds, layout, filling)
    if with_pixels is not None:
        opened[with_pixels].pixels = _open_pixels(members[with_pixels], layout)

    if ALL in teacher.members:
        return opened.get(ALL, teacher)
    return Ensemble({name: opened.get(name, member) for name, member in teacher.members.items()})


def check_before_fits(teacher: RunTeacher, data: DistillationDataModule, wanted: Wanted) -> None:
    """Those of :func:`open_cache`'s checks that need no teacher on its device.

    Called before the students' start is fitted, so that a cache of other views or pictures is refused before these
    minutes, not after them. Of the folders those that ``cache_dir`` names are read. Nothing is checked where one teacher
    has ``cache=auto``: it decides later, and never refuses.

    Args:
        teacher: or several, on whatever device.
        data: the training pictures and views.
        wanted: what losses read.

    Raises:
        UserError: the losses or the data need more than a cache can give, or a folder holds answers to other views or
            pictures; it names the key and the first difference.
    """
    modes = teacher.cache_modes
    if "auto" in modes or modes == {"off"}:
        return
    check_cacheable(teacher, data, wanted)
    named = {
        name: member
        for name, member in _cached_members(teacher, wanted).items()
        if member.spec.cache_dir
    }
    if not named:
        return  # folders that no setting names are found by what they hold
    layout = Layout(data)
    for name, member in named.items():
        for kind in layout.kinds(member, wanted.of(name)):
            if not kind.url:
                parts = {part: kind.parts[part] for part in ("transform", "data")}
                _is_begun(kind.folder, parts, member.key)


def _is_begun(folder: Path, parts: Parts, key: str) -> bool:
    """Whether a cache's folder holds answers or pixels already.

    Args:
        folder: of one kind of answers, or of pixels.
        parts: of its fingerprint: those that must be the run's.
        key: the teacher's configuration key, named in errors.

    Raises:
        UserError: what it holds depends on something else, or is damaged.
    """
    fingerprint = folder / FINGERPRINT
    if not fingerprint.is_file():
        return False
    compare(text_of(fingerprint, errors="replace"), parts, str(folder), key)
    return True


def _cached_members(
    teacher: RunTeacher, wanted: Wanted, filling: bool = False
) -> dict[str, RunTeacher]:
    """The teachers whose answers losses read and whose settings name a cache (``filling``: any setting)."""
    cached = {}
    for name, member in teacher.members.items():
        if (filling or member.spec.cache != "off") and wanted.of(name):
            cached[name] = member
    return cached


def _check(teacher: RunTeacher, kinds: list[Kind], layout: Layout, pixels: bool) -> None:
    """Compares the fingerprints of one teacher's caches, and their size with ``cache_gb`` and the free disk.

    Nothing is written. Published answers take no disk, and are compared when they are opened.

    Args:
        teacher: the live one.
        kinds: of its answers.
        layout: pictures and views.
        pixels: whether this teacher's cache stores the views' pixels too.

    Raises:
        UserError: a folder was filled with something else, or the caches do not fit.
    """
    records = layout.samples * teacher.spec.cache_views
    bytes_by_folder = _bytes_of_answers(kinds, records)
    parts_by_folder = {kind.folder: kind.parts for kind in kinds if kind.folder in bytes_by_folder}
    if pixels:
        folder, parts = layout.pixels(teacher)
        parts_by_folder[folder] = parts
        bytes_by_folder[folder] = layout.pixel_bytes * records
    for folder, parts in parts_by_folder.items():
        _is_begun(folder, parts, teacher.key)

    what = f"{teacher.spec.cache_views} view(s) of {layout.samples} pictures"
    needed = sum(bytes_by_folder.values())
    limit = teacher.spec.cache_gb
    if limit is not None and needed > limit * 1e9:
        of_pixels = ""
        if pixels:
            gb = layout.pixel_bytes * records / 1e9
            of_pixels = f", {gb:.3g} of them for pixels (cache_pixels)"
        raise UserError(
            f"{teacher.key}.cache_gb: {what} need {needed / 1e9:.3g} GB{of_pixels}, got {limit:g}"
        )
    if bytes_by_folder:
        check_room(bytes_by_folder, what, teacher.key, pixels)


def _bytes_of_answers(kinds: list[Kind], records: int) -> dict[Path, int]:
    """Bytes of so many records of each kind of answers, by folder; {} for published answers, which take no disk here."""
    if any(kind.url for kind in kinds):
        return {}
    return {kind.folder: kind.codec.record_bytes * records for kind in kinds}


def pixels_fit(teacher: RunTeacher, layout: Layout, wanted: Wanted) -> tuple[bool, str]:
    """Whether ``cache_pixels=auto`` may store the pixels of all views beside the answers.

    They take :data:`DISK_SHARE` of the free disk at most, and :func:`open_cache` would not refuse both together: they
    fit into ``cache_gb`` and the free disk. Of pixels whose cache is begun only ``cache_gb`` counts.

    Args:
        teacher: whose settings count.
        layout: pictures and views.
        wanted: of this teacher: the answers.

    Returns:
        Whether they may, and the reason, as the rest of a sentence that begins with the pixels; :data:`KEPT` where
        their cache is begun.

    Raises:
        UserError: a folder holds other pictures or views, or something else.
    """
    folder, parts = layout.pixels(teacher)
    is_kept = _is_begun(folder, parts, teacher.key)

    # as _check, which would refuse them
    records = layout.samples * teacher.spec.cache_views
    size = layout.pixel_bytes * records
    sizes = {**_bytes_of_answers(layout.kinds(teacher, wanted), records), folder: size}
    total_gb = sum(sizes.values()) / 1e9
    limit = teacher.spec.cache_gb
    if limit is not None and total_gb > limit:
        return False, f"with the answers they would take {total_gb:.3g} GB of cache_gb={limit:g}"
    if is_kept:
        return True, KEPT

    free = free_bytes(folder)
    of_free = f"of {free / 1e6:,.0f} MB free disk"
    if size > DISK_SHARE * free:
        return False, f"they would take {size / 1e6:,.1f} MB {of_free}"
    missing = missing_bytes(sizes)
    if missing > free:
        return False, f"with the answers they would take {missing / 1e6:,.1f} MB {of_free}"
    return True, f"they take {size / 1e6:,.1f} MB {of_free}"


def _announce(
    teacher: RunTeacher, name: str, kinds: list[Kind], layout: Layout, pixels: bool
) -> None:
    """Prints the size of one teacher's cache, its format and its place.

    Args:
        teacher: the live one.
        name: of several teachers; "" for a single one.
        kinds: of its answers.
        layout: how many pictures there are.
        pixels: whether the views' pixels are stored too.
    """
    views = teacher.spec.cache_views
    size = sum(kind.codec.record_bytes for kind in kinds)
    description = described([kind.codec for kind in kinds])
    form = ", ".join(f"{key} {value}" for key, value in description.items())
    place = kinds[0].place
    if len(kinds) > 1:
        place = place.rpartition("/")[0]
    title = f"cache of {name}" if name else "cache"
    megabytes = size * layout.samples * views / 1e6
    print(
        f"{title}: {size:,} bytes an answer ({form}), "
        f"{megabytes:,.1f} MB for {views} view(s) of {layout.samples} pictures in {place}",
        flush=True,
    )
    if pixels:
        megabytes = layout.pixel_bytes * layout.samples * views / 1e6
        print(
            f"cache: the views' pixels too, {layout.pixel_bytes:,} bytes each, "
            f"{megabytes:,.1f} MB in {layout.pixels(teacher)[0]}",
            flush=True,
        )


def _open_pixels(teacher: RunTeacher, layout: Layout) -> AnswerStore:
    """The store of the views' pixels, made where it is missing."""
    folder, parts = layout.pixels(teacher)
    views = teacher.spec.cache_views
    return AnswerStore(folder, parts, layout.samples, views, layout.pixel_bytes, key=teacher.key)


def _open(teacher: RunTeacher, kinds: list[Kind], layout: Layout, filling: bool) -> CachedTeacher:
    """One teacher behind the stores of all its kinds of answers, each opened or made.

    Args:
        teacher: the live one.
        kinds: of answers: logits, or one layer's features.
        layout: what the fingerprints hold of the data.
        filling: whether ``kd-cache`` fills it: then ``cache=only`` does not forbid computing.

    Raises:
        UserError: a place that can't be used.
    """
    entries = []
    for kind in kinds:
        store = _store(teacher, kind, layout, filling)
        entries.append(CacheEntry(store, kind.codec))
    only = teacher.spec.cache == "only" and not filling
    return CachedTeacher(teacher, entries, only)


def _store(teacher: RunTeacher, kind: Kind, layout: Layout, filling: bool) -> Store:
    """Where one kind of answers is: a folder of this machine, made where it is missing, or a published one.

    Raises:
        UserError: published answers are to be filled, or the folder can't be used.
    """
    samples = layout.samples
    views = teacher.spec.cache_views
    codec = kind.codec
    if kind.url and filling:
        raise UserError(
            f"{teacher.key}.cache_dir: {teacher.spec.cache_dir} is read-only; kd-cache out= writes there"
        )
    if kind.url:
        return PublishedStore(
            kind.url,
            kind.parts,
            samples,
            views,
            codec.record_bytes,
            codec.usable,
            teacher.key,
            layout.data.source.cache_bytes,
        )
    measure = partial(_measured, teacher, kind, layout.data)
    return AnswerStore(
        kind.folder,
        kind.parts,
        samples,
        views,
        codec.record_bytes,
        codec.usable,
        measure,
        teacher.key,
    )


def _measured(teacher: RunTeacher, kind: Kind, data: DistillationDataModule) -> dict[str, Any]:
    """The error of rounding, measured on up to :data:`MEASURED_ON` training pictures.

    Called once for each kind of answer, by the process that begins its cache, under the cache's lock.

    Returns:
        See :meth:`kd.teachers.answer_codec.AnswerCodec.measure`.
    """
    layers = [(ALL, *feature) for feature in kind.codec.features]
    logits_of_batches = []
    features_of_batches = []
    parts = data.sample_pictures(MEASURED_ON).split(EACH_TIME)
    hidden = getattr(rank_zero_only, "rank", 0) != 0
    for images in bar(parts, label="rounding of answers", unit=" parts", disable=hidden):
        logits, features_by_layer = teacher.look(images, layers)
        logits_of_batches.append(logits)
        features_of_batches.append(features_by_layer)
    features = {
        layer[1:]: torch.cat([batch[layer] for batch in features_of_batches]) for layer in layers
    }
    return kind.codec.measure(torch.cat(logits_of_batches), features)


def check_cacheable(
    teacher: RunTeacher, data: DistillationDataModule, wanted: Wanted, filling: bool = False
) -> None:
    """Refuses losses and data that need more than a cache can give.

    Args:
        teacher: or several.
        data: the training pictures and views.
        wanted: what losses read.
        filling: as if all teachers were cached.

    Raises:
        UserError: names the first setting that does not fit.
    """
    members = _cached_members(teacher, wanted, filling)
    mean_is_read = len(teacher.members) > 1 and ALL in wanted.logits
    for name, member in members.items():
        _check_teacher(member, data, wanted.of(name), several=mean_is_read)
    views = {name: member.spec.cache_views for name, member in members.items()}
    if len(set(views.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in views.items())
        raise UserError(
            f"model.teachers: cache_views must be the same for all that are cached, got {listed}"
        )
    for member in members.values():
        if member.spec.cache_pixels and data.engine != "torch":
            raise UserError(
                f"{member.key}.cache_pixels: needs data.engine=torch, got {data.engine}"
            )
    key = next((member.key for member in members.values()), "model.teacher")
    if data.augment.mixes and data.balance_classes:
        raise UserError(
            f"{key}.cache: keeps one mixture of a picture and view, and data.balance_classes shows a picture in "
            "several; data.augment.mixup=0 data.augment.cutmix=0, or cache=off"
        )
    if data.augment.mixes and data.batch_size % 2:
        raise UserError(
            f"data.batch_size: must be even where mixed pairs are cached ({key}.cache), got {data.batch_size}"
        )


def _check_teacher(
    teacher: RunTeacher, data: DistillationDataModule, wanted: Wanted, several: bool
) -> None:
    """Refuses what a cache can't keep of one teacher.

    Args:
        teacher: one whose answers are to be cached.
        data: the training pictures and views.
        wanted: of this teacher.
        several: a loss reads the mean of several teachers.

    Raises:
        UserError: names the setting, and what it can't keep.
    """
    if teacher.elsewhere == "file":
        raise UserError(
            f"{teacher.key}.cache: the answers of {teacher.key}.answers=FILE are read and not computed, so there is "
            "nothing to cache"
        )
    if not isinstance(getattr(teacher, "prepare", None), Preprocess | None):
        raise UserError(
            f"{teacher.key}.cache: needs to know how the teacher wants its pictures (a kd.Preprocess)"
        )
    for (_, layer, _), shape in wanted.features.items():
        if shape[0] != TRIAL:
            raise UserError(
                f"{teacher.key}.cache: keeps features by picture, but the layer '{layer}' of model.taps "
                f"gives {shape[0]} rows for {TRIAL} pictures"
            )
    topk = teacher.spec.cache_topk
    if topk is None:
        return
    key = f"{teacher.key}.cache_topk"
    classes = len(data.info.classes)
    if topk >= classes:
        raise UserError(f"{key}: must be less than the {classes} classes, got {topk}")
    if not wanted.logits:
        raise UserError(f"{key}: no loss reads logits, so none are stored; leave it out")
    if several:
        raise UserError(
            f"{key}: the mean of several teachers needs all logits; without cache_topk all are kept"
        )
    for loss in logit_losses(wanted):
        reads_largest = isinstance(loss, PixelKDLoss) or topk_temperature(loss) is not None
        if not reads_largest:
            raise UserError(
                f"{key}: {type(loss).__name__} needs all logits; without cache_topk all are kept"
            )


def cached_share(
    teacher: RunTeacher, data: DistillationDataModule, wanted: Wanted
) -> tuple[float, int]:
    """How full the caches are; begins none. ``cache=auto`` is decided by it, on rank 0 alone.

    Args:
        teacher: or several; in the precision of the run.
        data: the training pictures and views.
        wanted: what losses read.

    Returns:
        The share (0 to 1) of answers that the caches hold, by bytes, and the bytes of all answers once filled.
        Published answers count as whole. Pixels of views are not counted.

    Raises:
        UserError: a folder holds a cache of something else.
    """
    layout = Layout(data)
    all_bytes = 0
    filled_bytes = 0.0
    for name, member in _cached_members(teacher, wanted).items():
        for kind in layout.kinds(member, wanted.of(name)):
            bytes_of_kind = kind.codec.record_bytes * layout.samples * member.spec.cache_views
            all_bytes += bytes_of_kind
            if kind.url:  # published answers are whole
                filled_bytes += bytes_of_kind
            elif (kind.folder / FINGERPRINT).is_file():
                store = AnswerStore(
                    kind.folder,
                    kind.parts,
                    layout.samples,
                    member.spec.cache_views,
                    kind.codec.record_bytes,
                    key=member.key,
                )
                filled_bytes += bytes_of_kind * store.filled()
                store.close()
    return filled_bytes / max(all_bytes, 1), all_bytes
