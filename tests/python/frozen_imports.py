"""Hooks for conftest.py: collections, of which vLLM asks for many, pass over what was imported."""

import gc


def pytest_collection_finish() -> None:
    """All that test files import has been imported."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Modules look for what they have leaked when the interpreter ends."""
    gc.unfreeze()
