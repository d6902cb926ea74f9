"""Reads a JSON file that a user names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from phasekv.errors import InvalidArgumentError


def read_json(path: Path, argument: str) -> Any:
    """The file's content.

    Raises
    ------
    InvalidArgumentError
        Naming ``argument``, if the file cannot be read or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(argument, str(path), f"a JSON file ({error})") from error
