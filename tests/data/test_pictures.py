"""Pictures as they come: damaged, huge, of rare kinds, and what only looks like a picture."""

import io
import os
import struct
import threading
import time
import zlib
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

from kd.data import scan
from kd.data.datamodule import DistillationDataModule
from kd.data.pictures import decode
from kd.data.sources import FileSplit, ImageFolder
from kd.storage.decoding import TooLarge, decoded, open_picture
from tests._files import read_json
from tests._helpers import Command, draw_folder, refuses

RNG = np.random.RandomState(0)
PIXELS = RNG.randint(0, 255, (40, 44, 3), np.uint8)


def encoded(pixels: np.ndarray, kind: str = "PNG", **options: object) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind, **options)
    return stream.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, packed: bytes, bits: int = 8, colour: int = 2) -> bytes:
    """A PNG of any content, its checksums right."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


PACKED = zlib.compress(b"".join(b"\0" + row.tobytes() for row in PIXELS))
TURNED = bytes([*PACKED[:1000], PACKED[1000] ^ 0x40, *PACKED[1001:]])
DAMAGED = {
    "header.png": png(44, 40, b"\0\0" + PACKED[2:]),
    "check.png": png(44, 40, PACKED[:-4] + b"abcd"),
    "bit.png": png(44, 40, TURNED),
    "larger.png": png(400, 400, PACKED),
    "cut.png": png(44, 40, PACKED)[:2000],
    "half.jpg": encoded(PIXELS, "JPEG")[:700],
    "text.jpg": b"not a picture",
    "empty.jpg": b"",
}


@pytest.fixture()
def folder(tmp_path: Path) -> Path:
    return draw_folder(tmp_path / "data", train=3, val=2)


def module(root: Path, **kwargs: object) -> DistillationDataModule:
    return DistillationDataModule(
        ImageFolder(str(root)), img_size=32, batch_size=4, num_workers=0, **kwargs
    )


@pytest.mark.parametrize("engine", ["torch", "device"])
def test_a_damaged_picture_is_named_or_left_out_and_never_ends_the_process(
    folder: Path, engine: str
) -> None:
    for name, data in DAMAGED.items():
        (folder / "train" / "apple" / name).write_bytes(data)
    data = module(folder, engine=engine)
    assert data.info.train == 20  # listed, not decoded
    with refuses("8 damaged pictures") as error:
        data.prepare_data()
    assert all(name in str(error.value) for name in DAMAGED)
    assert not any(word in str(error.value) for word in ("\n", ".cpp", "Errno"))
    kept = module(folder, engine=engine, on_bad_image="skip")
    assert (kept.info.train, len(kept.splits.skipped)) == (12, 8)
    targets, seen = kept.split("train").targets, 0
    for batch in kept.train_dataloader():
        assert [targets[i] for i in batch["index"]] == batch["target"].tolist()
        seen += len(batch["index"])
    assert seen == 12


def test_a_picture_that_claims_to_be_huge_is_refused_by_its_header(folder: Path) -> None:
    jpeg = bytearray(encoded(PIXELS, "JPEG"))
    place = jpeg.index(b"\xff\xc0")
    jpeg[place + 5 : place + 9] = struct.pack(">HH", 65500, 65500)
    bomb = png(20_000, 20_000, zlib.compress(bytes(60_001 * 100)))
    start = time.monotonic()
    for data in (bytes(jpeg), bomb):
        with pytest.raises(RuntimeError, match=r"data\.max_pixels"):
            decode(data)
    assert time.monotonic() - start < 5
    with refuses("44 x 40 pixels are more than data.max_pixels=1000"):
        module(folder, max_pixels=1000).prepare_data()
    with pytest.raises(ValueError, match="max_pixels must be >= 1, got 0"):
        module(folder, max_pixels=0)


def test_a_lack_of_memory_is_not_called_a_matter_of_max_pixels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(image: Image.Image) -> None:
        raise MemoryError

    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1)  # Pillow's bound
    opened = open_picture(io.BytesIO(encoded(PIXELS)))
    monkeypatch.setattr(type(opened), "load", load)
    with pytest.raises(TooLarge, match="^its pixels need more memory than there is$"):
        decoded(opened)


def test_of_sixteen_bits_the_upper_eight_are_kept(tmp_path: Path) -> None:
    deep = RNG.randint(0, 65536, (40, 44, 4)).astype(np.uint16)
    packed = {
        c: zlib.compress(b"".join(b"\0" + row.astype(">u2").tobytes() for row in deep[..., :c]))
        for c in (3, 4)
    }
    expected = torch.from_numpy((deep >> 8).astype(np.uint8)).permute(2, 0, 1)
    assert torch.equal(decode(png(44, 40, packed[3], 16, 2)), expected[:3])
    assert torch.equal(decode(png(44, 40, packed[4], 16, 6)), expected[:3])
    for kind in ("PNG", "TIFF"):
        assert torch.equal(decode(encoded(deep[..., 0], kind)), expected[:1].expand(3, -1, -1))
    with pytest.raises(RuntimeError, match="32 bits"):
        decode(encoded(RNG.rand(4, 4).astype(np.float32), "TIFF"))


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_an_animation_the_first_frame_is_taken(kind: str) -> None:
    frames = [Image.new("RGB", (44, 40), colour) for colour in ("red", "blue")]
    stream = io.BytesIO()
    frames[0].save(stream, kind, save_all=True, append_images=frames[1:])
    picture = decode(stream.getvalue())
    assert picture.shape == (3, 40, 44)
    assert picture[0].float().mean() > 200 > 50 > picture[2].float().mean()


def test_what_is_no_picture_file_is_named(folder: Path) -> None:
    """A pipe would be waited for, a device never ends, a sparse file is gigabytes of zeros, EPS starts a program."""
    place = folder / "train" / "apple"
    os.mkfifo(place / "pipe.jpg")
    (place / "zeros.png").symlink_to("/dev/zero")
    with (place / "sparse.jpg").open("wb") as sparse:
        sparse.truncate(8 * 10**9)
    Image.fromarray(PIXELS).save(place / "eps.jpg", format="EPS")
    Path(os.fsdecode(os.fsencode(place) + b"/caf\xe9.jpg")).write_bytes(encoded(PIXELS, "JPEG"))
    with refuses("5 damaged pictures") as error:
        module(folder).prepare_data()
    for text in (
        "pipe.jpg (is a named pipe; only a regular file is read)", "zeros.png (is a device; only",
        "sparse.jpg (has 8,000,000,000 bytes",
        "eps.jpg (not a picture", r"caf\udce9.jpg (its name is not UTF-8)",
    ):  # fmt: skip
        assert text in str(error.value)
    assert module(folder, on_bad_image="skip").info.train == 12


def test_a_class_folder_whose_name_is_not_utf_8(folder: Path) -> None:
    Path(os.fsdecode(os.fsencode(folder / "train") + b"/caf\xe9")).mkdir()
    with refuses(r"train/caf\\udce9 is not UTF-8"):
        _ = module(folder).info


def test_both_decoders_of_jpeg_give_the_same_pixels() -> None:
    codec = pytest.importorskip("torchcodec.decoders")
    from torchvision.io import ImageReadMode, decode_image

    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = encoded(PIXELS, "JPEG", exif=exif)
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        other = decode_image(tensor, ImageReadMode.RGB, apply_exif_orientation=True)
        assert torch.equal(codec.decode_jpeg(tensor), other)
        assert torch.equal(decode(data), other)


# -- the look at all pictures before training --------


def test_how_closely_pictures_are_looked_at(folder: Path) -> None:
    (folder / "train" / "apple" / "bit.png").write_bytes(DAMAGED["bit.png"])
    (folder / "train" / "apple" / "none.png").write_text("not a picture")
    for check, found in (("all", 2), ("headers", 1)):
        data = module(folder, check=check, on_bad_image="skip")
        data.prepare_data()
        assert len(data.splits.skipped) == found, check


def test_many_pictures_are_looked_at_by_their_headers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kd.data.scan.ALL_UP_TO", 10)
    (folder / "train" / "apple" / "bit.png").write_bytes(DAMAGED["bit.png"])
    module(folder).prepare_data()
    with refuses("1 damaged picture"):
        module(folder, check="all").prepare_data()


def test_a_picture_that_could_not_be_read_is_looked_at_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file's size and time stay as they are where it gets its permission back."""
    denied = Mock(side_effect=PermissionError(13, "Permission denied"))
    with monkeypatch.context() as patched, refuses("12 damaged pictures"):
        patched.setattr(FileSplit, "read", denied)
        module(folder).prepare_data()
    module(folder).prepare_data()


def test_of_several_processes_one_looks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def slowly(data: bytes, most: int) -> torch.Tensor:
        seen.append(len(data))
        time.sleep(0.01)
        return decode(data, most)

    monkeypatch.setattr(scan, "decode", slowly)
    started = [threading.Thread(target=module(folder).prepare_data) for _ in range(3)]
    for one in started:
        one.start()
    for one in started:
        one.join()
    assert len(seen) == 12 + 8


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", "3", '{"999": "x"}', '{"a": 1}', '{"0": ', '{"-1": "x"}', "null"]
)
def test_a_damaged_note_of_an_earlier_look_is_written_anew(
    folder: Path, tmp_path: Path, content: str, own_cache: Path
) -> None:
    (folder / "train" / "apple" / "bit.png").write_bytes(DAMAGED["bit.png"])
    for _ in range(2):
        data = module(folder, on_bad_image="skip")
        data.prepare_data()
        assert (data.info.train, len(data.splits.skipped)) == (12, 1)
        notes = list((tmp_path / "cache" / "scans").glob("*.json"))
        assert len(notes) == 2
        assert all(read_json(note) for note in notes)
        for note in notes:
            note.write_text(content)


# -- what else lies in the folders --------


def test_pictures_are_found_at_any_depth_and_what_is_left_out_is_said(
    recipe: Path, tmp_path: Path, prints: Command
) -> None:
    root = draw_folder(tmp_path / "own", train=12, val=4)
    below = root / "train" / "apple" / "2024" / "may"
    below.mkdir(parents=True)
    (below / "x.jpg").write_bytes(encoded(PIXELS, "JPEG"))
    (below / "y.heic").write_bytes(b"heic")
    (root / "val" / "apple" / "notes.txt").write_text("")
    out = prints("train", [f"recipe={recipe}", f"data.source.root={root}", "trainer.max_epochs=1"])
    assert (
        "49 training and 16 validation pictures, 4 classes; left out: 1 of .heic, 1 of .txt" in out
    )
