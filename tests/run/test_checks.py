"""Names of runs, and values that need each other."""

import shutil
import subprocess
import sys
from pathlib import Path

from kd.config.kinds import wrong
from kd.run import keys


def test_names_of_runs() -> None:
    kind = keys.schema()["name"].kind
    assert wrong(kind, "first-try") == ""
    assert wrong(kind, "../x").startswith(
        "must be letters, digits, . + - _ alone, the first a letter"
    )


def test_zero_on_one_process_is_refused_before_torch(finished: Path, tmp_path: Path) -> None:
    """As of a run of two processes that is resumed on one."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("zero: false", "zero: true"))
    items = [f"resume={run}", "trainer.devices=1", "trainer.max_epochs=3"]
    code = f"import sys; from kd.cli import main; print(main('train', {items}), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"
    assert done.stderr.endswith("; optim.zero=false trains on one\n")
