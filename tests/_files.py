"""Files that tests read and write whole."""

import json
from pathlib import Path
from typing import Any

import yaml


def read_json(file: Path) -> Any:
    """What a JSON file holds."""
    return json.loads(file.read_text())


def read_yaml(file: Path) -> Any:
    """What a YAML file holds."""
    return yaml.safe_load(file.read_text())


def write_json(file: Path, content: Any) -> None:
    """Writes a JSON file anew."""
    file.write_text(json.dumps(content))
