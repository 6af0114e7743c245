"""The endpoint, asked in the middle of a run; the dashboard and the alerts name what it tells."""

import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pytorch_lightning import Callback, Trainer

from kd.cli import train_main
from kd.monitor.health import Health
from kd.monitor.numbers import GAUGES, RunNumbers
from kd.monitor.phases import Phases
from kd.monitor.prometheus import Prometheus
from kd.monitor.stopping import Stopping
from kd.monitor.system import System
from kd.monitor.watch import Watch
from kd.monitor.watched import Watched
from kd.settings import MonitorSettings
from kd.ship.serving.metrics import Metrics
from kd.storage.elsewhere import yaml_of
from tests._files import read_json
from tests._forks import free_port
from tests._helpers import Command
from tests._runs import callback, run

WATCHED = Watched(Path())
FILES = Path(__file__).parents[2] / "scripts" / "monitor"
PANELS = read_json(FILES / "grafana.json")["panels"]
ALERTS = yaml_of((FILES / "alerts.yaml").read_text())["groups"][0]["rules"]


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
    port = int(free_port())
    own = callback("tests.monitor.test_prometheus.Ask", port=port)
    slow = callback("tests._stop.Slow", seconds=0.05)
    items = [
        f"monitor.prometheus_port={port}",
        "monitor.interval_s=0.1",
        "monitor.rules_every_s=0.5",
    ]
    items += [own, slow]
    run(recipe, *items)
    from tests.monitor.test_prometheus import Ask as Used

    text = Used.answers[-1]
    if shutil.which("promtool"):
        done = subprocess.run(
            ["promtool", "check", "metrics"], input=text.encode(), capture_output=True, check=False
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, b"")
    values = {k: float(v) for k, v in re.findall(r"^(kd_[^ ]+) (\S+)$", text, re.M)}
    assert values['kd_phase_seconds{phase="teacher"}'] > 0
    assert values['kd_phase_seconds{phase="logging"}'] > 0.04
    assert values['kd_metric{name="train/loss"}'] > 0
    assert values["kd_images_per_second"] == pytest.approx(8 / values["kd_step_seconds"])
    assert 'kd_cpu_percent{core="0"}' in values
    assert values['kd_health{name="grad_norm"}'] > 0
    assert 'kd_network_bytes_per_second{direction="sent"}' in values
    with pytest.raises(urllib.error.URLError):  # closed with the run
        get(f"http://127.0.0.1:{port}/metrics")


def test_the_address_is_chosen(recipe: Path, refusal: Command) -> None:
    port = int(free_port())
    asked = callback("tests.monitor.test_prometheus.Ask", port=port, host="127.0.0.2")
    items = [f"recipe={recipe}", f"monitor.prometheus_port={port}", asked, "trainer.max_epochs=1"]
    assert train_main([*items, "monitor.prometheus_host=127.0.0.2"]) == 0
    told = refusal("train", [*items, "monitor.prometheus_host=192.0.2.1"])  # nobody's
    assert f"{port} can't be opened at 192.0.2.1 (monitor.prometheus_host): " in told


def test_a_taken_port_is_one_line(recipe: Path, refusal: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        told = refusal("train", [f"recipe={recipe}", f"monitor.prometheus_port={port}"])
    assert f"monitor.prometheus_port: {port} can't be opened" in told
    assert not (recipe.parent / "runs").exists()


def test_every_query_of_the_dashboard_names_a_series_that_there_is() -> None:
    """Names, labels and their values: of a run with all kinds of numbers, on a machine with a GPU."""
    phases, system, health, watch = (
        Phases(WATCHED),
        System(WATCHED),
        Health(WATCHED),
        Watch(WATCHED, Stopping().stop_for, MonitorSettings()),
    )
    phases.header = {"batch_size": 8, "world_size": 1}
    phases.recent.append({"step": 0, "epoch": 0, "ms": 5.0, "p": {"data": 1.0}})
    system.newest = {
        "cpu": [5.0], "mem": 40.0, "iowait": 1.0, "swap_mb": 0, "rss_mb": 900.0, "thread_wait": [1.0, 30.0],
        "net_r": 1.5, "net_w": 2.0, "disk_r": 0.0, "disk_w": 3.0, "gpu": [{"util": 90, "mem": 25.0, "w": 300}],
    }  # fmt: skip
    health.newest = {
        "grad_norm": 2.0, "update_ratio": 1e-3, "agreement": 0.5, "teacher_entropy": 0.4
    }  # fmt: skip
    watch.newest = {
        "verdict": {
            "bound": "data",
            "predicted_speedup": 2.0,
            "others": [{"bound": "host", "gain": 1.5}],
        },
        "findings": [{"rule": "Swap"}],
    }
    numbers = RunNumbers(phases, system, health, watch)
    numbers.trainer = SimpleNamespace(callback_metrics={"low/train/loss": 1.0, "val/acc1": 0.5})  # type: ignore[assignment]
    assert set(numbers.read()) == set(GAUGES)
    samples = [
        sample for family in Prometheus(numbers, 9400).collect() for sample in family.samples
    ]
    by_name = {name: [s for s in samples if s.name == name] for name in {s.name for s in samples}}
    for panel in PANELS:
        expression, legend = panel["targets"][0]["expr"], panel["targets"][0]["legendFormat"]
        named = set(re.findall(r"kd_\w+", expression))
        assert named
        assert named <= set(by_name), expression
        for name, matcher in re.findall(r"(kd_\w+){(.*?)}", expression):
            label, pattern = re.findall(r'(\w+)=~?"(.+)"', matcher)[0]
            assert any(re.fullmatch(pattern, s.labels[label]) for s in by_name[name]), expression
        for label in set(re.findall(r"{{(\w+)}}", legend)) - {"instance", "__name__"}:
            assert all(
                label in s.labels for name in named - {"kd_step_seconds"} for s in by_name[name]
            ), legend
    values = {(s.name, *s.labels.values()): s.value for s in samples}
    assert values["kd_verdict", "data"] == values["kd_rule_fired", "Swap"] == 1
    assert values["kd_verdict", "host"] == values["kd_rule_fired", "Overfit"] == 0
    assert values["kd_limit_speedup", "host"] == 1.5
    assert values["kd_network_bytes_per_second", "sent"] == 2 * 2**20
    assert values["kd_thread_wait_percent",] == 30
    assert values["kd_health", "grad_norm"] == 2


def test_alerts_name_series_that_there_are() -> None:
    """Of a run or of the server."""
    served = {
        f"{family.name}_total"
        for family in Metrics().registry.collect()
        if family.type == "counter"
    }
    for alert in ALERTS:
        named = set(re.findall(r"kd_\w+", alert["expr"]))
        assert named and named <= served | {f"kd_{name}" for name in GAUGES}
        for label in re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"]):
            assert label == "instance" or label in GAUGES["rule_fired"].labels
    if shutil.which("promtool"):
        done = subprocess.run(
            ["promtool", "check", "rules", str(FILES / "alerts.yaml")], check=False
        )
        assert done.returncode == 0
