"""Validation's view of a picture, which kd-predict and the server share: the same pixels, in bounded memory."""

import io
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tvf

from kd.data import transforms
from kd.data.engines import at_once
from kd.data.transforms import EvalView
from kd.settings import Augment
from kd.ship.export.manifest import ExportManifest
from kd.ship.serving.bodies import Refused
from kd.ship.serving.pictures import view
from kd.storage.decoding import TooLarge, frame
from tests._helpers import ROOT


def drawn(width: int, height: int, seed: int = 0) -> Image.Image:
    rng = np.random.RandomState(seed)
    small = rng.randint(0, 256, (max(2, height // 6), max(2, width // 6), 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height))


def encoded(picture: Image.Image, level: int = 1) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, "PNG", compress_level=level)
    return stream.getvalue()


def manifest(
    size: tuple[int, int], crop_ratio: float, task: str = "classification"
) -> ExportManifest:
    return ExportManifest(task, "x", ["a", "b"], size, crop_ratio, [0.0] * 3, [1.0] * 3, "onnx")  # type: ignore[arg-type]


def scaled_whole(picture: torch.Tensor, size: tuple[int, int], crop_ratio: float) -> torch.Tensor:
    """torchvision's own: all of the picture is scaled, then its centre cut out."""
    tall, wide = (math.floor(side / crop_ratio) for side in size)
    shape = [tall] if tall == wide else [tall, wide]
    return v2.Compose([v2.Resize(shape, antialias=True), v2.CenterCrop(size)])(picture)


def by_pillow(picture: Image.Image, size: tuple[int, int], crop_ratio: float) -> np.ndarray:
    """The same in Pillow's own words."""
    tall, wide = (math.floor(side / crop_ratio) for side in size)
    if tall == wide:
        short = min(picture.size)
        wide, tall = (tall if side == short else int(tall * side / short) for side in picture.size)
    left, top = round((wide - size[1]) / 2), round((tall - size[0]) / 2)
    whole = picture.resize((wide, tall), Image.Resampling.BILINEAR)
    return np.asarray(whole.crop((left, top, left + size[1], top + size[0])))


def sizes() -> Iterator[tuple[int, int]]:
    """Of pictures up to 6 times as long as wide, upright and not."""
    of = random.Random(0)
    yield from [
        (500, 375),
        (375, 500),
        (224, 224),
        (256, 256),
        (64, 48),
        (3, 2),
        (1, 1),
        (1, 6),
        (630, 105),
        (37, 256),
    ]
    for _ in range(60):
        short = of.randint(1, 120)
        pair = (short, of.randint(short, 6 * short))
        yield pair if of.random() < 0.5 else pair[::-1]


of_each_size = pytest.mark.parametrize(
    ("size", "crop_ratio"), [((32, 32), 0.875), ((24, 32), 0.875), ((33, 33), 0.9), ((20, 20), 1.0)]
)


@of_each_size
def test_ordinary_pictures_are_scaled_whole_bit_by_bit(
    size: tuple[int, int], crop_ratio: float
) -> None:
    """Training's validation and kd-predict as torchvision has it, the server as Pillow; a level apart at most."""
    validation, about = EvalView(size, crop_ratio), manifest(size, crop_ratio)
    for number, (width, height) in enumerate(sizes()):
        picture = drawn(width, height, number)
        tensor = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
        mine = validation(tensor)
        served = view(encoded(picture), about, 1_000_000)
        assert torch.equal(mine, scaled_whole(tensor, size, crop_ratio)), (width, height)
        assert np.array_equal(served, by_pillow(picture, size, crop_ratio)), (
            width,
            height,
        )
        assert np.abs(mine.numpy().astype(int) - served.transpose(2, 0, 1)).max() <= 1


@pytest.mark.parametrize("crop_ratio", [0.85, 0.875, 0.9, 0.95, 1.0])
def test_a_picture_is_scaled_as_timm_scales_it(crop_ratio: float) -> None:
    """timm takes whole pixels: 249.8 are 249, and a centre crop a pixel off changes answers."""
    for side in (*range(8, 100), 224, 240, 256, 288, 336, 384, 448, 518):
        timms = create_transform(side, crop_pct=crop_ratio, is_training=False).transforms[0].size
        assert min(frame((3000, 2000), (side, side), crop_ratio).scaled) == timms


def test_masks_and_whole_pictures_are_as_torchvisions() -> None:
    for number, (width, height) in enumerate(sizes()):
        picture = torch.from_numpy(np.array(drawn(width, height, number))).permute(2, 0, 1)
        mask = tv_tensors.Mask(torch.randint(0, 9, (1, height, width), dtype=torch.uint8))
        seen, labels = EvalView((24, 24), 0.875)(picture, mask)
        shape = v2.Compose([v2.Resize([27], antialias=True), v2.CenterCrop((24, 24))])
        theirs = shape(picture, mask)
        assert (
            torch.equal(seen, theirs[0])
            and torch.equal(labels, theirs[1])
            and isinstance(labels, tv_tensors.Mask)
        )
        assert torch.equal(
            EvalView((24, 30), None)(picture), v2.Resize((24, 30), antialias=True)(picture)
        )


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("width", "height"), [(2000, 3), (3001, 10), (900, 99), (4097, 64)])
def test_a_long_picture_is_shown_as_scaling_all_of_it_shows_it(
    width: int, height: int, turned: bool
) -> None:
    picture = (
        drawn(width, height).transpose(Image.Transpose.ROTATE_90)
        if turned
        else drawn(width, height)
    )
    tensor = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
    mine = EvalView((32, 32), 0.875)(tensor).int()
    served = (
        view(encoded(picture), manifest((32, 32), 0.875), 1_000_000).transpose(2, 0, 1).astype(int)
    )
    assert np.abs(mine.numpy() - served).max() <= 1
    assert torch.equal(mine, scaled_whole(tensor, (32, 32), 0.875).int())


def test_pictures_beyond_reason_are_refused_and_a_tiny_crop_ratio_takes_no_memory() -> None:
    with pytest.raises(TooLarge):
        frame((400, 300), (224, 224), 0.01)
    with pytest.raises(TooLarge, match="its 1 x 40000000 pixels are too long and narrow"):
        frame(
            (1, 40_000_000), (168, 224), 0.875, 40_000_000
        )  # stretched: its middle is not all that is shown
    with pytest.raises(TooLarge):
        frame((40_000_000, 1), (224, 224), None, 40_000_000)
    with pytest.raises(Refused) as refused:
        view(
            encoded(Image.new("1", (8, 400_000))),
            manifest((224, 224), 0.875, "segmentation"),
            40_000_000,
        )
    assert refused.value.status == 413 and "too long and narrow" in str(refused.value)
    for side in (1000, 3000):  # a picture of any size that passes is shown up to this shape
        for size in ((224, 224), (168, 224), (1024, 64)):
            for crop_ratio in (0.875, None):
                frame((side, side // 8), size, crop_ratio, side * side // 8)
                frame((side // 8, side), size, crop_ratio, side * side // 8)


def test_a_thin_picture_of_few_bytes_is_refused() -> None:
    """1 x 100,000 pixels: scaled they would be 256 x 25,600,000."""
    data = encoded(Image.new("1", (1, 100_000)), 9)
    assert len(data) < 300
    with pytest.raises(TooLarge, match="too long and narrow"):
        EvalView((224, 224), 0.875)(torch.zeros(3, 100_000, 1, dtype=torch.uint8))
    with pytest.raises(Refused) as refused:
        view(data, manifest((224, 224), 0.875), 40_000_000)
    assert refused.value.status == 413


@pytest.mark.parametrize("on_gpu", [False, True], ids=["pair by pair", "as on a GPU"])
@pytest.mark.parametrize(
    "more", [{"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.8, "cutmix": 1.0, "mix_probability": 0.4}]
)
def test_pairs_are_mixed_as_torchvision_mixes_each(more: dict[str, float], on_gpu: bool) -> None:
    """To the last bit, from the same random numbers; an unlabelled picture takes its partner's label away. As on a GPU a
    level may differ by one: mixup's numbers are added in another order.
    """
    augment, classes = Augment(**more), 7
    images, targets = (
        torch.randint(256, (33, 3, 20, 28), dtype=torch.uint8),
        torch.randint(-1, classes, (33,)),
    )
    keys = [(i, 3) for i in range(33)]
    kinds = [kind(alpha=more[name], num_classes=classes) for name, kind in (("mixup", v2.MixUp), ("cutmix", v2.CutMix))
             if name in more]  # fmt: skip
    mix = v2.RandomApply([v2.RandomChoice(kinds)], augment.mix_probability)
    pairs = transforms.MixPairs(augment, classes, 5)
    if on_gpu:
        mixes = pairs.draw(keys, (20, 28))
        labels = pairs.labels(targets, mixes).float().numpy()
        found, soft = at_once.finish(images, [], mixes, labels, classes)
    else:
        found, soft = pairs(images, targets, keys)
    expected = images.clone()
    for i in range(0, 32, 2):
        with transforms.seeded(5, *keys[i], 1):
            pair, shares = mix(images[i : i + 2].float(), targets[i : i + 2].clamp_min(0))
        expected[i : i + 2] = pair.round().clamp(0, 255).to(torch.uint8)
        if shares.ndim == 2:
            assert torch.equal(soft[i : i + 2], shares * (targets[i : i + 2] >= 0).all())
    difference = (found.int() - expected.int()).abs()
    assert difference.sum() <= 3 * on_gpu


def test_a_padded_crop_is_torchvisions() -> None:
    """Black around the resized picture, and any of the places that torchvision's RandomCrop can take."""
    picture = torch.randint(1, 256, (3, 40, 60), dtype=torch.uint8)
    padded = torch.nn.functional.pad(tvf.resize(picture, [32, 32], antialias=True), [4] * 4)
    whole, shift = transforms.train_transform((32, 32), Augment(pad=4, hflip=0.0)).transforms[:2]
    corners = set()
    for seed in range(40):
        torch.manual_seed(seed)
        found = shift(whole(picture))
        torch.manual_seed(seed)
        at = shift.make_params([whole(picture)])
        corners.add((at["top"], at["left"]))
        assert torch.equal(
            found, padded[:, at["top"] : at["top"] + 32, at["left"] : at["left"] + 32]
        )
    assert {0, 8} <= {top for top, _ in corners} | {left for _, left in corners} <= set(range(9))


def client_code(page: Path) -> str:
    """The function ``view`` that a page shows."""
    start = page.read_text().index("import numpy as np\nfrom PIL import Image, ImageOps")
    return page.read_text()[start:].split("[None]")[0] + "[None]"


@pytest.mark.parametrize("page", ["kd/ship/export/README.md", "kd/report/card.md.j2"])
@of_each_size
def test_the_clients_code_on_the_pages_makes_the_view_of_validation(
    page: str, size: tuple[int, int], crop_ratio: float, tmp_path: Path
) -> None:
    names: dict[str, Any] = {}
    exec(client_code(ROOT / page), names)
    for number, (width, height) in enumerate(((64, 48), (37, 90), (200, 31))):
        file = tmp_path / f"{number}.png"
        pixels = np.random.default_rng(number).integers(0, 255, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(file)
        about = manifest(size, crop_ratio)
        served = view(file.read_bytes(), about, 10**6)
        assert np.array_equal(names["view"](file, *size, crop_ratio)[0], served)
