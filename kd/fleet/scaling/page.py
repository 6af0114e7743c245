"""What ``kd-scale`` has measured: the content of its page and of ``scale.json``.

``scale`` is the content of ``scale.json`` in all functions, ``m`` one of its ``measured`` runs: times in ms, sizes in
MB, ``efficiency`` 1 where nothing is lost. Other programs read that file: its keys stay.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kd.fleet.scaling.model import MACHINES, PASSES, Network, ShortRun, StepModel, serial_part
from kd.report.metric import duration

CASE = "processes x batch"
"""Name of the tables' first column."""
UNKNOWN = "unknown with two readings (processes=1,2,4 gives more)"


def content(
    recipe: str,
    readings: Sequence[ShortRun],
    models: Mapping[str, StepModel],
    network: Network,
    pictures: int,
) -> dict[str, Any]:
    """The content of ``scale.json``: what was measured, the fitted models, and their forecast for a second machine.

    Args:
        recipe: its name.
        readings: the runs; the first has one process.
        models: fitted, by strategy; ``ddp`` first.
        network: between the machines.
        pictures: of the training set, by which an epoch's seconds are predicted.

    Returns:
        ``spread`` in it is the largest of the runs, as a share of the step.
    """
    single = readings[0]
    predicted: list[dict[str, Any]] = []
    for name, model in models.items():
        predicted += _predicted(name, model, single, network, pictures)
    return {
        "recipe": recipe,
        "measured": [_measured(reading, single) for reading in readings],
        "fitted": {name: _fitted(name, model, readings) for name, model in models.items()},
        "predicted": predicted,
        "network": {"gbit": network.gbit, "given": network.given, "latency_ms": network.latency_ms},
        "pictures": pictures,
        "spread": max(r.spread for r in readings),
    }


def _measured(reading: ShortRun, single: ShortRun) -> dict[str, Any]:
    """A run as ``scale.json`` has it.

    ``images_per_s`` is of all processes together. ``efficiency`` is the speed of one process over that of ``single``: 1
    where nothing is lost.

    Args:
        reading: the run.
        single: the run of one process. A run with its batch is called weak, any other strong.
    """
    ms_a_picture = reading.step_ms / reading.batch
    return {
        "strategy": reading.strategy,
        "processes": reading.processes,
        "batch": reading.batch,
        "step_ms": reading.step_ms,
        "images_per_s": 1000 * reading.processes / ms_a_picture,
        "efficiency": (single.step_ms / single.batch) / ms_a_picture,
        "kind": "weak" if reading.batch == single.batch else "strong",
        "parts_ms": reading.parts,
        "communication_ms": reading.exposed,
        "sent_mb": reading.sent_mb,
        "memory_mb": reading.memory_mb,
        "state_mb": reading.state_mb,
    }


def _fitted(name: str, model: StepModel, readings: Sequence[ShortRun]) -> dict[str, Any]:
    """A strategy's model as ``scale.json`` has it: times in ms, sizes in MB.

    ``serial_part`` comes from the runs of strong scaling; ``overlap``, ``error`` and ``serial_part`` are shares of 1.

    Args:
        name: of the strategy.
        model: fitted.
        readings: all, the first of one process.
    """
    single = readings[0]
    one_global_batch = [(single.processes, single.step_ms)]
    for reading in readings[1:]:
        if reading.strategy == name and reading.batch != single.batch:
            one_global_batch.append((reading.processes, reading.step_ms))
    return {
        "rates_ms": {
            part: {"fixed": line.fixed, "a_picture": line.each}
            for part, line in model.rates.items()
        },
        "alpha_ms": model.ring.alpha_ms,
        "ms_per_mb": model.ring.ms_per_mb,
        "overlap": model.overlap.share,
        "fixed_ms": model.overlap.fixed_ms,
        "gradient_mb": model.gradient_mb,
        "error": model.error,
        "serial_part": serial_part(one_global_batch),
    }


def _predicted(
    name: str, model: StepModel, single: ShortRun, network: Network, pictures: int
) -> list[dict[str, Any]]:
    """A strategy's forecast, weak and strong, as ``scale.json`` has it.

    ``step_ms``, ``images_per_s``, ``efficiency`` and ``epoch_s`` are ``[expected, lowest, highest]``. Strong scaling is
    left out where a process would have less than one picture.

    Args:
        name: of the strategy.
        model: fitted.
        single: the run of one process.
        network: between machines.
        pictures: of an epoch.
    """
    processes = MACHINES * model.processes
    # weak: each process keeps its batch; strong: the processes of one machine keep the batch of the machine
    batches = {"weak": float(single.batch), "strong": single.batch / MACHINES}
    rows = []
    for kind, batch in batches.items():
        if batch < 1:
            continue
        best_ms, expected_ms, worst_ms = model.forecast(batch, network)
        expected, slowest, fastest = (
            1000 * processes * batch / ms for ms in (expected_ms, worst_ms, best_ms)
        )
        without_loss = 1000 * processes * single.batch / single.step_ms
        rows.append(
            {
                "strategy": name,
                "machines": MACHINES,
                "processes": processes,
                "kind": kind,
                "batch": batch,
                "step_ms": [expected_ms, best_ms, worst_ms],
                "images_per_s": [expected, slowest, fastest],
                "efficiency": [speed / without_loss for speed in (expected, slowest, fastest)],
                "epoch_s": [pictures / speed for speed in (expected, fastest, slowest)],
            }
        )
    return rows


def sections(scale: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The sections of the page, from the content of ``scale.json``, for :func:`kd.report.html.write_page`.

    The first one's ``text`` is the headline, which ``kd-scale`` prints too.
    """
    measured = scale["measured"]
    predicted = scale["predicted"]
    rates = next(iter(scale["fitted"].values()))["rates_ms"]
    return [
        {
            "kind": "verdict",
            "bound": "scaling",
            "text": _headline(scale),
            "others": _assumed(scale),
        },
        *_curves(scale),
        {
            "kind": "table",
            "title": "Measured here",
            "columns": [CASE, "step (ms)", "images/s", "efficiency (%)"],
            "rows": [
                [
                    _case(m),
                    round(m["step_ms"], 1),
                    round(m["images_per_s"], 1),
                    round(100 * m["efficiency"], 1),
                ]
                for m in measured
            ],
        },
        {
            "kind": "table",
            "title": "Time of a step (ms)",
            "columns": [CASE, "teacher", "student", "rest", "waits"],
            "rows": [_time(m) for m in measured],
        },
        {
            "kind": "table",
            "title": "Traffic and memory of a process (MB)",
            "columns": [CASE, "sent, ring", "sent, counted", "state", "peak"],
            "rows": [_cost(m, scale) for m in measured],
            "note": "A step sends what the ring of the strategy needs; counted is what left by network devices, loopback "
            "too. State: weights, gradients, optimizer of the students.",
        },
        {
            "kind": "table",
            "title": "Rates, on a full machine",
            "columns": ["part", "each step (ms)", "a picture (ms)"],
            "rows": [
                [part, round(line["fixed"], 3), round(line["a_picture"], 4)]
                for part, line in rates.items()
            ],
        },
        {
            "kind": "table",
            "title": "Predicted for two machines like this one",
            "columns": [CASE, "step (ms)", "images/s", "efficiency (%)", "epoch"],
            "rows": [
                [
                    _case(p),
                    band(p["step_ms"]),
                    round(p["images_per_s"][0]),
                    band([100 * e for e in p["efficiency"]]),
                    duration(p["epoch_s"][0]),
                ]
                for p in predicted
            ],
        },
    ]


def _case(row: Mapping[str, Any]) -> str:
    """A row's name: strategy, processes, pictures of each process, weak or strong; of one process ``alone 1 x 32``."""
    if row["processes"] == 1:
        return f"alone 1 x {row['batch']:g}"
    return f"{row['strategy']} {row['processes']} x {row['batch']:g}, {row['kind']}"


def band(values: Sequence[float]) -> str:
    """``[expected, lowest, highest]`` as text: ``12.3 (11.1 to 14)``."""
    middle, low, high = (f"{v:,.0f}" if v >= 1000 else f"{v:.3g}" for v in values)
    return f"{middle} ({low} to {high})"


def _headline(scale: Mapping[str, Any]) -> str:
    """The page's first sentence: the best efficiencies with the most processes, and the part that does not shrink
    with the strategy that is best in strong scaling.
    """
    measured = scale["measured"]
    most = max(m["processes"] for m in measured)
    full_machine = [m for m in measured if m["processes"] == most]
    best = {}
    for kind in ("weak", "strong"):
        of_kind = [m for m in full_machine if m["kind"] == kind]
        best[kind] = max(of_kind, key=lambda m: m["efficiency"])
    efficiency = ", ".join(
        f"{m['efficiency']:.0%} {kind} with {m['strategy']}" for kind, m in best.items()
    )
    serial = scale["fitted"][best["strong"]["strategy"]]["serial_part"]
    return (
        f"{most} processes here: efficiency {efficiency}; "
        f"{serial:.0%} of a step does not shrink with more processes"
    )


def _assumed(scale: Mapping[str, Any]) -> list[str]:
    """The lines below the headline: where time goes, and what the forecast assumes."""
    weak = []
    for m in scale["measured"]:
        if m["strategy"] == "ddp" and m["kind"] == "weak":
            weak.append(m)
    full = max(weak, key=lambda m: m["processes"])
    lines = []
    teacher_ms = full["parts_ms"]["teacher"]
    if teacher_ms:
        lines.append(
            f"the teacher takes {teacher_ms:.1f} of {full['step_ms']:.1f} ms with {_case(full)}: with its "
            f"answers cached (model.teacher.cache=on) a step would take {full['step_ms'] - teacher_ms:.1f}"
        )

    most = full["processes"]
    lines.append(
        f"measured: up to {most} processes; predicted: {MACHINES * most} processes, on two such machines; "
        "nothing is predicted for more"
    )

    network = scale["network"]
    source = "as given"
    if not network["given"]:
        source = "taken for granted (network=GBIT), with half and double of it in the band"
    lines.append(
        f"between machines: {network['gbit']:g} Gbit/s a machine, {source}; "
        f"{1000 * network['latency_ms']:g} us a message"
    )

    errors = []
    for name, fitted in scale["fitted"].items():
        error = fitted["error"]
        errors.append(f"{name} {UNKNOWN if error is None else f'{error:.0%}'}")
    lines.append(
        f"the band holds the spread of the measured steps (up to {scale['spread']:.0%}) and the worst error of the "
        f"model against what was measured: {', '.join(errors)}"
    )
    lines.append(
        "weak: the batch of a process stays; strong: that of all processes together stays (of one process here, of one "
        "machine below); efficiency is against one process by itself"
    )
    return lines


def _time(m: Mapping[str, Any]) -> list[Any]:
    """A row of the table of times, in ms: the case, teacher, student, the rest, communication."""
    parts = m["parts_ms"]
    ms = (
        parts["teacher"],
        parts["forward"] + parts["backward"],
        parts["rest"],
        m["communication_ms"],
    )
    return [_case(m), *(round(value, 1) for value in ms)]


def _cost(m: Mapping[str, Any], scale: Mapping[str, Any]) -> list[Any]:
    """A row of the table of traffic and memory, in MB: the case, what the ring sends, then what was recorded.

    Args:
        m: a measured run, as ``scale.json`` has it; what was not recorded is an empty cell.
        scale: the whole ``scale.json``.
    """
    any_model = next(iter(scale["fitted"].values()))
    members = m["processes"]
    passes = PASSES[m["strategy"]]
    share_sent = passes * (members - 1) / members
    ring_mb = share_sent * any_model["gradient_mb"]
    row = [_case(m), round(ring_mb, 2)]
    for key in ("sent_mb", "state_mb", "memory_mb"):
        recorded = m[key]
        cell: Any = ""
        if recorded is not None:
            cell = round(recorded, 2)
        row.append(cell)
    return row


def _curves(scale: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A chart of efficiency in per cent over the number of processes for weak scaling, and one for strong."""
    strategies = list(scale["fitted"])
    most = max(m["processes"] for m in scale["measured"])
    charts = []
    for kind in ("weak", "strong"):
        series: dict[str, dict[int, float]] = {}  # by name of the curve: efficiency by processes

        # measured; the run of one process is the start of every strategy's curve
        for m in scale["measured"]:
            if m["processes"] == 1:
                for name in strategies:
                    series.setdefault(name, {})[1] = 100 * m["efficiency"]
            elif m["kind"] == kind:
                series.setdefault(m["strategy"], {})[m["processes"]] = 100 * m["efficiency"]

        # predicted; with several strategies the bounds of the band would hide the curves
        for p in scale["predicted"]:
            if p["kind"] != kind:
                continue
            expected, worst, best = p["efficiency"]
            name = p["strategy"]
            if kind == "strong":
                name += ", the batch of a machine"
            points = {name: expected}
            if len(strategies) == 1:
                points |= {"at worst": worst, "at best": best}
            for curve, efficiency in points.items():
                series.setdefault(curve, {})[p["processes"]] = 100 * efficiency

        x = sorted({count for values in series.values() for count in values})
        shown = {}
        for name, values in series.items():
            shown[name] = [round(values[n], 2) if n in values else None for n in x]
        title = f"Efficiency, {kind} (%; predicted above {most} processes)"
        charts.append(
            {"kind": "lines", "title": title, "x": x, "x_name": "processes", "series": shown}
        )
    return charts
