"""Options of the verifiers that come with the project."""

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class LengthVerifierOptions:
    """Length verifiers"""

    max_length_verifier_max_length: int = 32768
    """Tokens that the verifiers max_length and up_to_max_length count up to."""


@dataclass(kw_only=True)
class CodeOptions:
    """Code verifiers"""

    code_api_url: str | None = None
    """Address of a server that runs programs against their tests (python -m open_instruct.verifiers.code_server, or
    open-instruct's). By default programs run on the controller's node, each in a jail of its own."""
    code_max_execution_time: float = 1.0
    """Seconds that a program may take for one test."""
    code_pass_rate_reward_threshold: float = 0.0
    """The score of a program is the share of its tests that pass, or 0 if that share is below this value."""
    code_apply_perf_penalty: bool = False
    """A test that passes counts less the longer it takes: 1 - seconds / code_max_execution_time."""


@dataclass(kw_only=True)
class JudgeOptions:
    """LLM judge"""

    llm_judge_model: str | None = None
    """Model that judges the responses to rows of general-…: its name at the judge's server."""
    llm_judge_api_base: str | None = None
    """Address of the judge's server, which speaks OpenAI's protocol, such as http://localhost:8000/v1. By default the
    environment's OPENAI_BASE_URL, or else OpenAI's. The key is read from OPENAI_API_KEY."""
    llm_judge_max_tokens: int = 2048
    """Longest judgement, in tokens."""
    llm_judge_max_context_length: int = 8192
    """Longest question to the judge, in tokens, four characters each; a response that is longer is cut in the middle."""
    llm_judge_temperature: float = 1.0
    """Sampling temperature of the judge."""
    llm_judge_timeout: int = 60
    """Seconds that one judgement may take. It is asked for three times, then the response is not scored."""
    llm_judge_max_concurrency: int = 256
    """Judgements that are asked for at the same time."""
    llm_judge_cache_dir: str | None = None
    """Directory in which judgements are kept, so that the same question is never paid for twice. By default none is kept."""
    llm_judge_price_per_million_tokens: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """US dollars for a million tokens that the judge reads, and for a million that it writes: objective/verifier_cost."""


@dataclass(kw_only=True)
class VerifierConfig(LengthVerifierOptions, CodeOptions, JudgeOptions):
    """What verifiers are given."""
