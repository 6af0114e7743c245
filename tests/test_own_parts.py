"""The parts of the page "Your own parts" train together, as its command names them."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests._helpers import ROOT

PAGE = (ROOT / "recipes/OWN_PARTS.md").read_text()


def test_the_parts_of_the_page_train(recipe: Path, pictures: Path) -> None:
    code = "\n\n".join(re.findall(r"```python\n(.*?)```", PAGE, flags=re.S))
    (recipe.parent / "mine.py").write_text(code)
    (command,) = re.findall(r"```bash\nkd-train (.*?)```", PAGE, flags=re.S)
    words = shlex.split(command.replace("\\\n", " "))
    stands_for = {
        "recipe=R": f"recipe={recipe}",
        "data.source.folder=DIR": f"data.source.folder={pictures}",
    }
    given = [stands_for.get(word, word) for word in words]
    inputs = [
        "model.student.img_size=32",
        "model.student.mean=[0.5,0.5,0.5]",
        "model.student.std=[0.5,0.5,0.5]",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "kd.cli", *given, *inputs, "trainer.max_epochs=1"],
        cwd=recipe.parent,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{recipe.parent}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "epoch 0: " in done.stdout
    header = (recipe.parent / "runs/tiny/000/metrics.csv").read_text().splitlines()[0]
    assert "gap" in header
