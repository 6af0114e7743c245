"""The recipe of a detector's backbone, small."""

from pathlib import Path

from kd.cli import main
from tests._helpers import draw_folder

TEACHER = "embed_dim: 32, depth: 4, num_heads: 2"


def distil(tmp_path: Path, *items: str) -> int:
    """``kd-train recipe=detector_backbone`` with a small teacher and a few drawn pictures."""
    data = draw_folder(tmp_path / "data", train=6, val=2)
    return main("train", [
        "recipe=detector_backbone", f"data.source.root={data}", f"runs_dir={tmp_path}", "preflight=warn",
        "model.teachers.dino.pretrained=false", f"model.teachers.dino.kwargs={{{TEACHER}}}",
        "data.img_size=64", "model.student.img_size=64", "model.teachers.dino.img_size=56",
        "trainer.max_steps=2", "data.batch_size=4", "data.num_workers=0", *items,
    ])  # fmt: skip
