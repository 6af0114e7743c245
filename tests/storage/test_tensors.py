"""Files of torch whose tensors claim more than the file holds are refused, whoever reads them."""

import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kd.models.weights import read_weights
from kd.storage.checkpoints import damage
from kd.storage.tensors import read_checkpoint, read_tensors
from kd.strategies.checkpoint_files import CheckpointFiles
from tests._helpers import refuses

HUGE = 200_000  # squared: 160 GB of float32


def claims() -> dict[str, torch.Tensor]:
    """Tensors of a few bytes that claim 160 GB."""
    one = torch.zeros(1)
    indices = torch.zeros(2, 1, dtype=torch.long)
    return {
        "strides": one.expand(HUGE, HUGE),
        "sparse": torch.sparse_coo_tensor(indices, one, (HUGE, HUGE), check_invariants=True),
        "without data": torch.zeros(HUGE, HUGE, device="meta"),
    }


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "pickle"])
@pytest.mark.parametrize("name", ["strides", "sparse", "without data"])
def test_a_tensor_is_no_larger_than_the_file(
    name: str, zipped: bool, nested: bool, tmp_path: Path
) -> None:
    file, tensor = tmp_path / "last.ckpt", claims()[name]
    state = {"head.bias": torch.zeros(3), "head.weight": tensor}
    content = (
        {"state_dict": {}, "more": [{"deep": ({"x": tensor},)}]}
        if nested
        else {"state_dict": state}
    )
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    assert file.stat().st_size < 5000
    with pytest.raises(ValueError, match="claims 160,000,000,000 bytes and holds 4|not plain"):
        read_tensors(file)
    with pytest.raises(ValueError, match="claims|not plain"):
        CheckpointFiles().load_checkpoint(file)
    with refuses(r"model.student.checkpoint: .*last.ckpt is not a readable checkpoint"):
        read_weights(file, "model.student.checkpoint")


def test_one_storage_is_not_claimed_thousands_of_times(tmp_path: Path) -> None:
    storage = torch.zeros(1000)
    torch.save(
        {"state_dict": {f"w{i}": storage.view(10, 100) for i in range(1000)}}, tmp_path / "a.pth"
    )
    with pytest.raises(ValueError, match="claim 4,000,000 bytes and hold 4,000"):
        read_tensors(tmp_path / "a.pth")


def test_packed_records_are_refused_before_they_are_unpacked(tmp_path: Path) -> None:
    """torch unpacks them: 40 MB of zeros are 40 kB on the disk."""
    torch.save({"state_dict": {"w": torch.zeros(10_000_000)}}, tmp_path / "plain.ckpt")
    packed = tmp_path / "last.ckpt"
    with (
        zipfile.ZipFile(tmp_path / "plain.ckpt") as plain,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as to,
    ):
        for record in plain.infolist():
            to.writestr(record.filename, plain.read(record))
    assert packed.stat().st_size < 100_000
    with pytest.raises(ValueError, match="is compressed"):
        read_tensors(packed)
    assert "is compressed" in damage(packed)


def test_records_that_overlap_are_refused_before_they_are_read(tmp_path: Path) -> None:
    """A record that is listed many times would be read as often, to compare its checksum."""
    file = tmp_path / "last.ckpt"
    torch.save({"state_dict": {"w": torch.zeros(1000)}}, file)
    content = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        start, end = archive.start_dir, content.rindex(b"PK\5\6")
    begins = content.rindex(b"PK\1\2")
    while not content[begins + 46 :].startswith(b"last/data/0"):
        begins = content.rindex(b"PK\1\2", 0, begins)
    again = content[begins : content.index(b"PK", begins + 4)] * 9
    table = content[start : content.index(b"PK\6\6", start)] + again
    ending = struct.pack(
        "<4s4H2IH", b"PK\5\6", 0, 0, *[table.count(b"PK\1\2")] * 2, len(table), start, 0
    )
    file.write_bytes(content[:start] + table + ending)
    assert end and "records overlap" in damage(file)
    with pytest.raises(ValueError, match="records overlap"):
        read_tensors(file)


def shared(wrap: Callable[[object, object], object], times: int) -> object:
    """A value that is wrapped so often, together with the one before."""
    value: object = torch.zeros(1)
    for _ in range(times):
        value = wrap(value, torch.zeros(1))
    return value


def test_names_and_lists_that_grow_without_end_are_refused(tmp_path: Path) -> None:
    """One long name, or one list, is written once and met at each depth."""
    name = "k" * 600
    torch.save(shared(lambda inner, one: {name: inner, "t": one}, 5), tmp_path / "a.pth")
    with refuses(r"a.pth is not a readable checkpoint .*1000 characters"):
        read_weights(tmp_path / "a.pth", "x")
    laughs = shared(lambda inner, _: [inner, inner], 60)
    torch.save({"state_dict": {}, "optimizer_states": laughs}, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match="more than 10,000,000 values"):
        read_checkpoint(tmp_path / "last.ckpt")


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "pickle"])
def test_weights_of_any_usual_kind_are_read(zipped: bool, tmp_path: Path) -> None:
    linear = torch.nn.Linear(3, 4)
    state = {
        **linear.state_dict(), "turned": linear.weight.detach().t(), "tied": linear.weight, "empty": torch.zeros(0),
        "half": torch.ones(5, dtype=torch.bfloat16), "count": torch.tensor(3), "rows": torch.arange(12).view(3, 4)[1],
    }  # fmt: skip
    torch.save({"state_dict": state, "epoch": 1, "names": ["a"]}, tmp_path / "a.ckpt",
               _use_new_zipfile_serialization=zipped)  # fmt: skip
    found = read_checkpoint(tmp_path / "a.ckpt")
    assert all(torch.equal(found["state_dict"][name], value) for name, value in state.items())
    assert torch.equal(
        read_tensors(tmp_path / "a.ckpt", mmap=zipped)["state_dict"]["tied"], linear.weight
    )  # type: ignore[index]
