"""What a word of the command line names."""

from kd.run.paths import source_items


def test_source_items() -> None:
    assert source_items("data.source=s3://food/train.csv", []) == [
        "data.source=Manifest",
        "data.source.train=s3://food/train.csv",
    ]
