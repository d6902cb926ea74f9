"""Measures what reuse costs in fidelity: memory tasks, prompts, metrics and a logits recorder."""
