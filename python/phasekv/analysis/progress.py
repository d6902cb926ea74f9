"""Progress bars in terminals and notebooks, and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

from tqdm.auto import tqdm

Item = TypeVar("Item")


def progress(items: Sequence[Item], name: str) -> Iterable[Item]:
    """The items, with a bar on standard error that tells how far they are gone through."""
    # A notebook's output is no terminal, but shows bars.
    is_notebook = "ipykernel" in sys.modules
    bar: Iterable[Item] = tqdm(items, desc=name, disable=False if is_notebook else None)
    return bar
