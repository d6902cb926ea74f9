"""Phases of an agent's tokens: think, act, tool, others.

``choose_table`` finds the marker table for a model, ``compile_table`` makes it ready for the
tokenizer, and a ``PhaseTracker`` labels a stream of tokens as they arrive. ``docs/phases.md`` shows
how, and how to write a table.
"""

from phasekv._core import MarkerAutomaton, PhaseTracker, label_stream, phase_names
from phasekv.phases.automaton import compile_table
from phasekv.phases.choice import FALLBACK_TABLE, TableChoice, choose_table
from phasekv.phases.table import Marker, MarkerTable, load_table, table_named, table_names
from phasekv.phases.vocabulary import TokenVocabulary, token_vocabulary

__all__ = [
    "FALLBACK_TABLE",
    "Marker",
    "MarkerAutomaton",
    "MarkerTable",
    "PhaseTracker",
    "TableChoice",
    "TokenVocabulary",
    "choose_table",
    "compile_table",
    "label_stream",
    "load_table",
    "phase_names",
    "table_named",
    "table_names",
    "token_vocabulary",
]
