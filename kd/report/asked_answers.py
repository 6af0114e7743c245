"""What answers from elsewhere took: pictures, requests, time and price of teachers behind an address."""

from collections.abc import Mapping
from typing import Any

from kd.report.charts import Section, table
from kd.report.records import RunRecords


def asked_answers(run: RunRecords) -> Section | None:
    """A table with a row for each teacher behind an address; None without one.

    A run that was resumed, by one process after the other, has a second row for its last process alone.

    Args:
        run: read from its folder; ``asked`` of its teacher has the counts by the teacher's name ("" for the only one).
    """
    by_teacher = run.teacher.get("asked")
    if not isinstance(by_teacher, dict) or not by_teacher:
        return None
    rows = []
    for name, counts in by_teacher.items():
        of_run = counts["run"]
        title = name or "teacher"
        kept = f"{counts['kept']:,}"
        if of_run["processes"] == 1:
            rows.append([title, counts["url"], "the run", *_counted(of_run), kept])
            continue
        whose = f"the run, {of_run['processes']:.0f} processes"
        rows.append([title, counts["url"], whose, *_counted(of_run), kept])
        rows.append(["", "", "its last process", *_counted(counts), ""])
    counted = ["pictures", "requests", "repeated", "seconds", "ms a picture", "price"]
    columns = ["teacher", "address", "asked by", *counted, "kept"]
    note = (
        "Kept answers are not asked for again by a resumed run, a later one, or another process. The price is that of "
        "model.teacher.builder.price for 1,000 pictures."
    )
    return table("Answers from elsewhere", columns, rows, note=note)


def _counted(counts: Mapping[str, Any]) -> list[str]:
    """Cells of what was counted: pictures, requests, repeated ones, seconds, milliseconds a picture and the price.

    Args:
        counts: ``asked`` (pictures), ``requests``, ``repeated``, ``seconds`` (waited for answers), and ``price`` where
            one was given, in the user's currency.
    """
    asked = counts["asked"]
    seconds = counts["seconds"]
    ms = ""
    if asked:
        ms = f"{1000 * seconds / asked:.1f}"
    price = ""
    if "price" in counts:
        price = f"{counts['price']:g}"
    requests = f"{counts['requests']:,.0f}"
    repeated = f"{counts['repeated']:,.0f}"
    return [f"{asked:,.0f}", requests, repeated, f"{seconds:,.1f}", ms, price]
