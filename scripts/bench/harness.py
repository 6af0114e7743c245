"""What the benchmarks share: kd's commands as processes, calls timed in turn, tables, dated results that say how."""

import argparse
import datetime
import io
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCALES = {4: 0.2, 16: 0.3, 64: 0.5}
"""Of the noise in a drawn picture: pixels -> its share."""


# -- kd in processes of its own ----------------------------------------------------------------------------------------
def command_of(*words: str) -> list[str]:
    """A command line of kd in this Python: ``kd WORDS``, or ``kd-train WORDS`` where they begin with no command."""
    return [sys.executable, "-m", "kd.cli", *words]


def environment(**more: str) -> dict[str, str]:
    """This process's variables and ``more``; kd is the one of this checkout, and settings may name models of this folder."""
    paths = [str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | more


def run_kd(*words: str, **process: Any) -> "subprocess.CompletedProcess[str]":
    """Runs :func:`command_of` to its end.

    Args:
        *words: of its command line.
        **process: further arguments of :func:`subprocess.run`.

    Raises:
        SystemExit: it failed; the end of what it said, where that was captured.
    """
    done = subprocess.run(
        command_of(*words), **{"cwd": ROOT, "env": environment(), "text": True, **process}
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)}: status {done.returncode}\n{(done.stderr or '')[-2000:]}")
    return done


@contextmanager
def served(words: Sequence[str], **process: Any) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """Inside, ``kd-serve`` runs with these words on a free port: its process, and the port. It is killed at the end.

    Args:
        words: of its command line, without ``port``.
        **process: further arguments of :class:`subprocess.Popen`.
    """
    server = subprocess.Popen(
        command_of("serve", *words, "port=0"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **process,
    )
    try:
        assert server.stdout is not None
        said = []
        for line in server.stdout:
            said.append(line)
            if " on http://" in line:
                break
        else:
            raise SystemExit("".join(said))
        yield server, int(line.rpartition(":")[2])
    finally:
        server.kill()
        server.wait()


# -- times -------------------------------------------------------------------------------------------------------------
def synchronize() -> None:
    """Waits until a GPU has done what it was given: before a clock is stopped."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(
    arms: dict[str, Callable[[], Any]], rounds: int, warmup: int = 1, inner: int = 1
) -> dict[str, list[float]]:
    """Seconds of each arm's call, in turn: A B A B ...

    Args:
        arms: name -> what is timed.
        rounds: turns of each.
        warmup: turns before those, which are not kept.
        inner: calls in a turn, between which nobody waits for a GPU.
    """
    times: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(warmup + rounds):
        for name, call in arms.items():
            synchronize()
            start = time.perf_counter()
            for _ in range(inner):
                call()
            synchronize()
            if number >= warmup:
                times[name].append((time.perf_counter() - start) / inner)
    return times


# -- results -----------------------------------------------------------------------------------------------------------
def spread(values: Sequence[float], digits: int = 1) -> str:
    """``median (least to most)``."""
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def mean_of(values: Sequence[float], digits: int = 1) -> str:
    """Mean over some seeds, with the standard deviation of one."""
    text = f"{statistics.mean(values):.{digits}f}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.{digits}f}"
    return text


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    return lines


def settings() -> str:
    """Machine and versions, in a line."""
    import pytorch_lightning
    import timm
    import torch
    import torchvision

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, no GPU"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{device}; {cores} core(s) given, {torch.get_num_threads()} compute thread(s); Python "
        f"{platform.python_version()}, torch {torch.__version__}, torchvision {torchvision.__version__}, timm "
        f"{timm.__version__}, Lightning {pytorch_lightning.__version__}"
    )


def options(doc: str | None, *words: str, **defaults: Any) -> argparse.Namespace:
    """The command line of a benchmark, with ``--hardware`` (in the result's name) and ``--write`` (keeps the result).

    Args:
        doc: the module's docstring, which explains its options; ``--help`` prints it.
        *words: names of what is given without an option; one that ends in ``...`` takes several words.
        **defaults: of each option by its name. ``False``: it is a switch; a list: it takes several values; a type: it must
            be given; None: a text, which may be left out; any other value: one of its type.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in words:
        parser.add_argument(name.removesuffix("..."), nargs="+" if name.endswith("...") else None)
    for name, default in {"hardware": "cpu", "write": False, **defaults}.items():
        flags = sorted({f"--{name}", f"--{name.replace('_', '-')}"})
        if default is False:
            parser.add_argument(*flags, action="store_true")
        elif isinstance(default, list):
            kind = type(default[0]) if default else str
            parser.add_argument(*flags, nargs="*", type=kind, default=default)
        elif isinstance(default, type):
            parser.add_argument(*flags, type=default, required=True)
        else:
            parser.add_argument(*flags, type=str if default is None else type(default), default=default)  # fmt: skip
    return parser.parse_args()


def write(asked: argparse.Namespace, theme: str, title: str, lines: Sequence[str]) -> None:
    """Prints a result; keeps it beside the scripts, as ``THEME_HARDWARE_DATE.md``, where ``--write`` asks for that."""
    command = f"python scripts/bench/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}"
    head = [f"# {title}", "", f"{settings()}.", f"Command: `{command}`", ""]
    text = "\n".join([*head, *lines, ""])
    print(text)
    if asked.write:
        (HERE / f"{theme}_{asked.hardware}_{datetime.date.today()}.md").write_text(text)


# -- pictures ----------------------------------------------------------------------------------------------------------
def drawn(count: int, height: int, width: int) -> list[bytes]:
    """JPEG pictures with the detail of photographs: noise over several scales."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        pixels = np.zeros((height, width, 3), np.float32)
        for scale, share in SCALES.items():
            shape = (height // scale + 1, width // scale + 1, 3)
            coarse = Image.fromarray(rng.integers(0, 255, shape, dtype=np.uint8))
            pixels += share * np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))
        file = io.BytesIO()
        Image.fromarray(pixels.astype(np.uint8)).save(file, "JPEG")
        found.append(file.getvalue())
    return found
