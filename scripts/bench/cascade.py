"""The cascade's guarantee on real pictures.

python scripts/bench/cascade.py RUN [kd-eval's keys: split=test, folder=DIR, ...]

The measured pictures are taken for all there are. 200 times so many of them are drawn with replacement as half of them are;
the threshold is chosen on these, and its true accuracy and share are those on all pictures.
"""

import sys

import numpy as np

from kd.module.evaluation import metrics_of_student
from kd.proof.cascade import Goal, curve
from kd.run.cascade import Sureness, times_of
from kd.run.eval_options import EvalOptions
from kd.run.measure import subjects
from kd.run.options import take
from kd.run.request import translate

DRAWS, CONFIDENCE = 200, 0.95


def main() -> None:
    """Prints the tables."""
    request = translate(sys.argv[1:])
    options = take(request, "split", "folder")
    wanted = EvalOptions(split=options.get("split", "val"), folder=options.get("folder"))
    (subject,) = subjects(request, wanted)
    sureness = Sureness()
    batches = subject.data.eval_dataloader(wanted.place)
    metrics_of_student(
        subject.model, subject.prepare, batches, subject.task, subject.teacher, None, [sureness]
    )
    everything = sureness.measured
    student, teacher = everything.student_right, everything.teacher_right
    count = len(student)
    print(f"{count:,} pictures: student {student.mean():.1%}, teacher {teacher.mean():.1%}\n")

    random = np.random.default_rng(0)
    student_ms, teacher_ms = times_of(subject, wanted.place)
    print(f"\none picture: student {student_ms:.1f} ms, teacher {teacher_ms:.1f} ms\n")
    print("| teacher asked | accuracy | ms | of the teacher's ms |\n|---|---|---|---|")
    for row in curve(everything):
        ms = student_ms + row["share"] * teacher_ms
        cells = (
            f"{row['share']:.0%}",
            f"{row['accuracy']:.1%}",
            f"{ms:.1f}",
            f"{ms / teacher_ms:.0%}",
        )
        print("| " + " | ".join(cells) + " |")

    print(f"\n| goal | thresholds found in {DRAWS} draws | missed | mean share asked |")
    print("|---|---|---|---|")
    best = float(teacher.mean())
    goals = {  # with the least accuracy and the largest share that meet them
        "share=0.1": (Goal(share=0.1), 0.0, 0.1),
        "accuracy=teacher margin=2": (Goal(of_teacher=0.02), best - 0.02, 1.0),
        "accuracy=0.97*teacher": (Goal(share_of_teacher=0.97), 0.97 * best, 1.0),
    }
    between = round(float(student.mean() + teacher.mean()) / 2, 2)
    goals[f"accuracy={between}"] = (Goal(accuracy=between), between, 1.0)
    for name, (goal, least, most) in goals.items():
        found, missed, shares = 0, 0, []
        for _ in range(DRAWS):
            part = everything.part(random.integers(0, count, count // 2))
            threshold = goal.choose(part, CONFIDENCE)
            if threshold is None:
                continue
            true = everything.at(threshold)
            found += 1
            missed += true["accuracy"] < least or true["share"] > most
            shares.append(true["share"])
        share = f"{np.mean(shares):.1%}" if shares else ""
        print(f"| {name} | {found} | {missed} | {share} |", flush=True)


if __name__ == "__main__":
    main()
