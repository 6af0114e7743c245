"""The converter of other programs' lists: what it writes is a list that kd reads."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kd.data.sources import Manifest
from kd.machine import shipped

COCO = {
    "images": [{"id": 7, "file_name": "a.jpg"}, {"id": 3, "file_name": "b/c.jpg"}],
    "annotations": [{"image_id": 3, "category_id": 2}, {"image_id": 7, "category_id": 1}, {"image_id": 3, "category_id": 2},
                    {"image_id": 3, "category_id": 1}],
    "categories": [{"id": 0, "name": "things"}, {"id": 1, "name": "x"}, {"id": 2, "name": "y"}],
}  # fmt: skip
HEADER = {"type": "dataset", "task": "classify", "class_names": {"0": "x", "1": "y"}}
RECORDS = [
    {"type": "image", "file": file, "split": split, "annotations": {"classification": ids}}
    for file, split, ids in (
        ("a.jpg", "train", [0]),
        ("b/c.jpg", "train", [1, 0]),
        ("d.jpg", "val", [1]),
    )
]
FLAGS = "id, x , y ,split\na.jpg,1,0,train\nb/c.jpg,true,1.0,train\nd.jpg,0,1,val\n"


@pytest.mark.parametrize(("name", "content", "words"), [
    ("a.json", json.dumps(COCO), []), ("a.ndjson", "\n".join(map(json.dumps, [HEADER, *RECORDS])), []),
    ("a.csv", FLAGS, ["id"]),
])  # fmt: skip
def test_lists_of_other_programs_become_tables(
    name: str, content: str, words: list[str], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    script = shipped("recipes").parent / "scripts" / "to_list.py"
    command = [sys.executable, str(script), str(tmp_path / name), str(tmp_path / "out.csv"), *words]
    subprocess.run(command, check=True)
    source: Any = Manifest(str(tmp_path / "out.csv"), multi_label=True)
    split = source.load("train")
    assert split.paths == [str(tmp_path / "a.jpg"), str(tmp_path / "b/c.jpg")]
    labels = [{source.classes[i] for i in target} for target in split.targets]
    assert labels == [{"x"}, {"x", "y"}]
    assert source.has("val") == (name != "a.json")
