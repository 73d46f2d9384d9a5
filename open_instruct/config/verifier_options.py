"""Options of rewards, and of the verifiers that come with the project."""

from dataclasses import dataclass, field
from pathlib import Path

from open_instruct.option_limits import ANY, COUNT, MAX_TEMPERATURE, NOT_NEGATIVE, POSITIVE, SHARE, Limits, limited
from open_instruct.scored_groups import PASSTHROUGH

PICKLE = ".pkl"
"""Ending of a file that holds a pickled function, as the Python interface writes it for functions of a script or notebook."""


@dataclass(frozen=True)
class RewardFunctionSpec:
    """A reward function of a run."""

    target: str
    """`my_rewards.py:short_and_right`, `my_package.rewards:short_and_right`, or the path of a pickled function."""
    weight: float = 1.0

    @property
    def name(self) -> str:
        """The name in metrics and messages: that of the function."""
        if self.target.endswith(PICKLE):
            return Path(self.target).stem
        return self.target.rpartition(":")[2].rpartition(".")[2]


@dataclass(kw_only=True)
class RewardOptions:
    """Rewards"""

    apply_verifiable_reward: bool = True
    """Reward what verifiers find right. False: only the other rewards count; verifiers' scores are only reported."""
    verification_reward: float = limited(10.0, POSITIVE)
    """Reward of a right answer. A reward is score (0 to 1) * weight of the verifier * this: 1.0 * 0.5 * 10 = 5."""
    remap_verifier: list[str] = field(default_factory=list)
    """Verifiers under another name: math_dapo=math has rows of math_dapo scored by math."""
    default_verifier: str | None = None
    """Verifier of rows without a column dataset, such as those of TRL: math."""
    apply_r1_style_format_reward: bool = False
    """Look at the form of responses too: …</think> <answer>…</answer>. A response in another form gets nothing from its
    verifier."""
    r1_style_format_reward: float = limited(1.0, ANY)
    """Reward of the form, with additive_format_reward."""
    additive_format_reward: bool = False
    """Add r1_style_format_reward to the reward of a response in the right form, and let those in other forms keep theirs."""
    non_stop_penalty: bool = False
    """Give every response that did not end by itself, because it was cut off at response_length, the reward
    non_stop_penalty_value in place of its own."""
    non_stop_penalty_value: float = limited(0.0, ANY)
    """Reward of a response that did not end by itself, with non_stop_penalty."""
    overlong_buffer_len: int = limited(0, NOT_NEGATIVE)
    """Soft penalty for long responses: the reward falls over the last so many tokens before response_length, at response_length
    by overlong_penalty_factor. 0: no penalty."""
    overlong_penalty_factor: float = limited(1.0, NOT_NEGATIVE)
    """Reward that a response of response_length tokens loses, with overlong_buffer_len."""
    reward_funcs: list[str] = field(default_factory=list)
    """Reward functions as TRL takes them, f(prompts, completions, **columns) -> list of numbers: my_rewards.py:short_and_right,
    or a dotted name. Their rewards are added to those of verifiers; rows then need no verifier. See docs/guides/verifiers.md."""
    reward_weights: list[float] = field(default_factory=list)
    """What the rewards of each of reward_funcs are multiplied by. By default 1 for each."""
    reward_timeout_s: float = limited(60.0, POSITIVE)
    """Seconds that one of reward_funcs may take for the responses to one prompt. Then it is ended, and they are not scored."""
    reward_jail: bool = False
    """Run reward_funcs in the jail of verifiers: without network, files, further processes, and keys. By default each has
    processes of its own that may do everything."""
    verifier_modules: list[str] = field(default_factory=list)
    """Files (my_rewards.py) or modules that define further verifiers: subclasses of VerifierFunction.
    See docs/guides/verifiers.md."""
    verifier_timeout_s: float = limited(10.0, POSITIVE)
    """Seconds that the verification of one response may take. Then it is killed, and the response is not scored."""
    max_unscored_share: float = limited(0.5, SHARE)
    """The run ends with exit code 1 once more than this share of the last 1,000 responses was not scored, because its rewards
    cannot be trusted. 1: never."""
    verifier_workers: int | None = limited(None, COUNT)
    """Groups of responses that are verified at the same time, and processes of each reward function. By default a quarter as
    many as the controller's machine has cores, but from 2 to 16."""

    @property
    def verifier_of_unnamed_rows(self) -> str | None:
        """Verifier of rows without a column `dataset`: as the option says; without it none is needed if there are reward
        functions."""
        return self.default_verifier or (PASSTHROUGH if self.reward_funcs else None)

    @property
    def reward_functions(self) -> list[RewardFunctionSpec]:
        """The reward functions with their weights."""
        weights = self.reward_weights or [1.0] * len(self.reward_funcs)
        return [RewardFunctionSpec(*pair) for pair in zip(self.reward_funcs, weights, strict=False)]


@dataclass(kw_only=True)
class LengthVerifierOptions:
    """Length verifiers"""

    max_length_verifier_max_length: int = limited(32768, COUNT)
    """Tokens that the verifiers max_length and up_to_max_length count up to."""


@dataclass(kw_only=True)
class CodeOptions:
    """Code verifiers"""

    code_api_url: str | None = None
    """Address of a server that runs programs against their tests (python -m open_instruct.verifiers.code_server, or
    open-instruct's). By default programs run on the controller's node, each in a jail of its own."""
    code_max_execution_time: float = limited(1.0, POSITIVE)
    """Seconds that a program may take for one test."""
    code_pass_rate_reward_threshold: float = limited(0.0, SHARE)
    """The score of a program is the share of its tests that pass, or 0 if that share is below this value."""
    code_apply_perf_penalty: bool = False
    """A test that passes counts less the longer it takes: 1 - seconds / code_max_execution_time."""


@dataclass(kw_only=True)
class JudgeOptions:
    """LLM judge"""

    llm_judge_model: str | None = None
    """Model that judges the responses to rows of general-…: its name at the judge's server, with or without openai/, azure/ or
    hosted_vllm/ before it."""
    llm_judge_api_base: str | None = None
    """Address of the judge's server, which speaks OpenAI's protocol, such as http://localhost:8000/v1. By default the
    environment's OPENAI_BASE_URL, or else OpenAI's. The key is read from OPENAI_API_KEY."""
    llm_judge_max_tokens: int = limited(2048, COUNT)
    """Longest judgement, in tokens."""
    llm_judge_max_context_length: int = limited(8192, COUNT)
    """Longest question to the judge, in tokens, four characters each; a response that is longer is cut in the middle."""
    llm_judge_temperature: float = limited(1.0, Limits(0, MAX_TEMPERATURE))
    """Sampling temperature of the judge."""
    llm_judge_timeout: int = limited(60, COUNT)
    """Seconds that one judgement may take. It is asked for three times, then the response is not scored."""
    llm_judge_max_concurrency: int = limited(256, COUNT)
    """Judgements that are asked for at the same time."""
    llm_judge_cache_dir: str | None = None
    """Directory in which judgements are kept, so that the same question is never paid for twice. By default none is kept."""
    llm_judge_price_per_million_tokens: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """US dollars for a million tokens that the judge reads, and for a million that it writes: objective/verifier_cost."""


@dataclass(kw_only=True)
class EvolvingRubricOptions:
    """Evolving rubrics"""

    apply_evolving_rubric_reward: bool = False
    """Let the judge's model (or RUBRIC_GENERATION_MODEL of the environment) compare the responses to rows of rubric, and find
    criteria that count from then on beside those of the row."""
    max_active_rubrics: int = limited(5, COUNT)
    """Criteria found during the run that count at the same time for a question: the newest."""
    cache_evolving_rubric_data_dir: str | None = None
    """Directory in which a file per step keeps what was compared and found."""


@dataclass(kw_only=True)
class VerifierConfig(LengthVerifierOptions, CodeOptions, JudgeOptions):
    """What verifiers are given."""
