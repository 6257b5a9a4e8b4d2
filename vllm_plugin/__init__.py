"""vLLM plugin: moves in-flight requests between instances. Runs inside vLLM processes; knows no Django."""
