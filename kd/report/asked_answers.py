"""What answers from elsewhere took: pictures, requests, time and price of teachers behind an address."""

from kd.report.charts import Section, table
from kd.report.records import RunRecords


def asked_answers(run: RunRecords) -> Section | None:
    """A table with a row for each teacher behind an address; None without one.

    Args:
        run: read from its folder.
    """
    by_teacher = run.teacher.get("asked")
    if not isinstance(by_teacher, dict) or not by_teacher:
        return None
    rows = []
    for name, counts in by_teacher.items():
        asked, seconds = counts["asked"], counts["seconds"]
        cells = [
            name or "teacher",
            counts["url"],
            f"{asked:,}",
            f"{counts['requests']:,}",
            f"{counts['repeated']:,}",
            f"{seconds:,.1f}",
            f"{1000 * seconds / asked:.1f}" if asked else "",
            f"{counts['price']:g}" if "price" in counts else "",
            f"{counts['kept']:,}",
        ]
        rows.append(cells)
    counted = ["pictures", "requests", "repeated", "seconds", "ms a picture", "price", "kept"]
    columns = ["teacher", "address", *counted]
    note = (
        "By this process. Kept answers are not asked for again by a resumed run, a later one, or another process. The price "
        "is that of model.teacher.builder.price for 1,000 pictures."
    )
    return table("Answers from elsewhere", columns, rows, note=note)
