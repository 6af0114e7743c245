"""Installs the lowest releases that pyproject.toml allows; runs the main job and the strangers' tests with them.

    python scripts/floors.py [FOLDER]

FOLDER (build/floors) gets the environment, some 8 GB with CUDA's libraries; one that is there is brought up to date.
`.ci/run` calls this where the variable KD_FLOORS is set. What kd itself needs is at its lowest release; the tools of the
tests are not.
"""

import subprocess
import sys
import tomllib
import venv
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("hf", "serve", "export", "tune")
"""Whose packages read what others have written."""
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist")
TESTS = (
    "tests/test_stranger.py",
    "tests/test_doors.py",
    "tests/test_places.py",
    "tests/storage/test_elsewhere.py",
    "tests/run/test_trust.py",
    "tests/models/test_own_models.py",
)


def lowest(project: dict) -> list[str]:
    """``NAME==VERSION`` of each package that kd or one of :data:`EXTRAS` needs, at its lowest release."""
    wanted = list(project["dependencies"])
    for extra in EXTRAS:
        wanted += project["optional-dependencies"][extra]
    pins = []
    for requirement in map(Requirement, wanted):
        floors = [part.version for part in requirement.specifier if part.operator == ">="]
        pins += [f"{requirement.name}=={version}" for version in floors]
    return pins


def main() -> None:
    """Makes the environment and runs the checks; the first that fails ends the program with its status."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "floors").resolve()
    with (ROOT / "pyproject.toml").open("rb") as file:
        pins = lowest(tomllib.load(file)["project"])
    venv.create(folder, with_pip=True)
    constraints = folder / "lowest.txt"
    constraints.write_text("\n".join(pins))
    python = str(folder / "bin" / "python")
    extras = f"{ROOT}[{','.join(EXTRAS)}]"
    install = [python, "-m", "pip", "install", "-q", "-c", str(constraints), "-e", extras, *TOOLS]
    pytest = [python, "-m", "pytest"]
    main_job = [
        str(folder / "bin" / "kd-train"),
        "recipe=foodtag_vit",
        f"runs_dir={folder / 'runs'}",
    ]
    for command in (install, main_job, [*pytest, *TESTS], [*pytest, "-m", "fast"]):
        print("==", " ".join(command), flush=True)
        done = subprocess.run(command, cwd=ROOT)
        if done.returncode:
            sys.exit(done.returncode)


if __name__ == "__main__":
    main()
