"""How good reasoning-cache rollouts are: accuracy by cycle, over all problems and for each data set. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import mean
from typing import Any

from open_instruct.ground_truth_utils import boxed_answer, extract_answer, last_number
from open_instruct.rc_prompts import answer_of
from open_instruct.rc_types import REASONING, TrainingText

Trajectory = Sequence[TrainingText]


def evaluate(trajectories: Iterable[Trajectory]) -> dict[str, Any]:
    """Measures over complete trajectories, `overall` and by data set.

    `overflow` is the share of turns at their token limit, `tokens_by_cycle` a mean over trajectories. The others are means over
    problems of what is true of a problem's trajectories, so that problems count alike: `accuracy_by_cycle` (the share that is
    right after k cycles; one that stopped early keeps its last answer), `initial` and `final` (the first and last of these),
    `any_cycle` (the share that is right after at least one cycle), `best_of_n` (at least one is right at the end), `majority`
    (the final answer that most of them give is right).
    """
    by_dataset: defaultdict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        by_dataset[trajectory[0].metadata["dataset"]].append(trajectory)
    everything = [one for some in by_dataset.values() for one in some]
    return {"overall": _measures(everything), "by_dataset": {name: _measures(one) for name, one in by_dataset.items()}}


def _measures(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    if not trajectories:
        return {"problems": 0, "trajectories": 0}
    num_cycles = max(len(_reasoning(one)) for one in trajectories)
    by_problem: defaultdict[str, list[Trajectory]] = defaultdict(list)
    for one in trajectories:
        by_problem[one[0].problem_id].append(one)
    problems = list(by_problem.values())
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


def _reasoning(trajectory: Trajectory) -> list[TrainingText]:
    return [turn for turn in trajectory if turn.metadata["turn_type"] == REASONING]


def _right(turn: TrainingText) -> bool:
    return turn.reward is not None and turn.reward >= 1.0


def _right_after(trajectory: Trajectory, cycle: int) -> bool:
    """Whether the answer of a cycle, counted from 0, is right; of the last one, where there are fewer."""
    turns = _reasoning(trajectory)
    return _right(turns[min(cycle, len(turns) - 1)])


def _majority_is_right(trajectories: Sequence[Trajectory]) -> bool:
    """Ties go to the answer that came first; trajectories without an answer have no vote."""
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
