"""A data set's folder is checked before ``datasets`` reads it."""

import json
from pathlib import Path

import pytest

from kd.data.sources import HuggingFace
from kd.errors import UserError
from kd.storage.dataset_folder import check_dataset_folder, check_parquet

CARD = "---\n{}\n---\nA data set.\n"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("README.md", CARD.format(BOMB), "more than 100000 values"),
        (".huggingface.yaml", BOMB, "more than 100000 values"),
        ("README.md", CARD.format("configs: [{data_files: /etc/*}]"), "/etc/\\* leads out"),
        ("README.md", CARD.format("configs: [{data_dir: ../x}]"), "../x leads out"),
        (
            ".huggingface.yaml",
            "configs: [{data_files: [{split: train, path: ['http://127.0.0.1:9/x.csv']}]}]",
            "leads out",
        ),
        ("README.md", CARD.format("configs: [{storage_options: {}}]"), "got storage_options"),
        (
            "README.md",
            CARD.format(
                "dataset_info: {features: [{name: l, dtype: {class_label: {num_classes: 999999999}}}]}"
            ),
            "num_classes must be <= 65536",
        ),
        (
            "dataset_infos.json",
            json.dumps({"x": {"features": {"l": {"_type": "ClassLabel", "num_classes": 10**9}}}}),
            "num_classes must be <= 65536",
        ),
        ("dataset_infos.json", "[" * 100_000, "nested too deeply"),
        ("README.md", CARD.format("# a---\nconfigs: [{data_files: /etc/*}]"), "two lines ---"),
        ("README.md", "---\rconfigs: [{data_files: /etc/*}]\r---", "two lines ---|leads out"),
        ("README.md", CARD.format("names: {'0': a, '3_000_000_000': b}"), "id must be <= 65536"),
        ("README.md", CARD.format(f"names: {{'{'0' * 30}3000000': b}}"), "id must be <= 65536"),
    ],
)
def test_a_configuration_that_harms(name: str, text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=f"{name}: .*{why}"):
        check_dataset_folder(tmp_path)
    with pytest.raises(UserError, match=why):
        HuggingFace(str(tmp_path)).load("train")


def test_usual_cards_pass(tmp_path: Path) -> None:
    files = "configs: [{config_name: default, data_files: [{split: train, path: 'data/*.csv'}]}]"
    for text in (CARD.format(files), "no front matter --- at all", "---\nnot: ended"):
        (tmp_path / "README.md").write_text(text)
        check_dataset_folder(tmp_path)


@pytest.mark.parametrize("path", ["pandas", "xml"])
def test_a_reader_that_may_run_code_is_no_data_set(path: str) -> None:
    pytest.importorskip("datasets")
    with pytest.raises(
        UserError, match=f"must be a folder, a name on the hub, or one of .*, got '{path}'"
    ):
        HuggingFace(path).load("train")


def test_files_of_another_reader_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "train.xml").write_text("<a/>")
    with pytest.raises(UserError, match="its files are xml, not one of arrow, csv"):
        HuggingFace(str(tmp_path)).load("train")


def test_a_table_that_unfolds_is_refused(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    column = pa.array([0]).take(pa.array([0] * 1_000_000))
    schema = pa.schema([("x", pa.int64())])
    with parquet.ParquetWriter(tmp_path / "x.parquet", schema) as file:
        for _ in range(200):  # 200 million rows in some kB
            file.write_table(pa.table({"x": column}, schema=schema))
    with pytest.raises(UserError, match="x.parquet: unfolds to 1,600,000,000 bytes, at most"):
        check_parquet(tmp_path / "x.parquet")
    for name in ("x.parquet", "x.parquet.bin", "x.PARQUET", "data"):
        (tmp_path / "x.parquet").replace(tmp_path / name)
        (tmp_path / "y.parquet.bin").touch()  # by which all files are tables
        with pytest.raises(UserError, match=f"{name}: unfolds"):
            check_dataset_folder(tmp_path)
        (tmp_path / name).replace(tmp_path / "x.parquet")
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="x.parquet: is no parquet file"):
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
    with pytest.raises(UserError, match=r"x.parquet: (unfolds to|its texts are DELTA_BYTE_ARRAY)"):
        check_parquet(tmp_path / "x.parquet")


def test_a_link_to_a_folder_of_tables_is_refused(tmp_path: Path) -> None:
    """What it leads to would be read, and is not looked at."""
    (tmp_path / "data").symlink_to(tmp_path.parent)
    with pytest.raises(UserError, match="data: is a link to a folder"):
        check_dataset_folder(tmp_path)


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
    with pytest.raises(UserError, match="x.parquet: unfolds to 2,097,152,000 bytes, at most"):
        check_dataset_folder(tmp_path)
