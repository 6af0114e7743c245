"""What jsonargparse and our constructors report, as one line that names the key."""

import difflib
import inspect
import re

from kd.data.shards import Shards  # noqa: F401 - so that data.source=Shards is found by its short name
from kd.data.sources import ImageFolder, Source
from kd.data.transforms import Augment
from kd.losses import FeatureLoss, LayersLoss, LogitLoss, Projection
from kd.models import StudentSpec, TeacherSpec
from kd.taps import TapSpec
from kd.tasks import Classification, Task


def one_line(message: str, keys: list[str]) -> str:
    """jsonargparse's message, which can be a paragraph, in one line that starts with the key."""
    text = re.sub(r" Given value type: .*$", "", " ".join(message.split()))
    unknown = re.search(r"unrecognized arguments: --([\w.+-]+)|^Option '([\w.]+)' is not accepted", text, re.I)
    group = re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", text)
    if unknown or group:
        key = ".".join(group.groups()) if group else next(k for k in unknown.groups() if k)  # type: ignore[union-attr]
        place = key.rpartition(".")[0]
        near = difflib.get_close_matches(key, [*keys, *(f"{place}.{name}" for name in _argument_names())], 1, 0.6)
        return f"no key '{key}'{f'; did you mean {near[0]!r}?' if near else ''}"
    text = re.sub(r"^.*?[Pp]arser key \"([^\"]+)\": ?", r"\1: ", text)
    key = text.split(":", 1)[0]
    reasons = [r for r in re.split(r"(?:Errors:)? - ", text)[1:] if "NoneType" not in r and "Expected a path" not in r]
    if reasons:
        text = f"{key}: {reasons[-1]}" if re.fullmatch(r"[\w.]+", key) else reasons[-1]
    wrong_class = re.search(r"Expected a dot import path string: (\S+)", text)
    if wrong_class:
        given = wrong_class.group(1)
        takes_class = any(part in key for part in ("source", "losses", "callbacks", "logger", "strategy", "task"))
        text = (
            f"{key}: no class '{given}'{_near_class(given)}"
            if takes_class
            else (f"{key}: has settings of its own ({key}.NAME=VALUE), got '{given}'")
        )
    option = re.search(r"Option '(\w+)' is not accepted", text)
    if option:
        near = difflib.get_close_matches(option.group(1), _argument_names(), 1, 0.6)
        text = f"{key}: no option '{option.group(1)}'{f'; did you mean {near[0]!r}?' if near else ''}"
    return text if len(text) <= 300 else text[:297] + "..."


def _our_classes() -> list[type]:
    bases = (Source, ImageFolder, LogitLoss, FeatureLoss, LayersLoss, Task, Projection)
    found = [c for base in bases for c in base.__subclasses__()]
    return [c for c in found if not c.__name__.startswith("_")] + [s for c in found for s in c.__subclasses__()]


def _argument_names() -> list[str]:
    classes = [*_our_classes(), Augment, Classification, TeacherSpec, StudentSpec, TapSpec]
    return sorted({name for c in classes for name in inspect.signature(c).parameters})


def _near_class(name: str) -> str:
    known = [c.__name__ for c in _our_classes()]
    near = difflib.get_close_matches(name, known, 1, 0.5)
    return f"; did you mean '{near[0]}'?" if near else f" (ours: {', '.join(known)}; others by their class path)"
