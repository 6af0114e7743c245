"""Writes ``recipes/KEYS.md``, the page of all settings, from the settings themselves.

    python scripts/site/keys.py           # writes the page
    python scripts/site/keys.py --check   # exits with 1 if the page is not what would be written

Type, default and help come from ``kd/settings.py`` and from the classes that a setting may name. Lightning's own
arguments of the Trainer are named without their help, which differs by Lightning's version.
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kd.config.kinds import Key  # noqa: E402
from kd.config.parts import of_kind  # noqa: E402
from kd.run import keys  # noqa: E402
from kd.run.paths import LISTS, PARTS  # noqa: E402

PAGE = ROOT / "recipes" / "KEYS.md"
INTRODUCTION = """\
# All settings

`kd-train recipe=NAME key=value` sets one of these. `kd-train --keys PATTERN` prints those whose name holds `PATTERN`, and
`kd-train recipe=NAME --print_config` every setting of a recipe. What they are for is explained by topic in
[TOPICS.md](TOPICS.md). Completion in bash:
`complete -o nospace -W "$(kd-train --keys | awk '/^[a-z]/ {print $1 "="}')" kd-train`.

Several teachers, `model.teachers.NAME`, each have the settings of `model.teacher`. The settings of a task or a loss:
`kd-train --help KDLoss` ([which loss?](../kd/losses/README.md)). This page is written by `scripts/site/keys.py`.
"""
GROUPS = {
    "The run": (
        "recipe", "seed", "runs_dir", "name", "resume", "preflight", "labels_alone", "matmul_precision",
        "rank_timeout_s",
    ),
    "The pictures": ("data",),
    "The training views": ("data.augment",),
    "The model that is trained": ("model.student",),
    "The teacher": ("model.teacher",),
    "What is learnt": ("model",),
    "The optimizer": ("optim",),
    "Checkpoints": ("checkpoint",),
    "Monitoring": ("monitor",),
    "The trainer": ("trainer",),
}  # fmt: skip
"""Heading -> the groups, or single keys, below it. A key belongs to its longest group."""
CLASSES = {
    "Sources of pictures (`data.source`)": "sources",
}
EXAMPLES = {
    "ImageFolder": "data.source=ImageFolder data.source.root=DIR",
    "Manifest": "data.source.train=train.csv data.source.val=val.csv data.source.image_dir=DIR "
    "data.source.path_column=id data.source.label_column=label",
    "Shards": "data.source=Shards data.source.root=PACK",
    "WebDataset": "data.source=WebDataset data.source.train='DIR/train-{0000..0146}.tar'",
    "HuggingFace": "data.source=HuggingFace data.source.path=NAME",
    "SegmentationFolder": "data.source=SegmentationFolder data.source.root=SCENES data.source.class_names=[road,car]",
    "Pictures": "recipe=foundation_vit data.source.root=DIR",
    "Food101": "data.source=Food101",
    "FoodTagMini": "data.source=FoodTagMini",
    "FoodTagCalories": "data.source=FoodTagCalories model.task=Regression",
}
"""A command line's words for each source; a source without one fails the page's test."""


def cell(text: str) -> str:
    """Text as a cell of a Markdown table: reStructuredText's marks become Markdown's."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`").replace("|", "\\|").replace("\n", " ")


def row(key: Key, name: str, with_help: bool) -> str:
    """``| key | type | default | what it does |``."""
    default = f"`{cell(key.default)}`" if key.default else "must be given"
    return f"| `{name}` | `{cell(key.type)}` | {default} | {cell(key.text) if with_help else ''} |"


def group_of(name: str) -> str:
    """The heading below which a key is."""
    prefixes = {prefix: title for title, of_title in GROUPS.items() for prefix in of_title}
    fitting = [prefix for prefix in prefixes if name == prefix or name.startswith(f"{prefix}.")]
    return prefixes[max(fitting, key=len)]


def table(rows: list[str]) -> list[str]:
    """A table of keys with its head."""
    return ["| key | type | default | meaning |", "|---|---|---|---|", *rows, ""]


def page() -> str:
    """The whole page."""
    lines = [INTRODUCTION]
    for title in GROUPS:
        of_group = [key for key in keys.schema().values() if group_of(key.name) == title]
        rows = [row(key, key.name, with_help=title != "The trainer") for key in of_group]
        lines += [f"## {title}", "", *table(rows)]
    for title, part in CLASSES.items():
        lines += [f"## {title}", ""]
        for one in of_kind(LISTS[part]):
            name = one.short
            if name in PARTS:  # what losses are made of
                continue
            lines += [f"### {name}", "", cell(one.text), ""]
            if part == "sources":
                example = EXAMPLES[name]
                recipe = "" if example.startswith("recipe=") else "recipe=grocery_vit "
                lines += [f"`kd-train {recipe}{example}`", ""]
            if one.arguments:
                lines += table([row(key, key.name, True) for key in one.arguments.values()])
    return "\n".join(lines)


def main() -> int:
    """Writes the page, or compares it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        return int(PAGE.read_text() != page())
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
