"""What ``kd-scale`` has found: the content of its page and of ``scale.json``."""

from collections.abc import Mapping, Sequence
from typing import Any

from kd.fleet.scaling.model import PASSES, Model, Network, ShortRun, serial_part
from kd.report.metric import duration

CASE = "processes x batch"
UNKNOWN = "unknown with two readings (processes=1,2,4 gives more)"


def content(
    recipe: str,
    readings: Sequence[ShortRun],
    models: Mapping[str, Model],
    machines: Sequence[int],
    network: Network,
    pictures: int,
) -> dict[str, Any]:
    """The content of ``scale.json``: what was measured, the fitted models, and what they predict.

    Args:
        recipe: its name.
        readings: the runs; the first has one process.
        models: fitted, by strategy.
        machines: counts of machines to predict for.
        network: between machines.
        pictures: of the training set.
    """
    alone = readings[0]
    measured = [
        {
            "strategy": r.strategy,
            "processes": r.processes,
            "batch": r.batch,
            "step_ms": r.step_ms,
            "images_per_s": 1000 * r.processes * r.batch / r.step_ms,
            "efficiency": (r.batch / r.step_ms) / (alone.batch / alone.step_ms),
            "kind": "weak" if r.batch == alone.batch else "strong",
            "parts_ms": r.parts,
            "communication_ms": r.exposed,
            "sent_mb": r.sent_mb,
            "memory_mb": r.memory_mb,
            "state_mb": r.state_mb,
        }
        for r in readings
    ]
    fitted = {
        name: {
            "rates_ms": {
                part: {"fixed": line.fixed, "a_picture": line.each}
                for part, line in model.rates.items()
            },
            "alpha_ms": model.ring.alpha_ms,
            "ms_per_mb": model.ring.ms_per_mb,
            "overlap": model.talk.overlap,
            "fixed_ms": model.talk.fixed_ms,
            "gradient_mb": model.gradient_mb,
            "error": model.error,
            "serial_part": serial_part(
                [  # of one process, then of those that share its batch
                    (r.processes, r.step_ms)
                    for r in readings
                    if r is alone or (r.strategy == name and r.batch != alone.batch)
                ]
            ),
        }
        for name, model in models.items()
    }
    predicted = [
        row
        for name, model in models.items()
        for row in _predicted(name, model, alone, machines, network, pictures)
    ]
    return {
        "recipe": recipe,
        "measured": measured,
        "fitted": fitted,
        "predicted": predicted,
        "network": {"gbit": network.gbit, "given": network.given, "latency_ms": network.latency_ms},
        "pictures": pictures,
        "spread": max(r.spread for r in readings),
    }


def _predicted(
    name: str,
    model: Model,
    alone: ShortRun,
    machines: Sequence[int],
    network: Network,
    pictures: int,
) -> list[dict[str, Any]]:
    rows = []
    for count in machines:
        for kind, batch in (("weak", float(alone.batch)), ("strong", alone.batch / count)):
            if batch < 1:
                continue
            best, middle, worst = model.band(batch, count, network)
            processes = count * model.processes
            speed = [1000 * processes * batch / ms for ms in (middle, worst, best)]
            base = processes * 1000 * alone.batch / alone.step_ms
            rows.append(
                {
                    "strategy": name,
                    "machines": count,
                    "processes": processes,
                    "kind": kind,
                    "batch": batch,
                    "step_ms": [middle, best, worst],
                    "images_per_s": speed,
                    "efficiency": [s / base for s in speed],
                    "epoch_s": [pictures / s for s in (speed[0], speed[2], speed[1])],
                }
            )
    return rows


def sections(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The sections of the page, from the content of ``scale.json``."""
    measured, predicted = found["measured"], found["predicted"]
    rates = next(iter(found["fitted"].values()))["rates_ms"]
    return [
        {
            "kind": "verdict",
            "bound": "scaling",
            "text": _headline(found),
            "others": _assumed(found),
        },
        *_curves(found),
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
            "rows": [_cost(m, found) for m in measured],
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
            "title": "Predicted for more machines like this one",
            "columns": [CASE, "machines", "step (ms)", "images/s", "efficiency (%)", "epoch"],
            "rows": [
                [
                    _case(p),
                    p["machines"],
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
    if row["processes"] == 1:
        return f"alone 1 x {row['batch']:g}"
    return f"{row['strategy']} {row['processes']} x {row['batch']:g}, {row['kind']}"


def band(values: Sequence[float]) -> str:
    """A value with its lowest and highest, as text: ``12.3 (11.1 to 14)``."""
    middle, low, high = (f"{v:,.0f}" if v >= 1000 else f"{v:.3g}" for v in values)
    return f"{middle} ({low} to {high})"


def _headline(found: Mapping[str, Any]) -> str:
    most = max(m["processes"] for m in found["measured"])
    full = [m for m in found["measured"] if m["processes"] == most]
    order = sorted(full, key=lambda m: -m["efficiency"])
    best = {kind: next(m for m in order if m["kind"] == kind) for kind in ("weak", "strong")}
    text = ", ".join(
        f"{m['efficiency']:.0%} {kind} with {m['strategy']}" for kind, m in best.items()
    )
    serial = found["fitted"][best["strong"]["strategy"]]["serial_part"]
    text = f"{most} processes here: efficiency {text}; {serial:.0%} of a step does not shrink with more processes"
    return text + (
        f", which bounds strong scaling at {1 / serial:.3g}x (Amdahl)" if serial > 0.005 else ""
    )


def _assumed(found: Mapping[str, Any]) -> list[str]:
    network, errors = (
        found["network"],
        {name: fit["error"] for name, fit in found["fitted"].items()},
    )
    granted = "taken for granted (network=GBIT), with half and double of it in the band"
    given = "as given" if network["given"] else granted
    weak = (m for m in found["measured"] if (m["strategy"], m["kind"]) == ("ddp", "weak"))
    full = max(weak, key=lambda m: m["processes"])
    teacher = full["parts_ms"]["teacher"]
    free = [
        f"the teacher takes {teacher:.1f} of {full['step_ms']:.1f} ms with {_case(full)}: with its "
        f"answers cached (model.teacher.cache=on) a step would take {full['step_ms'] - teacher:.1f}"
    ]
    return [
        *(free if teacher else []),
        f"between machines: {network['gbit']:g} Gbit/s a machine, {given}; "
        f"{1000 * network['latency_ms']:g} us a message",
        f"the band holds the spread of the measured steps (up to {found['spread']:.0%}) and the worst error of the "
        "model against what was measured: "
        + ", ".join(
            f"{name} {UNKNOWN if error is None else f'{error:.0%}'}"
            for name, error in errors.items()
        ),
        "weak: the batch of a process stays; strong: that of all processes together stays (of one process here, of one "
        "machine below); efficiency is against one process by itself",
    ]


def _time(m: Mapping[str, Any]) -> list[Any]:
    parts = m["parts_ms"]
    ms = (
        parts["teacher"],
        parts["forward"] + parts["backward"],
        parts["rest"],
        m["communication_ms"],
    )
    return [_case(m), *(round(value, 1) for value in ms)]


def _cost(m: Mapping[str, Any], found: Mapping[str, Any]) -> list[Any]:
    gradient, n = next(iter(found["fitted"].values()))["gradient_mb"], m["processes"]
    ring = PASSES[m["strategy"]] * (n - 1) / n * gradient
    known = [
        "" if m[key] is None else round(m[key], 2) for key in ("sent_mb", "state_mb", "memory_mb")
    ]
    return [_case(m), round(ring, 2), *known]


def _curves(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    charts = []
    for kind in ("weak", "strong"):
        series: dict[str, dict[int, float]] = {}
        for m in found["measured"]:
            if m["kind"] == kind or m["processes"] == 1:
                for name in [m["strategy"]] if m["processes"] > 1 else found["fitted"]:
                    series.setdefault(name, {})[m["processes"]] = 100 * m["efficiency"]
        for p in found["predicted"]:
            names = (
                p["strategy"] + (", the batch of a machine" if kind == "strong" else ""),
                "at worst",
                "at best",
            )
            for name, value in zip(
                names[: 3 if len(found["fitted"]) == 1 else 1], p["efficiency"], strict=False
            ):
                if p["kind"] == kind:
                    series.setdefault(name, {})[p["processes"]] = 100 * value
        x = sorted({count for values in series.values() for count in values})
        shown = {
            name: [round(v[n], 2) if n in v else None for n in x] for name, v in series.items()
        }
        most = max(m["processes"] for m in found["measured"])
        title = f"Efficiency, {kind} (%; predicted above {most} processes)"
        charts.append(
            {"kind": "lines", "title": title, "x": x, "x_name": "processes", "series": shown}
        )
    return charts
