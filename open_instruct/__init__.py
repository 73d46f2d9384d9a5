"""GRPO post-training on Ray, vLLM and DeepSpeed. Start at `grpo_fast.py`."""
