"""What an export may lose, and how large it is."""

from pathlib import Path

from kd.ship.export.gate import ExportLimits, failure, size_mb


def test_what_an_export_may_lose() -> None:
    limits = ExportLimits(agreement=0.99, drop=0.01)
    found = {"agreement": 0.98, "pictures": 100, "metric": "acc1", "student": 0.80, "export": 0.795}
    assert failure(found, int8=False, limits=limits).startswith(
        "it agrees with the student on 98.000% of 100 pictures"
    )
    assert failure(found, int8=True, limits=limits) == ""
    assert "acc1 falls from 80.00% to 70.00%, by more than 1 points" in failure(
        {**found, "export": 0.7}, True, limits
    )
    assert failure({**found, "agreement": 1.0}, False, limits) == ""


def test_the_size_of_a_file_and_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(250_000))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c").write_bytes(bytes(500_000))
    assert (size_mb(tmp_path / "a"), size_mb(tmp_path)) == (0.25, 0.75)
