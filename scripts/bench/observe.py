"""What does watching cost? Epochs of one run with and without the monitor, in turn; median of the pairs.

    OMP_NUM_THREADS=1 taskset -c 0 python scripts/bench/observe.py --write
    OMP_NUM_THREADS=1 taskset -c 0 python scripts/bench/observe.py --everything --write
    python scripts/bench/observe.py grocery_vit --set data.source.root=DIR model.teacher.checkpoint=FILE

Without a recipe a tiny pair learns drawn pictures (batch 8, 100 steps an epoch): what watching takes hardly depends on
the models, and shows best where a step takes little else. On one core, as above, the thread that samples the machine
takes its time from the training; that is the worst case. Needs a machine to itself; the CPU time says most where it
has none.

``--foreign`` watches a training that is not kd's: a plain LightningModule with torchvision's ResNet-18, by ``kd.Monitor``.

``--everything`` names NVTX ranges, serves Prometheus and scrapes it every second as well. What the rules take a minute
is timed apart.
"""

import argparse
import resource
import socket
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.bench.harness import Turns, options, spread, train, write

ALWAYS = ["monitor.rules_every_s=0"]  # the rules are timed apart


class Scraper(threading.Thread):
    """Reads the endpoint every second while it is on."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.on, self.ms = threading.Event(), list[float]()

    def run(self) -> None:
        """Until the run has closed its port."""
        while self.on.wait():
            began = time.perf_counter()
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10).read()
            except OSError:
                return
            self.ms.append(1000 * (time.perf_counter() - began))
            time.sleep(1.0)


def rules_s(folder: Path) -> float:
    """Seconds of a core that one look of the rules at a run takes."""
    from kd.monitor.watch import ask_rules

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ask_rules(folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


class Watching:
    """Takes the monitor out of a running training, and puts it back."""

    def __init__(self, scraper: Scraper | None = None) -> None:
        self.all: list[Any] = []
        self.scraper = scraper

    def _find(self, trainer: Any) -> tuple[Any, Any]:
        from kd.monitor.phases import Phases
        from kd.monitor.system import System

        self.all = self.all or list(trainer.callbacks)
        return next(c for c in self.all if isinstance(c, Phases)), next(
            c for c in self.all if isinstance(c, System)
        )

    def off(self, module: Any) -> None:
        """No clock, no samples, no health, no looks at the file ``monitor``."""
        from kd.clock import run_clock
        from kd.monitor.control import Control
        from kd.monitor.health import Health
        from kd.monitor.kernels import Kernels
        from kd.monitor.results import WatchedResults
        from kd.monitor.stopping import Stopping

        phases, system = self._find(module.trainer)
        run_clock(None)
        module.trainer.profiler = phases.profiler.users
        system.on = False
        parts = Health | Kernels | Control | WatchedResults | Stopping
        rest = [c for c in self.all if not isinstance(c, parts)]
        module.trainer.callbacks = [c for c in rest if c not in (phases, system)]
        if self.scraper:
            self.scraper.on.clear()

    def on(self, module: Any) -> None:
        """As in any run."""
        from kd.clock import run_clock

        phases, system = self._find(module.trainer)
        module.trainer.callbacks = self.all
        module.trainer.profiler = phases.profiler
        run_clock(phases.clock)
        phases.clock.restart()
        system.on = True
        if self.scraper:
            self.scraper.on.set()


def tiny_pair(place: Path) -> str:
    """A recipe of its own: drawn pictures, an untrained teacher (what it knows costs nothing)."""
    from tests._helpers import draw_folder, save_teacher, write_recipe

    teacher = save_teacher(place / "teacher.safetensors")
    pictures = draw_folder(place / "pictures", train=200, val=8)
    return str(write_recipe(place / "pair.yaml", pictures, teacher, trainer__log_every_n_steps=10))


def train_foreign(folder: Path, turns: Turns, epochs: int) -> Any:
    """Trains torchvision's ResNet-18 on noise of 32 x 32 pixels, batches of 8, 40 steps an epoch; returns the trainer."""
    import pytorch_lightning as pl
    import torch
    import torchvision
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import kd

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torchvision.models.resnet18(num_classes=10)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            pictures, labels = batch
            return nn.functional.cross_entropy(self.net(pictures), labels)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    data = TensorDataset(torch.rand(320, 3, 32, 32), torch.arange(320) % 10)
    watch = kd.Monitor(folder, rules_every_s=0)
    trainer = pl.Trainer(
        max_epochs=epochs,
        callbacks=[watch, turns],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(data, batch_size=8))
    return trainer


def cost_row(measure: str, seconds: dict[str, list[float]], steps: int) -> str:
    """A row of the table: milliseconds of a step with and without the monitor, and the difference in each turn."""
    ms = {arm: [1000 * epoch / steps for epoch in epochs] for arm, epochs in seconds.items()}
    costs = [on - off for on, off in zip(ms["on"], ms["off"], strict=True)]
    low, middle, high = statistics.quantiles(costs, n=4)
    share = middle / statistics.median(ms["off"])
    return (
        f"| {measure} | {spread(ms['off'], 2)} | {spread(ms['on'], 2)} "
        f"| **{middle:+.2f} ms** ({low:+.2f} to {high:+.2f}): {share:+.1%} |"
    )


def main() -> None:
    """Prints the table, and writes it where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="?")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--everything", action="store_true")
    parser.add_argument("--foreign", action="store_true")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    asked = options(parser)
    scraper = Scraper() if asked.everything else None
    items = [f"monitor.prometheus_port={scraper.port}", "monitor.nvtx=true"] if scraper else []
    watching = Watching(scraper)
    turns = Turns({"off": watching.off, "on": watching.on}, after=2, before=watching.on)
    with tempfile.TemporaryDirectory() as place:
        epochs = 2 + 2 * asked.rounds
        if asked.foreign:
            folder, name, batch_size = Path(place, "run"), "torchvision's ResNet-18", 8
            trainer = train_foreign(folder, turns, epochs)
        else:
            recipe = asked.recipe or tiny_pair(Path(place))
            name = f"`{asked.recipe or 'tiny pair'}` {' '.join(asked.set)}"
            if scraper:
                scraper.start()  # it waits for the first epoch that is watched
            watched = train(
                recipe, [*ALWAYS, *items, *asked.set, f"trainer.max_epochs={epochs}"], turns
            )
            trainer, folder, batch_size = (
                watched.trainer,
                watched.folder.path,
                watched.data.batch_size,
            )
        looks = statistics.median(rules_s(folder) for _ in range(3))
    steps = trainer.num_training_batches
    lines = [
        f"{name}: batch {batch_size}, {steps} steps an "
        f"epoch, {asked.rounds} epochs of each in turn in one run, behind two to warm up.",
        "",
        "| | without the monitor, ms a step | with it | cost: median of the pairs (middle half) |",
        "|---|---|---|---|",
        cost_row("by the clock", turns.seconds, steps),
        cost_row("CPU time of all threads", turns.cpu_seconds, steps),
        "",
        f"Beside it: a look of the rules takes {looks:.2f} s of a core, {looks / 60:.2%} of one at one look a minute.",
    ]
    if scraper:
        lines[0] += (
            " Everything on: NVTX ranges, and Prometheus scraped every second in the watched epochs."
        )
        lines.append(f"A scrape is answered in {spread(scraper.ms, 1)} ms.")
    theme = "observe_everything" if scraper else "observe_foreign" if asked.foreign else "observe"
    write(theme, asked.hardware, asked.date, "Cost of watching", lines, asked.write)


if __name__ == "__main__":
    main()
