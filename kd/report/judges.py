"""How series are judged: functions of recorded numbers and thresholds that return a rule's evidence where it fires.

Series are in order of time, a value a sample, step or epoch; use is in %, a share in [0, 1]. ``skip`` is how many samples
of the start do not count. Evidence are the values that the rule's text names (:data:`kd.report.rules.RULES`); ``text`` or
``lever`` among them takes the place of the rule's own. None: the rule does not fire, also where too little is recorded.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from statistics import pstdev

from kd.proof.luck import is_clearly_more, shows_a_bad_teacher
from kd.report.metric import counted, format_metric, less_is_better
from kd.report.ratio import Number, ratio, share
from kd.report.records import percentile
from kd.report.step_facts import mean
from kd.storage.elsewhere import Json

Evidence = Json | None
Series = Sequence[float]
ByLayer = Mapping[str, float]


def fires(condition: object, **evidence: object) -> Evidence:
    """The evidence where the condition holds."""
    return evidence if condition else None


def often(hits: Sequence[bool], at: float, **evidence: object) -> Evidence:
    """Fires where more than a share ``at`` of the samples are hits; without samples it does not.

    The evidence is ``part``, the share of hits, and what else is given.
    """
    part = mean(hits)
    return fires(part > at, part=part, **evidence)


# -- the machine and the steps -----------------------------------------------------------------------------------------
def full_while_idle(
    busy: Series, gpu: Series, high: float, low: float, share: float, skip: int
) -> Evidence:
    """``busy``, of CPUs or the wait for a disk, is above ``high`` % while GPUs are below ``low`` %.

    It fires where that is so in more than a share ``share`` of the samples.
    """
    bound = [a > high and b < low for a, b in zip(busy, gpu, strict=False)]
    return often(bound[skip:], share)


def low_use(gpu: Series, low: float, floor: float, window: int, skip: int) -> Evidence:
    """In the newest ``window`` samples p95 is below ``low``, or p5 is below ``floor``."""
    recent = gpu[skip:][-window:]
    p5 = percentile(recent, 5)
    p95 = percentile(recent, 95)
    return fires(p95 < low or p5 < floor, p5=p5, p95=p95)


def room_left(*use: Series, low: float, window: int, skip: int) -> Evidence:
    """p95 of CPU, GPU and GPU memory are all below ``low``."""
    cpu, gpu, memory = (percentile(values[skip:][-window:], 95) for values in use)
    return fires(cpu < low and gpu < low and memory < low, cpu=cpu, gpu=gpu, memory=memory)


def growth(
    values: Series, increase: float, skip: int, window: int = 0, least_mb: float = 0.0
) -> Evidence:
    """Steady growth over the newest ``window`` samples; with ``window=0``, over all after the first third.

    The mean of the last tenth of these is above that of the first tenth by a share ``increase`` of it and by ``least_mb``.
    The growth is steady: at most one of the nine steps from tenth to tenth does not rise, and the median rise is at least
    half of the mean one. One jump, as when validation's loader starts, is no leak. None with fewer than 20 samples.
    """
    after_start = values[skip:]
    third = len(after_start) // 3
    counted = after_start[third:]
    if window:
        counted = after_start[-window:]
    count = len(counted)
    if count < 20:
        return None
    ends = [round(tenth * count / 10) for tenth in range(11)]
    tenths = []
    for start, end in pairwise(ends):
        tenths.append(mean(counted[start:end]))
    first = tenths[0]
    last = tenths[-1]
    rises = [after - before for before, after in pairwise(tenths)]
    rises.sort()
    second_least = rises[1]
    median = percentile(rises, 50)
    steady = second_least > 0 and median >= mean(rises) / 2
    enough = max(increase * first, least_mb)
    if steady and last - first >= enough:
        return {"first": first, "last": last}
    return None


def unbalanced(gpus: Sequence[Series], imbalance: float, skip: int) -> Evidence:
    """Mean utilisation of the idlest GPU is a share ``imbalance`` or more below the busiest one's.

    GPUs without values after ``skip`` samples are left out.
    """
    means = {}
    for number, values in enumerate(gpus):
        if len(values) > skip:
            means[number] = mean(values[skip:])
    if len(means) < 2:
        return None
    busy = max(means, key=means.__getitem__)
    idle = min(means, key=means.__getitem__)
    if share(means[busy] - means[idle], means[busy]) < imbalance:
        return None
    return {"busy": busy, "most": means[busy], "idle": idle, "least": means[idle]}


def outliers(step_ms: Series, sigma: float, ignore: int) -> Evidence:
    """More than ``ignore`` steps lie ``sigma`` standard deviations above the mean."""
    if len(step_ms) < 2:
        return None
    mean_ms = mean(step_ms)
    deviation = pstdev(step_ms, mean_ms)
    limit = mean_ms + sigma * deviation
    count = sum(ms > limit for ms in step_ms)
    return fires(deviation and count > ignore, count=count, mean=mean_ms, most=max(step_ms))


def loaders(
    data_share: float,
    workers: int,
    threads: int,
    cores: int,
    processes: int = 1,
    others: float = 0.0,
    sharers: str = "",
    lever: str = "",
    *,
    low: float,
) -> Evidence:
    """More loader processes and compute threads than cores; or cores to spare, and the step waits for a share above ``low``.

    One process or thread more than there are cores is usual and does not fire. Where each training process has one loader
    process or none, its compute threads do not count. ``others`` are cores that other programs use; they are not to spare.
    ``sharers``, who shares the cores in words, is the text of the first case; ``lever``, the lever of
    :func:`kd.report.limits.data_bound`, that of the second.
    """
    in_all = processes * workers
    taken = in_all + processes * threads
    too_many_loaders = in_all > max(1, cores)
    crowded = workers > 1 and taken > cores + 1
    if too_many_loaders or crowded:
        return {"text": sharers}
    idle = round(cores - taken - others)
    unused = counted(idle, "core")
    return fires(data_share > low and idle >= 1, part=data_share, unused=unused, lever=lever)


def delayed(
    training: Number, loading: Number, thread: str = "", lever: str = "", *, at: float
) -> Evidence:
    """Threads of training or loading wait for a core for a share ``at`` of the time.

    ``training`` and ``loading`` are the shares of the time, ``thread`` names the training's most delayed thread, and
    ``lever`` is that of :func:`kd.report.limits.who_takes_cores`.
    """
    trainer = "training"
    if thread:
        trainer = f"training ({thread})"
    waits = {trainer: training, "a loader process": loading}
    who = []
    for name, part in waits.items():
        if part is not None and part >= at:
            who.append(f"{name} {part:.0%}")
    words = " and ".join(who)
    return fires(who, words=words, lever=lever)


def throttled(reasons: Sequence[Sequence[str]], share: float) -> Evidence:
    """A GPU lowered its clocks in more than ``share`` of the samples."""
    names = ", ".join(sorted({name for of_sample in reasons for name in of_sample}))
    return often([bool(of_sample) for of_sample in reasons], share, names=names)


# -- losses and metrics ------------------------------------------------------------------------------------------------
def flat_loss(loss: Series, percent: float, least: int) -> Evidence:
    """The mean loss of the last fifth is not lower than that of the first fifth by more than ``percent`` % of it.

    A loss that is 0 throughout is fine. None with fewer than ``least`` values.
    """
    if len(loss) < least:
        return None
    fifth = max(1, len(loss) // 5)
    first = mean(loss[:fifth])
    last = mean(loss[-fifth:])
    least_fall = abs(first) * percent / 100
    if last < first - least_fall or first == last == 0:
        return None
    return {"first": first, "last": last}


def rising_loss(loss: Series, factor: float, first: int, newest: int) -> Evidence:
    """The median of the ``newest`` losses is ``factor`` times that of the ``first``, or NaN or infinite.

    A loss of cross entropy and divergence starts near its largest sensible value: a multiple of it diverges.
    """
    if len(loss) < first + newest:
        return None
    start = percentile(loss[:first], 50)
    now = percentile(loss[-newest:], 50)
    if not math.isfinite(now):
        return {"start": start, "now": now, "times": ""}
    times = f", {ratio(now, start):.0f} times as much"
    return fires(0 < start * factor <= now, start=start, now=now, times=times)


def overfit(
    train_loss: Series,
    val: Series,
    metric: str = "val/acc1",
    *,
    drop: float,
    patience: int,
) -> Evidence:
    """Over ``patience`` epochs validation stays ``drop`` below its best, and the training loss is lower at their end."""
    if min(len(val), len(train_loss)) <= patience:
        return None
    best = max(val)
    has_recovered = max(val[-patience:]) > best - drop
    still_falls = train_loss[-1] < train_loss[-1 - patience]
    if has_recovered or not still_falls:
        return None
    before = format_metric(metric, best)
    now = format_metric(metric, val[-1])
    return {"metric": metric, "before": before, "now": now}


def class_imbalance(counts: Sequence[int], factor: float) -> Evidence:
    """The most frequent class has ``factor`` times the pictures of the rarest; one without any counts as one with one."""
    most = max(counts, default=0)
    least = min(counts, default=0)
    return fires(len(counts) > 1 and most >= factor * max(1, least), most=most, least=least)


def weak_teacher(
    acc1: float, chance: float, pictures: int, remedy: str = "", *, sigma: float
) -> Evidence:
    """Luck explains the teacher's accuracy, and its ``pictures`` are enough to call it no better than guessing.

    ``chance`` is the share of the most frequent class; ``remedy`` the key that the preflight has found.
    """
    right = round(acc1 * pictures)
    lucky = not is_clearly_more(right, pictures, chance, sigma)
    if not lucky or not shows_a_bad_teacher(right, pictures, chance):
        return None
    shares = {"reached": format_metric("acc1", acc1), "guessed": format_metric("acc1", chance)}
    return {"right": right, "pictures": pictures, **shares, "lever": remedy}


def ignored_teacher(
    agreement: Series,
    losses: Mapping[str, Series],
    flat: float,
    patience: int,
    below: float,
) -> Evidence:
    """Over ``patience`` epochs agreement moves by at most ``flat`` and ends below ``below``.

    Besides, no distillation loss falls by a share ``flat`` in these epochs.
    """
    long = {name: loss for name, loss in losses.items() if len(loss) > patience}
    if len(agreement) <= patience or not long:
        return None
    for loss in long.values():
        before = loss[-1 - patience]
        enough = flat * abs(before)
        if loss[-1] < before - enough:
            return None  # it falls
    recent = agreement[-patience - 1 :]
    last = recent[-1]
    moved = max(recent) - min(recent)
    if moved > flat or last >= below:
        return None
    return {"agreement": last, "names": ", ".join(long)}


def dominant_term(terms: ByLayer, share: float) -> Evidence:
    """One of several weighted loss terms is more than ``share`` of their sum; features may well be 96 % of it."""
    total = sum(terms.values())
    if len(terms) < 2 or not total > 0:
        return None
    return worst_layer({name: ratio(value, total) for name, value in terms.items()}, share)


def overtrained(
    val: Series, kl: Series = (), metric: str = "val/acc1", *, patience: int, delta: float
) -> Evidence:
    """For ``patience`` epochs the metric has not risen ``delta`` above its best before, nor the divergence fallen as far.

    The divergence ``kl`` is in nats; where it has too few epochs the metric alone counts.
    """
    if len(val) <= patience:
        return None
    highest = max(val[:-patience])
    rises = max(val[-patience:]) >= highest + delta
    no_lower = ""
    if len(kl) > patience:
        least = min(kl[:-patience])
        rises = rises or -min(kl[-patience:]) >= -least + delta
        no_lower = f", val/kl no lower than {format_metric('kl', least)}"
    best = format_metric(metric, highest)
    return fires(not rises, metric=metric, best=best, no_lower=no_lower)


def standard_error(metric: str, value: float, pictures: int) -> float:
    """The standard error of an accuracy, ``sqrt(p (1 - p) / pictures)``; 0 for other metrics, and without pictures."""
    of_pictures = metric.endswith("acc1") and 0 <= value <= 1
    return math.sqrt(ratio(value * (1 - value), pictures)) if of_pictures else 0.0


def worse_than_start(
    start: Number,
    last: Number,
    pictures: int,
    metric: str = "val/acc1",
    exported_epoch: int = 0,
    lr: Number = None,
    *,
    drop: float,
) -> Evidence:
    """After the last epoch the student is worse than before the first step.

    Worse by more than a share ``drop`` of the value before, and by more than that value's standard error. ``exported_epoch``
    counts from 1; 0 is the start. ``lr``, the run's learning rate, is named in the lever.
    """
    if start is None or last is None or not math.isfinite(start + last):
        return None
    loss = last - start if less_is_better(metric) else start - last
    enough = max(drop * abs(start), standard_error(metric, start, pictures))
    was = f" (it was {lr:g})" if lr else ""
    return fires(
        loss > enough,
        metric=metric,
        before=format_metric(metric, start),
        now=format_metric(metric, last),
        kept=f"{f'epoch {exported_epoch}' if exported_epoch else 'the start itself'} is exported",
        lever=f"try a lower optim.lr{was}, a smaller model.task_loss_weight, the recipe's model.distill_losses",
    )


def under_trained(
    val: Series,
    agreement: Series,
    start: str = "",
    metric: str = "val/acc1",
    pictures: int = 0,
    start_value: Number = None,
    *,
    gain: float,
    part: float,
    below: float,
    least: int,
) -> Evidence:
    """The metric still rose in the last share ``part`` of the run, two epochs at least, and agreement is below ``below``.

    The last epoch's value is above those of all epochs before this part, and above that of the student before its first step
    (``start_value``), by ``gain`` and by a standard error. None in a run of fewer than ``least`` epochs. ``start`` says
    where the student's first weights came from (``scratch``: random).
    """
    count = len(val)
    epochs = max(2, round(part * count))
    if count < max(least, epochs + 1) or not agreement or agreement[-1] >= below:
        return None
    before = max(val[:-epochs])
    since = max(val[-epochs:])
    last = val[-1]
    enough = max(gain, standard_error(metric, before, pictures))
    if last < max(before, start_value or before) + enough:
        return None
    rise = f"{format_metric(metric, before)} to {format_metric(metric, since)} in the last {epochs} epochs"
    rose = f"{metric} rose from {rise} and is {format_metric(metric, last)} in the last one"
    lever = "more trainer.max_epochs, a higher optim.lr"
    if start == "scratch":
        better = "model.student.inherit=auto or .pretrained=true (it started from random weights)"
        lever = f"{better}, {lever}"
    return {"rose": rose, "agreement": agreement[-1], "lever": lever}


def collapsed(rank: Series, pictures: int, below: float, least: int) -> Evidence:
    """The features of at least ``least`` pictures vary in fewer than ``below`` directions, by RankMe (Garrido 2023)."""
    newest = rank[-1] if rank else math.inf
    return fires(newest < below and pictures >= least, rank=newest, pictures=pictures)


def same_losses(
    own: Mapping[float, float], others: Mapping[str, Mapping[float, float]], least: int, near: float
) -> Evidence:
    """Another run has the same losses at all steps that both have, and there are at least ``least`` of these.

    Two losses are the same if they differ by at most ``near`` times the loss, or times 1 where it is smaller.
    """
    for name, loss in others.items():
        common = [step for step in own if step in loss]
        alike = True
        for step in common:
            own_loss = own[step]
            difference = abs(own_loss - loss[step])
            largest = near * max(1.0, abs(own_loss))
            alike = alike and difference <= largest
        if len(common) >= least and alike:
            return {"name": name, "count": len(common)}
    return None


def confused(
    pairs: Sequence[tuple[str, str, int]], counts: Mapping[str, int], share: float, least: int
) -> Evidence:
    """More than ``share`` of a class's pictures are taken for one other class; the largest such share is named.

    ``pairs`` are the true class, the class that it is taken for, and how often; ``counts`` are pictures by class. Classes
    with fewer than ``least`` pictures are passed over.
    """
    frequent = []
    for true, called, count in pairs:
        of = counts.get(true, 0)
        part = ratio(count, of)
        if of >= least and part > share:
            frequent.append((part, true, called, count))
    if not frequent:
        return None
    part, true, called, count = max(frequent)
    return {"part": part, "true": true, "called": called, "count": count, "of": counts[true]}


# -- gradients, weights, activations, pictures -------------------------------------------------------------------------
def exploding(norms: Sequence[Number], factor: float) -> Evidence:
    """A gradient norm is NaN or infinite (None), or, of five norms or more, above ``factor`` times their median."""
    finite = [norm for norm in norms if norm is not None and math.isfinite(norm)]
    lost = len(norms) - len(finite)
    if lost:
        return {"text": f"{lost} of {len(norms)} gradient norms are not finite"}
    median = percentile(finite, 50)
    most = max(finite, default=0.0)
    return fires(len(finite) >= 5 and most > factor * median > 0, most=most, median=median)


def worst_layer(by_layer: ByLayer, share: float) -> Evidence:
    """Layers (or terms) whose share is above ``share``: how many, and the worst with its share."""
    above = {layer: value for layer, value in by_layer.items() if value > share}
    if not above:
        return None
    worst = max(above, key=above.__getitem__)
    return {"count": len(above), "name": worst, "value": above[worst]}


def all_zero(zeros: ByLayer, share: float) -> Evidence:
    """Layers whose outputs are 0 for a share ``share`` or more."""
    names = [name for name, zero_share in zeros.items() if zero_share >= share]
    return fires(names, names=", ".join(names[:3]))


def far_apart(spread: Mapping[str, Number], factor: float) -> Evidence:
    """The standard deviation of one layer's activations is over ``factor`` times that of another; NaN is passed over."""
    finite = []
    for layer, value in spread.items():
        if value is not None and math.isfinite(value):
            finite.append((value, layer))
    if len(finite) < 2:
        return None
    low, lowest = min(finite, key=itemgetter(0))
    high, highest = max(finite, key=itemgetter(0))
    if high <= factor * low:
        return None
    return {"low": low, "lowest": lowest, "high": high, "highest": highest}


def update_size(ratios: Series, low: float, high: float) -> Evidence:
    """The median step, of three or more, moves the weights by less than ``low`` or more than ``high`` of their size."""
    median = percentile(ratios, 50)
    lever = "a higher optim.lr" if median < low else "a lower optim.lr"
    return fires(len(ratios) >= 3 and not low <= median <= high, median=median, lever=lever)


def unchanged(names: Sequence[Sequence[str]], times: int) -> Evidence:
    """The same weights did not change in ``times`` readings one after another."""
    newest = [set(of_reading) for of_reading in names[-times:]]
    same = set.intersection(*newest) if len(newest) == times else set()
    return fires(same, count=len(same), name=min(same, default=""))


def variance_outside(spread: Mapping[str, Number], low: float, high: float) -> Evidence:
    """A layer's outputs have a variance below ``low`` or above ``high``; the first by name is named."""
    outside = {}
    for layer, value in spread.items():
        if value is not None and not low <= value * value <= high:
            outside[layer] = value * value
    if not outside:
        return None
    layer = min(outside)
    return {"name": layer, "variance": outside[layer]}


def odd_pictures(inputs: Sequence[Json], constant: float, duplicated: float) -> Evidence:
    """Training pictures of a single colour, the same picture several times in a batch, or values of a wrong range.

    Mean shares above ``constant`` (single colours) and ``duplicated`` fire; of several faults the first is named. ``inputs``
    have, of each reading, ``constant`` and ``duplicated`` (shares of the batch), ``low`` and ``high`` (the
    smallest and the largest value), ``bytes`` (whether pictures come as uint8).
    """
    if not inputs:
        return None
    one_colour = mean([reading["constant"] for reading in inputs])
    twice = mean([reading["duplicated"] for reading in inputs])
    low = min(reading["low"] for reading in inputs)
    high = max(reading["high"] for reading in inputs)
    of_bytes = inputs[0]["bytes"]
    odd = {
        f"all values of the pictures lie in {low:g} to {high:g}: bytes go to 255": of_bytes
        and high <= 1,
        f"the pictures are floats of {low:g} to {high:g}: they are not normalised": not of_bytes
        and high > 20,
        f"{one_colour:.0%} of the training pictures have a single colour": one_colour > constant,
        f"{twice:.0%} of a batch are duplicates within the batch": twice > duplicated,
    }
    text = next((text for text, is_so in odd.items() if is_so), "")
    return fires(text, text=text)
