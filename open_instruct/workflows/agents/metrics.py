"""Metrics of the agent programs of a training step: their costs and results."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from open_instruct.data_types import GenerationResult


def agent_metrics(results: Sequence[GenerationResult]) -> dict[str, float]:
    """Means over all rollouts, except for counts."""
    accounts: list[Mapping[str, Any]] = [account for result in results for account in result.notes or ()]
    if not accounts:
        return {}

    def mean(name: str) -> float:
        return sum(account[name] for account in accounts) / len(accounts)

    num_policy_tokens = sum(account["num_policy_tokens"] for account in accounts)
    metrics = {
        "agents/requests": mean("num_requests"),
        "agents/samples": mean("num_samples"),
        "agents/policy_tokens": mean("num_policy_tokens"),
        "agents/inserted_tokens": mean("num_inserted_tokens"),
        "agents/prompt_tokens_per_policy_token": sum(account["num_prompt_tokens"] for account in accounts)
        / max(1, num_policy_tokens),
        "agents/program_s": mean("program_s"),
        "agents/wait_s": mean("wait_s"),
        "agents/reward_rate": mean("has_reward"),
        "agents/limit_rate": mean("at_limit"),
    }
    for name in ("refused", "lost", "restarts"):
        metrics[f"agents/{name}"] = float(sum(account[f"num_{name}"] for account in accounts))
    return metrics | _of_programs(accounts)


def _of_programs(accounts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Numbers that programs printed together with their rewards, over the rollouts that have them."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for account in accounts:
        for name, value in account["metrics"].items():
            values[f"env/agent/{name}"].append(value)
    return {key: sum(numbers) / len(numbers) for key, numbers in values.items()}
