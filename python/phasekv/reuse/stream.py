"""The stream that the ops of a step run on."""

from __future__ import annotations

import torch


def current_stream(device: torch.device) -> int | None:
    """torch's current stream as the core takes it, a cudaStream_t; None on the CPU."""
    if device.type == "cpu":
        return None
    return int(torch.cuda.current_stream(device).cuda_stream)
