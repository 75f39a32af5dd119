"""JSON files of a checkpoint directory, read with errors that name the file."""

import json
from pathlib import Path
from typing import Any

from hybridjax.errors import CheckpointError


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      CheckpointError: the file is missing, not JSON, or not an object.
    """
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{file}: no such file") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: holds a {type(value).__name__}; it must be an object")
    return value


def write_object(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
