"""How series are judged: functions of recorded numbers and thresholds that return a rule's evidence where it fires.

Series are in order of time, a value a sample, step or epoch; use is in %, a share in [0, 1]. ``skip`` is how many samples
of the start do not count. Evidence are the values that the rule's text names (:data:`kd.report.rules.RULES`); ``text`` or
``lever`` among them takes the place of the rule's own. None: the rule does not fire, also where too little is recorded.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

from kd.proof.luck import is_clearly_more, shows_a_bad_teacher
from kd.report.metric import format_metric, less_is_better
from kd.report.ratio import ratio, share
from kd.report.records import percentile
from kd.report.step_facts import Swing, hot_cores_text, mean, slow_rank

Evidence = dict[str, Any] | None
A_PROGRAM = 0.3
"""Cores that other programs use, from which on they are named as the reason."""


def often(hits: Sequence[bool], at: float, **evidence: object) -> Evidence:
    """More than a share ``at`` of the samples are hits: ``part``, and what else is given. Not of no samples."""
    part = mean(hits)
    return {"part": part, **evidence} if part > at else None


# -- the machine and the steps -----------------------------------------------------------------------------------------
def full_while_idle(
    busy: Sequence[float], gpu: Sequence[float], high: float, low: float, share: float, skip: int
) -> Evidence:
    """CPUs, or the wait for a disk, above ``high`` % while GPUs are below ``low`` %."""
    bound = [a > high and b < low for a, b in zip(busy, gpu, strict=False)]
    return often(bound[skip:], share)


def low_use(gpu: Sequence[float], low: float, floor: float, window: int, skip: int) -> Evidence:
    """In the newest ``window`` samples p95 is below ``low``, or p5 is below ``floor``."""
    recent = gpu[skip:][-window:]
    p5, p95 = percentile(recent, 5), percentile(recent, 95)
    if p95 < low:
        return {"p95": p95}
    text = "GPU utilisation varies between {p5:.0f} and {p95:.0f} % (p5, p95)"
    return {"p5": p5, "p95": p95, "text": text} if p5 < floor else None


def room_left(
    cpu: Sequence[float],
    gpu: Sequence[float],
    memory: Sequence[float],
    low: float,
    window: int,
    skip: int,
) -> Evidence:
    """p95 of CPU, GPU and GPU memory are all below ``low``."""
    p95 = {}
    for name, values in {"cpu": cpu, "gpu": gpu, "memory": memory}.items():
        p95[name] = percentile(values[skip:][-window:], 95)
    if not all(value < low for value in p95.values()):
        return None
    return p95


def growth(
    values: Sequence[float], increase: float, skip: int, window: int = 0, least_mb: float = 0.0
) -> Evidence:
    """Steady growth over the newest ``window`` samples, without a window after the first third of the run.

    The mean of the last tenth is above the first's by a share ``increase`` and by ``least_mb``, and rose steadily: at most
    one of the nine steps between tenths does not rise, and the median rise is at least half of the mean one. One jump, as
    when validation's loader starts, is no leak.
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


def unbalanced(gpus: Sequence[Sequence[float]], imbalance: float, skip: int) -> Evidence:
    """Mean utilisation of the idlest GPU is a share ``imbalance`` below the busiest one's."""
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


def late_rank(compute_ms: Mapping[int, float], late: float) -> Evidence:
    """One rank computes ``late`` times as long as the median of the others."""
    slowest = slow_rank(compute_ms, late)
    return dict(zip(("rank", "extra"), slowest, strict=True)) if slowest else None


def outliers(step_ms: Sequence[float], sigma: float, ignore: int) -> Evidence:
    """More than ``ignore`` steps lie ``sigma`` standard deviations above the mean."""
    if len(step_ms) < 2:
        return None
    mean_ms = mean(step_ms)
    squares = [(ms - mean_ms) ** 2 for ms in step_ms]
    deviation = math.sqrt(mean(squares))
    if not deviation:
        return None
    limit = mean_ms + sigma * deviation
    slow = [ms for ms in step_ms if ms > limit]
    if len(slow) <= ignore:
        return None
    return {"count": len(slow), "mean": mean_ms, "most": max(slow)}


def too_long(seconds: float, limit_s: float) -> Evidence:
    """It takes more than ``limit_s`` seconds."""
    return {"minutes": seconds / 60} if seconds > limit_s else None


def loaders(
    data_share: float,
    workers: int,
    threads: int,
    cores: int,
    processes: int = 1,
    others: float = 0.0,
    *,
    low: float,
) -> Evidence:
    """More loader processes and threads than cores; or waits above ``low`` of the step with cores to spare.

    One more than there are cores is usual. Where each training process has one loader process or none, its compute threads
    do not count. ``others`` are cores that other programs use; they are not to spare.
    """
    in_all = processes * workers
    taken = processes * (workers + threads)
    if in_all > max(1, cores) or (workers > 1 and taken > cores + 1):
        return {
            "text": "{loaders} loader processes and {threads} compute threads on {cores} core{s}",
            "loaders": in_all,
            "threads": processes * threads,
            "cores": cores,
            "s": "s" * (cores > 1),
        }
    idle = round(cores - taken - others)
    if data_share <= low or idle < 1:
        return None
    unused = "1 core is" if idle == 1 else f"{idle} cores are"
    more = max(1, int(ratio(idle, processes)))
    lever = f"data.num_workers={workers + more}"
    return {"part": data_share, "unused": unused, "lever": lever}


def hot_cores(
    cores: Sequence[Sequence[float]], gpu: Sequence[float] = (), *, busy: float
) -> Evidence:
    """A few cores are full while the others have time, and the GPUs are below ``busy`` %."""
    text = hot_cores_text(cores)
    return None if not text or (gpu and mean(gpu) >= busy) else {"words": text}


def is_value(wanted: str) -> Callable[[str], Evidence]:
    """A judge of a text: it is ``wanted``."""
    return lambda value: {} if value == wanted else None


def swings(swing: Swing | None) -> Evidence:
    """A computing phase swings (:attr:`kd.report.step_facts.StepFacts.swing`)."""
    return {"words": swing.text()} if swing else None


def delayed(
    training: float | None,
    loading: float | None,
    thread: str = "",
    processes: int = 1,
    workers: int = 0,
    others: float = 0.0,
    *,
    at: float,
) -> Evidence:
    """Threads of training or loading wait for a core for ``at`` of the time; what takes cores is the lever."""
    trainer = f"training ({thread})" if thread else "training"
    waits = {trainer: training, "a loader process": loading}
    who = [f"{name} {part:.0%}" for name, part in waits.items() if part is not None and part >= at]
    if not who:
        return None
    levers = []
    if others >= A_PROGRAM:
        levers.append(f"end other programs (they use {others:.1f} cores)")
    if workers:
        levers.append(f"fewer loader processes (data.num_workers, now {workers})")
    if processes > 1:
        levers.append(f"fewer training processes on a machine (now {processes})")
    lever = ", ".join(levers) or "fewer threads (OMP_NUM_THREADS)"
    return {"words": " and ".join(who), "lever": f"{lever}, or more cores"}


def throttled(reasons: Sequence[Sequence[str]], share: float) -> Evidence:
    """A GPU lowered its clocks in more than ``share`` of the samples."""
    names = ", ".join(sorted({name for of_sample in reasons for name in of_sample}))
    return often([bool(of_sample) for of_sample in reasons], share, names=names)


def swapped(swap_mb: Sequence[float], grown_mb: float) -> Evidence:
    """Swap grew by ``grown_mb`` since the first sample."""
    growth = max(swap_mb) - swap_mb[0] if swap_mb else 0.0
    return {"growth": growth} if swap_mb and growth >= grown_mb else None


# -- losses and metrics ------------------------------------------------------------------------------------------------
def flat_loss(loss: Sequence[float], percent: float, least: int) -> Evidence:
    """The mean of the last fifth is not ``percent`` % of the first fifth's below it; a loss that is 0 throughout is fine."""
    if len(loss) < least:
        return None
    fifth = max(1, len(loss) // 5)
    first = mean(loss[:fifth])
    last = mean(loss[-fifth:])
    least_fall = abs(first) * percent / 100
    if last < first - least_fall or first == last == 0:
        return None
    return {"first": first, "last": last}


def rising_loss(loss: Sequence[float], factor: float, first: int, newest: int) -> Evidence:
    """The median of the ``newest`` losses is ``factor`` times that of the ``first``, or NaN or infinite.

    A loss of cross entropy and divergence starts near its largest sensible value: a multiple of it diverges.
    """
    if len(loss) < first + newest:
        return None
    start = percentile(loss[:first], 50)
    now = percentile(loss[-newest:], 50)
    times = ""
    if math.isfinite(now):
        if not 0 < start * factor <= now:
            return None
        times = f", {ratio(now, start):.0f} times as much"
    return {"start": start, "now": now, "times": times}


def overfit(
    train_loss: Sequence[float],
    val: Sequence[float],
    metric: str = "val/acc1",
    *,
    drop: float,
    patience: int,
) -> Evidence:
    """Over ``patience`` epochs validation stays ``drop`` below its best while the training loss still falls."""
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
    if len(counts) < 2 or max(counts) < factor * max(1, min(counts)):
        return None
    return {"most": max(counts), "least": min(counts)}


def weak_teacher(
    acc1: float, chance: float, pictures: int, remedy: str = "", *, sigma: float
) -> Evidence:
    """Luck explains the teacher's accuracy on its ``pictures``, and they are enough to say so.

    ``chance`` is the share of the most frequent class; ``remedy`` the key that the preflight has found.
    """
    right = round(acc1 * pictures)
    lucky = not is_clearly_more(right, pictures, chance, sigma)
    if not lucky or not shows_a_bad_teacher(right, pictures, chance):
        return None
    shares = {"reached": format_metric("acc1", acc1), "guessed": format_metric("acc1", chance)}
    return {
        "right": right,
        "pictures": pictures,
        **shares,
        **({"lever": remedy} if remedy else {}),
    }


def ignored_teacher(
    agreement: Sequence[float],
    losses: Mapping[str, Sequence[float]],
    flat: float,
    patience: int,
    below: float,
) -> Evidence:
    """Over ``patience`` epochs agreement stays below ``below`` and within ``flat``, and no distillation loss falls by it."""
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
    names = ", ".join(long)
    falls = "falls" if len(long) == 1 else "fall"
    return {"agreement": last, "names": names, "falls": falls}


def mean_outside(
    values: Sequence[float], low: float = -math.inf, high: float = math.inf
) -> Evidence:
    """The mean is below ``low`` or above ``high``."""
    level = mean(values)
    return {"level": level} if level < low or level > high else None


def dominant_term(shares: Mapping[str, float], share: float) -> Evidence:
    """One of several weighted loss terms is more than ``share`` of their sum; features may well be 96 % of it."""
    total = sum(shares.values())
    if len(shares) < 2 or not total > 0:
        return None
    of_all = {}
    for name, value in shares.items():
        of_all[name] = ratio(value, total)
    return worst_layer(of_all, share)


def overtrained(
    val: Sequence[float],
    kl: Sequence[float] = (),
    metric: str = "val/acc1",
    *,
    patience: int,
    delta: float,
) -> Evidence:
    """For ``patience`` epochs the metric has not risen by ``delta``, nor the divergence (nats) fallen by it."""
    if len(val) <= patience:
        return None
    highest = max(val[:-patience])
    if max(val[-patience:]) >= highest + delta:
        return None
    no_lower = ""
    if len(kl) > patience:
        least = min(kl[:-patience])
        recent = min(kl[-patience:])
        if -recent >= -least + delta:
            return None
        no_lower = f", val/kl no lower than {least:.3f}"
    best = format_metric(metric, highest)
    return {"metric": metric, "best": best, "no_lower": no_lower}


def worse_than_start(
    start: float | None,
    last: float | None,
    pictures: int,
    metric: str = "val/acc1",
    exported_epoch: int = 0,
    levers: Sequence[str] = (),
    *,
    drop: float,
) -> Evidence:
    """After the last epoch the student is worse than before the first step, by a share ``drop`` and more than an error.

    The standard error of an accuracy ``p`` of so many pictures is ``sqrt(p (1 - p) / pictures)``. The exported epoch
    counts from 1; 0 is the start.
    """
    if start is None or last is None or not math.isfinite(start + last):
        return None
    loss = last - start if less_is_better(metric) else start - last
    error = 0.0
    if metric.endswith("acc1") and pictures:
        variance = start * (1 - start)
        error = math.sqrt(ratio(variance, pictures))
    enough = max(drop * abs(start), error)
    if loss <= enough:
        return None
    kept = "the start itself is exported"
    if exported_epoch:
        kept = f"epoch {exported_epoch} is exported"
    values = {"before": format_metric(metric, start), "now": format_metric(metric, last)}
    lever = f"try {', '.join(levers) or 'a lower optim.lr'}"
    return {"metric": metric, **values, "kept": kept, "lever": lever}


def under_trained(
    val: Sequence[float],
    agreement: Sequence[float],
    start: str = "",
    metric: str = "val/acc1",
    *,
    gain: float,
    part: float,
    below: float,
    least: int,
) -> Evidence:
    """The metric rose by ``gain`` in the last ``part`` of the run, two epochs at least, and agreement is below ``below``.

    Of a run of ``least`` epochs or more; ``start`` says where the student's first weights came from.
    """
    count = len(val)
    epochs = max(2, round(part * count))
    fewest = max(least, epochs + 1)
    if count < fewest or not agreement or agreement[-1] >= below:
        return None
    before = max(val[:-epochs])
    since = max(val[-epochs:])
    last = val[-1]
    if last < before + gain:
        return None
    rise = f"{format_metric(metric, before)} to {format_metric(metric, since)} in the last {epochs} epochs"
    rose = f"{metric} rose from {rise}, with {format_metric(metric, last)} in the last one"
    if last == since:
        rose = f"the run ended while {metric} still rose ({rise})"
    lever = "more trainer.max_epochs, a higher optim.lr"
    if start == "scratch":
        better = "model.student.inherit=auto or .pretrained=true (it started from random weights)"
        lever = f"{better}, {lever}"
    return {"rose": rose, "agreement": agreement[-1], "lever": lever}


def collapsed(rank: Sequence[float], pictures: int, below: float, least: int) -> Evidence:
    """The features of at least ``least`` pictures vary in fewer than ``below`` directions, by RankMe (Garrido 2023)."""
    if not rank or pictures < least or rank[-1] >= below:
        return None
    return {"rank": rank[-1], "pictures": pictures}


def same_losses(
    own: Mapping[float, float], others: Mapping[str, Mapping[float, float]], least: int, near: float
) -> Evidence:
    """Another run has had the same losses at ``least`` steps, to a share ``near`` of them (of 1 for smaller ones)."""
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
    """More than ``share`` of a class's pictures, at least ``least``, are taken for one other class."""
    frequent = []
    for true, called, count in pairs:
        part = ratio(count, counts.get(true, 0))
        if counts.get(true, 0) >= least and part > share:
            frequent.append((part, true, called, count))
    if not frequent:
        return None
    part, true, called, count = max(frequent)
    more = ""
    if len(frequent) > 1:
        more = f", and {len(frequent) - 1} more pairs above {share:.0%}"
    return {
        "part": part,
        "true": true,
        "called": called,
        "count": count,
        "of": counts[true],
        "more": more,
    }


# -- gradients, weights, activations, pictures -------------------------------------------------------------------------
def vanishing(norms: Sequence[float], least: float, share: float) -> Evidence:
    """The gradient's norm is below ``least`` in more than ``share`` of the readings."""
    return often([norm < least for norm in norms], share)


def exploding(norms: Sequence[float | None], factor: float) -> Evidence:
    """A gradient norm that is NaN or infinite (None), or, of five or more, ``factor`` times the median."""
    finite = [norm for norm in norms if norm is not None and math.isfinite(norm)]
    lost = len(norms) - len(finite)
    median = percentile(finite, 50)
    if lost:
        text = "{lost} of {all} gradient norms are not finite"
        return {"text": text, "lost": lost, "all": len(norms)}
    if len(finite) >= 5 and max(finite) > factor * median > 0:
        return {"most": max(finite), "median": median}
    return None


def worst_layer(by_layer: Mapping[str, float], share: float) -> Evidence:
    """Layers (or terms) whose share is above ``share``: how many, and the worst with its share."""
    above = {}
    for layer, value in by_layer.items():
        if value > share:
            above[layer] = value
    if not above:
        return None
    worst = max(above, key=above.__getitem__)
    plural = "s" * (len(above) > 1)
    return {"count": len(above), "s": plural, "name": worst, "value": above[worst]}


def all_zero(zeros: Mapping[str, float], share: float) -> Evidence:
    """Layers whose outputs are 0 for a share ``share`` or more."""
    names = [name for name, zero_share in zeros.items() if zero_share >= share]
    return {"names": ", ".join(names[:3])} if names else None


def far_apart(spread: Mapping[str, float | None], factor: float) -> Evidence:
    """At the first reading the activations' standard deviations differ by ``factor`` between layers."""
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


def update_size(ratios: Sequence[float], low: float, high: float) -> Evidence:
    """The median step, of three or more, moves the weights by less than ``low`` or more than ``high`` of their size."""
    median = percentile(ratios, 50)
    if len(ratios) < 3 or low <= median <= high:
        return None
    return {"median": median, "lever": "a higher optim.lr" if median < low else "a lower optim.lr"}


def unchanged(names: Sequence[Sequence[str]], times: int) -> Evidence:
    """The same weights did not change in ``times`` readings one after another."""
    if len(names) < times:
        return None
    newest = [set(of_reading) for of_reading in names[-times:]]
    same = set.intersection(*newest)
    if not same:
        return None
    return {"count": len(same), "s": "s" * (len(same) > 1), "name": min(same)}


def variance_outside(spread: Mapping[str, float | None], low: float, high: float) -> Evidence:
    """A layer's outputs have a variance below ``low`` or above ``high``; the first by name is named."""
    outside = {}
    for layer, value in spread.items():
        if value is not None and not low <= value * value <= high:
            outside[layer] = value * value
    if not outside:
        return None
    layer = min(outside)
    return {"name": layer, "variance": outside[layer]}


def odd_pictures(
    inputs: Sequence[Mapping[str, Any]], constant: float, duplicated: float
) -> Evidence:
    """Training pictures of a single colour, the same picture several times in a batch, or values of a wrong range.

    ``inputs`` have, of each reading, ``constant`` and ``duplicated`` (shares of the batch), ``low`` and ``high`` (the
    smallest and the largest value), ``bytes`` (whether pictures come as uint8).
    """
    if not inputs:
        return None
    values = {
        name: mean([reading[name] for reading in inputs]) for name in ("constant", "duplicated")
    }
    values["low"] = min(reading["low"] for reading in inputs)
    values["high"] = max(reading["high"] for reading in inputs)
    if inputs[0]["bytes"] and values["high"] <= 1:
        text = "all values of the pictures lie in {low:g} to {high:g}: bytes go to 255"
    elif not inputs[0]["bytes"] and values["high"] > 20:
        text = "the pictures are floats of {low:g} to {high:g}: they are not normalised"
    elif values["constant"] > constant:
        text = "{constant:.0%} of the training pictures have a single colour"
    elif values["duplicated"] > duplicated:
        text = "{duplicated:.0%} of a batch are duplicates within the batch"
    else:
        return None
    return {"text": text, **values}
