"""A hub of models on this machine: what the hub's own client and timm read over HTTP, without internet."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
import pytest
import timm
from huggingface_hub import constants
from safetensors.torch import save
from torch import Tensor

from tests._http import Handler, http_server

COMMIT = "a" * 40
"""Of every repository."""


@contextmanager
def hub_with(
    arch: str, state: Mapping[str, Tensor], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[str]]:
    """Inside, the hub has one repository: the weights of a timm architecture.

    Args:
        arch: with its tag, as timm names the weights: ``resnet10t.c3_in1k``.
        state: what the repository's ``model.safetensors`` holds.
        cache: an empty folder for what the client downloads.
        monkeypatch: undoes what is set.

    Yields:
        Paths that were asked for, in order.
    """
    config = timm.get_pretrained_cfg(arch)
    assert config is not None and config.hf_hub_id
    weights = save(dict(state))
    file = f"/{config.hf_hub_id}/resolve/main/model.safetensors"
    paths: list[str] = []

    class Hub(Handler):
        def answer(self, with_body: bool) -> None:
            """The weights under their path, the hub itself under ``/``, else nothing."""
            paths.append(self.path)
            content = {file: weights, "/": b""}.get(self.path)
            more = {"X_Error_Code": "EntryNotFound"} if content is None else {}
            more["ETag"] = f'"{hashlib.sha256(content or b"").hexdigest()}"'
            status = 404 if content is None else 200
            self.reply(status, content or b"", with_body, X_Repo_Commit=COMMIT, **more)

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

    with http_server(Hub) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        template = f"{server.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        huggingface_hub.close_session()
        yield paths
