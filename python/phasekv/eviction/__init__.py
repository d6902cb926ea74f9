"""Eviction policies and windows as every engine's adapter takes them."""

from phasekv.eviction.settings import EvictionChoice, parse_engine_choice, parse_request_choice

__all__ = ["EvictionChoice", "parse_engine_choice", "parse_request_choice"]
