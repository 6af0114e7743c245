"""Learning from foundation models without labels: what it is worth on real photographs, and what it costs.

    python scripts/bench/foundation.py --part 1 --seeds 0 1 2 --epochs 30 --write

KD_SHARED names a folder with ``data/grocery/{train,val}/<class>`` and ``models/`` (DINOv2's ViT-S/14 without a
classifier, and the same fine-tuned on the groceries). Every arm is a run of ``kd-train``: a finished one is read again,
one that was stopped resumes. Parts:

1. k-NN and ridge probe of the features: teacher; student from scratch; inherited and untrained; inherited and
   distilled; with a teacher that looks at 224 px.
2. Labels on 10 % and on all of the pictures, from scratch and from the student distilled without labels (by part 1, for
   each seed), with and without a fine-tuned teacher.
3. Two teachers against each alone: k-NN, and agreement with the fine-tuned teacher's classifier.
5. Images/s with a live teacher and with cached features; disk a picture by precision, and its cost in k-NN.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from harness import options, write
from torch import Tensor

SHARED = Path(os.environ.get("KD_SHARED", "shared"))
GROCERY, MODELS = SHARED / "data/grocery", SHARED / "models"
DINO, TUNED = (
    MODELS / "vit_small_patch14_dinov2.safetensors",
    MODELS / "grocery81_vit_small_patch14_dinov2_112.safetensors",
)
ARCH, SIDE = "vit_small_patch14_dinov2", 112
Summary = dict
Arms = dict[str, list[str]]

PICTURES = [  # all training pictures, without their labels; validation's to hold out
    "recipe=foundation_vit", f"data.source.root={GROCERY / 'train'}", f"data.source.val={GROCERY / 'val'}",
    f"data.probe.root={GROCERY}", f"model.teachers.dino.checkpoint={DINO}",
]  # fmt: skip
CLOSER = ["data.img_size=224", "model.teachers.dino.img_size=224"]
TRAINED_LR, SCRATCH_LR = (
    "3.0e-4",
    "1.0e-3",
)  # part 2: of a student with weights, and of one without; not tuned


def run(name: str, seed: int, items: Sequence[str], runs: Path) -> Summary:
    """One run of ``kd-train``; a finished one is read, one that was stopped resumes."""
    recipe = next(item for item in items if item.startswith("recipe=")).removeprefix("recipe=")
    folder = runs / recipe / f"{name}-{seed}"
    file = folder / "summary.json"
    if not (file.is_file() and json.loads(file.read_text())["status"] == "done"):
        started = (folder / "checkpoints" / "last.ckpt").is_file()
        fresh = [*items, f"seed={seed}", f"name={name}-{seed}", f"runs_dir={runs}"]
        subprocess.run(
            [sys.executable, "-m", "kd.cli", *([f"resume={folder}"] if started else fresh)],
            check=True,
        )
    return json.loads(file.read_text())


def each(arms: Arms, chosen: argparse.Namespace) -> dict[str, list[Summary]]:
    """All arms over all seeds, seeds outermost, so that drift of the machine meets all arms alike."""
    found: dict[str, list[Summary]] = {name: [] for name in arms}
    for seed in chosen.seeds:
        for name, items in arms.items():
            if chosen.arm and name not in chosen.arm:
                continue
            filled = [item.replace("{seed}", str(seed)) for item in items]
            found[name].append(run(name, seed, [*filled, *chosen.set], chosen.runs))
            print(name, seed, found[name][-1]["student"]["val"], flush=True)
    return {name: summaries for name, summaries in found.items() if summaries}


def mean(values: Sequence[float], digits: int = 1, factor: float = 100) -> str:
    """Mean and its standard error over seeds."""
    scaled = [factor * v for v in values]
    error = (
        f" ± {statistics.stdev(scaled) / len(scaled) ** 0.5:.{digits}f}" if len(scaled) > 1 else ""
    )
    return f"{statistics.mean(scaled):.{digits}f}{error}"


def val(summaries: Sequence[Summary], metric: str) -> list[float]:
    """The last epoch's value of each seed."""
    return [s["student"]["val"][metric] for s in summaries]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def about(found: dict[str, list[Summary]], chosen: argparse.Namespace) -> list[str]:
    """Settings that all arms share."""
    first = next(iter(found.values()))[0]
    return [
        f"Seeds {chosen.seeds}, {chosen.epochs} epochs, batch {first['batch_size']}, {first['data']['train']} training "
        f"and {first['data']['val']} validation pictures, {first['precision']}, {first['world_size']} process(es); "
        "last epoch, no selection; ± is the standard error over seeds.",
        "",
    ]


# -- part 1 ------------------------------------------------------------------------------------------------------------


def part1(chosen: argparse.Namespace) -> tuple[str, list[str]]:
    """k-NN and probe of features, without any label in training."""
    trained = [
        *PICTURES,
        f"trainer.max_epochs={chosen.epochs}",
        f"trainer.check_val_every_n_epoch={chosen.every}",
    ]
    untrained = [
        *PICTURES,
        "optim.lr=0",
        "optim.warmup_epochs=0",
        "trainer.max_epochs=1",
        "trainer.limit_train_batches=1",
    ]
    arms = {
        "scratch": [*trained, "model.student.inherit=false"],
        "inherited": [*untrained, "model.student.inherit=true"],
        "distilled": [*trained, "model.student.inherit=true"],
        "closer": [*trained, "model.student.inherit=true", *CLOSER],
    }
    found = each(arms, chosen)
    names = {
        "scratch": "student from scratch, distilled", "inherited": "student inherited, untrained",
        "distilled": "student inherited, distilled", "closer": "likewise, its teacher looks at 224 px",
    }  # fmt: skip
    teachers = {name: found[arm][0]["teacher"]["val"] for name, arm in
                (("teacher at 112 px", "distilled"), ("teacher at 224 px", "closer")) if arm in found}  # fmt: skip
    rows = [
        [name, f"{100 * v['knn1']:.1f}", f"{100 * v['probe1']:.1f}", "", ""]
        for name, v in teachers.items()
    ]
    for arm, summaries in found.items():
        shares = [mean(val(summaries, metric)) for metric in ("knn1", "probe1")]
        rows.append([names[arm], *shares, mean(val(summaries, "rankme"), factor=1),
                     mean(val(summaries, "feature_loss"), 3, 1)])  # fmt: skip
    return "Features without labels: DINOv2 ViT-S/14 to ViT-Ti/16 at 112 px", [
        *about(found, chosen), *table(["", "k-NN %", "ridge probe %", "RankMe", "held-out loss"], rows),
    ]  # fmt: skip


# -- part 2 ------------------------------------------------------------------------------------------------------------


def lists(runs: Path, seed: int) -> list[str]:
    """A tenth of each class, at least one picture: a list for this seed."""
    folder = runs.resolve() / "lists"
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for part in ("train", "val"):
        rows = []
        for place in sorted(p for p in (GROCERY / part).iterdir() if p.is_dir()):
            files = sorted(place.rglob("*.jpg"))
            count = max(1, round(0.1 * len(files))) if part == "train" else len(files)
            rows += [
                [str(files[i].resolve()), place.name]
                for i in sorted(rng.permutation(len(files))[:count])
            ]
        with (folder / f"{part}-{seed}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["path", "label"], *rows])
    return [str(folder / f"{part}-{{seed}}.csv") for part in ("train", "val")]


def part2(chosen: argparse.Namespace) -> tuple[str, list[str]]:
    """Does distilling without labels first pay?"""
    train, held_out = next(lists(chosen.runs, seed) for seed in chosen.seeds)
    for seed in chosen.seeds:
        lists(chosen.runs, seed)
    tenth = json.dumps({"class_path": "Manifest", "init_args": {"train": train, "val": held_out}})
    pictures = {
        "10 %": [f"data.source={tenth}", "data.batch_size=32"],
        "100 %": [f"data.source.root={GROCERY}"],
    }
    distilled = chosen.runs / "foundation_vit" / "distilled-{seed}"
    starts = {
        "scratch": ["model.student.inherit=false", f"optim.lr={SCRATCH_LR}"],
        "distilled": [
            "model.student.inherit=false",
            f"model.student.checkpoint={distilled}",
            f"optim.lr={TRAINED_LR}",
        ],
    }
    teachers = {
        "labels": ["config=no_teacher"],
        "labels and KD": [f"model.teacher.checkpoint={TUNED}"],
    }
    arms: Arms = {}
    for (share, data), (start, weights), (kind, teacher) in (
        (d, s, t) for d in pictures.items() for s in starts.items() for t in teachers.items()
    ):
        name = f"{start}-{kind}-{share}".replace(" ", "_").replace("_%", "")
        length = [
            f"trainer.max_epochs={chosen.epochs}",
            f"trainer.check_val_every_n_epoch={chosen.every}",
        ]
        arms[name] = ["recipe=grocery_vit", "optim.name=adamw", *data, *teacher, *weights, *length]
    found = each(arms, chosen)
    rows = [[*name.split("-"), mean(val(s, "acc1"))] for name, s in found.items()]
    return "Labels after distillation without labels: ViT-Ti/16 at 112 px", [
        *about(found, chosen),
        f"Learning rate {SCRATCH_LR} from scratch, {TRAINED_LR} from the distilled student; not tuned.",
        "", *table(["start", "learns from", "% of the labels", "val acc1 %"], rows),
    ]  # fmt: skip


# -- part 3 ------------------------------------------------------------------------------------------------------------


def part3(chosen: argparse.Namespace) -> tuple[str, list[str]]:
    """Does one student serve two teachers?"""
    tuned = json.dumps({"arch": ARCH, "img_size": SIDE, "checkpoint": str(TUNED), "head": False})
    losses = {"tuned_summary": {"class_path": "CosineLoss"},
              "tuned_patches": {"class_path": "RADIOLoss", "init_args": {"standardize": "phi_s"}}}  # fmt: skip
    taps = {"tuned_summary": {"student": "prelogits", "teacher": "prelogits"},
            "tuned_patches": {"student": "norm", "teacher": "norm"}}  # fmt: skip
    more = [f"model.distill_losses.{name}={json.dumps(loss)}" for name, loss in losses.items()]
    more += [f"model.taps.{name}={json.dumps(tap)}" for name, tap in taps.items()]
    more += [f"model.teacher_of.{name}=tuned" for name in losses]
    off = [
        "model.distill_losses.dino_summary.weight=0",
        "model.distill_losses.dino_patches.weight=0",
    ]
    shared = [*PICTURES, "model.student.inherit=true", f"trainer.max_epochs={chosen.epochs}",
              f"trainer.check_val_every_n_epoch={chosen.every}"]  # fmt: skip
    both = [*shared, f"model.teachers.tuned={tuned}", *more]
    arms = {
        "distilled": shared,
        "tuned": [*both, *off],
        "both": both,
    }
    found = each(arms, chosen)
    names = {"distilled": "DINOv2 alone", "tuned": "the fine-tuned one alone", "both": "both"}  # fmt: skip
    rows = []
    for arm, summaries in found.items():
        places = [chosen.runs / "foundation_vit" / f"{arm}-{seed}" for seed in chosen.seeds]
        agreed = [agreement(place / "student.safetensors") for place in places]
        shares = [mean(val(summaries, metric)) for metric in ("knn1", "probe1")]
        rows.append([names[arm], *shares, mean(agreed)])
    members = found.get("both", found.get("tuned", [{}]))[0].get("teacher", {}).get("members", {})
    rows += [[f"teacher {name}", f"{100 * m['val']['knn1']:.1f}", f"{100 * m['val']['probe1']:.1f}", ""]
             for name, m in members.items()]  # fmt: skip
    return "Two teachers against each alone: ViT-Ti/16 at 112 px", [
        *about(found, chosen),
        "All students start from DINOv2's layers. Agreement: a ridge map from the student's features to the fine-tuned "
        "teacher's, fitted on the training pictures without labels, then that teacher's classifier; the share of "
        "validation pictures where it names the teacher's class.",
        "", *table(["", "k-NN %", "ridge probe %", "agreement with the fine-tuned teacher %"], rows),
    ]  # fmt: skip


def agreement(file: Path) -> float:
    """See above; in 0..1."""
    import timm
    from safetensors.torch import load_file

    from kd.data.datamodule import DistillationDataModule
    from kd.data.sources import Pictures
    from kd.models import preprocess_for
    from kd.module.evaluation import look_at
    from kd.settings import Probe
    from kd.ship.export import load_student

    student, prepare, _ = load_student(file)
    teacher = timm.create_model(ARCH, num_classes=81, img_size=SIDE).eval()
    teacher.load_state_dict({name: value.float() for name, value in load_file(TUNED).items()})
    own = preprocess_for(teacher, SIDE)
    data = DistillationDataModule(
        Pictures(str(GROCERY / "val")), img_size=SIDE, num_workers=0, probe=Probe(str(GROCERY))
    )
    models: dict[str, Callable[[Tensor], Tensor]] = {
        "student": lambda images: student(prepare(images)),
        "teacher": lambda images: teacher.forward_head(
            teacher.forward_features(own(images)), pre_logits=True
        ),
    }
    seen = look_at(models, data, data.eval_dataloader("probe"), torch.device("cpu"))
    bank = seen.bank
    x, y = seen.features["student"].double(), seen.features["teacher"].double()
    x = (x - x[:bank].mean(0)) / x[:bank].std(0).clamp_min(1e-6)
    centre = y[:bank].mean(0)
    gram = x[:bank].T @ x[:bank] + 1e-2 * bank * torch.eye(x.shape[1], dtype=torch.float64)
    mapped = x[bank:] @ torch.linalg.solve(gram, x[:bank].T @ (y[:bank] - centre)) + centre
    with torch.no_grad():
        told, wanted = (teacher.head(z.float()).argmax(1) for z in (mapped, y[bank:]))
    return float((told == wanted).double().mean())


# -- part 5 ------------------------------------------------------------------------------------------------------------


def part5(chosen: argparse.Namespace) -> tuple[str, list[str]]:
    """Live and cached: speed wants a quiet machine, disk and accuracy do not."""
    shared = [*PICTURES, "model.student.inherit=true", f"trainer.max_epochs={chosen.epochs}",
              f"trainer.check_val_every_n_epoch={chosen.every}"]  # fmt: skip
    arms = {"distilled": shared}
    folder = chosen.runs.resolve() / "cache-half-{seed}"
    arms["half"] = [*shared, "model.teachers.dino.cache=only", "model.teachers.dino.cache_views=4",
                    f"model.teachers.dino.cache_dir={folder}"]  # fmt: skip
    for seed in chosen.seeds:
        if not chosen.arm or "half" in chosen.arm:
            items = [item.replace("{seed}", str(seed)) for item in arms["half"]]
            command = [
                sys.executable,
                "-c",
                "import sys; from kd.cli import main; sys.exit(main('cache', sys.argv[1:]))",
            ]
            subprocess.run([*command, *items, f"seed={seed}", *chosen.set], check=True)
    found = each(arms, chosen)
    rows = []
    for arm, summaries in found.items():
        first = summaries[0]
        kept = (
            first["cache"]["disk_mb"] * 1e3 / (4 * first["data"]["train"])
            if first["cache"]
            else None
        )
        rows.append(["live" if arm == "distilled" else f"cached, {arm}",
                     mean([s["images_per_s"] for s in summaries], 0, 1), "" if kept is None else f"{kept:.1f}",
                     mean(val(summaries, "knn1")), mean(val(summaries, "probe1"))])  # fmt: skip
    return "Live and cached features: DINOv2 ViT-S/14 to ViT-Ti/16 at 112 px", [
        *about(found, chosen),
        "Four views of each picture are cached, filled before training; live ones never come again.",
        "", *table(["", "images/s", "kB a picture and view", "k-NN %", "ridge probe %"], rows),
    ]  # fmt: skip


PARTS = {1: part1, 2: part2, 3: part3, 5: part5}


def main() -> None:
    """Runs one part and writes its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", type=int, choices=PARTS, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--every", type=int, default=5, help="validate after so many epochs; must divide --epochs"
    )
    parser.add_argument("--arm", nargs="*", default=[], help="these arms alone")
    parser.add_argument("--set", nargs="*", default=[], help="settings for all arms")
    parser.add_argument("--runs", type=Path, default=Path("runs/foundation"))
    chosen = options(parser)
    chosen.every = min(chosen.every, chosen.epochs)
    if chosen.epochs % chosen.every:
        parser.error("--every must divide --epochs: the last epoch must be measured")
    title, lines = PARTS[chosen.part](chosen)
    write(f"foundation_part{chosen.part}", chosen.hardware, chosen.date, title, lines, chosen.write)


if __name__ == "__main__":
    main()
