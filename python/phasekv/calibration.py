"""What ``phasekv calibrate`` measures of a model's queries, for the policy triattention."""

from __future__ import annotations

from phasekv import _core
from phasekv.errors import InvalidArgumentError


def load_statistics(path: str) -> _core.TriattentionStatistics:
    """Read a file of ``phasekv calibrate``."""
    raise InvalidArgumentError("calibration", path, "a file of `phasekv calibrate`")
