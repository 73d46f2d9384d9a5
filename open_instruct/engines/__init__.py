"""vLLM engines: started, stepped, put to sleep, given new weights."""
