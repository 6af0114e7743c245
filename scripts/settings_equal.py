"""Do command lines give the same settings as at another commit? Compares an old checkout with this one.

    python scripts/settings_equal.py [--base FOLDER_OR_COMMIT] [--doors train,python,...] [--every N] [--exact]
                                     [--without KEY ...]
    python scripts/settings_equal.py --save FILE.jsonl     asks the base once; --base FILE.jsonl compares with that
    python scripts/settings_equal.py --golden      writes the answers in tests/golden/*.jsonl anew

A case goes through one *door*: ``kd-train`` (every recipe x every overlay x :data:`WORDS`), ``kd.train``, a resumed run, a
finished run, a launcher's job, SageMaker's container, ``kd-launch --dry-run``, ``--print_config``. Each side answers with
its settings as a plain tree and its notes, or the line of its refusal. The same are: equal trees, notes and output; or two
refusals that name the same key (``--exact``: in the same words). Exit status 1 where one differs. ``--without`` leaves out
keys that one side no longer has, with all below them (``model.teachers.*.cache``). Some 200 s of CPU for each side.
"""

import argparse
import contextlib
import importlib
import inspect
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from fnmatch import fnmatch
from functools import wraps
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
BASE = "fcb134fb"
GOLDEN = ROOT / "tests" / "golden"
WORDS = """

optim.lr=1e-3 data.batch_size=16 trainer.max_epochs=2
model.distill_losses.kd=DKDLoss model.distill_losses.kd.beta=2
data.source=ImageFolder data.source.root=/x
trainer.callbacks+=EarlyStopping trainer.callbacks.monitor=val/acc1
model.student.kwargs.depth=3 model.student.img_size=[64,96]
--trainer.precision bf16-mixed --data.num-workers 2
data.img_size=[112,96] data.augment.transform=TrivialAugmentWide
name=run007 runs_dir=007 data.source.root=${recipe}
model.teacher=null model.distill_losses={} model.taps={}
model.student.builder=mine.Nets model.student.builder.width=8 trust=mine
data.source=mine.Listed data.source.folder=DIR --trust
model.student.arch=vit_tiny_patch16_224 optim.lr=1e-4
model.distill_losses.kd.weight=.5 model.taps.summary.student=norm
trainer.logger=CSVLogger trainer.profiler=simple trainer.max_time=0:30:00 trainer.val_check_interval=0.5
trainer.callbacks={"class_path":"EarlyStopping","init_args":{"monitor":"val/acc1"}} trainer.callbacks+=ModelSummary
optim.kwargs.betas=[0.9,0.99] trainer.strategy=FSDP trainer.devices=[0,1]
model.teachers.x.arch=vit_tiny_patch16_224 model.teacher=null model.teacher_of.kd=x
model.task=MultiLabel monitor.actions.Overtraining=stop data.probe.root=DIR
config=overlay.yaml model.teacher={"arch":"vit_tiny_patch16_224","pretrained":true} checkpoint.every_n_steps=5
"""
"""Twenty sets of words, the first one empty; each goes on every recipe and every overlay."""
WRONG = """
optim.lrr=1;optim.lr=abc;optim.lr=-1;data.engine=tourch;lr=0.1;trainer.max_epoch=3;model.distill_losses.kd.temperature=hot
model.distill_losses.kd=KDLos;data.source=ImageFoldr;trainer.precision=fp16;data.img_size=[1,2,3];model.student.kwargs=3
seed=1.5;trainer.callbacks+=EarlyStoping;data.augment=3;students.a.optim.lr=3;optim.milestones=[1];model.teacher=x.pth
data.unlabeled_ratio=2;optim.warmup_epochs=9999;trainer.plugins=x;data.lr=1;model.task.class_weights=balanced
"""
"""Words that are refused, one at a time on each recipe."""
MINE = """class Nets:
    def __init__(self, width: int = 3, deep: bool = False) -> None: ...
class Listed:
    def __init__(self, folder: str, limit: int = 5) -> None: ...
"""
OVERLAY = """optim: {lr: 1e-2}
model.student.kwargs: {depth: 5}
model: {distill_losses: {kd: {weight: 3}}}
"""


class Reached(BaseException):  # no part of a command catches it
    """The command knows its settings, or begins its work: ``answer`` is what it has come to."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = answer


def stop_at_settings() -> None:
    """Makes the commands of this process's ``kd`` raise :class:`Reached` once a run's settings are complete and checked.

    The one part that knows kd from inside. Of a run to train: ``settings``, ``notes``, and ``then``, the line of a later
    refusal of what the machine lacks; of a finished run ``settings``.
    """
    from kd.commands import train
    from kd.errors import UserError
    from kd.run.request import Request
    from kd.run.run import Run

    notes: list[str] = []
    check_read, check_needs, settings_of_run = Request.check_read, train.check_needs, Run.settings

    def read(request: Request, config: Mapping[str, Any]) -> None:
        check_read(request, config)
        notes[:] = request.notes

    def needs(config: Mapping[str, Any], *more: object) -> None:
        answer: dict[str, Any] = {"settings": config, "notes": [*notes], "then": ""}
        try:
            check_needs(config, *more)
        except UserError as error:
            answer["then"] = str(error)
        raise Reached(answer)

    def of_run(file: Path | None, request: Request) -> None:
        raise Reached({"settings": settings_of_run(file, request)[0]})

    Request.check_read = read  # type: ignore[method-assign]
    train.check_needs = needs
    Run.settings = staticmethod(of_run)  # type: ignore[method-assign, assignment]


def cases(names: Mapping[str, list[str]]) -> Iterator[dict[str, Any]]:
    """All cases. ``names``: those of the ``recipes`` and ``configs``."""
    sets = [line.split() for line in WORDS.split("\n")[1:-1]]
    more = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    recipes = [f"recipe={name}" for name in names["recipes"]]
    overlays = [[], *([f"config={name}"] for name in names["configs"])]
    for recipe, overlay, words in product(recipes, overlays, sets):
        yield {"door": "train", "words": [recipe, *overlay, *words]}
    for recipe, word in product(recipes, re.findall(r"[^;\n]+", WRONG)):
        yield {"door": "train", "words": [recipe, word]}
    for recipe in recipes:
        yield {"door": "print", "words": [recipe, "--print_config"]}
    for recipe, values in product(names["recipes"], more["values"]):
        yield {"door": "python", "recipe": recipe, "values": values}
    for run, words in product(RUNS, sets):
        yield {"door": "resumed", "words": [f"resume=WORK/runs/{run}/000", *words]}
        yield {
            "door": "finished",
            "command": "predict",
            "words": [f"WORK/runs/{run}/000", "a.jpg", *words],
        }
    for env, words in product(more["jobs"], more["job_words"]):
        yield {"door": "cluster", "words": ["recipe=foodtag_vit", *words.split()], "env": env}
    for given, words in product(
        more["parameters"], ["", "train", "optim.lr=0.5", "runs_dir=/mine"]
    ):
        env = {"SAGEMAKER_BASE_DIR": "WORK/ml", "SM_HPS": json.dumps(given)}
        yield {"door": "sagemaker", "words": words.split(), "env": env}
    for (place, own), words in product(more["places"].items(), more["sent"]):
        line = f"{place} recipe=foodtag_vit job=j --dry-run {own} {words}"
        yield {"door": "launch", "command": "launch", "words": line.split()}


RUNS = ["foodtag_vit", "food101_vitl_vits", "camvid_seg"]
"""Recipes of the runs that are resumed, and that finished ones have."""


def prepare(folder: Path) -> None:
    """Makes the files that the cases name, below the working directory ``folder``."""
    for name in ("ml/input/config", "ml/input/data/train", "ml/input/data/t"):
        (folder / name).mkdir(parents=True)
    (folder / "ml/input/data/train/r.yaml").write_text("seed: 5\n")
    (folder / "overlay.yaml").write_text(OVERLAY)
    (folder / "mine.py").write_text(MINE)
    (folder / "a.jpg").write_bytes(b"")
    for name in RUNS:
        run = folder / "runs" / name / "000"
        (run / "checkpoints").mkdir(parents=True)
        for file in ("checkpoints/last.ckpt", "student.safetensors"):
            (run / file).write_bytes(b"")
        (run / "config.yaml").write_text(
            answer({"words": [f"recipe={name}", "--print_config"]})["out"]
        )


def answer(case: Mapping[str, Any]) -> dict[str, Any]:
    """What this process's ``kd`` answers: as :class:`Reached` has it, and ``line``, the refusal, ``out``, what was printed,
    ``status``, and ``env``, the variables that were set. The environment is as before afterwards.
    """
    from kd.cli import main

    before = dict(os.environ)
    os.environ.update(case.get("env", {}))
    out, err = io.StringIO(), io.StringIO()
    found: dict[str, Any] = {}
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            if case.get("door") == "python":
                import kd

                kd.train(case["recipe"], case["values"])
            else:
                found["status"] = main(case.get("command", "train"), case["words"])
    except Reached as reached:
        found |= reached.answer
    except Exception as error:
        found["line"] = f"kd: {error}"
    changed = {key: value for key, value in os.environ.items() if before.get(key) != value}
    os.environ.clear()
    os.environ.update(before)
    # these are loaded once in this process, so the line that says so is not of each answer
    said = re.sub(
        r"loading (torch|optuna) \.\.\.\n", "\n", err.getvalue().replace("\r", "\n")
    ).splitlines()
    lines = [line for line in said if re.match(r"kd-\w+: .", line)]
    return {"line": "\n".join(lines), "out": out.getvalue(), "env": changed, **found}


def serve() -> None:
    """Answers the cases on the standard input, a line of JSON each, in a folder of its own."""
    import kd

    assert Path(kd.__file__).is_relative_to(os.environ["KD_ROOT"]), kd.__file__
    results = os.fdopen(os.dup(1), "w")
    with tempfile.TemporaryDirectory() as folder:
        work = str(Path(folder).resolve())
        os.environ.update(KD_CACHE=f"{work}/cache", PYTHONPATH=f"{os.environ['PYTHONPATH']}:{work}")
        os.chdir(work)
        sys.path.append(work)
        prepare(Path(work))
        stop_at_settings()
        for line in sys.stdin:
            text = json.dumps(answer(json.loads(line.replace("WORK", work))), default=str)
            text = text.replace(work, "WORK").replace(os.environ["KD_ROOT"], "REPO")
            results.write(f"{text}\n")


def answers(root: Path, asked: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The answers of a checkout, in a process of its own."""
    env = {
        **os.environ,
        "PYTHONPATH": str(root),
        "KD_ROOT": str(root),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, __file__, "--serve"]
    with tempfile.TemporaryFile("w+") as questions:
        questions.writelines(json.dumps(case) + "\n" for case in asked)
        questions.seek(0)
        process = subprocess.Popen(
            command, env=env, stdin=questions, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        yield from map(json.loads, process.stdout)
        if process.wait():
            sys.exit(f"{root}: its process has ended with status {process.returncode}")


def flat(tree: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a tree by dotted key."""
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from flat(value, f"{place}.{name}".lstrip("."))
    else:
        yield place, tree


def key_of(line: str) -> str:
    """The key that a refusal names, in its first words."""
    match = re.match(
        r"(?:kd[\w-]*: )?(?:\S+\.yaml: )?(?:no key |no option |what is )?'?([^\s':?]+)", line
    )
    return match[1] if match else ""


def difference(old: dict[str, Any], new: dict[str, Any], exact: bool, without: list[str]) -> str:
    """What differs between two answers to a case; "" for nothing."""
    for name in ("line", "then", "notes", "settings", "out", "env", "status"):
        before, after = old.get(name), new.get(name)
        if name in ("line", "then") and old.get("status") != 0 and not exact:
            same = key_of(before or "") == key_of(after or "")
        else:
            same = before == after
        if same:
            continue
        if name != "settings" or not (before and after):
            pairs = zip_longest(f"{before}".split("\n"), f"{after}".split("\n"))
            first, second = next((a, b) for a, b in pairs if a != b)
            return f"{name}: {first!s:.200} -> {second!s:.200}"
        leaves = [dict(flat(tree)) for tree in (before, after)]
        keys = [
            key
            for key in {**leaves[0], **leaves[1]}
            if leaves[0].get(key, "-") != leaves[1].get(key, "-")
        ]
        keys = [key for key in keys if not any(fnmatch(f"{key}.", f"{left}.*") for left in without)]
        if keys:
            return "settings: " + ", ".join(
                f"{key} {leaves[0].get(key, '-')!r} -> {leaves[1].get(key, '-')!r}"
                for key in keys[:3]
            )
    return ""


def compare(
    asked: list[dict[str, Any]],
    old_answers: Iterator[dict[str, Any]],
    exact: bool,
    without: list[str],
) -> int:
    """Asks this checkout, prints what differs and the counts of each door; 1 if anything does."""
    counts: dict[str, Counter[str]] = {}
    others: dict[str, list[str]] = {}
    for case, old, new in zip(asked, old_answers, answers(ROOT, asked), strict=True):
        what = difference(old, new, exact, without)
        kind = (
            "same settings"
            if "settings" in old
            else "same output"
            if old["out"]
            else "refused by both"
        )
        counts.setdefault(case["door"], Counter())["differ" if what else kind] += 1
        if what:
            words = case.get("words", [case.get("recipe"), case.get("values")])
            others.setdefault(what, []).append(
                f"{case['door']} {json.dumps(words)} {case.get('env', '')}"
            )
    for what, lines in others.items():
        print(f"{len(lines)} x {what}\n    {lines[0][:300]}")
    for door, count in counts.items():
        print(
            f"{door:<10}{count.total():5} cases: {', '.join(f'{n} {kind}' for kind, n in sorted(count.items()))}"
        )
    return int(bool(others))


def known_cases(*roots: Path) -> list[dict[str, Any]]:
    """All cases, with the recipes and overlays of these checkouts."""
    names = {}
    for kind in ("recipes", "configs"):
        names[kind] = sorted({file.stem for root in roots for file in (root / kind).glob("*.yaml")})
    return [*cases(names)]


def checkout(name: str, folder: Path) -> Path:
    """The folder ``name``, or a clone of this repository in ``folder`` at the commit ``name``."""
    if Path(name).is_dir():
        return Path(name).resolve()
    subprocess.run(["git", "clone", "-q", "--shared", "-n", str(ROOT), str(folder)], check=True)
    subprocess.run(["git", "checkout", "-q", name], cwd=folder, check=True)
    return folder


# -- the golden tables: words, and what a command says or does --------


WORK = (
    "kd.run.fit.fit", "kd.run.fill.fill", "kd.run.fill_from.fill_from",
    "kd.run.measure.evaluate_models", "kd.run.measure.evaluate_pays",
    "kd.ship.predict.Predictions", "kd.ship.export.gate.export", "kd.ship.latency.measure_latency",
    "kd.ship.serving.app.Server",
    "kd.fleet.tuning.confirm.search_and_confirm", "kd.fleet.sizing.search.SizeSearch",
    "kd.commands.scale._measure", "kd.data.pack.pack", "kd.report.card.card", "kd.report.costs.outlook_table",
    "kd.commands.launch._show",
)  # fmt: skip
"""Where commands have read their options and begin their work: what these are given is what an option's words mean."""
HIDDEN = {"config", "secret", "request", "run", "opened", "manifest", "ScalingPlan.threads",
          "ServeOptions.decoders", "SearchPlan.trusted", "_show.files"}  # fmt: skip
"""Names of arguments and fields that are no option's value, or another one on each machine or in each process."""


def plain(value: Any) -> Any:
    """A value as JSON has it: dataclasses are dicts, paths text; of anything else an ellipsis, which is left out."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [inner for inner in map(plain, value) if inner is not ...]
    if is_dataclass(value):
        kind = type(value).__name__
        names = [field.name for field in fields(value) if f"{kind}.{field.name}" not in HIDDEN]
        value = {name: getattr(value, name) for name in names}
    if not isinstance(value, dict):
        return ...
    inner = {str(name): plain(of_name) for name, of_name in value.items() if name not in HIDDEN}
    return {name: of_name for name, of_name in inner.items() if of_name is not ...}


def stop_at_work(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Makes the functions of :data:`WORK` raise :class:`Reached`; ``replace`` sets an attribute."""
    for path in WORK:
        module, _, name = path.rpartition(".")
        owner = importlib.import_module(module)
        replace(owner, name, _stopping(getattr(owner, name), name))


def _stopping(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @wraps(function, updated=())
    def begin(*arguments: Any, **named: Any) -> None:
        given = signature.bind(*arguments, **named).arguments
        shown = {key: value for key, value in given.items() if f"{name}.{key}" not in HIDDEN}
        raise Reached({"does": name.strip("_"), "with": plain(shown)})

    return begin


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of a golden table.

    ``words``, in some ``files`` by name (``../x``: elsewhere), and ``says``, a refusal, or ``does``, where work begins and
    with what.
    """
    return [json.loads(line) for line in (GOLDEN / f"{name}.jsonl").read_text().splitlines()]


def told(row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A row with what its command says, or does, in the working directory ``folder``, which is ``HERE`` in the answer."""
    asked = {key: row[key] for key in ("words", "files") if key in row}
    for name, content in row.get("files", {}).items():
        Path(name).write_text(content)
    command, *items = shlex.split(row["words"])
    found = answer({"command": command.removeprefix("kd-"), "words": items})
    kept = {key: found[key] for key in ("does", "with") if key in found}
    # a package that no row before has imported is announced
    lines = [line for line in found["line"].splitlines() if not line.endswith(" ...")]
    text = json.dumps(kept or {"says": "\n".join(lines) or found["out"].partition("\n")[0]})
    text = text.replace(str(folder), "HERE").replace(f"{sys.executable} -m pip", "pip")
    return {**asked, **json.loads(text)}


def write_golden() -> None:
    """Writes the answers of all tables anew; the words stay."""
    from tests._helpers import place_of_examples

    with tempfile.TemporaryDirectory() as outside:
        folder = Path(outside, "here")
        folder.mkdir()
        os.chdir(folder)
        place_of_examples(folder)
        for name in ("refused", "mistakes", "options"):
            if name != "refused":  # what is refused may be so only when models are built
                stop_at_work()
            lines = [json.dumps(told(row, folder)) for row in rows(name)]
            (GOLDEN / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def main() -> int:
    """Reads the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--base",
        default=BASE,
        help="a checkout's folder, a commit of this repository, or a file of --save",
    )
    parser.add_argument("--save", help="only writes the base's answers, to a file .jsonl")
    parser.add_argument("--doors", default="", help="some doors alone")
    parser.add_argument("--every", type=int, default=1, help="only each Nth case")
    parser.add_argument("--exact", action="store_true", help="refusals in the same words")
    parser.add_argument(
        "--without", nargs="*", default=[], metavar="KEY", help="settings that do not count"
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--golden", action="store_true", help="write the golden tables anew")
    given = parser.parse_args()
    if given.golden:
        sys.path.insert(0, str(ROOT))
        write_golden()
        return 0
    if given.serve:
        serve()
        return 0
    if given.base.endswith(".jsonl"):
        lines = Path(given.base).read_text().splitlines()
        asked, known = map(list, zip(*map(json.loads, lines), strict=True))
        some = slice(None, None, given.every)
        return compare(asked[some], iter(known[some]), given.exact, given.without)
    with tempfile.TemporaryDirectory() as folder:
        base = checkout(given.base, Path(folder) / "base")
        doors = given.doors.split(",")
        asked = [
            case for case in known_cases(base, ROOT) if given.doors == "" or case["door"] in doors
        ]
        asked = asked[:: given.every]
        old = answers(base, asked)
        if given.save:
            pairs = zip(asked, old, strict=True)
            Path(given.save).write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
            return 0
        return compare(asked, old, given.exact, given.without)


if __name__ == "__main__":
    sys.exit(main())
