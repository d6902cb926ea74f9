"""Eviction inside vLLM: windows that the scheduler frees, and the worker that fills them."""
