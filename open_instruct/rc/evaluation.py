"""How good reasoning-cache rollouts are: accuracy by cycle, over all problems and for each data set. Pure.

Cycles are compared with one long turn at the same token budget, where there are such turns: without them a gain by cycles may be
one by tokens.
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
    """Measures over complete trajectories, `overall` and by data set; `budgets` are the tokens that cycles 1 … N may have spent.

    `overflow` is the share of turns at their token limit, `tokens_by_cycle` a mean over trajectories. The others are means over
    problems of what is true of a problem's trajectories, so that problems count alike: `accuracy_by_cycle` (the share that is
    right after k cycles; one that stopped early keeps its last answer), `initial` and `final` (the first and last of these),
    `any_cycle` (the share that is right after at least one cycle), `best_of_n` (at least one is right at the end), `majority`
    (the final answer that most of them give is right).

    Controls are no trajectories here and count in none of these. Where there are any, `one_long_turn_by_budget` is their accuracy
    at each of `budget_by_cycle`, and `one_long_turns_cut_by_context` says how many had no room for all of their tokens.
    """
    by_dataset: defaultdict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in sorted(trajectories, key=lambda one: one[0].trajectory_id):  # not as they happened to come
        by_dataset[trajectory[0].metadata["dataset"]].append(trajectory)
    everything = [one for some in by_dataset.values() for one in some]
    return {
        "overall": _measures(everything, budgets),
        "by_dataset": {name: _measures(some, budgets) for name, some in by_dataset.items()},
    }


def _measures(trajectories: Sequence[Trajectory], budgets: Sequence[int]) -> dict[str, Any]:
    long_turns = [one[0] for one in trajectories if one[0].is_control]
    by_cycle = _measures_of_cycles([one for one in trajectories if not one[0].is_control])
    return by_cycle | (_measures_of_long_turns(long_turns, budgets) if long_turns else {})


def _measures_of_cycles(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    if not trajectories:
        return {"problems": 0, "trajectories": 0}
    num_cycles = max(len(_reasoning(one)) for one in trajectories)
    problems = _by_problem(trajectories)
    by_cycle = [mean(mean(_right_after(one, k) for one in same) for same in problems) for k in range(num_cycles)]
    turns = [turn for one in trajectories for turn in one]
    return {
        "problems": len(problems),
        "trajectories": len(trajectories),
        "accuracy_by_cycle": by_cycle,
        "initial": by_cycle[0],
        "final": by_cycle[-1],
        "any_cycle": mean(mean(any(_right(turn) for turn in _reasoning(one)) for one in same) for same in problems),
        "best_of_n": mean(any(_right_after(one, num_cycles) for one in same) for same in problems),
        "majority": mean(_majority_is_right(same) for same in problems),
        "overflow": mean(not turn.finished for turn in turns),
        "tokens_by_cycle": [_tokens_of_cycle(trajectories, k + 1) for k in range(num_cycles)],
    }


def _by_problem(trajectories: Iterable[Trajectory]) -> list[list[Trajectory]]:
    problems: defaultdict[str, list[Trajectory]] = defaultdict(list)
    for one in trajectories:
        problems[one[0].problem_id].append(one)
    return list(problems.values())


def _reasoning(trajectory: Trajectory) -> list[TrainingText]:
    return [turn for turn in trajectory if turn.metadata["turn_type"] == REASONING]


def _right(turn: TrainingText) -> bool:
    return turn.reward is not None and turn.reward >= 1.0


def _right_after(trajectory: Trajectory, cycle: int) -> bool:
    """Whether the answer of a cycle, counted from 0, is right; of the last one, where there are fewer."""
    turns = _reasoning(trajectory)
    return _right(turns[min(cycle, len(turns) - 1)])


def _majority_is_right(trajectories: Sequence[Trajectory]) -> bool:
    """Ties go to the answer that comes first in the order of the ids; trajectories without an answer have no vote."""
    last = [_reasoning(one)[-1] for one in trajectories]
    votes = Counter(answer for turn in last if (answer := stated_answer(turn.text)) is not None)
    if not votes:
        return False
    (winner, _), *_ = votes.most_common(1)
    return any(_right(turn) for turn in last if stated_answer(turn.text) == winner)


def stated_answer(raw: str) -> str | None:
    """The answer of a reasoning turn: in tags, in a box, or the last number; None without one."""
    said = answer_of(raw)
    for found in (extract_answer(said), boxed_answer(said), last_number(said)):
        if found is not None:
            return str(found)
    return None


def _tokens_of_cycle(trajectories: Sequence[Trajectory], number: int) -> float:
    """Mean tokens sampled in a cycle, reasoning and summary together, over all trajectories."""
    sizes = (
        sum(len(turn.response_ids) for turn in one if turn.metadata["turn_number"] == number) for one in trajectories
    )
    return mean(sizes)


# --- the control ------------------------------------------------------------------------------------------------------


def _measures_of_long_turns(turns: Sequence[TrainingText], budgets: Sequence[int]) -> dict[str, Any]:
    """One sample gives the whole curve: a turn that ended by itself would have ended there under every larger limit, and been cut
    under a smaller one. What was cut counts as wrong."""
    problems = _by_problem([turn] for turn in turns)
    return {
        "one_long_turns": len(turns),
        "budget_by_cycle": list(budgets),
        "one_long_turn_by_budget": [
            mean(mean(_right_within(turn, budget) for (turn,) in same) for same in problems) for budget in budgets
        ],
        "one_long_turns_cut_by_context": sum(
            not turn.finished and len(turn.response_ids) < budgets[-1] for turn in turns
        ),
    }


def _right_within(turn: TrainingText, budget: int) -> bool:
    return _right(turn) and turn.finished and len(turn.response_ids) <= budget


def format_comparison(measures: Mapping[str, Any]) -> str:
    """Cycles and the long turn side by side for a terminal or a job log; empty without a long turn."""
    if "one_long_turn_by_budget" not in measures or "accuracy_by_cycle" not in measures:
        return ""
    head = ("tokens", "by cycle", "one long turn")
    columns = (measures["budget_by_cycle"], measures["accuracy_by_cycle"], measures["one_long_turn_by_budget"])
    rows = [(f"{budget:,}", f"{cycle:.1%}", f"{turn:.1%}") for budget, cycle, turn in zip(*columns, strict=False)]
    cut = measures["one_long_turns_cut_by_context"]
    note = f"{cut} of {measures['one_long_turns']} long turns were cut by the context before they had spent that much"
    return "\n".join([format_table([head, *rows], ">>>"), *([note] if cut else [])])
