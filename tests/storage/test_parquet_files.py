"""A parquet file is checked before it is read."""

import json
from pathlib import Path

import pytest

from kd.data.sources import HuggingFace
from kd.data.sources.hugging_face import local_files
from kd.storage.parquet_files import check_parquet
from tests._helpers import refuses

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize("name", ["README.md", ".huggingface.yaml", "dataset_infos.json"])
def test_a_folders_configuration_is_not_read(name: str, tmp_path: Path) -> None:
    """Aliases of YAML that grow without end, patterns that lead out of the folder, classes that take all memory."""
    datasets = pytest.importorskip("datasets")
    (tmp_path / name).write_text(
        f"---\n{BOMB}\nconfigs: [{{data_dir: /etc, storage_options: {{}}}}]\n"
        "dataset_info: {features: [{name: l, dtype: {class_label: {num_classes: 999999999}}}]}\n---\n"
    )
    (tmp_path / "a.png").touch()
    rows = {"image": [str(tmp_path / "a.png")] * 2, "label": ["a", "b"]}
    datasets.Dataset.from_dict(rows).to_parquet(str(tmp_path / "train-00000-of-00001.parquet"))
    (tmp_path / "a.png").unlink()
    source = HuggingFace(str(tmp_path))
    assert len(source.load("train").targets) == 2
    assert source.classes == ["a", "b"]


def test_a_card_that_names_splits_by_files_without_one_is_no_silent_training_set(
    tmp_path: Path,
) -> None:
    for name in ("one.csv", "two.csv"):
        (tmp_path / name).write_text("image,label\n")
    assert [*local_files(str(tmp_path)).by_split] == ["train"]
    (tmp_path / "README.md").write_text("---\nconfigs:\n- data_files: [{split: test}]\n---\n")
    with refuses(r"kd goes by their names: one.csv must name its split"):
        local_files(str(tmp_path))


def test_files_say_their_splits(tmp_path: Path) -> None:
    for name in ("train-00000-of-00002.csv", "data/Testing/x.csv", "valid_set.csv", "other.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    files = local_files(str(tmp_path))
    assert (files.reader, sorted(files.by_split), files.unread) == (
        "csv",
        ["test", "train", "val"],
        1,
    )


@pytest.mark.parametrize("path", ["pandas", "xml", "csv"])
def test_a_reader_is_no_data_set(path: str) -> None:
    pytest.importorskip("datasets")
    with refuses(f"must be a folder or a name on the hub, got '{path}'"):
        HuggingFace(path).load("train")


def test_files_of_another_reader_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.xml").write_text("<a/>")
    with refuses(r"has no files of a data set \(.parquet, .arrow, .csv"):
        HuggingFace(str(tmp_path)).load("train")


@pytest.mark.parametrize(
    "told",
    [
        {"l": {"_type": "ClassLabel", "num_classes": 10**9}},
        {"names": {"0": "a", "3_000_000_000": "b"}},
        {"names": {"0" * 30 + "3000000": "b"}},
    ],
)
def test_classes_that_take_all_memory_are_refused(told: object, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pa.table({"l": [0]}).replace_schema_metadata({"huggingface": json.dumps(told)})
    parquet.write_table(table, tmp_path / "x.parquet")
    with refuses("x.parquet: .*must be <= 99999"):
        check_parquet(tmp_path / "x.parquet")


def test_a_table_that_unfolds_is_refused(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    column = pa.array([0]).take(pa.array([0] * 1_000_000))
    schema = pa.schema([("x", pa.int64())])
    with parquet.ParquetWriter(tmp_path / "x.parquet", schema) as file:
        for _ in range(200):  # 200 million rows in some kB
            file.write_table(pa.table({"x": column}, schema=schema))
    with refuses("x.parquet: .* unfolds to 1,600,000,000 bytes, at most"):
        check_parquet(tmp_path / "x.parquet")
    with refuses("x.parquet: .* unfolds"):
        HuggingFace(str(tmp_path)).load("train")
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with refuses("x.parquet: can't be read as parquet"):
        check_parquet(tmp_path / "x.parquet")


@pytest.mark.parametrize("kind", ["binary", "list", "texts"])
def test_a_table_of_some_bytes_that_unfolds_is_refused(kind: str, tmp_path: Path) -> None:
    """Each value is stored once, or as what it has beside the value before."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    times, options = 20, {}
    if kind == "list":
        column = pa.ListArray.from_arrays([0, 10**7], pa.array([0]).take(pa.array([0] * 10**7)))
    elif kind == "texts":
        times, column = 1, pa.array([b"x" * 2**20] * 10)
        options = {"use_dictionary": False, "column_encoding": {"x": "DELTA_BYTE_ARRAY"}}
    else:
        column = pa.array([b"x" * 2**16] * 1000, pa.binary(2**16))
    table = pa.table({"x": column})
    with parquet.ParquetWriter(
        tmp_path / "x.parquet", table.schema, compression="zstd", **options
    ) as file:
        for _ in range(times):
            file.write_table(table)
    assert (tmp_path / "x.parquet").stat().st_size < 2**19
    with refuses(r"x.parquet: .* (it unfolds to|its texts are DELTA_BYTE_ARRAY)"):
        check_parquet(tmp_path / "x.parquet")


@pytest.mark.parametrize("kind", ["text", "in a struct", "in a list"])
def test_a_table_whose_dictionary_unfolds_is_refused(kind: str, tmp_path: Path) -> None:
    """A row takes four bytes, and stands for a text of 1 MB."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    column = pa.array(["x" * 2**20]).dictionary_encode().take(pa.array([0] * 2000))
    if kind == "in a struct":
        column = pa.StructArray.from_arrays([column], ["bytes"])
    elif kind == "in a list":
        column = pa.ListArray.from_arrays(pa.array(range(2001)), column)
    parquet.write_table(pa.table({"x": column}), tmp_path / "x.parquet", store_schema=False)
    assert (tmp_path / "x.parquet").stat().st_size < 2**19
    with refuses("x.parquet: .* unfolds to 2,097,152,000 bytes, at most"):
        check_parquet(tmp_path / "x.parquet")
