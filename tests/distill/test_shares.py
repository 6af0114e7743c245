"""Two processes with half the batch learn what one learns from the whole, also where labels or pixels are missing."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import kd
from kd.losses import CWDLoss, DistillLoss, KDLoss, PixelKDLoss, RegressionKDLoss
from kd.tasks import Classification, MultiLabel, Regression, Segmentation, Task
from tests._forks import skip_forks_beside_a_gpu

NAN, COUNT = float("nan"), 8
IDS = torch.tensor([0, 1, 2, 0, 1, -1, -1, -1])
MASKS = torch.arange(COUNT * 16).view(COUNT, 4, 4) % 3
MASKS[4:, 1:] = 255
MASKS[7] = 255
NUMBERS = torch.linspace(-1, 1, COUNT * 3).view(COUNT, 3)
NUMBERS[4:, 1:] = NAN
LABELS = (torch.arange(COUNT * 3).view(COUNT, 3) % 2).float()
LABELS[5:] = NAN

Case = tuple[Callable[[], Task], dict[str, Callable[[], DistillLoss]], Tensor]
CASES: dict[str, Case] = {
    "Classification": (lambda: Classification(3, label_smoothing=0.1), {"kd": KDLoss}, IDS),
    "class weights": (
        lambda: Classification(3, class_weights=[1.0, 2.0, 3.0]),
        {"kd": KDLoss},
        IDS,
    ),
    "MultiLabel": (lambda: MultiLabel(3), {"kd": kd.losses.BinaryKDLoss}, LABELS),
    "Regression": (
        lambda: Regression(3),
        {"kd": RegressionKDLoss, "b": lambda: RegressionKDLoss(bounded=True)},
        NUMBERS,
    ),
    "Segmentation": (lambda: Segmentation(3, 255), {"kd": PixelKDLoss, "cwd": CWDLoss}, MASKS),
    "all labelled": (lambda: Classification(3), {"kd": KDLoss}, IDS.abs()),
}


class PerPixel(nn.Module):
    """Three numbers a picture of 4 x 4 pixels, or a pixel."""

    def __init__(self, dense: bool, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.dense, self.layer = dense, nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.layer(x)
        return logits if self.dense else logits.mean(dim=(2, 3))


def gradients(name: str, part: slice, batches: int = 1) -> list[Tensor]:
    """Of one step over some of the pictures, in so many batches of an accumulation window."""
    make_task, losses, target = CASES[name]
    task, dense = make_task(), name == "Segmentation"
    kind = {"MultiLabel": "several labels a picture", "Segmentation": "masks"}
    meaning = "numbers" if "Regression" in name else kind.get(name, "one label a picture")
    info = kd.DataInfo(["a", "b", "c"], kind=meaning, ignore_index=255 if dense else None)
    made = {key: loss() for key, loss in losses.items()}
    step = kd.Distillation(
        PerPixel(dense, 0), PerPixel(dense, 1), task=task, losses=made, data=info
    )
    torch.manual_seed(2)
    images = torch.randn(COUNT, 3, 4, 4)
    parts = list(zip(images[part].chunk(batches), target[part].chunk(batches), strict=True))
    window = [labels for _, labels in parts] if batches > 1 else None
    for pictures, labels in parts:
        (step(pictures, labels, window=window).total / batches).backward()
    return [parameter.grad for parameter in step.parameters() if parameter.grad is not None]


def rank_main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = {}
    for name in CASES:
        for batches in (1, 2):
            own = gradients(name, slice(4 * rank, 4 * rank + 4), batches)
            for gradient in own:
                dist.all_reduce(gradient)
            found[f"{name} {batches}"] = [gradient / 2 for gradient in own]  # as DDP averages
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def of_two_processes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Tensor]]:
    skip_forks_beside_a_gpu()
    folder = tmp_path_factory.mktemp("ranks")
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                rank_main(rank, folder)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    return torch.load(folder / "0.pt", weights_only=True)


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_two_processes_learn_what_one_learns_from_the_whole_batch(
    name: str, batches: int, of_two_processes: dict[str, list[Tensor]]
) -> None:
    """2 x 4 pictures, and 2 x 2 x 2 in windows of two batches, teach what 1 x 8 do."""
    whole = gradients(name, slice(None))
    assert whole
    for mine, theirs in zip(whole, of_two_processes[f"{name} {batches}"], strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("batches", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_a_window_of_batches_teaches_what_the_whole_batch_does(name: str, batches: int) -> None:
    for mine, theirs in zip(
        gradients(name, slice(None)), gradients(name, slice(None), batches), strict=True
    ):
        torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-6)


def test_float_pictures_reach_a_teacher_of_another_mean_and_std_as_timms_do() -> None:
    """timm's DistillationTeacher.normalize_input: back to 0..1 by the student's, then on by the teacher's own."""
    student, teacher = PerPixel(False, 0), PerPixel(False, 1)
    of_student = kd.Preprocess(4, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    of_teacher = kd.Preprocess(4, (0.5,) * 3, (0.5,) * 3)
    step = kd.Distillation(
        student,
        teacher,
        task=Classification(3),
        losses={"kd": KDLoss()},
        prepare=of_student,
        teacher_prepare=of_teacher,
    )  # fmt: skip
    bytes_ = torch.randint(0, 256, (4, 3, 4, 4), dtype=torch.uint8)
    assert step.teacher is not None
    torch.testing.assert_close(
        step.teacher(of_student(bytes_)), step.teacher(bytes_), rtol=1e-4, atol=1e-5
    )
    assert of_teacher.floats is None, "the user's own is left as it is"
