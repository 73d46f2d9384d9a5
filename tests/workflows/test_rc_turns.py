"""The workflow of reasoning-cache rollouts against a scripted server: order, prompts, lengths, what counts and what is kept."""

from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web
from rc_fakes import DOCUMENTED, Call, Rig, ScriptedServer, codec, completion, polite, problem, settings, states, table

from open_instruct.workflows.rc.policies import generate_math_rollout
from open_instruct.workflows.rc.state import InferenceProblemState
from open_instruct.workflows.rc.turns import FinishedTurn, Score
from open_instruct.workflows.rc.types import REASONING, SUMMARIZATION, TrainingText


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as one:
        yield one


# --- order and counters -----------------------------------------------------------------------------------------------


def test_three_cycles_give_the_documents_table(server: ScriptedServer) -> None:
    (result,) = Rig([server]).run(states(1))
    assert table(result) == DOCUMENTED
    assert [call.turn_type for call in server.calls] == [REASONING, SUMMARIZATION] * 3


@pytest.mark.parametrize("cycles", [1, 2, 5])
def test_counters_and_stores(server: ScriptedServer, cycles: int) -> None:
    (state,) = states(1, settings(cycles))
    assert (state.reasoning_turn_number, state.summarization_turn_number, state.overall_cycle_step) == (0, 0, 0)
    Rig([server]).run([state])
    assert (state.reasoning_turn_number, state.summarization_turn_number) == (cycles, cycles)
    assert state.overall_cycle_step == 2 * cycles
    stores = [getattr(state, name) for name in vars(state) if name.endswith("_store")]
    assert [len(store) for store in stores] == [cycles] * 6
    for turn in state.rollouts:
        number, is_summary = turn.metadata["turn_number"], turn.metadata["turn_type"] == SUMMARIZATION
        assert turn.metadata["cycle_step"] == 2 * (number - 1) + is_summary


def test_metadata_is_there_before_the_next_turn(server: ScriptedServer) -> None:
    (state,) = states(1)
    seen: list[dict[str, Any]] = []

    async def policy(turn: FinishedTurn, score: Score) -> TrainingText:
        if turns := state.rollouts:
            seen.append(dict(turns[-1].metadata))
        return await generate_math_rollout(turn, score)

    Rig([server], policies={REASONING: policy, SUMMARIZATION: policy}).run([state])
    documented = [
        {"model_version": 0, "rollout_index": 0, "cycle_step": step, "turn_type": kind, "turn_number": number}
        for step, kind, number in DOCUMENTED[:-1]
    ]
    assert [{key: one[key] for key in documented[0]} for one in seen] == documented


def test_samples_of_a_problem_are_independent(server: ScriptedServer) -> None:
    samples = [InferenceProblemState(problem(), settings(2), sample_id=number) for number in range(3)]
    results = Rig([server]).run(samples)
    assert {one.trajectory_id for one in results} == {f"test#0/attempt-0/{number}" for number in range(3)}
    assert {turn.group_id for one in results for turn in one.rollouts} == {"test#0/attempt-0"}
    assert len({call.body["seed"] for call in server.calls}) == len(server.calls) == 3 * 4
    samples[0].curr_summary = "changed"
    samples[0].reasoning_string_store.clear()
    assert samples[1].curr_summary != "changed"
    assert len(samples[1].reasoning_string_store) == 2


@pytest.mark.parametrize(
    ("how", "reason"), [(400, "rejected"), (503, "retries_exhausted"), (None, "policy_error")], ids=str
)
def test_a_sample_that_fails_leaves_the_others_of_its_problem(
    server: ScriptedServer, how: int | None, reason: str
) -> None:
    """In the middle of its trajectory: refused by the server, failing for good, or too much for the policy."""
    samples = [InferenceProblemState(problem(), settings(2), sample_id=number) for number in range(4)]
    failing = InferenceProblemState(problem(), settings(2), sample_id=1, overall_cycle_step=2).turn_seed

    def script(call: Call) -> Any:
        return web.Response(status=how) if how and call.body["seed"] == failing else polite(call)

    async def policy(turn: FinishedTurn, score: Score) -> TrainingText:
        if how is None and turn.request.seed == failing:
            raise KeyError("odd text")
        return await generate_math_rollout(turn, score)

    server.script = script
    results = Rig([server], policies=dict.fromkeys((REASONING, SUMMARIZATION), policy), max_requeues=1).run(samples)
    assert {one.trajectory_id: one.dropped for one in results} == {
        "test#0/attempt-0/0": "",
        "test#0/attempt-0/1": reason,
        "test#0/attempt-0/2": "",
        "test#0/attempt-0/3": "",
    }
    assert [table(one) for one in results if not one.dropped] == [DOCUMENTED[:4]] * 3


def test_a_solved_trajectory_goes_on_unless_told_to_stop(server: ScriptedServer) -> None:
    (result,) = Rig([server]).run(states(1))
    assert [turn.reward for turn in result.rollouts] == [1.0, None] * 3
    (result,) = Rig([server]).run(states(1, settings(stop_when_solved=True)))
    assert table(result) == DOCUMENTED[:1]


# --- what a turn sees -------------------------------------------------------------------------------------------------


def sentinels(call: Call) -> dict[str, Any]:
    return completion(f"<think>THOUGHT{call.number}</think>SAID{call.number}")


def test_a_turn_sees_the_problem_and_the_latest_summary_alone(server: ScriptedServer) -> None:
    server.script = sentinels
    Rig([server]).run(states(1))
    for call in server.calls:
        assert call.prompt.count("PROBLEM0.") == 1
        visible = {number for number in range(6) if f"THOUGHT{number}" in call.prompt or f"SAID{number}" in call.prompt}
        if call.number == 0:
            assert not visible
            assert "KNOWING  GO" in call.prompt
        elif call.turn_type == REASONING:
            assert visible == {call.number - 1}
        else:
            assert visible == {call.number - 1} | ({call.number - 2} if call.number > 1 else set())
    assert "OLD  NEW THOUGHT0 GO" in server.calls[1].prompt
    assert "OLD SAID1 NEW THOUGHT2 GO" in server.calls[3].prompt


def test_the_chat_template_stands_around_a_prompt_once(server: ScriptedServer) -> None:
    server.script = lambda call: completion("<|user|>again<|assistant|>and<|end|>", token_ids=[1, 2])
    (result,) = Rig([server]).run(states(1))
    user, assistant = codec().encode("<|user|>"), codec().encode("<|assistant|>")
    assert len(user) == len(assistant) == 1
    for call, turn in zip(server.calls, result.rollouts, strict=True):
        assert call.body["prompt"].count(user[0]) == call.body["prompt"].count(assistant[0]) == 1
        assert turn.prompt_ids.tolist() == call.body["prompt"]
        assert turn.response_ids.tolist() == [1, 2]


BRACES = r"\boxed{x} {problem} {curr_summary} {reasoning} {0} {} {{problem}} }{"


def test_braces_pass_unchanged(server: ScriptedServer) -> None:
    server.script = lambda call: completion(f"{call.number}: {BRACES}")
    Rig([server]).run([InferenceProblemState(problem(BRACES), settings(2))])
    assert all(BRACES in call.prompt for call in server.calls)
    assert f"0: {BRACES}" in server.calls[1].prompt
    assert f"1: {BRACES}" in server.calls[2].prompt


def test_appended_summaries_are_parted_by_a_blank_line_and_capped(server: ScriptedServer) -> None:
    server.script = lambda call: completion(f"S{call.number}")
    (state,) = states(1, settings(3, summarization_style="append"))
    Rig([server]).run([state])
    assert state.curr_summary == "S1\n\nS3\n\nS5"
    server.calls.clear()
    server.script = lambda call: completion(f"S{call.number}" + "x y" * 40)
    (state,) = states(1, settings(4, summarization_style="append", max_summary_tokens=64))
    Rig([server]).run([state])
    assert len(codec().encode(state.curr_summary)) <= 64 + 2
    assert state.curr_summary.startswith("S1")


def test_the_gold_answer_is_in_no_prompt(server: ScriptedServer) -> None:
    server.script = lambda call: completion("nothing")
    state = InferenceProblemState(problem(), settings())
    object.__setattr__(state.problem, "ground_truth", "GOLD")
    Rig([server]).run([state])
    assert len(server.calls) == 6
    assert not any("GOLD" in call.prompt for call in server.calls)


# --- think tags -------------------------------------------------------------------------------------------------------


def test_think_tags_open_reasoning_and_never_a_summary(server: ScriptedServer) -> None:
    server.script = lambda call: completion("T</think>A" if call.turn_type == REASONING else "S")
    (state,) = states(1, settings(2, use_think_tags=True))
    Rig([server]).run([state])
    for call in server.calls:
        assert codec().decode(call.body["prompt"]).rstrip().endswith("<think>") == (call.turn_type == REASONING)
    assert state.reasoning_string_complete_store == ["<think>T</think>A"] * 2
    assert state.reasoning_string_store == ["T"] * 2
    assert state.summarization_string_complete_store == ["S"] * 2
    server.script = lambda call: completion("<think>T</think>A")
    (state,) = states(1, settings(1, use_think_tags=True))
    Rig([server]).run([state])
    assert state.reasoning_string_complete_store == ["<think>T</think>A"]


def test_an_unclosed_thought_has_no_answer(server: ScriptedServer) -> None:
    server.script = lambda call: completion("<think>is it <answer>yes</answer>", "length")
    (result,) = Rig([server]).run(states(1, settings(1)))
    reasoning, summary = result.rollouts
    assert (reasoning.reward, reasoning.finished, reasoning.metadata["no_answer"]) == (0.0, False, True)
    assert "is it <answer>yes</answer>" in server.calls[1].prompt
    assert summary.metadata["empty_summary"]


# --- lengths ----------------------------------------------------------------------------------------------------------


def test_a_turn_at_its_limit_is_marked_and_the_trajectory_goes_on(server: ScriptedServer) -> None:
    server.script = lambda call: completion(f"PART{call.number}", "length")
    (result,) = Rig([server]).run(states(1, settings(2)))
    assert [turn.finished for turn in result.rollouts] == [False] * 4
    assert "PART0" in server.calls[1].prompt
    assert "PART1" in server.calls[2].prompt


def test_a_summary_at_its_limit_may_be_passed_over(server: ScriptedServer) -> None:
    server.script = lambda call: completion(f"S{call.number}", "length" if call.number == 3 else "stop")
    (state,) = states(1, settings(2, truncated_summary="keep_previous"))
    Rig([server]).run([state])
    assert state.curr_summary == "S1"
    assert state.summarization_rollout_store[1].metadata["kept_previous_summary"]


@pytest.mark.parametrize("empty", ["", " \n", "<think>only thoughts", "<think>t</think> "])
def test_an_empty_summary_leaves_the_one_before(server: ScriptedServer, empty: str) -> None:
    server.script = lambda call: completion(empty if call.number == 3 else f"S{call.number}")
    (state,) = states(1)
    (result,) = Rig([server]).run([state])
    assert table(result) == DOCUMENTED
    assert result.rollouts[3].metadata["empty_summary"]
    assert "KNOWING S1 GO" in server.calls[4].prompt
    assert state.curr_summary == "S5"


def test_prompts_that_leave_no_room_are_shortened(server: ScriptedServer) -> None:
    server.script = lambda call: completion(f"BEGIN{call.number} " + "word " * 400 + f" END{call.number}")
    (result,) = Rig([server], max_model_len=512).run(states(1, settings(2, max_reasoning_tokens=300)))
    assert table(result) == DOCUMENTED[:4]
    for call in server.calls:
        assert len(call.body["prompt"]) + call.body["max_tokens"] <= 512
        assert call.body["max_tokens"] >= 128
    for number in (1, 2, 3):
        assert result.rollouts[number].metadata["prompt_shortened"]
        assert f"BEGIN{number - 1}" in server.calls[number].prompt
        assert f"END{number - 1}" in server.calls[number].prompt
    assert "prompt_shortened" not in result.rollouts[0].metadata


def test_a_problem_that_fills_the_context_is_dropped_and_the_others_go_on(server: ScriptedServer) -> None:
    long = InferenceProblemState(problem("7 " * 600, 9), settings(1))
    nearly = InferenceProblemState(problem("7 " * 240, 8), settings(1))
    results = {one.trajectory_id: one for one in Rig([server], max_model_len=512).run([long, nearly, *states(1)])}
    assert results["test#9/attempt-0/0"].dropped == "prompt_too_long"
    assert not results["test#0/attempt-0/0"].dropped
    assert all(len(call.body["prompt"]) + call.body["max_tokens"] <= 512 for call in server.calls)


# --- weight versions --------------------------------------------------------------------------------------------------


def test_each_turn_has_the_versions_that_sampled_it() -> None:
    import asyncio

    from rc_fakes import MAX_MODEL_LEN, score

    from open_instruct.workflows.rc.turns import RCTurns
    from open_instruct.workflows.rc.types import Generation, TurnRequest

    spans = iter([[(3, 2)], [(3, 1), (4, 1)], [(4, 2)], [(5, 2)]])

    async def generate(_: TurnRequest) -> Generation:
        return Generation("ab", [5, 6], [-1.0, -1.0], "stop", next(spans))

    policies = {REASONING: generate_math_rollout, SUMMARIZATION: generate_math_rollout}
    (state,) = states(1, settings(2))
    turns = asyncio.run(RCTurns(generate, codec(), policies, score, MAX_MODEL_LEN).run(state))
    versions = [(turn.metadata["model_version"], turn.metadata["model_version_end"]) for turn in turns]
    assert versions == [(3, 3), (3, 4), (4, 4), (5, 5)]
