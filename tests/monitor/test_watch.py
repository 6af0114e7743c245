"""Rules while a run trains: what they do when they fire; time and budget; what they read of classes and pictures."""

import json
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kd.monitor import watch
from kd.monitor.watch import Watch, ask_rules
from kd.monitor.watched import Watched
from kd.report.facts import Facts
from kd.report.records import RunRecords, Writer, read_run
from kd.report.series import Series
from kd.settings import MonitorSettings
from tests._http import Handler, http_server
from tests._runs import callback, newest_run, resumed
from tests._runs import run as trained

SLOW = callback("tests._stop.Slow", seconds=0.1)
LONG = ["trainer.max_epochs=300", SLOW, "monitor.rules_every_s=0.8"]


def test_a_rule_stops_the_run_with_a_checkpoint_and_the_best_student(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tiny pair's teacher is nearly uniform: the first reading tells."""
    run = read_run(trained(recipe, *LONG, "monitor.actions.TemperatureTooHigh=stop"))
    assert run.summary["status"] == "stopped: TemperatureTooHigh"
    assert 0 < run.summary["steps"] < 600
    assert (run.folder / "student.safetensors").is_file()
    told = capsys.readouterr()
    assert "kd-train: TemperatureTooHigh: at this temperature" in told.err
    assert (
        f"kd-train: stopped: TemperatureTooHigh at step {run.summary['steps']}; checkpoint: "
        in told.out
    )
    assert f"kd-train resume={run.folder}" in told.out
    (event,) = (
        e for e in run.events if e["name"] == "finding" and e["rule"] == "TemperatureTooHigh"
    )
    assert event["action"] == "stop"
    more = run.summary["steps"] // 6 + 1
    items = ["trainer.callbacks=null", f"trainer.max_epochs={more}", "monitor.actions=null"]
    resumed(run.folder, *items)
    assert read_run(run.folder).summary["status"] == "done"
    assert read_run(run.folder).summary["steps"] == 6 * more


def test_a_budget_is_hours_at_a_price(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    items = ["monitor.budget=0.01", "monitor.price_per_hour=40", *LONG]  # 0.9 s
    trained(recipe, *items)
    assert newest_run(recipe).summary["status"] == "stopped: BudgetSpent"
    assert "BudgetSpent: a budget of 0.01 spent" in capsys.readouterr().err


class Hook(Handler):
    """Refuses the first post, as a service that is just restarting."""

    seen: list[dict[str, Any]] = []  # noqa: RUF012 (the test reads it)
    refused = False

    def do_POST(self) -> None:
        content = json.loads(self.posted())
        if not Hook.refused:
            Hook.refused = True
            self.reply(503)
            return
        Hook.seen.append(content)
        self.reply(200)


@pytest.fixture
def address() -> Iterator[str]:
    with http_server(Hook) as server:
        yield f"{server.address}/alarm"


def test_a_webhook_is_told_once_and_tried_again(
    recipe: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kd.monitor.watch.PAUSE_S", 0.1)
    monkeypatch.setattr(
        "kd.monitor.watch.ask_rules", lambda folder: HOT
    )  # another process, as above
    items = [
        "monitor.actions.TemperatureTooHigh=webhook",
        f"monitor.webhook={address}",
        "trainer.max_epochs=4",
    ]
    trained(recipe, *LONG, *items)
    (told,) = Hook.seen
    assert told["rule"] == "TemperatureTooHigh"
    assert told["run"] == str(newest_run(recipe).folder)
    assert "nearly uniform" in told["text"]


HOT = {"findings": [{"rule": "TemperatureTooHigh", "text": "nearly uniform", "lever": "less"}]}


class NoHttp(socketserver.StreamRequestHandler):
    """A service that is none: it answers in a protocol of its own."""

    posts = 0

    def handle(self) -> None:
        NoHttp.posts += 1
        self.wfile.write(b"220 mail.example.com ESMTP\r\n")


def test_a_webhook_that_is_no_http_is_told_once_and_the_limits_hold(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule fires at the first look; posting it takes longer than the run may."""
    monkeypatch.setattr("kd.monitor.watch.PAUSE_S", 0.1)
    monkeypatch.setattr(
        "kd.monitor.watch.ask_rules", lambda folder: HOT
    )  # another process, slow on a busy machine
    with socketserver.TCPServer(("127.0.0.1", 0), NoHttp) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/"
        items = [
            "monitor.actions.TemperatureTooHigh=webhook",
            f"monitor.webhook={address}",
            "monitor.max_hours=0.0015",
        ]
        trained(recipe, *LONG, *items)
        server.shutdown()
    assert newest_run(recipe).summary["status"] == "stopped: MaxHours"
    told = capsys.readouterr().err
    assert told.count("monitor.webhook") == 1
    assert "monitor.webhook: TemperatureTooHigh: ...: " in told
    assert NoHttp.posts == 3


def test_an_action_that_fails_leaves_the_others(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule's event can't be written; the run stops all the same when its hours are up."""

    class Full(Writer):
        def write(self, record: dict[str, Any]) -> None:
            if record["kind"] == "event":
                raise OSError("no room")
            super().write(record)

    monkeypatch.setattr("kd.monitor.watch.Writer", Full)
    monkeypatch.setattr("kd.monitor.watch.ask_rules", lambda folder: HOT)
    items = ["monitor.actions.TemperatureTooHigh=log", "monitor.max_hours=0.0005"]
    trained(recipe, *LONG, *items)
    assert newest_run(recipe).summary["status"] == "stopped: MaxHours"
    assert capsys.readouterr().err.count("kd-train: TemperatureTooHigh: no room\n") == 1


@pytest.mark.filterwarnings("error")
def test_an_answer_of_the_rules_after_the_end_does_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rules may take minutes; the end of the training waits for them for less."""
    asked, may_answer = threading.Event(), threading.Event()

    def slow(folder: Path) -> dict[str, Any]:
        asked.set()
        may_answer.wait(60)
        return HOT

    monkeypatch.setattr("kd.monitor.watch.ask_rules", slow)
    monkeypatch.setattr("kd.monitor.watch.WAITS_S", 0.01)
    stopped_for: list[str] = []
    settings = MonitorSettings(
        rules_every_s=0.01, max_hours=1e9, actions={"TemperatureTooHigh": "stop"}
    )
    watch = Watch(Watched(tmp_path), stopped_for.append, settings)
    trainer: Any = SimpleNamespace(is_global_zero=True, global_step=7)
    watch.on_train_start(trainer, None)  # type: ignore[arg-type]
    threads = list(watch._threads)
    assert asked.wait(60)
    watch.close(trainer)
    may_answer.set()
    for thread in threads:
        thread.join(60)
    assert stopped_for == []
    assert capsys.readouterr().err == ""


def test_a_threshold_by_key_holds_for_all_who_ask(recipe: Path) -> None:
    folder = trained(recipe, "monitor.thresholds.TemperatureTooHigh.high=1.1")
    assert "TemperatureTooHigh" not in {f["rule"] for f in newest_run(recipe).summary["findings"]}
    assert "TemperatureTooHigh" not in {f["rule"] for f in ask_rules(folder)["findings"]}
    assert ask_rules(folder)["findings"]  # the teacher of the tiny pair guesses


def test_the_price_is_that_of_the_machines(recipe: Path) -> None:
    table = recipe.with_name("prices.yaml")
    table.write_text("p4d.24xlarge: {on_demand: 37.688, spot: 12.0}\nc5.18xlarge: 3.672\n")
    machines = "monitor.instances=[p4d.24xlarge, 2*c5.18xlarge]"
    folder = trained(recipe, f"monitor.prices={table}", "trainer.max_epochs=1", machines)
    assert read_run(folder).headers[0]["price_per_hour"] == pytest.approx(45.032)
    assert Facts(read_run(folder)).price == pytest.approx(45.032)
    assert "cost per epoch" in (folder / "report.html").read_text()


@pytest.fixture()
def plain(finished: Path) -> RunRecords:
    """A run with nothing special; not to be changed."""
    return read_run(finished)


def test_mistakes_between_classes_are_counted(plain: RunRecords) -> None:
    """Each wrong picture of the best validation is one confusion; the rules read them."""
    of_run = Series("run", Facts(plain))
    assert of_run["val_counts"] == dict.fromkeys(["apple", "bread", "cake", "dates"], 4)
    wrong = 16 * (1 - plain.summary["student"]["best_val"]["acc1"])
    assert sum(times for _, _, times in of_run["confusions"]) == pytest.approx(wrong)


def test_pictures_and_weights_are_looked_at(plain: RunRecords) -> None:
    reading = plain.health[-1]
    assert reading["inputs"]["bytes"] is True
    assert reading["inputs"]["constant"] == reading["inputs"]["duplicated"] == 0
    assert 0 <= reading["inputs"]["low"] < reading["inputs"]["high"] <= 255
    assert reading["unchanged"] == []
    assert set(reading["zeros"]) == set(reading["spread"])


def test_a_failed_post_does_not_show_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "TRIES", 1)
    with pytest.raises(OSError, match=r"^\.\.\.: InvalidURL$"):
        watch.post("https://me:hush@127.0.0.1/hook", {})
