"""A vision-language model behind a chat address: its probabilities of the data's classes, for ``kd-cache from=URL``."""

import base64
import hashlib
import io
import json
import math
import os
import re
import string
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from PIL import Image

from kd.errors import UserError
from kd.settings import AskSettings
from kd.storage.elsewhere import json_of
from kd.teachers.probabilities import SMALLEST
from kd.teachers.server import AnswerServer

LETTERS = string.ascii_uppercase + string.ascii_lowercase
"""Stand for classes: every tokenizer has a token of each, so one token is a whole answer."""
ALTERNATIVES = 20
"""Likeliest tokens that are asked for; servers allow no more."""
PROMPT = "What does the picture show? Answer with one letter.\n{classes}"


class Chat(AnswerServer):
    """Asks an endpoint of OpenAI's chat protocol (also vLLM, SGLang, llama.cpp) which class a view shows.

    Each class has a letter; the probabilities are those of the first token of the answer (``top_logprobs``). What is
    missing of 1 is spread evenly over the classes that are not among the :data:`ALTERNATIVES` likeliest tokens.

    Args:
        url: of the endpoint.
        settings: how it is asked; ``model`` must be given.
    """

    batch = 4
    foreign = ("output",)

    def __init__(self, url: str, settings: AskSettings) -> None:
        """Checks the settings without connecting; the arguments are the class's.

        Raises:
            UserError: no model's name, or a question without classes.
        """
        super().__init__(url, settings)
        self.path = self._parts.path
        self.prompt = settings.prompt or PROMPT
        if settings.model is None:
            raise UserError("from.model: must be the endpoint's name of a model")
        if "{classes}" not in self.prompt:
            raise UserError(f"from.prompt: must hold {{classes}}, got '{self.prompt}'")
        self.model = settings.model
        self._secret = ""
        self._question = ""

    def connect(self, classes: Sequence[str]) -> dict[str, Any]:
        """Reads the key from the environment and writes the question; no request is sent before the first picture's.

        Args:
            classes: names of the data's classes, by class id.

        Returns:
            The address, the model and a digest of the question: the endpoint does not say which weights answer.

        Raises:
            UserError: more classes than there are letters, or a key that is not in the environment.
        """
        if len(classes) > len(LETTERS):
            raise UserError(
                f"from: {self.url} is asked for one letter of {len(LETTERS)}, the data has {len(classes)} classes"
            )
        key = self.settings.key
        if key is not None:
            self._secret = os.environ.get(key, "")
            if not self._secret:
                raise UserError(f"from.key: the environment has no variable {key}")
        self._classes = len(classes)
        lines = [f"{letter}: {name}" for letter, name in zip(LETTERS, classes, strict=False)]
        self._question = self.prompt.replace("{classes}", "\n".join(lines))
        digest = hashlib.sha256(self._question.encode()).hexdigest()[:16]
        return {"arch": self.model, "url": self.url, "question": digest}

    # -- the protocol ------------------------------------------------------------------------------------------------
    def _headers(self, json_bytes: int) -> dict[str, str]:
        """The headers of a request, with the key as a bearer token where there is one; :class:`AnswerServer` calls it."""
        headers = {"Content-Type": "application/json"}
        if self._secret:
            headers["Authorization"] = f"Bearer {self._secret}"
        return headers

    def _infer(self, views: np.ndarray, exact: bool = True) -> np.ndarray:
        """Logarithms of probabilities ``(N, C)``, float32: a request for each view, all at once.

        Args:
            views: uint8 ``(N, H, W, 3)``, at least one.
            exact: of the interface; not read.
        """
        with ThreadPoolExecutor(len(views)) as pool:
            return np.stack([*pool.map(self._ask_about, views)])

    def _ask_about(self, view: np.ndarray) -> np.ndarray:
        """Asks for one view, uint8 ``(H, W, 3)``, sent as PNG: log-probabilities ``(C,)``, float32.

        One token is generated at temperature 0; its alternatives' log-probabilities are the answer.

        Raises:
            UserError: as of :meth:`AnswerServer._send`; no log-probabilities in the response, or none of a class.
        """
        file = io.BytesIO()
        Image.fromarray(view).save(file, "PNG")
        picture = base64.b64encode(file.getvalue()).decode()
        parts = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
            {"type": "text", "text": self._question},
        ]
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": ALTERNATIVES,
        }
        answer, _ = self._send("POST", self.path, json.dumps(body).encode(), 0)
        try:
            tokens = json_of(answer)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            logprobs = [(str(each["token"]), float(each["logprob"])) for each in tokens]
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise UserError(
                f"from: {self.url} did not answer with choices[0].logprobs.content[0].top_logprobs"
            ) from error
        return self._log_probabilities(logprobs)

    def _log_probabilities(self, logprobs: Sequence[tuple[str, float]]) -> np.ndarray:
        """The logarithms of the classes' probabilities ``(C,)``, float32, from (token, logarithm of its probability).

        Tokens that hold the same single letter, in the same case, count together (``A``, `` A``, ``A.``). The
        probabilities add up to 1.

        Raises:
            UserError: NaN or a logarithm above 0.01, or no probability for a letter of a class.
        """
        p_C = np.zeros(self._classes)
        seen_C = np.zeros(self._classes, bool)
        for token, logprob in logprobs:
            if math.isnan(logprob) or logprob > 0.01:
                raise UserError(
                    f"from: {self.url} answers {logprob} as the logarithm of a probability"
                )
            letter = re.sub(r"[^A-Za-z]", "", token)
            class_id = -1
            if len(letter) == 1:
                class_id = LETTERS.find(letter)
            if 0 <= class_id < len(p_C):
                p_C[class_id] += math.exp(logprob)
                seen_C[class_id] = True
        if not p_C.any():  # also where each letter has probability 0
            others = [repr(token) for token, logprob in logprobs if math.exp(logprob) > 0]
            raise UserError(
                f"from: {self.url} answers no letter of a class, but {', '.join(others[:3])}"
            )

        # Classes whose letter is missing share what is left of 1.
        left = max(0.0, 1 - p_C.sum())
        missing = (~seen_C).sum()
        rest = left / max(1, missing)
        p_C = np.where(seen_C, p_C, rest)
        p_C = p_C / p_C.sum()
        logits_C = np.log(np.clip(p_C, SMALLEST, 1))
        return logits_C.astype(np.float32)
