"""``kd-eval RUN pays=DIR`` with boxes: torchvision's FasterRCNN, fine-tuned from each start by the same steps."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.detection import MeanAveragePrecision
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign

from kd.data.boxes import BoxFolder, BoxPictures, Sample
from kd.errors import UserError, plain
from kd.models import Preprocess
from kd.models.own import OwnModel
from kd.models.preprocess import evaluating
from kd.models.taps import Taps
from kd.progress import bar
from kd.proof.seeds import Gain, gain_over_seeds
from kd.ship.export.base import need
from kd.ship.finished import FinishedRun

STRIDES = (8, 16, 32)
"""Pixels of the picture for one position of a map, of each level of the pyramid."""
ANCHORS = ((32,), (64,), (128,))
"""Sides in pixels, of each stride."""
RATIOS = (0.5, 1.0, 2.0)
"""Height over width of anchors."""
WIDTH = 128
"""Channels of the pyramid."""
SIDE = 320
"""Pixels of a picture's shorter side; the longer one has at most twice as many."""
EVAL_BATCH = 8
"""Pictures in a batch that is judged."""
METRICS = {"map50": "mAP50", "map": "mAP50-95"}
"""Names in :func:`box_scores` -> names on the page and in ``pays.json``."""


@dataclass(frozen=True)
class Budget:
    """What each detector is trained with."""

    steps: int
    """Of the optimizer."""
    batch: int = 4
    """Pictures in a step."""
    lr: float = 1e-3
    """Highest learning rate of AdamW, by a one-cycle schedule."""
    proposals: int = 64
    """Boxes of a picture in the head's loss."""


class Pyramid(nn.Module):
    """The maps of strides 8, 16 and 32 of a backbone, and torchvision's feature pyramid above them.

    Args:
        model: of timm; or of a builder, whose maps are found by a run.
        key: the setting that is named in errors.

    Raises:
        UserError: the model has no such maps.
    """

    def __init__(self, model: Any, key: str) -> None:
        """Finds the maps; the pyramid above them is drawn anew. Arguments as of the class."""
        super().__init__()
        self.model = model
        self.maps: Callable[[Tensor], list[Tensor]]
        """Gives the maps ``(N, C, H / stride, W / stride)`` of pictures ``(N, 3, H, W)``, the finest first."""
        if isinstance(model, OwnModel):
            found = _FoundMaps(model, key)
            self.maps, channels = found, found.channels
        else:
            listed = _ListedMaps(model, key)
            self.maps, channels = listed, listed.channels
        self.pyramid = FeaturePyramidNetwork(channels, WIDTH)
        self.out_channels = WIDTH  # torchvision reads it

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Maps ``(N, WIDTH, H / stride, W / stride)`` by number, the finest first, of ``(N, 3, H, W)``."""
        by_number = {str(number): level for number, level in enumerate(self.maps(images))}
        return self.pyramid(by_number)


class _ListedMaps:
    """The maps of a timm model, which lists its features. Arguments as of :class:`Pyramid`."""

    def __init__(self, model: Any, key: str) -> None:
        """Notes place and channels of the deepest map of each stride."""
        places: dict[int, int] = {}
        widths: dict[int, int] = {}
        for place, feature in enumerate(getattr(model, "feature_info", ())):
            places[feature["reduction"]] = place
            widths[feature["reduction"]] = feature["num_chs"]
        if not hasattr(model, "forward_intermediates") or not set(STRIDES) <= set(places):
            raise UserError(
                f"{key}: a detector needs a CNN with maps of strides 8, 16 and 32, which {type(model).__name__} lacks"
            )
        self._model = model
        self._places = [places[stride] for stride in STRIDES]
        self.channels = [widths[stride] for stride in STRIDES]

    def __call__(self, images: Tensor) -> list[Tensor]:
        """As of :attr:`Pyramid.maps`."""
        return self._model.forward_intermediates(
            images, indices=self._places, intermediates_only=True
        )


class _FoundMaps:
    """The maps of a builder's model, found by their sizes in a run on empty pictures. Arguments as of :class:`Pyramid`."""

    def __init__(self, model: OwnModel, key: str) -> None:
        """Shows the model two empty pictures, once a stride; notes each map's layer, its channels, and whether they come
        last.
        """
        self._model = model
        self._taps = Taps(model, [], (SIDE, SIDE))
        self._layers: list[str] = []
        self._channels_last: list[bool] = []
        self.channels: list[int] = []
        images = next(model.parameters()).new_zeros(2, 3, SIDE, SIDE)
        for stride in STRIDES:
            layer = f"maps@stride{stride}"
            try:
                self._taps.add(layer, key=key)
                with torch.no_grad(), evaluating(model), self._taps as caught:
                    model(images)
            except RuntimeError as error:
                kind = type(model.model).__name__
                problem = f"a detector shows its backbone pictures of {SIDE} px, which {kind} does not take"
                raise UserError(f"{key}: {problem}: {plain(error)}") from error
            (channels_first,) = self._taps.read(caught, layer, "patch")
            (path,) = self._taps.paths(layer)
            self._layers.append(path)
            self._channels_last.append(caught[path].shape != channels_first.shape)
            self.channels.append(channels_first.shape[1])

    def __call__(self, images: Tensor) -> list[Tensor]:
        """As of :attr:`Pyramid.maps`; a layer that gives ``(N, H, W, C)`` is permuted."""
        with self._taps as caught:
            self._model(images)
        maps = []
        for path, channels_last in zip(self._layers, self._channels_last, strict=True):
            level = caught[path]
            maps.append(level.permute(0, 3, 1, 2) if channels_last else level)
        return maps


def detector_of(
    model: nn.Module, prepare: Preprocess, kinds: int, budget: Budget, seed: int, key: str
) -> nn.Module:
    """FasterRCNN above a backbone; the same seed draws the same pyramid and heads, whatever the backbone.

    Args:
        model: the backbone.
        prepare: has the mean and standard deviation that it was trained with.
        kinds: number of classes, without the background.
        budget: of its training.
        seed: of its weights.
        key: the setting that is named in errors.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return FasterRCNN(
            Pyramid(model, key),
            num_classes=1 + kinds,
            min_size=SIDE,
            max_size=2 * SIDE,
            image_mean=list(prepare.mean),
            image_std=list(prepare.std),
            rpn_anchor_generator=AnchorGenerator(ANCHORS, (RATIOS,) * len(ANCHORS)),
            box_roi_pool=MultiScaleRoIAlign(["0", "1", "2"], output_size=7, sampling_ratio=2),
            box_batch_size_per_image=budget.proposals,
        )


def in_lists(samples: Sequence[Sample]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Pictures and targets in a list each: torchvision's detectors take lists, because pictures differ in size."""
    pictures, targets = zip(*samples, strict=True)
    return list(pictures), list(targets)


def train_detector(
    detector: nn.Module, pictures: BoxPictures, budget: Budget, seed: int, device: torch.device
) -> float:
    """Trains the weights of a torchvision detector that require gradients.

    Args:
        detector: moved to the device, and left there.
        pictures: at least ``budget.batch``.
        budget: the steps, and what each takes.
        seed: of the pictures' order, and of the proposals in each step.
        device: to train on.

    Returns:
        The mean loss of the last twenty steps.
    """
    detector.to(device).train()
    for part in detector.modules():
        weights_of_part = list(part.parameters())
        if weights_of_part and not any(weights.requires_grad for weights in weights_of_part):
            part.eval()  # norms of frozen parts keep their statistics
    trained = [weights for weights in detector.parameters() if weights.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=budget.lr, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, budget.lr, budget.steps)
    order = torch.Generator().manual_seed(seed)
    loader = DataLoader(
        pictures,
        budget.batch,
        shuffle=True,
        collate_fn=in_lists,
        drop_last=True,
        generator=order,
    )
    losses: list[float] = []
    batches = islice(_again_and_again(loader), budget.steps)
    with torch.random.fork_rng():  # torchvision draws the proposals that count
        torch.manual_seed(seed)
        for images, targets in bar(batches, total=budget.steps, label="fine-tuning", unit=" steps"):
            on_device = [image.to(device) for image in images]
            boxes = [{name: value.to(device) for name, value in one.items()} for one in targets]
            terms = detector(on_device, boxes)
            loss = torch.stack(list(terms.values())).sum()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 10.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
    return statistics.mean(losses[-20:])


def _again_and_again(loader: DataLoader) -> Iterator[Any]:
    """Batches without an end, each pass in another order."""
    while True:
        yield from loader


@torch.no_grad()
def box_scores(
    detector: nn.Module, pictures: BoxPictures, device: torch.device
) -> dict[str, float]:
    """``map50`` and ``map`` (IoU 0.50 to 0.95) in 0..1; ``map50`` of each class too, as ``map50_NAME``.

    A class that has no box in the pictures is among them only if the detector answers it, with -1.

    Args:
        detector: on the device.
        pictures: to judge by.
        device: of the detector.
    """
    metric = MeanAveragePrecision()
    by_class = MeanAveragePrecision(iou_thresholds=[0.5], class_metrics=True)
    detector.eval()
    batches = DataLoader(pictures, EVAL_BATCH, collate_fn=in_lists)
    for images, targets in bar(batches, label="judging", unit=" batches"):
        answers = detector([image.to(device) for image in images])
        boxes = [{name: value.cpu() for name, value in answer.items()} for answer in answers]
        metric.update(boxes, targets)
        by_class.update(boxes, targets)
    values = metric.compute()
    scores = {"map50": float(values["map_50"]), "map": float(values["map"])}
    at_50 = by_class.compute()
    numbers = at_50["classes"].reshape(-1).tolist()
    means = at_50["map_per_class"].reshape(-1).tolist()
    for number, value in zip(numbers, means, strict=True):
        scores[f"map50_{pictures.kinds[number - 1]}"] = value
    return scores


def check_extra(key: str) -> None:
    """Refuses boxes where the package that torchmetrics computes mAP with is missing.

    Raises:
        UserError: the extra ``boxes`` is not installed.
    """
    need("pycocotools", "boxes", key)


class Backbones(Protocol):
    """The starts that are compared."""

    run: FinishedRun
    """Has their input."""

    @property
    def names(self) -> list[str]:
        """Of the starts."""

    def new(self, name: str, seed: int) -> nn.Module:
        """A backbone that may be trained."""


def detectors(
    starts: Backbones, pictures: BoxFolder, budget: Budget, seeds: int, device: torch.device
) -> dict[str, dict[str, list[float]]]:
    """Values of :data:`METRICS` in 0..1 by start and the metric's name, one a seed.

    Args:
        starts: the backbones.
        pictures: with boxes.
        budget: of each detector.
        seeds: how many detectors of each start.
        device: to train on.

    Raises:
        UserError: too few pictures for a step, or backbones without the maps.
    """
    if len(pictures.train) < budget.batch:
        raise UserError(f"pays: needs {budget.batch} pictures with boxes to train with")
    prepare = starts.run.preprocess
    scores: dict[str, dict[str, list[float]]] = {}
    for seed in range(seeds):  # outermost: the machine's drift meets all starts alike
        for name in starts.names:
            backbone = starts.new(name, seed)
            detector = detector_of(backbone, prepare, len(pictures.kinds), budget, seed, "pays")
            train_detector(detector, pictures.train, budget, seed, device)
            values = box_scores(detector, pictures.judged, device)
            of_start = scores.setdefault(name, {shown: [] for shown in METRICS.values()})
            for metric, shown in METRICS.items():
                of_start[shown].append(values[metric])
            print(f"{name}, seed {seed}: mAP50 {values['map50']:.1%}", flush=True)
    return scores


def gains_of(
    scores: Mapping[str, Mapping[str, Sequence[float]]], distilled: str
) -> Iterator[tuple[str, str, Gain]]:
    """By how much the distilled start is ahead of each other: the start, the metric's name, the gain in 0..1.

    Args:
        scores: of :func:`detectors`.
        distilled: name of that start.
    """
    for name, of_start in scores.items():
        if name == distilled:
            continue
        for metric, values in of_start.items():
            yield name, metric, gain_over_seeds(scores[distilled][metric], values)
