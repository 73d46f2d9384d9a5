"""The reward functions of a run, made from its options, in any process of the run."""

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.rewards.pool import RewardFunctions


def reward_functions(args: GRPOConfig, *, num_processes: int) -> RewardFunctions | None:
    """The functions of `--reward_funcs`; None without any. The caller closes them.

    Args:
        num_processes: most processes of one function, if `--verifier_workers` does not say.
    """
    if not args.reward_funcs:
        return None
    return RewardFunctions(
        args.reward_functions,
        timeout_s=args.reward_timeout_s,
        num_processes=args.verifier_workers or num_processes,
        is_jailed=args.reward_jail,
    )
