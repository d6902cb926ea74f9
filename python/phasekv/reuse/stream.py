"""The stream that the ops of a step run on."""

from __future__ import annotations

import torch


def current_stream(device: torch.device) -> int | None:
    """torch's current stream as the core takes it, a cudaStream_t; None on the CPU."""
    if device.type == "cpu":
        return None
    return int(torch.cuda.current_stream(device).cuda_stream)


def wait_for(device: torch.device) -> None:
    """Return once the ops on torch's current stream are done; at once on the CPU."""
    if device.type != "cpu":
        torch.cuda.current_stream(device).synchronize()
