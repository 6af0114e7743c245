"""The meeting point of processes on one machine."""

import os

import pytest
from pytorch_lightning import Trainer

from kd.launch.loopback import meet_on_loopback


def test_one_process_needs_no_meeting_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    meet_on_loopback(
        Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    )
    assert "MASTER_PORT" not in os.environ
