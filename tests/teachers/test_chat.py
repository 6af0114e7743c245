"""A chat endpoint answers: its probabilities of named classes, asked once, and what it costs."""

import base64
import io
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kd.cli import main
from kd.data.datamodule import DistillationDataModule
from kd.data.sources import ImageFolder
from kd.run.fill_from import fill_from
from kd.settings import AskSettings
from kd.tasks import MultiLabel
from kd.teachers.chat import Chat
from tests._helpers import CLASSES, refuses, write_recipe
from tests._http import Handler, http_server
from tests._runs import run, summary_of


def of_colour(picture: np.ndarray, classes: dict[str, str]) -> dict[str, float]:
    """Half of it for the class that the red tells, a quarter with a blank, the rest for a word."""
    red = picture[..., 0].mean() / 60
    letter = list(classes)[min(len(classes) - 1, round(red))]
    return {letter: 0.5, f" {letter}": 0.25, "The": 0.2}


class Chats(Handler):
    """OpenAI's chat protocol, with one token and its alternatives."""

    def do_POST(self) -> None:
        body = json.loads(self.posted())
        server: Any = self.server
        if server.failures:
            self.reply(server.failures.pop(0), b'{"error": "busy"}')
            return
        picture, text = body["messages"][0]["content"]
        file = base64.b64decode(picture["image_url"]["url"].removeprefix("data:image/png;base64,"))
        view = np.asarray(Image.open(io.BytesIO(file)))
        server.seen.append(view.tobytes())
        server.bodies.append(body)
        server.keys.append(self.headers["Authorization"])
        classes = dict(re.findall(r"^(\w): (.+)$", text["text"], re.MULTILINE))
        tokens = server.choose(view, classes)
        top = [{"token": token, "logprob": math.log(p)} for token, p in tokens.items()]
        content = [{**top[0], "top_logprobs": top}]
        self.reply(200, json.dumps({"choices": [{"logprobs": {"content": content}}]}).encode())


@pytest.fixture()
def endpoint() -> Iterator[Any]:
    """It keeps pictures, requests and keys, fails as often as ``failures`` says, and answers as ``choose`` does."""
    kept: dict[str, Any] = {"seen": [], "bodies": [], "keys": [], "failures": []}
    with http_server(Chats, **kept, choose=of_colour) as server:
        server.url = f"{server.address}/v1/chat/completions"
        yield server


def chat(endpoint: Any, **settings: Any) -> Chat:
    asked = Chat(endpoint.url, AskSettings(model="eyes", **settings))
    asked.connect(CLASSES)
    return asked


def views_of(*reds: int) -> np.ndarray:
    views = np.zeros((len(reds), 8, 8, 3), np.uint8)
    views[..., 0] = np.array(reds)[:, None, None]
    return views


def test_letters_become_the_probabilities_of_classes(
    endpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of one letter are added; what is missing of 1 is spread over the other classes."""
    monkeypatch.setenv("MY_KEY", "secret")
    asked = chat(endpoint, key="MY_KEY", price=5.0)
    found = np.exp(asked.logits_of(views_of(0, 120, 180)))
    expected = np.full((3, 4), 0.25 / 3)
    expected[[0, 1, 2], [0, 2, 3]] = 0.75
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert set(endpoint.keys) == {"Bearer secret"}
    body = endpoint.bodies[0]
    assert (body["model"], body["logprobs"], body["top_logprobs"]) == ("eyes", True, 20)
    assert "A: apple\nB: bread\nC: cake\nD: dates" in body["messages"][0]["content"][1]["text"]
    assert asked.spent().startswith("3 pictures asked in 3 requests (0 repeated), ")
    assert asked.spent().endswith("price 0.015")
    other = Chat(endpoint.url, AskSettings(model="eyes", prompt="Which food?\n{classes}"))
    assert other.connect(CLASSES) != asked.connect(CLASSES)


def test_what_is_no_answer_is_one_line(endpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kd.teachers.server.time.sleep", lambda seconds: None)
    asked = chat(endpoint, retries=2, budget=3)
    endpoint.failures = [429, 500]
    asked.logits_of(views_of(0))
    assert "(2 repeated)" in asked.spent()
    endpoint.choose = lambda picture, classes: {"I": 0.9, "Sorry": 0.1}
    with refuses("answers no letter of a class, but 'I', 'Sorry'"):
        asked.logits_of(views_of(9))
    endpoint.choose = lambda picture, classes: {"A": 2.0}
    with refuses("as the logarithm of a probability"):
        asked.logits_of(views_of(9))
    endpoint.failures = [401]
    with refuses("can't be asked: 401"):
        asked.logits_of(views_of(9))
    with refuses("budget of 3 pictures is used up"):
        asked.logits_of(views_of(1, 2, 3, 4))
    with refuses(
        "no letter of a class, but 'The'$"
    ):  # endpoints write -9999 for the logarithm of 0
        asked._log_probabilities([("The", 0.0), ("A", -9999.0), ("B", -9999.0)])
    with refuses("the environment has no variable NOT_SET"):
        chat(endpoint, key="NOT_SET")
    with refuses("one letter of 52, the data has 81 classes"):
        Chat(endpoint.url, AskSettings(model="eyes")).connect(["a"] * 81)
    with refuses("from.prompt: must hold {classes}"):
        Chat(endpoint.url, AskSettings(model="eyes", prompt="What is it?"))


def test_a_run_learns_from_what_it_has_answered(
    endpoint: Any,
    pictures: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    own_cache: Path,
) -> None:
    losses = {"kd": {"class_path": "kd.losses.KDLoss"}}
    recipe = write_recipe(tmp_path / "chat.yaml", pictures, None, model__distill_losses=losses)
    data = DistillationDataModule(ImageFolder(str(pictures)))
    with refuses("is asked for the class of a picture, the data has several labels a picture"):
        fill_from(endpoint.url, AskSettings(model="eyes"), data, MultiLabel())
    fill = [f"recipe={recipe}", f"from={endpoint.url}", "from.views=1", "from.model=eyes"]
    assert main("cache", fill) == 0
    assert len(endpoint.seen) == len(set(endpoint.seen)) == 48 + 16
    (folder,) = (tmp_path / "cache" / "stored").glob("eyes-*")
    assert f"use them with model.teacher.answers={folder}" in capsys.readouterr().out
    trained = run(recipe, f"model.teacher.answers={folder}", "trainer.max_epochs=1")
    assert len(endpoint.seen) == 48 + 16
    assert summary_of(trained)["teacher"]["val"]["acc1"] == 1
