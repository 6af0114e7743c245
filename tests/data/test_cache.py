"""The store of answers: rounding, torn records, several writers, foreign folders, a full disk."""

import multiprocessing
import os
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kd.losses import KDLoss, kd_loss
from kd.losses.base import TopKLogits
from kd.teachers.answer_codec import Codec, Half, TopK
from kd.teachers.answer_store import AnswerStore, Kind
from tests._helpers import refuses


def of_topk(
    student: torch.Tensor,
    values: torch.Tensor,
    indices: torch.Tensor,
    tail: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """KD from the teacher's largest logits."""
    known = TopKLogits(values, indices, {temperature: tail})
    return KDLoss(temperature).forward_topk(student, known, torch.zeros(len(student)))


PARTS: dict[str, dict[str, Any]] = {
    "teacher": {"arch": "a", "weights": "1"},
    "transform": {"img_size": 32, "mixup": 0.0},
    "data": {"content": "x"},
    "answers": {"format": "dense"},
}


def dense(classes: int = 50) -> Half:
    return Half((classes,), relative=True)


def logits(n: int = 6, classes: int = 50, scale: float = 8.0, seed: int = 0) -> torch.Tensor:
    return scale * torch.randn(n, classes, generator=torch.Generator().manual_seed(seed))


def store(folder: Path, codec: Any, samples: int = 6, views: int = 2, **parts: Any) -> AnswerStore:
    kind = Kind({**PARTS, **parts}, str(folder), codec.record_bytes, codec)
    return AnswerStore(kind, samples, views)


def put(target: AnswerStore, codec: Any, view: int, z: torch.Tensor, first: int = 0) -> None:
    target.put(view, np.arange(first, first + len(z)), codec.encode(z).numpy())


def read(source: AnswerStore, codec: Any, view: int, index: list[int]) -> Any:
    assert source.present(view, np.array(index)).all()
    return codec.decode(torch.from_numpy(source.read(view, np.array(index))[0]))


# -- rounding --------


@pytest.mark.parametrize("classes", [2, 3, 1000])
def test_dense_answers_come_back_within_the_stated_error(tmp_path: Path, classes: int) -> None:
    codec, z = dense(classes), logits(classes=classes)
    s = store(tmp_path / "c", codec)
    put(s, codec, 1, z)
    back = read(s, codec, 1, [3, 0, 5])
    below = z.amax(1, keepdim=True) - z
    assert ((back - z[[3, 0, 5]]).abs() <= below[[3, 0, 5]] / 2048 + 1e-5).all()
    assert not s.present(0, np.arange(6)).any()


def test_strong_logits_are_kept_finite(tmp_path: Path) -> None:
    z = torch.tensor([[60.0, -60.0, 1e6], [-1e6, 0.0, 1.0]])
    assert dense(3).decode(dense(3).encode(z)).isfinite().all()
    numbers = Codec((3,))  # of a regression: each has a unit of its own
    assert torch.equal(numbers.decode(numbers.encode(z)), z)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.parametrize("k", [1, 5, 49])
def test_top_k_is_exact_on_the_k_classes_and_bounded_on_the_rest(
    k: int, temperature: float
) -> None:
    teacher, student = logits().double(), logits(seed=1, scale=3).double().requires_grad_()
    values, indices = teacher.topk(k)
    others = teacher.scatter(1, indices, -torch.inf)
    rest = (
        (teacher / temperature).softmax(1).scatter(1, indices, 0).sum(1)
    )  # the teacher's mass outside the k
    full = kd_loss(student, teacher, temperature)
    (g_full,) = torch.autograd.grad(full, student)
    tail = (others / temperature).logsumexp(1)
    some = of_topk(student, values, indices, tail, temperature)
    (g_some,) = torch.autograd.grad(some, student)
    torch.testing.assert_close(g_some.gather(1, indices), g_full.gather(1, indices))
    off = (g_some - g_full).abs() * len(teacher)
    assert (off <= temperature * rest[:, None] + 1e-12).all()
    assert (off.sum(1) <= 2 * temperature * rest + 1e-12).all()
    q_t = (others / temperature).softmax(1)
    q_s = (student / temperature).scatter(1, indices, -torch.inf).softmax(1)
    within = torch.where(q_t > 0, q_t * (q_t / q_s.clamp(min=1e-300)).log(), 0.0).sum(1)
    torch.testing.assert_close(full - some, temperature**2 * (rest * within).mean())


@pytest.mark.parametrize("classes", [20, 40_000, 70_000])
def test_stored_top_k_gives_the_loss_of_exact_top_k(tmp_path: Path, classes: int) -> None:
    """Also where 16 bits of a class number would not do, signed (over 32,767) or not (over 65,535)."""
    z, student = logits(n=3, classes=classes), logits(n=3, classes=classes, seed=1)
    z[0, classes - 1] = 90.0
    codec = TopK((classes,), 4, (1.0, 2.0))
    s = store(tmp_path / "c", codec, samples=3)
    put(s, codec, 0, z)
    back = read(s, codec, 0, [0, 1, 2])
    assert isinstance(back, TopKLogits)
    assert torch.equal(back.indices, z.topk(4).indices)
    values, indices = z.topk(4)
    tail = (z.scatter(1, indices, -torch.inf) / 2).logsumexp(1)
    exact = of_topk(student, values, indices, tail, 2.0)
    torch.testing.assert_close(
        KDLoss(2.0).forward_topk(student, back, torch.zeros(3)), exact, rtol=2e-3, atol=1e-4
    )


def test_features_come_back_within_the_stated_error(tmp_path: Path) -> None:
    """An odd number of values too; beyond half precision they are kept finite."""
    codec = Half((5, 3, 3))
    grid = torch.randn(6, 5, 3, 3, generator=torch.Generator().manual_seed(5)) * 100
    s = store(tmp_path / "c", codec)
    put(s, codec, 0, grid)
    back = read(s, codec, 0, [4, 1])
    assert ((back - grid[[4, 1]]).abs() <= grid[[4, 1]].abs() / 2048 + 1e-7).all()
    vector = torch.tensor([[1e6, -7e4, 0.3]]).bfloat16()
    back = Half((3,)).decode(Half((3,)).encode(vector))
    assert back.tolist() == [[65504.0, -65504.0, vector[0, 2].item()]]


def test_a_record_of_ten_answers_is_small() -> None:
    assert TopK((1000,), 10, (2.0,)).record_bytes == 48
    assert dense(1000).record_bytes == 2008


# -- torn records --------


@pytest.mark.parametrize("byte", [0, 3, 4, -1])
def test_a_torn_record_is_missing_and_written_anew(tmp_path: Path, byte: int) -> None:
    codec, z = dense(), logits()
    put(store(tmp_path / "c", codec), codec, 0, z)
    file = tmp_path / "c" / "view-0000.bin"
    data = bytearray(file.read_bytes())
    data[2 * codec.record_bytes + byte % codec.record_bytes] ^= 0x40
    file.write_bytes(data)
    s = store(tmp_path / "c", codec)
    assert s.present(0, np.arange(6)).tolist() == [True, True, False, True, True, True]
    put(s, codec, 0, z)
    torch.testing.assert_close(read(s, codec, 0, [2]), z[2:3], rtol=0, atol=0.05)


def test_a_truncated_file_loses_its_end_alone(tmp_path: Path) -> None:
    codec = dense()
    put(store(tmp_path / "c", codec), codec, 0, logits())
    file = tmp_path / "c" / "view-0000.bin"
    file.write_bytes(file.read_bytes()[: 3 * codec.record_bytes + 10])
    assert (
        store(tmp_path / "c", codec).present(0, np.arange(6)).tolist() == [True] * 3 + [False] * 3
    )


def test_a_whole_record_is_never_overwritten(tmp_path: Path) -> None:
    codec, z = dense(), logits()
    s = store(tmp_path / "c", codec)
    put(s, codec, 0, z)
    before = read(s, codec, 0, [0])
    put(store(tmp_path / "c", codec), codec, 0, -z)
    assert torch.equal(read(store(tmp_path / "c", codec), codec, 0, [0]), before)


def write(folder: Path, seed: int, rounds: int, ready: Event) -> None:
    codec = dense()
    s = store(folder, codec, samples=100)
    rng = np.random.default_rng(seed)
    ready.set()
    for _ in range(rounds):
        index = rng.choice(100, 8, replace=False)
        s.put(0, index, codec.encode(torch.from_numpy(index)[:, None] * torch.arange(50.0)).numpy())


def test_several_processes_write_and_one_is_killed(tmp_path: Path) -> None:
    """Whatever is there afterwards is whole and is its own sample's answer."""
    folder, codec = tmp_path / "c", dense()
    forks = multiprocessing.get_context("fork")
    writers = []
    for seed, rounds in ((0, 10**6), (1, 20), (2, 20)):
        writers.append(
            forks.Process(target=write, args=(folder, seed, rounds, ready := forks.Event()))
        )
        writers[-1].start()
        assert ready.wait(60)
    for writer in writers[1:]:
        writer.join(60)
        assert writer.exitcode == 0
    writers[0].kill()
    writers[0].join(60)
    s = store(folder, codec, samples=100)
    there = np.flatnonzero(s.present(0, np.arange(100)))
    assert len(there) > 50
    expected = torch.from_numpy(there)[:, None] * torch.arange(50.0)
    torch.testing.assert_close(
        read(s, codec, 0, there.tolist()), expected, rtol=1e-3, atol=0.01 * 100 * 50
    )
    assert s.filled() == pytest.approx(len(there) / 200)


# -- foreign folders, a full disk --------


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("teacher", {"arch": "a", "weights": "2"}, "other teacher: weights is 1 there, 2 here"),
        (
            "transform",
            {"img_size": 32, "mixup": 0.8},
            "other transforms: mixup is 0.0 there, 0.8 here",
        ),
        ("data", {"content": "y"}, "other data: content is x there, y here"),
        (
            "answers",
            {"format": "top-5"},
            "other kinds of answers: format is dense there, top-5 here",
        ),
    ],
)
def test_a_cache_of_something_else_says_what(
    tmp_path: Path, part: str, change: dict[str, Any], message: str
) -> None:
    store(tmp_path / "c", dense())
    with refuses(message):
        store(tmp_path / "c", dense(), **{part: change})


def test_a_damaged_fingerprint(tmp_path: Path) -> None:
    store(tmp_path / "c", dense())
    (tmp_path / "c" / "fingerprint.json").write_text("{")
    with refuses("fingerprint.json is damaged"):
        store(tmp_path / "c", dense())


def test_more_views_than_before_keep_the_old_ones(tmp_path: Path) -> None:
    codec = dense()
    put(store(tmp_path / "c", codec, views=1), codec, 0, logits())
    s = store(tmp_path / "c", codec, views=3)
    assert s.filled() == pytest.approx(1 / 3)


# -- what others do to its files --------


@pytest.mark.parametrize("name", ["view-0000.bin", "fingerprint.json", "fingerprint.json.part"])
@pytest.mark.parametrize("kind", ["link", "second name", "pipe"])
def test_a_file_that_leads_elsewhere_is_refused_and_what_it_leads_to_left_alone(
    tmp_path: Path, name: str, kind: str
) -> None:
    store(tmp_path / "c", dense()).close()
    precious, file = tmp_path / "precious", tmp_path / "c" / name
    precious.write_text("precious")
    if name.endswith(".part"):
        (tmp_path / "c" / "fingerprint.json").unlink()
        for view in (tmp_path / "c").glob("view-*.bin"):
            view.unlink()
    file.unlink(missing_ok=True)
    {"link": file.symlink_to, "second name": file.hardlink_to, "pipe": lambda _: os.mkfifo(file)}[
        kind
    ](precious)
    if name.endswith(".part"):  # a name in passing: it is taken away, not written through
        store(tmp_path / "c", dense())
    else:
        with refuses(rf"can't be used: {name} is (a link|not a regular file)"):
            store(tmp_path / "c", dense())
    assert precious.read_text() == "precious"


@pytest.mark.parametrize("records", [0, 2.5])
def test_a_file_cut_by_another_process_loses_records_and_ends_nothing(
    tmp_path: Path, records: float
) -> None:
    codec, z = dense(), logits()
    s = store(tmp_path / "c", codec)
    put(s, codec, 0, z)
    assert s.present(0, np.arange(6)).all()
    os.truncate(tmp_path / "c" / "view-0000.bin", int(records * codec.record_bytes))
    left = [i < int(records) for i in range(6)]
    assert s.present(0, np.arange(6)).tolist() == left
    store(tmp_path / "c", codec)  # another process, which makes it as long as before
    assert s.present(0, np.arange(6)).tolist() == left
    put(s, codec, 0, z)
    torch.testing.assert_close(read(s, codec, 0, [5]), z[5:6], rtol=0, atol=0.05)


@pytest.mark.parametrize(
    "codec",
    [dense(), TopK((50,), 3, (2.0,)), Half((50,)), Codec((50,))],
    ids=["dense", "topk", "features", "numbers"],
)
def test_a_poisoned_record_with_the_right_checksum_is_missing(tmp_path: Path, codec: Codec) -> None:
    z = logits()
    whole, poisoned = codec.encode(z).numpy(), codec.encode(z).numpy()
    poisoned[1:, 4:] = 0xFF  # NaN in any float, a class beyond all
    a = store(tmp_path / "c", codec, views=1)
    a.put(0, np.arange(6), poisoned)
    assert a.present(0, np.arange(6)).tolist() == [True] + [False] * 5
    a.put(0, np.arange(6), whole)
    assert a.present(0, np.arange(6)).all()


def test_a_data_folder_named_as_a_cache_stays_as_it_is(tmp_path: Path) -> None:
    """And a disk without room is reported before the start."""
    (tmp_path / "photo.jpg").write_text("")
    with refuses("is not a cache of answers: it holds photo.jpg"):
        store(tmp_path, dense())
    with refuses("cache_dir: .*photo.jpg.* can't be used"):
        store(tmp_path / "photo.jpg", dense())
    assert [p.name for p in tmp_path.iterdir()] == ["photo.jpg"]
    needs = r"needs [\d,.]+ MB more for 2 view\(s\) of 1000000000000 pictures, the disk has"
    with refuses(needs):
        store(tmp_path / "new", dense(), samples=10**12)
    assert not (tmp_path / "new").exists()
