"""Weights without internet: one attempt, and a message that helps."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from kd.errors import UserError
from kd.models.build import build_model
from kd.models.hub import check_weights
from kd.models.spec import StudentSpec


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


def test_a_teachers_training_names_the_key_outside(attempts: list[str]) -> None:
    with pytest.raises(UserError, match="model.teacher.backbone=FILE"):
        check_weights("vit_small_patch14_dinov2", "model.teacher.backbone")
