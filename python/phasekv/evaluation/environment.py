"""The environment of an engine that runs inside this process and prints only what matters."""

from __future__ import annotations

import logging
import os
import warnings

_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


def prepare_environment() -> None:
    """Sets the variables that the user has not set, and quietens what vLLM and torch print.

    Some of them are read when torch is imported: a command calls this before anything else.
    """
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    # vLLM's scan of loaded modules touches deprecated names of torch.
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
