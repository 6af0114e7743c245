"""Secrets of the settings are in the run's ``config.yaml`` alone, which nobody else can read."""

import stat
from pathlib import Path

import pytest

from kd.cli import card_main, report_main, train_main
from kd.report.records import read_run
from kd.storage.shown import masked, without_secrets
from kd.storage.writing import write_text
from tests._helpers import Command

HOOK = "http://127.0.0.1:9/services/T00/a-secret"
PASSWORD = "so-secret"


def test_secrets_are_shown_nowhere(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], prints: Command
) -> None:
    words = [
        f"recipe={recipe}",
        f"monitor.webhook={HOOK}",
        "monitor.actions.Overtraining=webhook",
        "trainer.logger=CSVLogger",
    ]
    words += [f"monitor.otlp=http://me:{PASSWORD}@127.0.0.1:9", "trainer.max_epochs=1"]
    printed = prints("train", [*words, "--print_config"])
    assert "webhook: '...'" in printed or "webhook: ..." in printed
    assert "otlp: http://...@127.0.0.1:9" in printed
    assert train_main([word for word in words if "otlp" not in word]) == 0
    folder = tmp_path / "runs" / "tiny" / "000"
    assert report_main([str(folder)]) == card_main([str(folder)]) == 0
    assert read_run(folder).config["monitor"]["webhook"] == "..."
    config = folder / "config.yaml"
    assert HOOK in config.read_text() and stat.S_IMODE(config.stat().st_mode) == 0o600
    held = [
        file for file in folder.rglob("*") if file.is_file() and HOOK.encode() in file.read_bytes()
    ]
    output = capsys.readouterr()
    assert held == [config] and HOOK not in printed + output.out + output.err
    assert PASSWORD not in printed


def test_any_text_with_a_secret_is_its_owners(tmp_path: Path) -> None:
    masked({"trainer": {"logger": {"init_args": {"api_key": "k-1234567"}}}})
    assert without_secrets("k-1234567 ftp://u:w@h x:y@z") == "... ftp://...@h x:y@z"
    for text, mode in (("--key=k-1234567", 0o600), ("plain", 0o600 | 0o044)):
        write_text(tmp_path / "x", text)
        assert stat.S_IMODE((tmp_path / "x").stat().st_mode) & ~0o022 == mode
