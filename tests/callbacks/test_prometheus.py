"""The endpoint, asked in the middle of a run: by hand, and by Prometheus itself where it is installed."""

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pytorch_lightning import Callback, Trainer

from kd.callbacks.phases import Phases
from kd.callbacks.prometheus import Prometheus
from kd.callbacks.run_folder import RunFolder
from kd.callbacks.system import System
from kd.cli import train_main
from scripts.grafana import dashboard
from tests._helpers import ROOT


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


class Ask(Callback):
    """Reads the endpoint at the end of each epoch."""

    answers: list[str] = []  # noqa: RUF012 (the test reads it)

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.port, self.host = port, host

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.answers.append(get(f"http://{self.host}:{self.port}/metrics"))


def test_the_endpoint_tells_phases_losses_and_the_machine(recipe: Path) -> None:
    port = free_port()
    own = json.dumps({"class_path": "tests.callbacks.test_prometheus.Ask", "init_args": {"port": port}})
    slow = json.dumps({"class_path": "tests._stop.Slow", "init_args": {"seconds": 0.05}})
    items = [f"monitor.prometheus_port={port}", "monitor.interval_s=0.1"]
    items += [f"trainer.callbacks+={own}", f"trainer.callbacks+={slow}"]
    assert train_main([f"recipe={recipe}", *items]) == 0
    from tests.callbacks.test_prometheus import Ask as Used

    text = Used.answers[-1]
    values = {k: float(v) for k, v in re.findall(r"^(kd_[^ ]+) (\S+)$", text, re.M)}
    assert values['kd_phase_seconds{phase="teacher"}'] > 0
    assert values['kd_phase_seconds{phase="logging"}'] > 0.04
    assert values['kd_metric{name="train/loss"}'] > 0
    assert values["kd_images_per_second"] == pytest.approx(8 / values["kd_step_seconds"])
    assert 'kd_cpu_percent{core="0"}' in values
    with pytest.raises(urllib.error.URLError):  # closed with the run
        get(f"http://127.0.0.1:{port}/metrics")


def test_the_address_is_chosen(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    asked = {"class_path": "tests.callbacks.test_prometheus.Ask", "init_args": {"port": port, "host": "127.0.0.2"}}
    items = [f"monitor.prometheus_port={port}", f"trainer.callbacks+={json.dumps(asked)}", "trainer.max_epochs=1"]
    assert train_main([f"recipe={recipe}", *items, "monitor.prometheus_host=127.0.0.2"]) == 0
    assert train_main([f"recipe={recipe}", *items, "monitor.prometheus_host=192.0.2.1"]) == 2  # nobody's
    assert f"{port} can't be opened at 192.0.2.1 (monitor.prometheus_host): " in capsys.readouterr().err


def test_a_taken_port_is_one_line(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        assert train_main([f"recipe={recipe}", f"monitor.prometheus_port={port}"]) == 2
    assert f"monitor.prometheus_port: {port} can't be opened" in capsys.readouterr().err


class Scrape(Callback):
    """Waits in the last step until Prometheus has scraped, then asks it what each panel of the dashboard asks."""

    found: dict[str, int] = {}  # noqa: RUF012 (the test reads it)

    def __init__(self, server: str) -> None:
        self.server = server

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.current_epoch < 1:
            return
        until = time.monotonic() + 30
        while time.monotonic() < until and not self._ask("kd_metric"):
            time.sleep(0.5)
        panels = json.loads((ROOT / "scripts" / "grafana.json").read_text())["panels"]
        self.found.update({p["title"]: self._ask(p["targets"][0]["expr"]) for p in panels})

    def _ask(self, expression: str) -> int:
        query = urllib.parse.urlencode({"query": expression})
        return len(json.loads(get(f"{self.server}/api/v1/query?{query}"))["data"]["result"])


@pytest.mark.skipif(not shutil.which("prometheus"), reason="Prometheus is not installed")
def test_prometheus_scrapes_and_every_panel_has_data(recipe: Path, tmp_path: Path) -> None:
    port, server_port = free_port(), free_port()
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 500ms}\n"
        f"scrape_configs: [{{job_name: kd, static_configs: [{{targets: ['127.0.0.1:{port}']}}]}}]\n"
    )
    command = ["prometheus", f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'db'}",
               f"--web.listen-address=127.0.0.1:{server_port}"]  # fmt: skip
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        init = {"server": f"http://127.0.0.1:{server_port}"}
        own = json.dumps({"class_path": "tests.callbacks.test_prometheus.Scrape", "init_args": init})
        slow = json.dumps({"class_path": "tests._stop.Slow", "init_args": {"seconds": 0.3}})
        items = [f"monitor.prometheus_port={port}", f"trainer.callbacks+={slow}", f"trainer.callbacks+={own}"]
        assert train_main([f"recipe={recipe}", *items]) == 0
    finally:
        server.terminate()
        server.wait(10)
    from tests.callbacks.test_prometheus import Scrape as Used

    without_gpu = {title: n for title, n in Used.found.items() if not title.startswith("GPU")}
    assert len(without_gpu) == 6
    assert all(without_gpu.values()), Used.found


class Gpus(System):
    """A machine with a GPU, as NVML reads it."""

    newest: dict[str, Any] = {"cpu": [5.0], "mem": 40.0, "gpu": [{"util": 90, "mem": 25.0, "w": 300}]}  # noqa: RUF012

    def __init__(self) -> None: ...


def test_every_query_of_the_dashboard_names_a_metric_that_there_is(tmp_path: Path) -> None:
    phases = Phases(RunFolder(tmp_path, "tiny", "", []))
    phases.header = {"batch_size": 8, "world_size": 1}
    phases.recent.append({"step": 0, "epoch": 0, "ms": 5.0, "p": {"data": 1.0}})
    endpoint = Prometheus(phases, Gpus(), 9400)
    endpoint._trainer = SimpleNamespace(callback_metrics={"low/train/loss": 1.0})  # type: ignore[assignment]
    served = {family.name for family in endpoint.collect()}
    for expression in (panel["targets"][0]["expr"] for panel in dashboard()["panels"]):
        named = set(re.findall(r"kd_\w+", expression))
        assert named
        assert named <= served, expression
        for pattern in re.findall(r'name=~"([^"]+train[^"]+)"', expression):
            assert re.fullmatch(pattern, "low/train/loss")
            assert re.fullmatch(pattern, "train/loss")


def test_the_dashboard_file_is_what_its_script_writes() -> None:
    assert json.loads((ROOT / "scripts" / "grafana.json").read_text()) == dashboard()
