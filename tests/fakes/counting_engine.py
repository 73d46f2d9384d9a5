"""A real engine that tells how many tokens its steps compute. To be run in an actor, because it sets environment variables."""

from typing import Any

from open_instruct.data_types import SamplingConfig
from open_instruct.engines.kv_ages import KvAges
from open_instruct.engines.vllm_engine import EngineOptions, VLLMEngine, make_engine, sampling_params


class CountingEngine:
    """vLLM's engine, and the number of tokens of each step."""

    def __init__(self, options: EngineOptions) -> None:
        self.engine = VLLMEngine(make_engine(options, 0), timeout_s=60.0)
        self.ages = KvAges("by_version", block_size=32, num_blocks=64)
        self.num_tokens: list[int] = []
        core = self.engine.engine_core.engine_core
        schedule = core.scheduler.schedule

        def counted(*args: Any, **kwargs: Any) -> Any:
            scheduled = schedule(*args, **kwargs)
            self.num_tokens.append(scheduled.total_num_scheduled_tokens)
            return scheduled

        core.scheduler.schedule = counted

    def first_step(self, name: str, version: int, prompt_ids: list[int], num_responses: int) -> int:
        """Tokens of the step that begins `num_responses` responses to the prompt, which the engine then finishes."""
        del self.num_tokens[:]
        prompt = {"prompt_token_ids": prompt_ids, "cache_salt": self.ages.salt(version, needs_fresh=False)}
        self.engine.add_request(
            name, prompt, sampling_params(SamplingConfig(n=num_responses, max_tokens=2, ignore_eos=True))
        )
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return self.num_tokens[0]
