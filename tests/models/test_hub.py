"""Weights without internet: one attempt, and a message that helps."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import timm
import torch
from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError

from kd.data.sources import HuggingFace
from kd.errors import UserError
from kd.models.build import build_model
from kd.models.hub import check_downloadable
from kd.models.spec import StudentSpec
from kd.storage import hub
from tests._helpers import Command, refuses
from tests._hub import hub_with


@pytest.fixture
def attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub that hangs up on everybody, with an empty cache: its callers."""
    callers: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            while True:
                try:
                    caller, address = server.accept()
                except OSError:
                    return
                callers.append(str(address))
                caller.close()

        threading.Thread(target=hang_up, daemon=True).start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        huggingface_hub.close_session()
        yield callers
        server.shutdown(socket.SHUT_RDWR)


def test_one_attempt_and_the_remedies(attempts: list[str]) -> None:
    spec = StudentSpec("resnet18", pretrained=True)
    for _ in range(2):
        with pytest.raises(UserError) as raised:
            build_model(spec, 5, "model.student")
    assert len(attempts) == 1
    message = str(raised.value)
    assert message.startswith("model.student.checkpoint: no internet (http://127.0.0.1")
    for remedy in (
        "model.student.checkpoint=FILE",
        "HTTPS_PROXY",
        "HF_ENDPOINT",
        "timm's resnet18",
    ):
        assert remedy in message


def test_a_student_begins_with_the_weights_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real client and timm's own loading, over HTTP; the second student takes them from the cache."""
    torch.manual_seed(3)
    state = timm.create_model("test_vit").state_dict()
    with hub_with("test_vit.r160_in1k", state, tmp_path, monkeypatch) as paths:
        for _ in range(2):
            student = build_model(StudentSpec("test_vit.r160_in1k", pretrained=True), 5, "")
        requests = [path for path in paths if path.endswith("model.safetensors")]
    assert len(requests) == 3  # its size and its content; later only whether it has changed
    other = set()
    for name, tensor in student.state_dict().items():
        if tensor.shape != state[name].shape or not torch.equal(tensor, state[name]):
            other.add(name)
    assert other == {"head.weight", "head.bias"}


def test_a_data_set_of_the_hub_is_asked_for_once(
    attempts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``datasets`` by itself asks six times for each file, with pauses. What it has kept is read without the hub."""
    datasets = pytest.importorskip("datasets")
    source = HuggingFace(path="nobody/nothing")
    with refuses("no folder of this name, and no internet .*HTTPS_PROXY"):
        source.load("train")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", ".")
    Path("t.csv").write_text("image,label\na.png,a\n")
    builder = datasets.load_dataset_builder("csv", data_files="t.csv")
    builder.dataset_name = "nothing"
    builder.download_and_prepare("nobody___nothing/default/0.0.0/0")
    assert source.load("train").targets == [0]
    assert len(attempts) == 1


def test_a_teachers_training_names_the_key_outside(attempts: list[str]) -> None:
    with refuses("model.teacher.backbone=FILE"):
        check_downloadable("vit_small_patch14_dinov2", "model.teacher.backbone")


def test_an_address_that_never_ends_its_answer_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's own limit holds for each step alone; the whole attempt has one too."""
    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            caller, _ = server.accept()
            caller.sendall(b"HTTP/1.1 200 OK\r\n")
            end = time.monotonic() + 20
            while not is_over.wait(0.1) and time.monotonic() < end:
                caller.sendall(b"X-Drop: 1\r\n")
            caller.sendall(b"Content-Length: 0\r\n\r\n")
            caller.close()

        threading.Thread(target=drip, daemon=True).start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(hub, "WAIT_S", 1.0)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        huggingface_hub.close_session()
        with refuses("no internet"):
            check_downloadable("resnet18", "model.student.checkpoint")
        is_over.set()


def test_missing_weights_are_reported_before_a_picture_is_read(
    attempts: list[str], tmp_path: Path, refusal: Command
) -> None:
    for number in range(20):
        (tmp_path / f"{number}.jpg").write_bytes(b"no picture")
    words = ["recipe=foundation_vit", f"data.source.root={tmp_path}", "trainer.accelerator=cpu"]
    last_line = refusal("train", [*words, f"runs_dir={tmp_path / 'runs'}"]).strip().splitlines()[-1]
    assert last_line.startswith("kd-train: model.teachers.dino.checkpoint: no internet")
    assert len(attempts) == 1


def test_weights_that_timm_does_not_have_are_left_to_the_building(attempts: list[str]) -> None:
    check_downloadable("resnet18.nobody", "model.student.checkpoint")
    assert not attempts


def test_a_data_sets_name_is_doubted_before_the_library_that_reads_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise HFValidationError("no name")

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "why_unreachable", lambda: "")
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", refused)
    with refuses("^data.source.path: some/Thing: .* no data set of the hub"):
        hub.check_dataset("some/Thing", "data.source.path")
    (tmp_path / "some___thing").mkdir()
    (tmp_path / "two_words").mkdir()
    for name in ("some/Thing", "TwoWords"):
        hub.check_dataset(name, "data.source.path")  # downloaded before
    monkeypatch.setattr(hub, "why_unreachable", lambda: "no internet")
    with refuses("^data.source.path: other: no folder of this name, and no int"):
        hub.check_dataset("other", "data.source.path")
