"""Demonstrations that run with a real model in the real engine."""
