"""kd beside its peers on pictures that the field knows: one teacher, one student, the same pictures, epochs and views.

    python scripts/bench/public.py --shrink ARCHIVE/imagewoof2 data/imagewoof2-160
    python scripts/bench/public.py --data data/imagewoof2-160 --backbone DINOV2.safetensors --timm TIMM --write

``--data`` is a folder of classes (``train/``, ``val/``): Imagewoof2 and CIFAR-100's PNG files come as one; ``--shrink``
copies it with the shorter side 160, as fast.ai's own smaller archives are. ``TIMM`` is a checkout of
pytorch-image-models, whose ``train.py`` is the peer. The teacher, DINOv2's ViT-S/14 at ``--side`` pixels, is fine-tuned
by ``recipe=photos_teacher``. Each row is a process of its own; its accuracy after the last epoch and its seconds, start
and teacher's answers included, are kept in ``--runs`` and read again.

Rows: each of three starts (random weights, selected weights, kd's) with each of three ways to learn (labels alone, the
teacher's logits alone, kd's recipe); kd's recipe with one part left out; timm's script from random weights and from kd's
start. ``--row "kd's start /"`` takes those whose names hold these words.

Two more copies of a folder, whose files are hard links:

    python scripts/bench/public.py --tenth data/imagewoof2-160 data/woof-rates   # a tenth of train as val: for rates
    python scripts/bench/public.py --wrong noisy_imagewoof.csv 50 data/imagewoof2-160 data/woof-50  # wrong labels
"""

import argparse
import csv
import hashlib
import inspect
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import timm
import torch
import yaml
from harness import options, write
from PIL import Image
from safetensors.torch import load_file, save_file

from kd.data.info import DataInfo
from kd.data.samples import PictureSet
from kd.data.sources import ImageFolder
from kd.data.transforms import EvalView
from kd.distill.inherit import inherit_together
from kd.distill.on_device import fit_on
from kd.fit_to_machine.precision import choose_precision
from kd.losses import KDLoss
from kd.models import StudentSpec, TeacherSpec
from kd.run.assemble import assemble

# as recipe=grocery_vit with AdamW, but for the peer's weight of the labels, which the recipe's row does not have
TEACHER, STUDENT = "vit_small_patch14_dinov2", "vit_tiny_patch16_224"
BATCH, DECAY, WARMUP, TEMPERATURE, LABELS = 64, 0.05, 1, 2.0, 0.1
PARTS_OF_TENTH = 10
PICTURES_OF_START = 3000  # as recipe=grocery_vit
TEACHER_SETTINGS = [
    "data.augment.cutmix=1.0",
    "data.augment.mixup=0.2",
    "data.augment.mix_probability=0.5",
    "model.task.label_smoothing=0.1",
    "model.ema_decay=0.998",
]
"""Of a tenth of Imagewoof2's training pictures, held out, ten epochs at 126 px name 93.6 % with mixing (rate 3e-5; at
6e-5 92.5 %, at 1.2e-4 88.6 %) and 89.4 % without (6e-5)."""


def adamw(lr: float) -> list[str]:
    """Settings of rows that stand for other methods: AdamW, as their authors; the recipe's own optimizer is Muon."""
    return ["optim.name=adamw", f"optim.lr={lr}"]


NO_FEATURES = "model.taps={}"
LOGITS = "model.distill_losses={kd: {class_path: kd.losses.KDLoss, init_args: {temperature: 2.0}}}"

STARTS: dict[str, list[str]] = {
    "random start": ["model.student.inherit=false", *adamw(1e-3)],
    "selected weights": [
        "model.student.inherit=false",
        "model.student.checkpoint=SELECTED",
        *adamw(1e-3),
    ],
    "kd's start": adamw(2e-5),
}
"""Settings by start. Selected weights: Xu et al., 2024; their rate is level from 1e-3 to 2e-3 on Imagewoof2. From kd's
start 2e-5 is the best of four rates, with labels and with logits, on a held-out tenth of the training pictures."""

WAYS: dict[str, list[str]] = {
    "labels alone": ["model.task_loss_weight=1", "model.distill_losses={}", NO_FEATURES],
    "logits alone": [LOGITS, NO_FEATURES],
    "kd's recipe": [],
}
"""Settings by what the student learns from."""

LEFT_OUT: dict[str, list[str]] = {
    "the middle layers": ["model.distill_losses.middle.weight=0"],
    "all features": [LOGITS, NO_FEATURES],
    "mixing": [
        "data.augment.mixup=0",
        "data.augment.cutmix=0",
        "data.augment.mix_probability=0",
    ],
    "Muon (AdamW, 2e-4)": adamw(2e-4),
    "crops, flips and colours": [
        "data.augment.scale=1",
        "data.augment.hflip=0",
        "data.augment.color_jitter=0",
    ],
}
"""kd's recipe from kd's start with one part left out."""


def kd_rows() -> dict[str, list[str]]:
    """Settings of kd's rows by name."""
    settings = {}
    for start, of_start in STARTS.items():
        for way, of_way in WAYS.items():
            settings[f"{start} / {way}"] = [*of_start, *of_way]
    settings["kd's start / kd's recipe"] = []  # the recipe as it is, with its own optimizer
    for part, of_part in LEFT_OUT.items():
        settings[f"kd's recipe without {part}"] = of_part
    return settings


PEERS = {
    "timm's train.py --kd-distill-type logit, from scratch": 2.5e-4,
    "timm's train.py --kd-distill-type logit, from kd's start": 2e-5,
}
"""Learning rates of timm's script by row: the best of four, of the first after three epochs, of the second after five on
a held-out tenth of the training pictures."""


def shrink(source: Path, target: Path, side: int = 160, quality: int = 95) -> None:
    """Copies a folder of pictures as JPEG, the shorter side of each at most ``side`` pixels."""
    files = [
        file
        for file in sorted(source.rglob("*"))
        if file.suffix.lower() in (".jpeg", ".jpg", ".png")
    ]
    with ProcessPoolExecutor() as pool:
        list(pool.map(partial(_shrink, source, target, side, quality), files, chunksize=64))


def _shrink(source: Path, target: Path, side: int, quality: int, file: Path) -> None:
    picture = Image.open(file).convert("RGB")
    factor = min(1.0, side / min(picture.size))
    place = (target / file.relative_to(source)).with_suffix(".jpg")
    place.parent.mkdir(parents=True, exist_ok=True)
    small = picture.resize(
        [max(1, round(edge * factor)) for edge in picture.size], Image.Resampling.BICUBIC
    )
    small.save(place, quality=quality)


def tenth(source: Path, target: Path) -> None:
    """Hard links to a folder's training pictures; every tenth picture of a class becomes validation."""
    for folder in sorted((source / "train").iterdir()):
        for i, file in enumerate(sorted(folder.iterdir())):
            split = "train" if i % PARTS_OF_TENTH else "val"
            link(file, target / split / folder.name / file.name)


def wrong_labels(table: Path, percent: str, source: Path, target: Path) -> int:
    """Hard links to a folder's pictures, those of training under the labels of fast.ai's table.

    Args:
        table: ``noisy_imagewoof.csv`` of fastai/imagenette.
        percent: of wrong labels: 0, 1, 5, 25 or 50, which names a column.
        source: the folder; its files' endings may differ from the table's.
        target: a new folder.

    Returns:
        How many training pictures have another label now.
    """
    labels = {}
    with table.open() as file:
        for row in csv.DictReader(file):
            labels[Path(row["path"]).stem] = row[f"noisy_labels_{percent}"]
    changed = 0
    for picture in sorted((source / "train").glob("*/*")):
        label = labels[picture.stem]
        changed += label != picture.parent.name
        link(picture, target / "train" / label / picture.name)
    for picture in sorted((source / "val").glob("*/*")):
        link(picture, target / "val" / picture.parent.name / picture.name)
    return changed


def link(file: Path, place: Path) -> None:
    """A hard link to a file; folders that are missing are made."""
    place.parent.mkdir(parents=True, exist_ok=True)
    os.link(file, place)


def kds_start(teacher: Path, data: Path, side: int, patch: int, file: Path) -> None:
    """kd's student before its first step, fitted to training pictures as validation shows them.

    At most :data:`PICTURES_OF_START`, spread evenly over the training set, which is sorted by class.

    Args:
        teacher: folder of the fine-tuned teacher.
        data: folder of ``train/`` and ``val/``.
        side: of the pictures, pixels.
        patch: side of the student's patches, pixels.
        file: to write, safetensors.
    """
    source = ImageFolder(str(data))
    split = source.load("train")
    module = assemble(
        DataInfo(source.classes, len(split.targets), 0),
        StudentSpec(STUDENT, side, inherit=True, kwargs={"patch_size": patch}),
        TeacherSpec(TEACHER, side, checkpoint=str(teacher)),
        distill_losses={"kd": KDLoss(temperature=TEMPERATURE)},
    )
    shown = PictureSet(split, EvalView((side, side), 0.875), 0, source)
    count = min(len(shown), PICTURES_OF_START)
    chosen = torch.linspace(0, len(shown) - 1, count).round().long().tolist()
    pictures = torch.stack([shown[i, 0][0] for i in chosen])
    student = module.student_of_one
    teachers_model = module.teacher.model

    def fit(device: torch.device) -> None:
        pairs = [(student.model, student.prepare)]
        inherit_together(pairs, teachers_model, pictures.to(device), module.teacher.prepare)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fit_on(device, [student.model, teachers_model], fit)
    weights = student.model.state_dict()
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, file)


def select_weights(teacher: Path, student: Any, file: Path) -> None:
    """The student's weights picked from the teacher's: its first blocks, evenly spaced channels of each tensor.

    Source: Xu et al., Initializing Models with Larger Ones, ICLR 2024 (uniform selection of the first layers). A patch
    embedding of other pixels and the positions keep their random start, and so does what has another number of axes.

    Args:
        teacher: its weights, safetensors.
        student: timm's model.
        file: to write, safetensors.
    """
    teacher_weights = load_file(teacher)
    chosen = {}
    for name, own in student.state_dict().items():
        picked = teacher_weights.get(name)
        is_of_pixels = name in ("patch_embed.proj.weight", "pos_embed")
        if picked is None or picked.ndim != own.ndim or is_of_pixels:
            chosen[name] = own
            continue
        for axis, length in enumerate(own.shape):
            places = torch.linspace(0, picked.shape[axis] - 1, length).round().long()
            picked = picked.index_select(axis, places)
        chosen[name] = picked
    save_file({name: tensor.contiguous() for name, tensor in chosen.items()}, file)


def kd_train(items: list[str], folder: Path) -> tuple[float, float]:
    """A run of ``kd-train``: accuracy after the last epoch, seconds."""
    start = time.perf_counter()
    where = [f"runs_dir={folder.parent}", f"name={folder.name}"]
    subprocess.run([sys.executable, "-m", "kd.cli", *items, *where], check=True)
    seconds = time.perf_counter() - start
    summary = json.loads(next(folder.parent.glob(f"*/{folder.name}/summary.json")).read_text())
    return 100 * summary["student"]["val"]["acc1"], seconds


def timm_train(
    name: str, start: Path | None, epochs: int, seed: int, folder: Path, bench: "Bench"
) -> tuple[float, float]:
    """timm's own script with the same student, views and optimizer: accuracy after the last epoch, seconds.

    Args:
        name: of :data:`PEERS`.
        start: weights that it begins with; None: random ones.
        epochs: how many.
        seed: of its random numbers.
        folder: for its results.
        bench: pictures, teacher and sizes.
    """
    asked = bench.asked
    classes = len(list((asked.data / "train").iterdir()))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # kd's student is fitted to pictures as its own weights take them, with mean and deviation 0.5
    statistics_ = "--mean 0.485 0.456 0.406 --std 0.229 0.224 0.225"
    if start is not None:
        statistics_ = f"--mean 0.5 0.5 0.5 --std 0.5 0.5 0.5 --initial-checkpoint {start.resolve()}"
    precision = ""
    if device == "cuda" or choose_precision("cpu")[0] == "bf16-mixed":
        precision = "--amp --amp-dtype bfloat16"
    compiled = (
        "--torchcompile" if device == "cpu" else ""
    )  # takes longer than these few epochs on a GPU
    command = f"""train.py {asked.data.resolve()} --model {STUDENT} --num-classes {classes}
        --model-kwargs img_size={asked.side} patch_size={asked.patch} --img-size {asked.side}
        --kd-model-name local-dir:{bench.teacher.resolve()} --kd-distill-type logit --kd-temperature {TEMPERATURE}
        --distill-loss-weight {1 - LABELS} --task-loss-weight {LABELS} --epochs {epochs} --seed {seed}
        -b {BATCH} -j {asked.loaders} --opt adamw --lr {asked.peer_lr or PEERS[name]} --weight-decay {DECAY} --clip-grad 1
        --sched cosine --sched-on-updates --min-lr 0
        --warmup-epochs {min(WARMUP, epochs - 1)} --warmup-lr 1e-5 --cooldown-epochs 0 --reprob 0 --smoothing 0
        --val-interval {epochs} {compiled}
        --scale 0.35 1 --ratio 0.75 1.3333 --hflip 0.5 --color-jitter 0.2 --mixup 0.8 --cutmix 1 --mixup-prob 1
        --mixup-mode elem --interpolation bilinear --train-interpolation bilinear --crop-pct 0.875
        {statistics_} {precision}
        --device {device} --output {folder.parent.resolve()} --experiment {folder.name}"""
    began = time.perf_counter()
    subprocess.run([sys.executable, *command.split()], check=True, cwd=asked.timm)
    seconds = time.perf_counter() - began
    with (folder / "summary.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    return float(last["eval_top1"]), seconds


class Bench:
    """The teacher, the starts, and the rows that are trained or were.

    Args:
        asked: the command line.
    """

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.folder: Path = asked.runs
        self.folder.mkdir(parents=True, exist_ok=True)
        self.records = self.folder / "rows.jsonl"
        self.settings = {
            name: settings for name, settings in kd_rows().items() if self._wanted(name)
        }
        self.peers = [name for name in PEERS if asked.timm and self._wanted(name)]
        self.teacher, self.teacher_acc1 = self._fine_tuned_teacher()
        self.selected = self.folder / "selected.safetensors"
        self.start = self.folder / "start.safetensors"
        self._write_starts()

    def _wanted(self, name: str) -> bool:
        words = self.asked.row
        return not words or any(word in name for word in words)

    def _fine_tuned_teacher(self) -> tuple[Path, float]:
        """timm's folder of the teacher, fine-tuned where it is not yet, and its accuracy in per cent."""
        asked = self.asked
        folder = self.folder / "photos_teacher" / "teacher"
        if not (folder / "summary.json").is_file():
            settings = [
                "recipe=photos_teacher",
                f"data.source.root={asked.data}",
                f"data.img_size={asked.side}",
                f"model.student.img_size={asked.side}",
                f"trainer.max_epochs={asked.teacher_epochs}",
                *TEACHER_SETTINGS,
                *asked.teacher_set,
            ]
            if asked.backbone:
                settings += [
                    f"model.student.checkpoint={asked.backbone}",
                    "model.student.pretrained=false",
                ]
            kd_train(settings, self.folder / "teacher")
        summary = json.loads((folder / "summary.json").read_text())
        return folder / "student", 100 * summary["student"]["best_val"]["acc1"]

    def _write_starts(self) -> None:
        """The files that rows begin with, where a row needs them and they are not there."""
        asked = self.asked
        weights = self.teacher / "model.safetensors"
        if not self.selected.is_file():
            torch.manual_seed(0)
            classes = len(list((asked.data / "train").iterdir()))
            student = timm.create_model(
                STUDENT, img_size=asked.side, patch_size=asked.patch, num_classes=classes
            )
            select_weights(weights, student, self.selected)
        if any("kd's start" in name for name in self.peers) and not self.start.is_file():
            kds_start(self.teacher, asked.data, asked.side, asked.patch, self.start)

    def of_kd(self, name: str, epochs: int, seed: int, folder: Path) -> tuple[float, float]:
        """A row of ``kd-train``: accuracy in per cent, seconds."""
        asked = self.asked
        settings = [item.replace("SELECTED", str(self.selected)) for item in self.settings[name]]
        return kd_train(
            [
                "recipe=grocery_vit",
                f"data.source.root={asked.data}",
                f"data.img_size={asked.side}",
                f"model.teacher.img_size={asked.side}",
                f"model.teacher.checkpoint={self.teacher}",
                f"model.student.img_size={asked.side}",
                f"model.student.kwargs={{patch_size: {asked.patch}}}",
                "model.task.label_smoothing=0",
                f"seed={seed}",
                f"trainer.max_epochs={epochs}",
                f"optim.warmup_epochs={min(WARMUP, epochs - 1)}",
                *settings,
                *asked.set,
            ],
            folder,
        )

    def of_timm(self, name: str, epochs: int, seed: int, folder: Path) -> tuple[float, float]:
        """A row of timm's script: accuracy in per cent, seconds."""
        start = self.start if "kd's start" in name else None
        return timm_train(name, start, epochs, seed, folder, self)

    def digest(self, name: str) -> str:
        """Of what a row is trained by: rows of other settings are not read again."""
        asked = self.asked
        recipes = Path(__file__).parents[2] / "recipes"
        recipe = yaml.safe_load((recipes / "grocery_vit.yaml").read_text())
        made_by = [STUDENT, asked.side, asked.patch, str(asked.data), BATCH, DECAY, WARMUP]
        if name in PEERS:
            made_by += [inspect.getsource(timm_train), asked.peer_lr or PEERS[name]]
        else:
            made_by += [inspect.getsource(Bench.of_kd), recipe, self.settings[name], asked.set]
        return hashlib.sha256(json.dumps(made_by).encode()).hexdigest()[:8]

    def rows(self) -> dict[str, dict[tuple[int, int], tuple[float, float]]]:
        """By name, then by epochs and seed: accuracy in per cent and seconds. Trains what is not kept yet."""
        known = []
        if self.records.is_file():
            known = [json.loads(line) for line in self.records.read_text().splitlines()]
        names = [*self.settings, *self.peers]
        digests = {name: self.digest(name) for name in names}
        table: dict[str, dict[tuple[int, int], tuple[float, float]]] = {name: {} for name in names}
        for row in known:
            if row["made"] == digests.get(row["name"]):
                table[row["name"]][row["epochs"], row["seed"]] = row["acc1"], row["seconds"]

        def train(epochs: int, seed: int, name: str) -> None:
            of_row = self.of_timm if name in PEERS else self.of_kd
            folder = self.folder / f"row-{digests[name]}-{epochs}-{seed}"
            acc1, seconds = of_row(name, epochs, seed, folder)
            table[name][epochs, seed] = acc1, seconds
            row = {"name": name, "epochs": epochs, "seed": seed, "acc1": acc1}
            row |= {"seconds": seconds, "made": digests[name]}
            with self.records.open("a") as file:
                file.write(json.dumps(row) + "\n")

        with ThreadPoolExecutor(self.asked.at_once) as pool:
            trainings = [
                pool.submit(train, epochs, seed, name)
                for epochs, seed, name in product(self.asked.epochs, self.asked.seeds, names)
                if (epochs, seed) not in table[name]
            ]
        for training in trainings:
            training.result()
        return table

    def lines(self) -> list[str]:
        """The page: what was done, and the table."""
        asked = self.asked
        seeds = ", ".join(map(str, asked.seeds))
        lines = [
            f"{asked.data.name}; teacher: ViT-S/14 (DINOv2), {asked.teacher_epochs} epochs, {self.teacher_acc1:.1f} %; "
            f"student: {STUDENT} with patches of {asked.patch} at {asked.side} px, batch {BATCH}; seeds {seeds}. "
            "Accuracy after the last epoch in per cent (mean ± standard deviation over seeds); minutes of the whole "
            "process. All rows augment alike (crops from 0.35, flips, colours, all pairs mixed) but those that leave "
            f"it out. kd's rows: {' '.join(asked.set) or 'nothing else set'}.",
            "",
            "| | " + " | ".join(f"{n} epoch{'s' * (n > 1)}" for n in asked.epochs) + " |",
            "|---|" + "---|" * len(asked.epochs),
        ]
        for name, results in self.rows().items():
            cells = []
            for epochs in asked.epochs:
                of_seeds = [results[epochs, seed] for seed in asked.seeds]
                accuracies = [acc1 for acc1, _ in of_seeds]
                minutes = statistics.mean(seconds for _, seconds in of_seeds) / 60
                spread = f" ± {statistics.stdev(accuracies):.1f}" if len(accuracies) > 1 else ""
                cells.append(f"{statistics.mean(accuracies):.1f}{spread} % ({minutes:.1f} min)")
            lines.append(f"| {name} | {' | '.join(cells)} |")
        return lines


def main() -> None:
    """Trains what is not there yet and writes the table; or copies a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shrink", nargs=2, type=Path, metavar=("FROM", "TO"))
    parser.add_argument("--quality", type=int, default=95, help="of --shrink's JPEG files")
    parser.add_argument("--tenth", nargs=2, type=Path, metavar=("FROM", "TO"))
    parser.add_argument("--wrong", nargs=4, metavar=("CSV", "PERCENT", "FROM", "TO"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--backbone", help="DINOv2's ViT-S/14, a file; default: downloaded")
    parser.add_argument("--teacher-epochs", type=int, default=3)
    parser.add_argument("--teacher-set", nargs="*", default=[], help="settings for its fine-tuning")
    parser.add_argument("--side", type=int, default=112, help="of the pictures, in pixels")
    parser.add_argument("--patch", type=int, default=16, help="of the student, in pixels")
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 5, 20])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--timm", type=Path, help="a checkout of pytorch-image-models")
    parser.add_argument("--peer-lr", type=float, help="of timm's script")
    parser.add_argument(
        "--loaders", type=int, default=1, help="processes that load for timm's script"
    )
    parser.add_argument("--row", nargs="*", default=[], help="rows with one of these words alone")
    parser.add_argument("--set", nargs="*", default=[], help="settings for kd's rows")
    parser.add_argument("--at-once", type=int, default=1, help="rows that train at the same time")
    parser.add_argument("--runs", type=Path, default=Path("runs/public"))
    asked = options(parser)
    if asked.shrink:
        shrink(*asked.shrink, quality=asked.quality)
    elif asked.tenth:
        tenth(*asked.tenth)
    elif asked.wrong:
        table, percent, source, target = asked.wrong
        changed = wrong_labels(Path(table), percent, Path(source), Path(target))
        print(f"{changed} training pictures have a wrong label")
    else:
        lines = Bench(asked).lines()
        title = f"Beside peers on {asked.data.name}"
        write("public", asked.hardware, asked.date, title, lines, asked.write)


if __name__ == "__main__":
    main()
