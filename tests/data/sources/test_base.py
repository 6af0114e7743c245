"""What all sources share."""

from pathlib import Path

from kd.data.sources.base import fingerprint, identity, split_facts
from kd.data.sources.files import FileSplit
from kd.data.sources.segmentation import MaskSplit
from tests._helpers import draw_picture


def test_the_identity_of_a_split_follows_labels_and_content_not_the_folder(tmp_path: Path) -> None:
    here = FileSplit([draw_picture(tmp_path / "a" / "x.png")], [0])
    there = FileSplit([draw_picture(tmp_path / "b" / "x.png")], [0])
    assert identity(here) == identity(there)
    assert fingerprint(here) != fingerprint(there)
    assert identity(FileSplit(here.paths, [1])) != identity(here)
    mask = tmp_path / "mask.png"
    masked = MaskSplit(here.paths, [mask], 2, None)
    identities = {mask.write_text(text) and identity(masked) for text in ("a", "bb")}
    assert len(identities) == 2, "a mask is a label"
    assert split_facts(FileSplit(here.paths, [1])).content == split_facts(here).content, (
        "whatever the labels"
    )
