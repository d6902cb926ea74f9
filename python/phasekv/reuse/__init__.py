"""Reuse of stored chunks as every engine does it: which rows run, and what is written where."""
