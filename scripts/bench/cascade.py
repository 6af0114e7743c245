"""The cascade's guarantee on real pictures, and what each score gains.

python scripts/bench/cascade.py RUN [kd-eval's keys: split=test, folder=DIR, ...]

The measured pictures are taken for all there are. 200 times so many of them are drawn with replacement as half of them are;
the threshold is chosen on these, and its true accuracy and share are those on all pictures.
"""

import sys

import numpy as np

from kd.module.evaluation import metrics_of_student
from kd.proof.cascade import SCORES, Goal, Measured, curve, fit_head, gain_area, score_of
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
    features = np.concatenate(sureness.features)
    student, teacher = np.concatenate(sureness.student), np.concatenate(sureness.teacher)
    count = len(student)
    print(f"{count:,} pictures: student {student.mean():.1%}, teacher {teacher.mean():.1%}\n")

    random = np.random.default_rng(0)
    print("| score | points gained over asking at random, mean over all shares (20 halves) |")
    print("|---|---|")
    gains: dict[str, list[float]] = {score: [] for score in SCORES}
    for _ in range(20):
        order = random.permutation(count)
        fitted, judged = order[: count // 2], order[count // 2 :]
        head = fit_head(features[fitted], student[fitted], teacher[fitted])
        for score in SCORES:
            everything = Measured(score_of(features, score, head), student, teacher)
            gains[score].append(100 * gain_area(everything.part(judged)))
    for score, values in gains.items():
        print(f"| {score} | {np.mean(values):.2f} ± {np.std(values) / 20**0.5:.2f} |")

    everything = Measured(score_of(features, "probability"), student, teacher)
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
