"""Measures how good reasoning-cache rollouts are: accuracy by cycle, over all problems and for each data set. Pure functions.

If the run has controls (one long turn each), cycles are compared with them at the same token budget. Without this comparison, a
gain from more cycles may be merely a gain from more tokens.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

from open_instruct.report.run_summary import format_table
from open_instruct.verifiers.answer_reading import boxed_answer, extract_answer, last_number
from open_instruct.workflows.rc.prompts import answer_of
from open_instruct.workflows.rc.types import REASONING, TrainingText

Trajectory = Sequence[TrainingText]


def evaluate(trajectories: Iterable[Trajectory], budgets: Sequence[int]) -> dict[str, Any]:
    """Measures over complete trajectories, `overall` and by data set. `budgets` are the tokens that may have been spent after
    cycles 1 … N.

    `overflow` is the share of turns that were cut at their token limit, and `tokens_by_cycle` is a mean over trajectories. Every
    other measure is computed for each problem from its trajectories and then averaged over problems, so that each problem counts
    the same:

        accuracy_by_cycle    share of trajectories that are right after k cycles; a shorter trajectory keeps its last answer
        initial, final       first and last value of accuracy_by_cycle
        any_cycle            share of trajectories that are right after at least one cycle
        best_of_n            1 if at least one trajectory is right at the end
        majority             1 if the final answer that most trajectories give is right

    If a rollout policy has left a reasoning turn of a trajectory without a reward, the trajectory counts in no measure, because
    its result is not known; `not_scored` is the number of such trajectories, if there are any.

    Controls count in none of these measures. If there are controls, `one_long_turn_by_budget` is their accuracy at each budget of
    `budget_by_cycle`, and `one_long_turns_cut_by_context` counts those whose context had no room for all of their tokens.
    """
    by_dataset: defaultdict[str, list[Trajectory]] = defaultdict(list)
    in_order = sorted(trajectories, key=lambda trajectory: trajectory[0].trajectory_id)  # not the order of arrival
    for trajectory in in_order:
        by_dataset[trajectory[0].metadata["dataset"]].append(trajectory)
    return {
        "overall": _measures([trajectory for part in by_dataset.values() for trajectory in part], budgets),
        "by_dataset": {name: _measures(part, budgets) for name, part in by_dataset.items()},
    }


def _measures(trajectories: Sequence[Trajectory], budgets: Sequence[int]) -> dict[str, Any]:
    scored = [trajectory for trajectory in trajectories if _is_scored(trajectory)]
    long_turns = [trajectory[0] for trajectory in scored if trajectory[0].is_control]
    measures = _measures_of_cycles([trajectory for trajectory in scored if not trajectory[0].is_control])
    measures |= _measures_of_long_turns(long_turns, budgets) if long_turns else {}
    return measures | ({"not_scored": len(trajectories) - len(scored)} if len(scored) < len(trajectories) else {})


def _is_scored(trajectory: Trajectory) -> bool:
    return all(turn.reward is not None for turn in _reasoning(trajectory))


def _measures_of_cycles(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    if not trajectories:
        return {"problems": 0, "trajectories": 0}
    num_cycles = max(len(_reasoning(trajectory)) for trajectory in trajectories)
    problems = _by_problem(trajectories)
    by_cycle = [
        mean(mean(_right_after(trajectory, k) for trajectory in problem) for problem in problems)
        for k in range(num_cycles)
    ]
    turns = [turn for trajectory in trajectories for turn in trajectory]
    return {
        "problems": len(problems),
        "trajectories": len(trajectories),
        "accuracy_by_cycle": by_cycle,
        "initial": by_cycle[0],
        "final": by_cycle[-1],
        "any_cycle": mean(mean(_right_in_any_cycle(trajectory) for trajectory in problem) for problem in problems),
        "best_of_n": mean(any(_right_after(trajectory, num_cycles) for trajectory in problem) for problem in problems),
        "majority": mean(_majority_is_right(problem) for problem in problems),
        "overflow": mean(not turn.finished for turn in turns),
        "tokens_by_cycle": [_tokens_of_cycle(trajectories, k + 1) for k in range(num_cycles)],
    }


def _by_problem(trajectories: Iterable[Trajectory]) -> list[list[Trajectory]]:
    problems: defaultdict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        problems[trajectory[0].problem_id].append(trajectory)
    return list(problems.values())


def _reasoning(trajectory: Trajectory) -> list[TrainingText]:
    return [turn for turn in trajectory if turn.metadata["turn_type"] == REASONING]


def _right(turn: TrainingText) -> bool:
    return turn.reward is not None and turn.reward >= 1.0


def _right_after(trajectory: Trajectory, cycle: int) -> bool:
    """Whether the answer of cycle `cycle`, counted from 0, is right. A shorter trajectory gives the answer of its last cycle."""
    turns = _reasoning(trajectory)
    return _right(turns[min(cycle, len(turns) - 1)])


def _right_in_any_cycle(trajectory: Trajectory) -> bool:
    return any(_right(turn) for turn in _reasoning(trajectory))


def _majority_is_right(trajectories: Sequence[Trajectory]) -> bool:
    """Whether the most frequent final answer is right. Among equally frequent answers, the one that comes first in the order of
    the trajectories' ids wins. Trajectories without an answer have no vote."""
    turns = [_reasoning(trajectory)[-1] for trajectory in trajectories]
    votes = Counter(answer for turn in turns if (answer := stated_answer(turn.text)) is not None)
    if not votes:
        return False
    (winner, _), *_ = votes.most_common(1)
    return any(_right(turn) for turn in turns if stated_answer(turn.text) == winner)


def stated_answer(raw: str) -> str | None:
    """The answer of a reasoning turn: in answer tags, else in a box, else the last number; None if there is no answer."""
    answer = answer_of(raw)
    for value in (extract_answer(answer), boxed_answer(answer), last_number(answer)):
        if value is not None:
            return str(value)
    return None


def _tokens_of_cycle(trajectories: Sequence[Trajectory], number: int) -> float:
    """Mean tokens sampled in a cycle, reasoning and summary together, over all trajectories."""
    sizes = (
        sum(len(turn.response_ids) for turn in trajectory if turn.metadata["turn_number"] == number)
        for trajectory in trajectories
    )
    return mean(sizes)


# --- the control ------------------------------------------------------------------------------------------------------


def _measures_of_long_turns(turns: Sequence[TrainingText], budgets: Sequence[int]) -> dict[str, Any]:
    """Measures of the controls. One sample gives the accuracy at every budget: a turn that ended after 700 tokens would have
    ended there under every larger limit, and would have been cut under every smaller one. A turn that is cut counts as wrong."""
    problems = _by_problem([turn] for turn in turns)
    return {
        "one_long_turns": len(turns),
        "budget_by_cycle": list(budgets),
        "one_long_turn_by_budget": [
            mean(mean(_right_within(turn, budget) for (turn,) in problem) for problem in problems) for budget in budgets
        ],
        "one_long_turns_cut_by_context": sum(
            not turn.finished and len(turn.response_ids) < budgets[-1] for turn in turns
        ),
    }


def _right_within(turn: TrainingText, budget: int) -> bool:
    return _right(turn) and turn.finished and len(turn.response_ids) <= budget


def format_comparison(measures: Mapping[str, Any]) -> str:
    """A table of cycles and long turns side by side, for a terminal or a job log; "" if there are no long turns."""
    if "one_long_turn_by_budget" not in measures or "accuracy_by_cycle" not in measures:
        return ""
    head = ("tokens", "by cycle", "one long turn")
    columns = (measures["budget_by_cycle"], measures["accuracy_by_cycle"], measures["one_long_turn_by_budget"])
    rows = [(f"{budget:,}", f"{cycle:.1%}", f"{turn:.1%}") for budget, cycle, turn in zip(*columns, strict=False)]
    num_cut = measures["one_long_turns_cut_by_context"]
    note = f"{num_cut} of {measures['one_long_turns']} long turns were cut by the context before they had spent these tokens"
    return "\n".join([format_table([head, *rows], ">>>"), *([note] if num_cut else [])])
