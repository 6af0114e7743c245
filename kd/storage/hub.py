"""The hub of models and data sets: one attempt to reach it, and what to do where there is no internet."""

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants

from kd.errors import UserError

REMEDIES = "behind a proxy set HTTPS_PROXY, for a mirror HF_ENDPOINT"
"""What helps where nothing answers."""
FORMATS = ("arrow", "cache", "csv", "imagefolder", "json", "parquet", "text", "webdataset")
"""Formats of the hub's data sets that are read; ``cache``: what ``datasets`` has made of one of the others before."""
WAIT_S = 10.0
"""Seconds for the one attempt: with the search for the name, and with all addresses that it has."""


def why_unreachable() -> str:
    """Why nothing can be fetched from the hub, as a part of a sentence; "" where it answers.

    The first call of a process may take :data:`WAIT_S` seconds; its answer is kept.
    """
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if _reachable(constants.ENDPOINT):
        return ""
    return f"no internet ({constants.ENDPOINT} does not answer)"


def check_dataset(path: str, key: str) -> None:
    """Checks that a data set is on this machine, or that the hub has it, before libraries that take seconds are imported.

    Args:
        path: a folder, or a name on the hub.
        key: the setting that gives it.

    Raises:
        UserError: none of these, or a name that is not on this machine while the hub can't be reached. Other errors of
            the hub are left to the library that loads the data set.
    """
    if Path(path).expanduser().exists() or _is_cached(path):
        return
    if path.startswith((".", "/", "~")):
        raise UserError(f"{key}: folder {path} not found")
    why = why_unreachable()
    if why:
        raise UserError(f"{key}: {path}: no folder of this name, and {why}; {REMEDIES}")
    # its own client comes along, which takes a tenth of a second
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        huggingface_hub.HfApi().dataset_info(path, timeout=WAIT_S)
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UserError(
            f"{key}: {path}: no folder of this name, and no data set of the hub ({constants.ENDPOINT}); a private one "
            "needs HF_TOKEN"
        ) from error
    except Exception:  # loading it reports what else is wrong
        return


def _is_cached(path: str) -> bool:
    """Whether ``datasets`` or the hub's client may hold a data set of this name."""
    name = path.replace("/", "--")
    if Path(constants.HF_HUB_CACHE, f"datasets--{name}").exists():
        return True
    given = os.environ.get("HF_DATASETS_CACHE")
    home = Path(given or f"{constants.HF_HOME}/datasets")
    # ``datasets`` writes some/FooBar as some___foo_bar
    names = {_letters(folder.name) for folder in home.glob("*")}
    return _letters(path) in names


def _letters(name: str) -> str:
    """A name without what ``datasets`` writes otherwise: slashes, underscores, upper case."""
    return re.sub("[/_]", "", name).lower()


@contextmanager
def without_retries(path: str) -> Iterator[str]:
    """Inside, ``datasets`` reads its own cache alone if the hub can't be reached.

    By itself it asks for each file six times, with pauses: more than a minute for a wrong name.

    Args:
        path: of a data set. The hub is not asked for a local one.

    Yields:
        :func:`why_unreachable`; "" for a local data set.
    """
    from datasets import config

    why = "" if Path(path).exists() else why_unreachable()
    given = config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    if why:
        config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield why
    finally:
        config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = given


@cache
def _reachable(address: str) -> bool:
    """Whether a web address answers within :data:`WAIT_S`, through the proxy of the environment; tried once.

    A client's own limit holds for each step alone: a name with eight addresses, of which none answers, takes eight
    times as long, and the search for the name has no limit. So the attempt has a thread of its own, which is left
    behind when the time is up.
    """
    answers = []

    def attempt() -> None:
        """In the thread: takes any answer, whatever its status."""
        # the hub's client is httpx or requests, each with errors of its own
        with suppress(Exception):
            answers.append(huggingface_hub.get_session().head(address, timeout=WAIT_S))

    thread = threading.Thread(target=attempt, name="hub", daemon=True)
    thread.start()
    thread.join(WAIT_S)
    return bool(answers)
