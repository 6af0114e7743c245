"""``kd-pack``: writes a recipe's pictures as tar shards."""

from typing import Annotated

from kd.config.kinds import Range
from kd.run.options import CommandOptions
from kd.run.request import Request
from kd.run.run import Run

HELP = """\
  kd-pack recipe=NAME out=FOLDER_OR_URL [short_side=PIXELS] [data.source.key=value ...]

{options}
"""


class PackOptions(CommandOptions):
    """What ``kd-pack`` is given beside the settings of a run."""

    OTHERS = "run"
    out: str | None = None
    """A folder, or a URL that fsspec knows (s3://bucket/name; extra stream)."""
    short_side: Annotated[int, Range(">= 1 and < 1000000")] | None = None
    """Pixels: pictures with a larger shorter side are resized once, here, instead of in every epoch."""


OPTIONS = PackOptions


def run(request: Request, options: PackOptions) -> int | None:
    """Writes the shards of ``train``, and of ``val`` where the source has one.

    Without one no picture is held out here: what trains on the pack does that.

    Returns:
        The exit status; None without ``out=``.

    Raises:
        UserError: a mistake in the command line or the settings, or a place that can't be written.
    """
    out = options.out
    if out is None:
        return None
    run = Run.of(request)
    from kd.run.pictures import list_whole

    listed = list_whole(run.config)
    from kd.data.pack import pack
    from kd.data.sources import labelled
    from kd.run.build import data_of

    source = data_of(run.config, run.trusted).source if listed is None else listed
    for name in ("train", "val"):
        if name == "val" and not source.has(name):
            continue  # held out of train where the pack is trained on
        split = labelled(source.load(name), name)
        size = pack(split, source.classes, out.rstrip("/"), name, options.short_side, source=source)
        print(f"{name}: {len(split.targets)} pictures, {size / 1e6:,.1f} MB in {out}", flush=True)
    print(f"train with data.source=Shards data.source.root={out}")
    return 0
