"""Files that tests read and write whole."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from kd.run.files import Dumper


def read_json(file: Path) -> Any:
    """What a JSON file holds."""
    return json.loads(file.read_text())


def read_yaml(file: Path) -> Any:
    """What a YAML file holds."""
    return yaml.load(file.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def write_json(file: Path, content: Any) -> None:
    """Writes a JSON file anew."""
    file.write_text(json.dumps(content))


def write_yaml(file: Path, content: Any, **options: bool) -> None:
    """Writes a YAML file anew, with PyYAML's options."""
    file.write_text(yaml.dump(content, Dumper=Dumper, **options))


def json_lines(file: Path) -> list[Any]:
    """What each line of a file holds."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def write_lines(file: Path, contents: Iterable[Any]) -> None:
    """Writes a file of JSON lines anew."""
    file.write_text("".join(json.dumps(content) + "\n" for content in contents))
