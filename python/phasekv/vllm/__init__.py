"""PhaseKV inside vLLM: the plugin, its configuration and its requests."""
