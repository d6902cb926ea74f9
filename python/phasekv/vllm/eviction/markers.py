"""The marker table of the engine's model, compiled for its tokenizer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from vllm.tokenizers.registry import cached_tokenizer_from_config

from phasekv._core import MarkerAutomaton
from phasekv.phases import choose_table, compile_table, table_names, token_vocabulary

logger = logging.getLogger("phasekv")


def markers_of(model_config: Any, phases: str | None) -> MarkerAutomaton | None:
    """How phases are told from the model's tokens; None for one phase.

    Parameters
    ----------
    model_config : vllm ModelConfig
        Of the engine.
    phases : str or None
        Name or file of the marker table; None: picked from the tokenizer and its chat template.
    """
    if model_config.skip_tokenizer_init:
        logger.warning("PhaseKV: without a tokenizer all tokens are of one phase, others")
        return None
    tokenizer = cached_tokenizer_from_config(model_config)
    vocabulary = token_vocabulary(tokenizer)
    override = phases if phases is None or phases in table_names() else Path(phases)
    choice = choose_table(
        vocabulary, chat_template=getattr(tokenizer, "chat_template", None), override=override
    )
    logger.info("PhaseKV: phases by the table %s: %s", choice.table.name, choice.reason)
    return compile_table(choice.table, vocabulary)
