"""Metrics of the conversations of a training step: their costs and results."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from open_instruct.data_types import GenerationResult


def conversation_metrics(results: Sequence[GenerationResult]) -> dict[str, Any]:
    """Means over all conversations. `tools/…` and `env/…` have open-instruct's names."""
    accounts: list[Mapping[str, Any]] = [account for result in results for account in result.notes or ()]
    if not accounts:
        return {}
    return {**_turns(accounts), **_tokens(accounts), **_tools(accounts), **_environments(accounts)}


def _turns(accounts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    number = len(accounts)
    ends = [account["ended_by"] for account in accounts]
    metrics = {
        "conversations/turns": sum(account["num_turns"] for account in accounts) / number,
        "conversations/steps": sum(account["num_steps"] for account in accounts) / number,
        "conversations/branch_rate": sum(account["num_branches"] > 0 for account in accounts) / number,
        "conversations/restarts": float(sum(account["num_restarts"] for account in accounts)),
        "conversations/restores": float(sum(account["num_restores"] for account in accounts)),
        "conversations/shortened_answers": float(sum(account["num_truncated"] for account in accounts)),
        "conversations/wait_s": sum(account["wait_s"] for account in accounts) / number,
    }
    for end in ("answer", "environment", "steps", "length"):
        metrics[f"conversations/ended_by_{end}"] = ends.count(end) / number
    rewards = [account["turn_rewards"] for account in accounts if account["turn_rewards"]]
    if rewards:
        metrics["conversations/turn_reward"] = sum(map(sum, rewards)) / sum(map(len, rewards))
    return metrics


def _tokens(accounts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    number = len(accounts)
    num_policy_tokens = _num_policy_tokens(accounts)
    num_prompt_tokens = sum(account["num_prompt_tokens"] for account in accounts)
    return {
        "conversations/policy_tokens": num_policy_tokens / number,
        "conversations/tool_tokens": sum(account["num_tool_tokens"] for account in accounts) / number,
        "conversations/template_tokens": sum(account["num_template_tokens"] for account in accounts) / number,
        "conversations/prompt_tokens_per_policy_token": num_prompt_tokens / max(1, num_policy_tokens),
    }


def _tools(accounts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    totals: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    slowest: defaultdict[str, float] = defaultdict(float)
    for account in accounts:
        for name, (calls, errors, seconds) in account["calls"].items():
            for key in (name, "aggregate"):
                totals[key] = [
                    total + value for total, value in zip(totals[key], (calls, errors, seconds), strict=True)
                ]
            slowest[name] = max(slowest[name], seconds / calls)
    metrics: dict[str, Any] = {}
    for name, (calls, errors, seconds) in totals.items():
        metrics[f"tools/{name}/avg_calls_per_rollout"] = calls / len(accounts)
        metrics[f"tools/{name}/failure_rate"] = errors / calls
        metrics[f"tools/{name}/avg_runtime"] = seconds / calls
    for name, seconds in slowest.items():
        metrics[f"tools/{name}/max_runtime"] = seconds
    if slowest:
        tool_s = totals["aggregate"][2]
        metrics["conversations/tool_s"] = tool_s / len(accounts)
        metrics["conversations/tool_ms_per_policy_token"] = 1000 * tool_s / max(1, _num_policy_tokens(accounts))
        metrics["conversations/slowest_environment"] = max(slowest, key=lambda name: slowest[name])
    return metrics


def _num_policy_tokens(accounts: Sequence[Mapping[str, Any]]) -> int:
    return sum(account["num_policy_tokens"] for account in accounts)


def _environments(accounts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    values: defaultdict[str, list[float]] = defaultdict(list)
    for account in accounts:
        for name, metrics in account["metrics"].items():
            for key, value in metrics.items():
                values[f"env/{name}/{key}"].append(value)
    return {key: sum(numbers) / len(numbers) for key, numbers in values.items()}
