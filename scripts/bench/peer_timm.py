"""timm's ``train.py --kd-*`` beside ``arms/public.yaml``: the same teacher, student, pictures, views and epochs.

    python scripts/bench/peer_timm.py race --data DIR --teacher FOLDER --timm CHECKOUT --epochs 3 --rounds 3 --write

    python scripts/bench/peer_timm.py select --data DIR --teacher FOLDER --out selected.safetensors
    python scripts/bench/peer_timm.py train --data DIR --teacher FOLDER --timm CHECKOUT --epochs 20 --seeds 0 1 2 --write
    python scripts/bench/peer_timm.py train ... --start RUN/student.safetensors --lr 2e-5

``race`` runs whole trainings of kd, timm and torchdistill (``peer_torchdistill.py``) in turn, loaders, validation and all,
each from random weights with the labels' loss and logits' KD: images/s, seconds to the first step, seconds in all. A peer
that is not there (``--timm`` not given, no package torchdistill) is left out, and said to be.
``select`` writes weights that a student of public.yaml begins with (Xu et al., 2024). RUN is that of its arm "kd's start,
untrained"; ``--kd``: more settings of kd-train in a race. CHECKOUT is one of pytorch-image-models. The rates 2.5e-4 from
scratch and 2e-5 from kd's start are the best of four, of the first after three epochs, of the second after five on a
held-out tenth of the training pictures.
"""

import argparse
import csv
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import timm
import torch
from harness import ROOT, options, spread, table, write
from safetensors.torch import load_file, save_file
from start_families import selected_weights

from kd.fit_to_machine.precision import choose_precision

# as recipe=grocery_vit with AdamW, but for the weight of the labels, which the recipe's row does not have
STUDENT = "vit_tiny_patch16_224"
BATCH, DECAY, WARMUP, TEMPERATURE, LABELS = 64, 0.05, 1, 2.0, 0.1


def write_selected(asked: argparse.Namespace) -> None:
    """The file that the rows of selected weights begin with.

    A patch embedding of other pixels and the positions keep their random start.
    """
    torch.manual_seed(0)
    classes = len(list((asked.data / "train").iterdir()))
    student = timm.create_model(
        STUDENT, img_size=asked.side, patch_size=asked.patch, num_classes=classes
    )
    given = load_file(asked.teacher / "model.safetensors")
    for of_pixels in ("patch_embed.proj.weight", "pos_embed"):
        given.pop(of_pixels, None)
    save_file(selected_weights(student.state_dict(), given), asked.out)


def timm_command(asked: argparse.Namespace, seed: int, folder: Path) -> list[str]:
    """The words of timm's own script with the same student, views and optimizer; it writes into ``folder``."""
    classes = len(list((asked.data / "train").iterdir()))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # kd's student is fitted to pictures as its own weights take them, with mean and deviation 0.5
    statistics_ = "--mean 0.485 0.456 0.406 --std 0.229 0.224 0.225"
    if asked.start is not None:
        statistics_ = f"--mean 0.5 0.5 0.5 --std 0.5 0.5 0.5 --initial-checkpoint {Path(asked.start).resolve()}"
    precision = ""
    if device == "cuda" or choose_precision("cpu")[0] == "bf16-mixed":
        precision = "--amp --amp-dtype bfloat16"
    compiled = (
        "--torchcompile" if device == "cpu" else ""
    )  # takes longer than these few epochs on a GPU
    return f"""train.py {asked.data.resolve()} --model {STUDENT} --num-classes {classes}
        --model-kwargs img_size={asked.side} patch_size={asked.patch} --img-size {asked.side}
        --kd-model-name local-dir:{asked.teacher.resolve()} --kd-distill-type logit --kd-temperature {TEMPERATURE}
        --distill-loss-weight {1 - LABELS} --task-loss-weight {LABELS} --epochs {asked.epochs} --seed {seed}
        -b {BATCH} -j {asked.loaders} --opt adamw --lr {asked.lr} --weight-decay {DECAY} --clip-grad 1
        --sched cosine --sched-on-updates --min-lr 0
        --warmup-epochs {min(WARMUP, asked.epochs - 1)} --warmup-lr 1e-5 --cooldown-epochs 0 --reprob 0 --smoothing 0
        --val-interval {asked.epochs} {compiled}
        --scale 0.35 1 --ratio 0.75 1.3333 --hflip 0.5 --color-jitter 0.2 --mixup 0.8 --cutmix 1 --mixup-prob 1
        --mixup-mode elem --interpolation bilinear --train-interpolation bilinear --crop-pct 0.875
        {statistics_} {precision}
        --device {device} --output {folder.parent} --experiment {folder.name}""".split()


def kd_command(asked: argparse.Namespace, seed: int, folder: Path) -> list[str]:
    """The words of ``kd-train`` with the same, which writes into ``folder``."""
    weights = asked.teacher.resolve() / "model.safetensors"
    kd = f"{{class_path: KDLoss, init_args: {{temperature: {TEMPERATURE}, weight: {1 - LABELS}}}}}"
    return [
        "recipe=grocery_vit", f"data.source.root={asked.data.resolve()}", f"model.teacher.checkpoint={weights}",
        f"data.img_size={asked.side}", f"model.teacher.img_size={asked.side}", f"model.student.img_size={asked.side}",
        *asked.kd, f"model.student.kwargs={{patch_size: {asked.patch}}}", "model.student.inherit=false",
        f"model.task_loss_weight={LABELS}", "model.taps=null", f"model.distill_losses={{kd: {kd}}}",
        "optim.name=adamw", f"optim.lr={asked.lr}", "optim.lr_scratch=null", f"optim.weight_decay={DECAY}",
        f"optim.warmup_epochs={min(WARMUP, asked.epochs - 1)}", f"seed={seed}", f"data.batch_size={BATCH}",
        f"data.num_workers={asked.loaders}", f"trainer.max_epochs={asked.epochs}",
        f"trainer.check_val_every_n_epoch={asked.epochs}", "preflight=off", f"runs_dir={folder}",
    ]  # fmt: skip


STEPS = """
import sys, time
file = open(sys.argv.pop(1), "w")
from torch.optim.optimizer import register_optimizer_step_post_hook
register_optimizer_step_post_hook(lambda *_: print(time.time(), file=file, flush=True))
"""
"""Writes the time after each optimizer step; the training follows in the same process."""


def torchdistill_command(asked: argparse.Namespace) -> list[str]:
    """The words of torchdistill's training with the same; it writes nothing."""
    script = Path(__file__).with_name("peer_torchdistill.py")
    return f"""{script} --data {asked.data.resolve()} --teacher {asked.teacher.resolve()} --student {STUDENT}
        --side {asked.side} --patch {asked.patch} --lr {asked.lr} --decay {DECAY} --temperature {TEMPERATURE}
        --labels {LABELS} --epochs {asked.epochs} --batch {BATCH} --loaders {asked.loaders}""".split()


def raced(name: str, words: list[str], folder: Path, cwd: Path) -> dict[str, float]:
    """One whole training: images/s of its steps, seconds to the first and in all.

    Args:
        name: ``timm``, ``torchdistill`` or ``kd``.
        words: of the command.
        folder: that it writes into.
        cwd: that it runs in.
    """
    program = "from kd.cli import train_main\nsys.exit(train_main(sys.argv[1:]))"
    if name != "kd":
        program = "import runpy\nsys.argv.pop(0)\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    folder.mkdir(parents=True, exist_ok=True)
    stamps = folder / "steps.txt"
    began = time.time()
    command = [sys.executable, "-c", STEPS + program, str(stamps), *words]
    with (folder / "log.txt").open("w") as log:
        subprocess.run(command, check=True, cwd=cwd, stdout=log, stderr=log)
    seconds = time.time() - began
    times = [float(line) for line in stamps.read_text().split()]
    between = statistics.median(later - one for one, later in pairwise(times))
    return {"images/s": BATCH / between, "first step, s": times[0] - began, "in all, s": seconds}


def race(asked: argparse.Namespace) -> list[str]:
    """Whole trainings in turn, as a table."""
    runners: dict[str, tuple[Callable[[Path], list[str]], Path]] = {
        "kd": (partial(kd_command, asked, 0), ROOT),
        "timm": (partial(timm_command, asked, 0), Path(asked.timm or ".")),
        "torchdistill": (lambda folder: torchdistill_command(asked), ROOT),
    }
    if asked.timm is None:
        del runners["timm"]
    if find_spec("torchdistill") is None:
        del runners["torchdistill"]
    results: dict[str, list[dict[str, float]]] = {name: [] for name in runners}
    for number in range(asked.rounds):
        for name, (make, cwd) in runners.items():
            folder = asked.out.resolve() / f"race-{name}-{number}"
            results[name].append(raced(name, make(folder), folder, cwd))
    columns = list(results["kd"][0])
    rows = []
    for name, found in results.items():
        rows.append([name, *(spread([one[column] for one in found]) for column in columns)])
    return [
        f"{asked.data.name}, {asked.side} px, {asked.epochs} epochs, {asked.rounds} round(s) in turn; "
        f"images/s by the median time between two steps. Ran: {', '.join(runners)}.",
        "",
        *table(["", *columns], rows),
    ]


def timm_train(asked: argparse.Namespace, seed: int) -> tuple[float, float]:
    """timm's own script: accuracy after the last epoch, minutes.

    Args:
        asked: the command line.
        seed: of its random numbers.
    """
    folder = asked.out.resolve() / f"timm-{asked.epochs}-{seed}"
    found = raced("timm", timm_command(asked, seed, folder), folder, Path(asked.timm))
    with (folder / "summary.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    return float(last["eval_top1"]), found["in all, s"] / 60


def main() -> None:
    """Writes selected weights, or trains and writes a row."""
    asked = options(
        __doc__,
        "what",
        data=Path,
        teacher=Path,
        out=Path("runs/peer_timm"),
        timm=None,
        start=None,
        side=112,
        patch=16,
        lr=2.5e-4,
        epochs=5,
        seeds=[0],
        loaders=1,
        rounds=1,
        kd=[],
    )
    if asked.what == "select":
        write_selected(asked)
        return
    if asked.what == "race":
        title = "Whole trainings: kd-train, timm's train.py, torchdistill"
        write(asked, "peers_trainings", title, race(asked))
        return
    if asked.what != "train":
        sys.exit(f"{asked.what}: select, train or race")
    accuracies, minutes = zip(*(timm_train(asked, seed) for seed in asked.seeds), strict=True)
    lines = [
        f"{asked.data.name}, {asked.side} px, patches of {asked.patch}, {asked.epochs} epochs, rate {asked.lr}, start "
        f"{asked.start or 'random'}, seeds {asked.seeds}: accuracy after the last epoch {spread(accuracies)} %, "
        f"{statistics.mean(minutes):.1f} minutes each.",
    ]
    write(asked, "peer_timm", "timm's train.py distils", lines)


if __name__ == "__main__":
    main()
