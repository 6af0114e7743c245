"""Opening (or making) the caches that teachers ask for."""

from functools import partial
from typing import Any

import torch

from kd.data.datamodule import DistillationDataModule
from kd.errors import UserError
from kd.losses import PixelKDLoss
from kd.models import Preprocess
from kd.models.taps import TRIAL
from kd.storage.elsewhere import text_of
from kd.teachers.answer import ALL, Wanted
from kd.teachers.answer_codec import BESIDE, UNITS_OF, described
from kd.teachers.answer_store import FINGERPRINT, AnswerStore, check_room, compare, free_bytes
from kd.teachers.base import Ensemble, RunTeacher
from kd.teachers.cache_layout import Kind, Layout, logit_losses, topk_temperature
from kd.teachers.cached import CachedTeacher, CacheEntry
from kd.teachers.published import PublishedStore
from kd.teachers.reading import Store

MEASURED_ON = 256  # pictures, for the units of int8 and the error that a cache states
DISK_SHARE = 0.5  # of the free disk, at most, where nobody has said how much
KEPT = "they are kept already"
WORST = 0.1  # of one picture's answer, that int8 may be off by


def open_cache(
    teacher: RunTeacher,
    data: DistillationDataModule,
    wanted: Wanted,
    announce: bool = False,
    filling: bool = False,
    auto_pixels: bool = False,
) -> RunTeacher:
    """The teacher, or each of several, behind the cache that its settings name.

    ``announce``: log the size before anything is written; ``filling`` (``kd-cache``): compute answers that are missing;
    ``auto_pixels``: what ``cache_pixels=auto`` means here.
    """
    check_cacheable(teacher, data, wanted, filling)
    layout = Layout(data)
    kinds = {
        name: layout.kinds(m, wanted.of(name))
        for name, m in _asking(teacher, wanted, filling).items()
    }
    asked = {name: teacher.members[name].spec.cache_pixels for name in kinds}
    shows = next(
        (n for n, value in asked.items() if value is True or (value == "auto" and auto_pixels)),
        None,
    )
    for name, found in kinds.items():
        _check(teacher.members[name], found, layout, name == shows)
    for name, found in kinds.items():
        if announce:
            _announce(teacher.members[name], name, found, layout, name == shows)
    opened = {
        name: _open(teacher.members[name], found, layout, filling) for name, found in kinds.items()
    }
    if shows is not None:
        member, (folder, parts) = teacher.members[shows], layout.pixels(teacher.members[shows])
        opened[shows].pixels = AnswerStore(
            folder,
            parts,
            layout.samples,
            member.spec.cache_views,
            layout.pixel_bytes,
            key=member.key,
        )
    if ALL in teacher.members:
        return opened.get(ALL, teacher)
    return Ensemble({name: opened.get(name, member) for name, member in teacher.members.items()})


def _asking(teacher: RunTeacher, wanted: Wanted, filling: bool = False) -> dict[str, RunTeacher]:
    members = teacher.members.items()
    return {
        name: m for name, m in members if (filling or m.spec.cache != "off") and wanted.of(name)
    }


def _check(teacher: RunTeacher, kinds: list[Kind], layout: Layout, pixels: bool) -> None:
    count = layout.samples * teacher.spec.cache_views
    own = [] if any(kind.url for kind in kinds) else kinds
    found = {kind.folder: (kind.parts, kind.codec.record_bytes * count) for kind in own}
    if pixels:
        folder, parts = layout.pixels(teacher)
        found[folder] = (parts, layout.pixel_bytes * count)
    for folder, (parts, _) in found.items():
        if (folder / FINGERPRINT).is_file():
            compare(text_of(folder / FINGERPRINT), parts, str(folder), teacher.key)
    what, needed = (
        f"{teacher.spec.cache_views} view(s) of {layout.samples} pictures",
        sum(s for _, s in found.values()),
    )
    limit = teacher.spec.cache_gb
    if limit is not None and needed > limit * 1e9:
        of = (
            f", {layout.pixel_bytes * count / 1e9:.3g} of them for pixels (cache_pixels)"
            if pixels
            else ""
        )
        raise UserError(
            f"{teacher.key}.cache_gb: {what} need {needed / 1e9:.3g} GB{of}, got {limit:g}"
        )
    if found:
        check_room({folder: size for folder, (_, size) in found.items()}, what, teacher.key, pixels)


def pixels_fit(teacher: RunTeacher, layout: Layout) -> tuple[bool, str]:
    """Whether the pixels of all views may be kept, and what they take: half of the free disk at most."""
    size, (folder, parts) = (
        layout.pixel_bytes * layout.samples * teacher.spec.cache_views,
        layout.pixels(teacher),
    )
    free = free_bytes(folder)
    text = f"{size / 1e6:,.1f} MB of {free / 1e6:,.0f} MB free disk"
    if (folder / FINGERPRINT).is_file():
        compare(text_of(folder / FINGERPRINT), parts, str(folder), teacher.key)
        return True, KEPT
    limit = teacher.spec.cache_gb
    if limit is not None and size > limit * 1e9:
        return False, f"they would take {size / 1e9:.3g} GB of cache_gb={limit:g}"
    return (
        size <= DISK_SHARE * free,
        f"they {'' if size <= DISK_SHARE * free else 'would '}take {text}",
    )


def _announce(
    teacher: RunTeacher, name: str, kinds: list[Kind], layout: Layout, pixels: bool
) -> None:
    views, size = teacher.spec.cache_views, sum(kind.codec.record_bytes for kind in kinds)
    kept = ", ".join(
        f"{key} {value}" for key, value in described([kind.codec for kind in kinds]).items()
    )
    place = kinds[0].place if len(kinds) == 1 else kinds[0].place.rpartition("/")[0]
    print(
        f"cache{f' of {name}' if name else ''}: {size:,} bytes an answer ({kept}), "
        f"{size * layout.samples * views / 1e6:,.1f} MB for {views} view(s) of {layout.samples} pictures in {place}",
        flush=True,
    )
    if pixels:
        print(
            f"cache: the views' pixels too, {layout.pixel_bytes:,} bytes each, "
            f"{layout.pixel_bytes * layout.samples * views / 1e6:,.1f} MB in {layout.pixels(teacher)[0]}",
            flush=True,
        )


def _open(teacher: RunTeacher, kinds: list[Kind], layout: Layout, filling: bool) -> CachedTeacher:
    found = []
    for kind in kinds:
        store = _store(teacher, kind, layout, filling)
        try:
            kind.codec.as_measured(store.measured)
        except ValueError as error:
            raise UserError(
                f"{teacher.key}.cache_dir: {kind.place}/{FINGERPRINT} is damaged: {error}"
            ) from error
        found.append(CacheEntry(store, kind.codec))
    return CachedTeacher(teacher, found, teacher.spec.cache == "only" and not filling)


def _store(teacher: RunTeacher, kind: Kind, layout: Layout, filling: bool) -> Store:
    samples, views, codec = layout.samples, teacher.spec.cache_views, kind.codec
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
    """Units of int8 and the error of rounding; refuses int8 where that is above :data:`WORST` of a picture's answer."""
    layers = [(ALL, *key) for key in kind.codec.features]
    given = [
        teacher.look(part, layers) for part in data.sample_pictures(MEASURED_ON).split(UNITS_OF)
    ]
    features = {layer[1:]: torch.cat([found[layer] for _, found in given]) for layer in layers}
    noted = kind.codec.measure(torch.cat([logits for logits, _ in given]), features)
    name = max(noted["worst"], key=noted["worst"].__getitem__, default="")
    if "units" in noted and noted["worst"][name] > WORST:
        raise UserError(
            f"{teacher.key}.cache_precision: int8 is off by {noted['worst'][name]:.0%} of {name} of one of "
            f"{noted['pictures']} pictures, at most {WORST:.0%} are allowed; cache_precision=half"
        )
    return noted


def check_precision(teacher: RunTeacher, data: DistillationDataModule, wanted: Wanted) -> None:
    """Raises a UserError where int8 is asked for and a cache would keep nothing in it, or more bytes than without."""
    for name, member in _asking(teacher, wanted).items():
        if member.spec.cache_precision != "int8":
            continue
        if not (wanted.of(name).features or wanted.of(name).maps):
            raise UserError(
                f"{member.key}.cache_precision: int8 is for features, and no loss reads any; leave it out"
            )
        if len(data.source.classes) <= BESIDE and not wanted.of(name).features:
            raise UserError(
                f"{member.key}.cache_precision: int8 is no smaller than half precision with so few classes "
                f"({len(data.source.classes)}; {BESIDE + 1} or more do); leave it out"
            )


def check_cacheable(
    teacher: RunTeacher, data: DistillationDataModule, wanted: Wanted, filling: bool = False
) -> None:
    """Raises a UserError where the losses or the data need more than a cache can give."""
    asking = _asking(teacher, wanted, filling)
    for name, member in asking.items():
        _check_teacher(
            member, data, wanted.of(name), several=len(teacher.members) > 1 and ALL in wanted.logits
        )
    views = {name: member.spec.cache_views for name, member in asking.items()}
    if len(set(views.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in views.items())
        raise UserError(
            f"model.teachers: cache_views must be the same for all that are cached, got {listed}"
        )
    key = next((member.key for member in asking.values()), "model.teacher")
    pixels = next((member.key for member in asking.values() if member.spec.cache_pixels), "")
    if pixels and data.engine != "torch":
        raise UserError(f"{pixels}.cache_pixels: needs data.engine=torch, got {data.engine}")
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
    key, classes = f"{teacher.key}.cache_topk", len(data.info.classes)
    if topk >= classes:
        raise UserError(f"{key}: must be less than the {classes} classes, got {topk}")
    if not wanted.logits:
        raise UserError(f"{key}: no loss reads logits, so none are stored; leave it out")
    if several:
        raise UserError(
            f"{key}: the mean of several teachers needs all logits; without cache_topk all are kept"
        )
    for loss in logit_losses(wanted):
        if not (isinstance(loss, PixelKDLoss) or topk_temperature(loss) is not None):
            raise UserError(
                f"{key}: {type(loss).__name__} needs all logits; without cache_topk all are kept"
            )


def cached_share(
    teacher: RunTeacher, data: DistillationDataModule, wanted: Wanted
) -> tuple[float, int]:
    """The share (0 to 1) of answers that the caches hold, and the bytes of all; makes nothing.

    Raises:
        UserError: a folder holds a cache of something else.
    """
    layout, size, filled = Layout(data), 0, 0.0
    for name, member in _asking(teacher, wanted).items():
        for kind in layout.kinds(member, wanted.of(name)):
            whole = kind.codec.record_bytes * layout.samples * member.spec.cache_views
            size += whole
            if kind.url:
                filled += whole
            elif (kind.folder / FINGERPRINT).is_file():
                store = AnswerStore(
                    kind.folder,
                    kind.parts,
                    layout.samples,
                    member.spec.cache_views,
                    kind.codec.record_bytes,
                    key=member.key,
                )
                filled += whole * store.filled()
                store.close()
    return filled / max(size, 1), size
