"""What each lever gives a student of `grocery_vit`: many short trainings on answers that are computed once.

    python scripts/bench/quality.py views --count 8
    python scripts/bench/quality.py start --pictures 512
    python scripts/bench/quality.py train NAME --epochs 10 --lr 5e-5 --summary 0.5 --patches 0.5

KD_SHARED names a folder with ``data/grocery`` and ``models/``, --out where views, starts and results are kept. One in
seven training pictures is a fold that nothing trains on. Reads `train` and `val` alone, never `test`.
"""

import argparse
import copy
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from kd.data.info import DataInfo
from kd.data.samples import PictureSet
from kd.data.sources import ImageFolder
from kd.data.transforms import EvalView, MixPairs, seeded, train_transform
from kd.distill.inherit import inherit_together
from kd.distill.inherit.ridge import fit_projection
from kd.fit_to_machine.precision import choose_precision
from kd.losses import KDLoss, MSELoss
from kd.models import StudentSpec, TeacherSpec
from kd.models.attention import InFloat32
from kd.optim import OptimSpec, build_optimizer, warmup_cosine
from kd.run.assemble import assemble
from kd.settings import Augment

SHARED = Path(os.environ.get("KD_SHARED", "shared"))
SOURCE = ImageFolder(str(SHARED / "data/grocery"))
TEACHER = SHARED / "models/grocery81_vit_small_patch14_dinov2_112.safetensors"
SIZE, FOLD, BATCH = (112, 112), 7, 66
MIDDLE = (3, 7)  # blocks after which the teacher's stream is kept
BFLOAT16 = choose_precision("cpu")[0] == "bf16-mixed"
Data = dict[str, Any]


def pair(arch: str = "vit_tiny_patch16_224", drop_path: float = 0.0) -> tuple[Any, Any]:
    """The student and the teacher as the recipe builds them."""
    split = SOURCE.load("train")
    kwargs = {"patch_size": "auto"} | ({"drop_path_rate": drop_path} if drop_path else {})
    module = assemble(
        DataInfo(SOURCE.classes, len(split.targets), 296),
        StudentSpec(arch, SIZE[0], inherit=True, kwargs=kwargs),
        TeacherSpec("vit_small_patch14_dinov2", SIZE[0], checkpoint=str(TEACHER)),
        distill_losses={"kd": KDLoss(temperature=2.0)},
    )
    return module.student_of_one, module.teacher


@torch.no_grad()
def answers(teacher: Any, images: Tensor) -> Data:
    """Logits and tokens of the teacher: its last norm's, and after :data:`MIDDLE` the normed stream, in float16."""
    seen: dict[str, list[Tensor]] = {name: [] for name in ("last", *map(str, MIDDLE))}
    logits, model = [], teacher.model

    def note(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            x = output if name == "last" else F.layer_norm(output.float(), output.shape[-1:])
            seen[name].append(x.half())

        return hook

    hooks = [model.norm.register_forward_hook(note("last"))]
    hooks += [model.blocks[b].register_forward_hook(note(str(b))) for b in MIDDLE]
    for part in images.split(BATCH):
        with torch.autocast("cpu", torch.bfloat16, enabled=BFLOAT16):
            logits.append(model(teacher.prepare(part)).float())
    for hook in hooks:
        hook.remove()
    return {
        "image": images,
        "logits": torch.cat(logits),
        **{k: torch.cat(v) for k, v in seen.items()},
    }


def pictures(split: Any, transform: Any, view: int) -> Tensor:
    """All pictures of a split, uint8."""
    found = PictureSet(split, transform, 0, SOURCE)
    return torch.stack([found[i, view][0] for i in range(len(found))])


def make_views(asked: argparse.Namespace) -> None:
    """The pictures as validation sees them, and so many random views, with the teacher's answers."""
    _, teacher = pair()
    teacher.model.eval()
    for name in ("val", "train"):
        split, file = SOURCE.load(name), asked.out / f"{name}.pt"
        if not file.exists():
            found = answers(teacher, pictures(split, EvalView(SIZE, 0.875), 0))
            torch.save({**found, "target": torch.tensor(split.targets)}, file)
            right = (found["logits"].argmax(1) == torch.tensor(split.targets)).float().mean()
            print(name, f"teacher {100 * right:.1f} %", flush=True)
    split = SOURCE.load("train")
    targets = torch.tensor(split.targets)
    for view in range(asked.first, asked.first + asked.count):
        start = time.perf_counter()
        augment = Augment(scale=asked.scale, hflip=0.5, color_jitter=0.2)
        shown = pictures(split, train_transform(SIZE, augment), view)
        found = answers(teacher, shown)
        torch.save(found, asked.out / f"{view}.pt")
        right = (found["logits"].argmax(1) == targets).float().mean()
        print(view, f"{100 * right:.1f} % named, {time.perf_counter() - start:.0f} s", flush=True)


def mix_views(asked: argparse.Namespace) -> None:
    """Pairs of a view that is there, mixed by mixup or cutmix, with the teacher's answers to the mixed pictures."""
    _, teacher = pair()
    teacher.model.eval()
    augment = Augment(mixup=asked.mixup, cutmix=asked.cutmix, mix_probability=1.0)
    mix = MixPairs(augment, len(SOURCE.classes), 0)
    targets = torch.tensor(SOURCE.load("train").targets)
    for view in range(asked.first, asked.first + asked.count):
        start = time.perf_counter()
        plain = torch.load(asked.out / f"{view}.pt", mmap=True)
        names = (torch.arange(len(targets)) % FOLD).nonzero()[:, 0]  # the fold takes no part
        with seeded(view):
            names = names[torch.randperm(len(names))]
        shown, _ = mix(plain["image"][names], targets[names], [(int(i), view) for i in names])
        found = answers(teacher, shown)
        empty = {
            key: torch.zeros(len(targets), *x.shape[1:], dtype=x.dtype) for key, x in found.items()
        }
        torch.save(
            {k: x.index_copy(0, names, found[k]) for k, x in empty.items()},
            asked.out / f"m{view}.pt",
        )
        sure = found["logits"].softmax(1).max(1).values.mean()
        print(
            f"m{view}",
            f"mean of the largest probability {sure:.2f}, plain "
            f"{plain['logits'].softmax(1).max(1).values.mean():.2f}, {time.perf_counter() - start:.0f} s",
            flush=True,
        )


def make_start(asked: argparse.Namespace) -> None:
    """The inherited student, fitted on pictures outside of the fold."""
    student, teacher = pair(asked.arch)
    shown = torch.load(asked.out / "train.pt")["image"]
    names = (torch.arange(len(shown)) % FOLD).nonzero()[:, 0]
    with seeded(0):
        names = names[torch.randperm(len(names))]
    sample = [shown[names]] + [
        torch.load(asked.out / f"{v}.pt", mmap=True)["image"][names] for v in asked.views
    ]
    start = time.perf_counter()
    shown = torch.cat(sample)[: asked.pictures]
    inherit_together([(student.model, student.prepare)], teacher.model, shown, teacher.prepare)
    torch.save(student.model.state_dict(), asked.out / f"start_{asked.name}.pt")
    print(
        asked.name,
        f"{time.perf_counter() - start:.0f} s",
        measured(student, load_judged(asked.out)),
        flush=True,
    )


def load_judged(out: Path) -> dict[str, Data]:
    """Validation's pictures and the fold's, as validation sees them."""
    val, train = torch.load(out / "val.pt"), torch.load(out / "train.pt")
    fold = torch.arange(len(train["target"])) % FOLD == 0
    return {"val": val, "fold": {key: value[fold].clone() for key, value in train.items()}}


@torch.no_grad()
def measured(
    student: Any, judged: dict[str, Data], model: nn.Module | None = None
) -> dict[str, float]:
    """Accuracy and agreement in per cent, KL from the teacher at T 1."""
    model = (model or student.model).eval()
    found = {}
    for name, data in judged.items():
        logits = torch.cat([model(student.prepare(part)) for part in data["image"].split(BATCH)])
        said, right = logits.argmax(1), data["logits"].argmax(1)
        kl = F.kl_div(
            logits.log_softmax(1),
            data["logits"].log_softmax(1),
            log_target=True,
            reduction="batchmean",
        )
        found |= {f"{name} acc": 100 * (said == data["target"]).float().mean().item(),
                  f"{name} agree": 100 * (said == right).float().mean().item(), f"{name} kl": kl.item()}  # fmt: skip
    return {key: round(value, 3 if "kl" in key else 1) for key, value in found.items()}


class Features(nn.Module):
    """Losses over tokens: the last norm's summary and patches, and the stream after :data:`MIDDLE`."""

    def __init__(self, student: Any, sample: Data, weights: dict[str, float]) -> None:
        super().__init__()
        self.weights = {name: weight for name, weight in weights.items() if weight}
        self.losses = nn.ModuleDict(
            {name: MSELoss(standardize="variance") for name in self.weights}
        )
        self.seen: dict[str, Tensor] = {}
        student.model.norm.register_forward_hook(self.note("last"))
        for block in MIDDLE:
            student.model.blocks[block].register_forward_hook(self.note(str(block)))
        with torch.no_grad():
            student.model.eval()(student.prepare(sample["image"]))
            for name, loss in self.losses.items():
                own, other = self.part(name, self.seen), self.part(name, sample)
                loss.build(own.shape, other.shape)
                fit_projection(loss.projection, *loss.settle(own, other))

    def note(self, name: str) -> Any:
        """Keeps what a layer gave; a stream is normed, as the teacher's was."""

        def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            if name == "last" or self.weights.get(name):
                self.seen[name] = (
                    output if name == "last" else F.layer_norm(output, output.shape[-1:])
                )

        return hook

    def part(self, name: str, tokens: Data) -> Tensor:
        """The tokens that a loss reads."""
        x = tokens[{"summary": "last", "patches": "last"}.get(name, name)].float()
        return x[:, 0] if name == "summary" else x[:, 1:] if name == "patches" else x

    def forward(self, batch: Data) -> tuple[Tensor, dict[str, float]]:
        """The weighted sum, and each loss."""
        none = torch.zeros(0)
        each = {name: loss(self.part(name, self.seen), self.part(name, batch), none) for name, loss in
                self.losses.items()}  # fmt: skip
        total = sum((self.weights[name] * value for name, value in each.items()), torch.zeros(()))
        return total, {name: value.item() for name, value in each.items()}


def load_views(asked: argparse.Namespace, wanted: list[str]) -> dict[str, Tensor]:
    """(views, pictures, ...) of each wanted thing, without the fold."""
    names = (torch.arange(len(SOURCE.load("train").targets)) % FOLD).nonzero()[:, 0]
    if asked.all:
        names = torch.arange(len(SOURCE.load("train").targets))
    files = [torch.load(asked.out / f"{v}.pt", mmap=True) for v in asked.views]
    return {key: torch.stack([file[key][names] for file in files]) for key in wanted} | {
        "target": torch.tensor(SOURCE.load("train").targets)[names].expand(len(files), -1)
    }


def groups(student: Any, optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Smaller rates for earlier layers: the last block has all of it, each one before ``decay`` of the next."""
    depth = len(student.model.blocks)
    place = {
        id(p): depth - 1 - i
        for i, block in enumerate(student.model.blocks)
        for p in block.parameters()
    }
    first = [
        *student.model.patch_embed.parameters(),
        student.model.cls_token,
        student.model.pos_embed,
    ]
    place |= {id(p): depth for p in first}
    for group in list(optimizer.param_groups):
        optimizer.param_groups.remove(group)
        for level in range(depth + 1):
            own = [p for p in group["params"] if place.get(id(p), 0) == level]
            if own:
                optimizer.add_param_group(
                    {**group, "params": own, "lr": group["lr"] * decay**level}
                )


def train(asked: argparse.Namespace) -> None:
    """One training; prints a line at each measure and keeps it in results.jsonl."""
    torch.manual_seed(asked.seed)
    student, _ = pair(asked.arch, asked.drop_path)
    student.model.load_state_dict(torch.load(asked.out / f"start_{asked.start}.pt"))
    weights = {
        "summary": asked.summary,
        "patches": asked.patches,
        **dict.fromkeys(map(str, MIDDLE), asked.middle),
    }
    kept = {"3", "7"} if asked.middle else set()
    kept |= {"last"} if asked.summary or asked.patches else set()
    data, judged = load_views(asked, ["image", "logits", *sorted(kept)]), load_judged(asked.out)
    views, count = data["image"].shape[:2]
    features = Features(student, {k: v[0, :512] for k, v in data.items()}, weights)
    optimizer = build_optimizer([student.model, features], OptimSpec(asked.optim, lr=asked.lr, weight_decay=asked.wd,
                                kwargs=json.loads(asked.kwargs)))  # fmt: skip
    if asked.layer_decay < 1:
        groups(student, optimizer, asked.layer_decay)
    rates = [group["lr"] for group in optimizer.param_groups]
    averages = {decay: copy.deepcopy(student.model).requires_grad_(False) for decay in asked.ema}
    steps, step, started = count // asked.batch, 0, time.process_time()
    total = asked.steps_of * steps if asked.steps_of else asked.epochs * steps
    kd_loss = KDLoss(asked.temperature)
    print(asked.name, "start", measured(student, judged), flush=True)
    for epoch in range(asked.epochs):
        order, sums = torch.randperm(count), {}
        shift = (
            torch.randperm(views)[torch.arange(count) % views] + epoch if asked.shuffle else epoch
        )
        student.model.train()
        for first in range(0, steps * asked.batch, asked.batch):
            rows = order[first : first + asked.batch]
            view = (shift[rows] if asked.shuffle else torch.full_like(rows, epoch)) % views
            batch = {key: value[view, rows] for key, value in data.items()}
            with torch.autocast("cpu", torch.bfloat16, enabled=BFLOAT16), InFloat32():
                logits = student.model(student.prepare(batch["image"])).float()
                hints, each = features(batch)
            left = min(1.0, (1 - step / total) / (1 - asked.fade)) if asked.fade < 1 else 1.0
            loss = asked.kd * kd_loss(logits, batch["logits"], batch["target"]) + left * hints
            if asked.task:
                loss = loss + asked.task * F.cross_entropy(logits, batch["target"])
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * warmup_cosine(step, round(asked.warmup * steps), total, 0.0)
            loss.backward()
            if asked.clip:
                nn.utils.clip_grad_norm_(student.model.parameters(), asked.clip)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            for decay, average in averages.items():
                now = min(decay, (1 + step) / (10 + step))
                torch._foreach_lerp_(
                    list(average.parameters()),
                    [p.detach() for p in student.model.parameters()],
                    1 - now,
                )
            for key, value in {"loss": loss.item(), **each}.items():
                sums[key] = sums.get(key, 0.0) + value / steps
        if (epoch + 1) % asked.every and epoch + 1 < asked.epochs:
            continue
        rows = {"": measured(student, judged)} | {
            f"ema{d}": measured(student, judged, m) for d, m in averages.items()
        }
        line = {"name": asked.name, "epoch": epoch + 1, "s": round(time.process_time() - started),
                **{k: round(v, 3) for k, v in sums.items()}, "measured": rows}  # fmt: skip
        print(json.dumps(line), flush=True)
        with (asked.out / "results.jsonl").open("a") as file:
            file.write(
                json.dumps({**line, "asked": {k: str(v) for k, v in vars(asked).items()}}) + "\n"
            )
    torch.save(student.model.state_dict(), asked.out / f"end_{asked.name}.pt")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/quality"))
    parser.add_argument("--arch", default="vit_tiny_patch16_224")
    parts = parser.add_subparsers(required=True)
    part = parts.add_parser("views")
    part.set_defaults(call=make_views)
    part.add_argument("--scale", type=float, default=0.35)
    parts_of_views = [part, parts.add_parser("mix")]
    parts_of_views[1].set_defaults(call=mix_views)
    parts_of_views[1].add_argument("--mixup", type=float, default=0.8)
    parts_of_views[1].add_argument("--cutmix", type=float, default=1.0)
    for part in parts_of_views:
        part.add_argument("--first", type=int, default=0)
        part.add_argument("--count", type=int, default=6)
    part = parts.add_parser("start")
    part.set_defaults(call=make_start)
    part.add_argument("name")
    part.add_argument("--pictures", type=int, default=512)
    part.add_argument("--views", nargs="*", default=[])
    part = parts.add_parser("train")
    part.set_defaults(call=train)
    part.add_argument("name")
    for name, value in (("start", "512"), ("optim", "adamw"), ("kwargs", "{}")):
        part.add_argument(f"--{name}", default=value)
    for name, value in (("epochs", 10), ("batch", 64), ("every", 2), ("seed", 0), ("steps_of", 0)):
        part.add_argument(f"--{name}", type=int, default=value)
    for name, number in (("lr", 5e-5), ("wd", 0.05), ("warmup", 1.0), ("kd", 0.9), ("task", 0.1), ("temperature", 2.0),
                         ("summary", 0.0), ("patches", 0.0), ("middle", 0.0), ("clip", 1.0), ("layer_decay", 1.0),
                         ("drop_path", 0.0), ("fade", 1.0)):  # fmt: skip
        part.add_argument(f"--{name}", type=float, default=number)
    part.add_argument("--views", nargs="*", default=[str(i) for i in range(6)])
    part.add_argument("--ema", nargs="*", type=float, default=[])
    part.add_argument(
        "--shuffle", action="store_true", help="each picture takes the views in an order of its own"
    )
    part.add_argument("--all", action="store_true", help="trains on the fold too")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    asked.call(asked)


if __name__ == "__main__":
    main()
