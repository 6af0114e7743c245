"""Builds the documentation site: ``python scripts/site/build.py OUT`` (extra ``docs``).

The guides stay beside the code that they explain; this copies them, adds one page for each group of public names, and
runs ``mkdocs build --strict``: a link to a missing page or a docstring that cannot be read ends it with status 1.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import kd

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
GROUPS = {  # page: (title, what is documented there)
    "training": ("Training", ["kd.train", "kd.evaluate", "kd.predict", "kd.export", "kd.DistillationModule",
                              "kd.Distillation", "kd.OptimSpec", "kd.load_student", "kd.save_student", "kd.Monitor",
                              "kd.annotate"]),
    "losses": ("Losses", ["kd.losses"]),
    "parts": ("Tasks, teachers, data", ["kd.tasks", "kd.Teacher", "kd.TapSpec", "kd.Preprocess", "kd.DataInfo",
                                        "kd.DistillationDataModule"]),
}  # fmt: skip


def guides() -> list[Path]:
    """The pages that are written by hand, relative to the repository."""
    found = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "scripts/bench/README.md",
    ]
    found += (ROOT / "scripts/bench/log").glob("*.md")
    found += [*(ROOT / "recipes").glob("*.md"), *(ROOT / "kd").rglob("*.md")]
    return [page.relative_to(ROOT) for page in found]


def documented(name: str) -> str:
    """Where mkdocstrings finds a public name: kd imports lazily, so its names are looked up in their own modules."""
    thing = getattr(kd, name.removeprefix("kd."))
    return name if isinstance(thing, ModuleType) else f"{thing.__module__}.{thing.__qualname__}"


def fill(pages: Path) -> None:
    """Writes all pages of the site below a folder."""
    for guide in guides():
        target = pages / guide
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text((ROOT / guide).read_text())
    for page, (title, names) in GROUPS.items():
        target = pages / "api" / f"{page}.md"
        target.parent.mkdir(exist_ok=True)
        target.write_text(
            f"# {title}\n\n" + "\n".join(f"::: {documented(name)}\n" for name in names)
        )


def main(out: Path) -> int:
    """Builds the site in ``out``; returns mkdocs' exit status."""
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder) / "pages")
        shutil.copy(HERE / "mkdocs.yml", folder)
        command = [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "--quiet",
            "-d",
            str(out.resolve()),
        ]
        return subprocess.run(
            command, cwd=folder, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
        ).returncode


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "site"))
