"""vLLM engines: how they start, step, sleep, and receive new weights."""
