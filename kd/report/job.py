"""What a fetched run's machines have cost, by group: from ``job.json``, which ``kd-launch`` leaves in the folder."""

from typing import Any

from kd.report.facts import Facts


def cost_by_group(facts: Facts) -> dict[str, Any] | None:
    """A table of the groups, their machines, prices and costs; None for a run that was not sent by ``kd-launch``.

    The hours are those that the place has counted (start-up and waiting for data too), else the run's own.
    """
    job = facts.run.job
    groups = [group for group in job.get("groups") or [] if isinstance(group, dict) and "machines" in group]
    if not groups:
        return None
    hours = job.get("hours") or facts.hours
    rows, total = [], 0.0
    for group in groups:
        price = group.get("price_per_hour")
        cost = price * hours if price is not None and hours else None
        total += cost or 0.0
        shown = ["" if value is None else f"{value:.4g}" for value in (price, hours, cost)]
        rows.append([str(group.get("name", "")), str(group["machines"]), *shown])
    if len(rows) > 1 and total:
        rows.append(["all", "", "", "", f"{total:.4g}"])
    billed = f"; billed: {job['billed_hours']:.4g} h" if job.get("billed_hours") else ""
    title = f"Machines and cost ({job.get('target', 'kd-launch')}, job {job.get('job', '')}{billed})"
    return {"kind": "table", "title": title, "columns": ["group", "machines", "price an hour", "hours", "cost"],
            "rows": rows, "empty": ""}  # fmt: skip
