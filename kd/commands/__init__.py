"""One file a command, imported by ``kd/command_line.py``: ``HELP``, ``OPTIONS`` and ``FLAGS``, and ``run``.

``run`` returns a result, the exit status, or None to show the help. All commands take ``--help`` and ``--trust``.
"""

COMMANDS = {
    "train": "trains a small, fast student from a big vision model.",
    "cache": "computes the teacher's answers to a recipe's training pictures ahead, for model.teacher.cache=on or only.",
    "card": "a model card: data, teacher, losses, accuracy by class, fidelity, speed, exports, limits, how to load.",
    "eval": "accuracy of a run's student (and of its teacher), as a table and as JSON.",
    "export": "a run's student for other programs, compared with the student in torch before it is kept.",
    "latency": "milliseconds, images/s and memory of a run's student and teacher on this machine's CPU.",
    "launch": "sends a run to other machines.",
    "pack": "writes a recipe's pictures as tar shards (WebDataset's layout), for data.source=Shards.",
    "predict": "a run's student on pictures: labels, masks or features.",
    "report": "what limits a run, as one page.",
    "runs": "the runs in a folder, the newest first, and the cache; what may be deleted.",
    "scale": "how a recipe scales over processes here, and over more of them.",
    "serve": "a run's student, or an export of it, behind HTTP (extra serve; ONNX Runtime inside).",
    "size": "the most accurate student for a latency budget, before training.",
    "tune": "searches for a better run: learning rate, losses, temperature, views, whatever has a key.",
}
"""What each command is for: the first line of its help."""
