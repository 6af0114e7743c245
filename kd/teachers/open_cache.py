"""Opens, or makes, the caches that the teachers' settings name.

``cache=on`` reads answers and stores those that are missing; ``only`` ends a run for one that is missing; ``auto``
counts here as ``on``: the caller has measured before that a cache pays, else it opens none. *Filling* is what
``kd-cache`` does: all answers are computed ahead, and nothing is trained.
"""

from collections.abc import Mapping, Sequence

from kd.data.datamodule import DistillationDataModule
from kd.errors import UserError
from kd.losses import PixelKDLoss
from kd.models import Preprocess
from kd.models.taps import TRIAL
from kd.storage.elsewhere import text_of
from kd.teachers.answer import ALL, Wanted
from kd.teachers.answer_store import AnswerStore, Kind, check_room, describe_kinds, shared_place
from kd.teachers.base import Ensemble, RunTeacher
from kd.teachers.cache_layout import Layout, topk_temperature
from kd.teachers.cached import CachedTeacher
from kd.teachers.fingerprint import FINGERPRINT, PARTS, compare_fingerprints

DISK_SHARE = 0.5
"""Largest share of the free disk that answers take unasked (``cache=auto``)."""


def open_cache(
    teacher: RunTeacher,
    data: DistillationDataModule,
    wanted: Wanted,
    announce: bool = False,
    filling: bool = False,
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

    Raises:
        UserError: the losses or the data need more than a cache can give, the disk lacks room, or a folder holds
            something else.
    """
    check_cacheable(teacher, data, wanted, filling)
    layout = Layout(data)
    members = _cached_members(teacher, wanted, filling)
    kinds_by_teacher: dict[str, list[Kind]] = {}
    has_pixels = False
    for name, member in members.items():
        # of several teachers that want the views' pixels the first stores them for all
        pixels = member.spec.cache_pixels and not has_pixels
        has_pixels = has_pixels or pixels
        of_member = wanted.of(name)
        kinds_by_teacher[name] = layout.kinds(member, of_member, pixels)

    # nothing is written before all have been checked
    for name, kinds in kinds_by_teacher.items():
        _check_size(members[name], kinds, layout)
    if announce:
        for name, kinds in kinds_by_teacher.items():
            _announce(members[name], name, kinds, layout)
    opened: dict[str, RunTeacher] = dict(teacher.members)
    for name, kinds in kinds_by_teacher.items():
        opened[name] = _open(members[name], kinds, layout, filling)
    if ALL in opened:
        return opened[ALL]
    return Ensemble(opened)


def _open(teacher: RunTeacher, kinds: list[Kind], layout: Layout, filling: bool) -> CachedTeacher:
    """One teacher behind the stores of all its kinds of answers, each opened or made.

    Args:
        teacher: the live one.
        kinds: of answers, and the pixels of views.
        layout: what the fingerprints hold of the data.
        filling: whether ``kd-cache`` fills it: then ``cache=only`` does not forbid computing.

    Raises:
        UserError: published answers are to be filled, or a place can't be used.
    """
    stores = []
    for kind in kinds:
        if kind.published and filling:
            raise UserError(
                f"{teacher.key}.cache_dir: {kind.place} is read-only; kd-cache out= writes there"
            )
        views = teacher.spec.cache_views
        stores.append(AnswerStore(kind, layout.samples, views, teacher.key))
    return CachedTeacher(teacher, stores, teacher.spec.cache == "only" and not filling)


# -- checks ----------------------------------------------------------------------------------------------------------
def check_before_fits(teacher: RunTeacher, data: DistillationDataModule, wanted: Wanted) -> None:
    """Those of :func:`open_cache`'s checks that need no teacher on its device.

    Called before the students' start is fitted, so that a cache of other views or pictures is refused before these
    minutes, not after them. Only folders that ``cache_dir`` names are read: any other is named after its fingerprint, so
    it can't hold answers to other views. Nothing is checked where one teacher has ``cache=auto``, which is decided later
    and refuses nothing.

    Args:
        teacher: or several, on whatever device.
        data: the training pictures and views.
        wanted: what losses read.

    Raises:
        UserError: the losses or the data need more than a cache can give, or a folder holds answers to other views or
            pictures; it names the key and the first difference.
    """
    if "auto" in teacher.cache_modes:
        return
    check_cacheable(teacher, data, wanted)
    for name, member in _cached_members(teacher, wanted).items():
        for kind in Layout(data).kinds(member, wanted.of(name)) if member.spec.cache_dir else ():
            if not kind.published:
                _is_begun(kind, member.key, ("transform", "data"))


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
        _check_teacher(member, data, wanted.of(name), mean_is_read)
    views = {name: member.cache_views for name, member in members.items() if member.cache_views}
    if len(set(views.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in views.items())
        raise UserError(
            f"model.teachers: cache_views must be the same for all that are cached, got {listed}"
        )
    for member in members.values():
        check_mixing(data, member.key)


def check_mixing(data: DistillationDataModule, key: str = "model.teacher") -> None:
    """Refuses data whose mixed pairs differ from epoch to epoch: a stored answer is of one pair.

    Args:
        data: the training pictures and views.
        key: the teacher's configuration key, for messages.

    Raises:
        UserError: names the setting.
    """
    repeats = data.given.balance_classes or data.given.sampler is not None
    if data.augment.mixes and repeats:
        raise UserError(
            f"{key}.cache: keeps one mixture of a picture and view, and data.balance_classes and data.sampler show a "
            "picture in several; data.augment.mixup=0 data.augment.cutmix=0, or cache=off"
        )
    if data.augment.mixes and data.batch_size % 2:
        raise UserError(
            f"data.batch_size: must be even where mixed pairs are cached ({key}.cache), got {data.batch_size}"
        )


def _check_teacher(
    teacher: RunTeacher, data: DistillationDataModule, wanted: Wanted, several: bool
) -> None:
    """Refuses what a cache can't keep of one teacher; a UserError names the setting.

    Args:
        teacher: one whose answers are to be cached.
        data: the training pictures and views.
        wanted: of this teacher.
        several: a loss reads the mean of several teachers.
    """
    key = teacher.key
    if teacher.spec.cache_pixels and data.engine != "torch":
        raise UserError(f"{key}.cache_pixels: needs data.engine=torch, got {data.engine}")
    # the fingerprint of a model reads its input there; a user's teacher has no ``prepare``
    if not isinstance(getattr(teacher, "prepare", None), Preprocess | None):
        raise UserError(
            f"{key}.cache: needs to know how the teacher wants its pictures (a kd.Preprocess)"
        )
    for (_, layer, _), shape in wanted.features.items():
        if shape[0] != TRIAL:
            raise UserError(
                f"{key}.cache: keeps features by picture, but the layer '{layer}' of model.taps "
                f"gives {shape[0]} rows for {TRIAL} pictures"
            )
    topk = teacher.spec.cache_topk
    if topk is None:
        return
    classes = len(data.info.classes)
    needing_all = [
        type(loss).__name__
        for loss in wanted.losses
        if not isinstance(loss, PixelKDLoss) and topk_temperature(loss) is None
    ]
    problem = ""
    if topk >= classes:
        problem = f"must be less than the {classes} classes, got {topk}"
    elif not wanted.logits:
        problem = "no loss reads logits, so none are stored; leave it out"
    elif several:
        problem = "the mean of several teachers needs all logits; without cache_topk all are kept"
    elif needing_all:
        problem = f"{needing_all[0]} needs all logits; without cache_topk all are kept"
    if problem:
        raise UserError(f"{key}.cache_topk: {problem}")


def _check_size(teacher: RunTeacher, kinds: Sequence[Kind], layout: Layout) -> None:
    """Compares the fingerprints of one teacher's caches, and their size with ``cache_gb`` and the free disk.

    Nothing is written. Published answers are compared when they are opened.

    Args:
        teacher: the live one.
        kinds: of its answers, and the pixels of its views where they are stored too.
        layout: pictures and views.

    Raises:
        UserError: a folder was filled with something else, or the caches do not fit.
    """
    views = teacher.spec.cache_views
    local = [kind for kind in kinds if not kind.published]
    for kind in local:
        _is_begun(kind, teacher.key)
    sizes = {kind.folder: kind.record_bytes * layout.samples * views for kind in local}
    what = f"{views} view(s) of {layout.samples} pictures"
    limit = teacher.spec.cache_gb
    gb = sum(sizes.values()) / 1e9
    if limit is not None and gb > limit:
        raise UserError(f"{teacher.key}.cache_gb: {what} need {gb:.3g} GB, got {limit:g}")
    if sizes:
        check_room(sizes, what, teacher.key)


def _is_begun(kind: Kind, key: str, parts: Sequence[str] = PARTS) -> bool:
    """Whether the cache of one kind of answers, or of pixels, was begun: its folder has a fingerprint, which must fit.

    Args:
        kind: on this machine.
        key: the teacher's configuration key, named in errors.
        parts: of its fingerprint that must be the run's.

    Raises:
        UserError: what it holds depends on something else, or is damaged.
    """
    file = kind.folder / FINGERPRINT
    if not file.is_file():
        return False
    wanted = {part: kind.parts[part] for part in parts}
    compare_fingerprints(text_of(file, errors="replace"), wanted, str(kind.folder), key)
    return True


def _cached_members(
    teacher: RunTeacher, wanted: Wanted, filling: bool = False
) -> Mapping[str, RunTeacher]:
    """The teachers whose answers losses read and whose settings name a cache (``filling``: any setting)."""
    return {
        name: member
        for name, member in teacher.members.items()
        if (filling or member.spec.cache != "off") and wanted.of(name)
    }


# -- how large -------------------------------------------------------------------------------------------------------
def _announce(teacher: RunTeacher, name: str, kinds: Sequence[Kind], layout: Layout) -> None:
    """Prints the size of one teacher's cache, its format and its place, and the same of the views' pixels.

    Args:
        teacher: the live one.
        name: of several teachers; "" for a single one.
        kinds: of its answers; last the views' pixels, where they are stored.
        layout: how many pictures there are.
    """
    views = teacher.spec.cache_views
    title = f"cache of {name}" if name else "cache"
    answers = [kind for kind in kinds if kind.codec is not None]
    form = ", ".join(f"{key} {value}" for key, value in describe_kinds(answers).items())
    stored = {f"an answer ({form})": answers, "a view's pixels": kinds[len(answers) :]}
    for what, of_kind in stored.items():
        size = sum(kind.record_bytes for kind in of_kind)
        mb = size * layout.samples * views / 1e6
        if size:
            print(
                f"{title}: {size:,} bytes {what}, {mb:,.1f} MB for {views} view(s) of {layout.samples} pictures in "
                f"{shared_place(of_kind)}",
                flush=True,
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
        views = member.spec.cache_views
        for kind in layout.kinds(member, wanted.of(name)):
            size = kind.record_bytes * layout.samples * views
            all_bytes += size
            if kind.published:  # which are whole
                filled_bytes += size
            elif _is_begun(kind, member.key):
                store = AnswerStore(kind, layout.samples, views, member.key)
                share = store.filled()
                store.close()
                filled_bytes += size * share
    return filled_bytes / max(all_bytes, 1), all_bytes
