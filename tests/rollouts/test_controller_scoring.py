# ruff: noqa: F811 - fixtures are imported
"""What the controller makes of scored groups: some teach nothing, a teacher looks at others, rubrics change."""

import json
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
from conftest import TINY_MODEL
from controller_stage import (  # noqa: F401 - fixtures
    HOPELESS,
    MIXED,
    NUM_PROMPTS,
    SOLVED,
    TIMEOUT_S,
    MakePlay,
    Play,
    VerifiersInThisProcess,
    all_samples_of,
    content_of,
    datasets,
    identities,
    load_rows,
    make_play,
    tokenizer,
)
from group_fakes import ended_by
from judges import JudgeServer
from played_teachers import TOP_K, PlayedTeacher, said_of

from open_instruct.data.prompt_dataset import PromptDataset
from open_instruct.data_types import GenerationResult
from open_instruct.rollouts import controller as rollout
from open_instruct.rollouts.prompt_ledger import CONSUMED, MASKED, ZERO_STD
from open_instruct.verifiers.scoring_processes import Scored

# --- groups that teach nothing ----------------------------------------------------------------------------------------


def test_groups_that_scored_alike_are_left_out(make_play: MakePlay) -> None:
    play = make_play().start()
    requests = play.receive(NUM_PROMPTS)
    scores = [MIXED, SOLVED, MIXED, HOPELESS]
    play.deliver(*(play.answer(request, own) for request, own in zip(requests, scores, strict=True)))
    batch = play.batch(1)
    assert play.prompts_in(batch) == all_samples_of(requests[0], requests[2])
    assert batch.metrics["batch/filtered_prompts"] == 2
    assert batch.metrics["scores"] == 5.0  # of all that was generated
    fates = play.finish_step(1)
    assert [fate["fate"] for fate in fates] == [CONSUMED, ZERO_STD, CONSUMED, ZERO_STD]
    assert [(fate["prompt_id"], fate["index"]) for fate in fates] == [(r.prompt_id, r.index) for r in requests]
    assert [fate["row"] for fate in fates] == [play.datasets[False].places[r.index] for r in requests]


def test_groups_that_scored_alike_may_stay(make_play: MakePlay) -> None:
    play = make_play(filter_zero_std_samples=False).start()
    requests = play.receive(NUM_PROMPTS)
    play.deliver(*(play.answer(request, SOLVED) for request in requests))
    assert play.prompts_in(play.batch(1)) == all_samples_of(*requests)
    assert play.controller.status()["prompts"]["issued"] == NUM_PROMPTS


@pytest.mark.parametrize("num_prompts", [1, 4])
def test_a_step_without_a_useful_group_gets_new_prompts(
    make_play: MakePlay, num_prompts: int, caplog: pytest.LogCaptureFixture
) -> None:
    play = make_play(num_unique_prompts_rollout=num_prompts, total_episodes=4 * num_prompts).start()
    for _ in range(2):
        play.deliver(*(play.answer(request, SOLVED) for request in play.receive(num_prompts)))
    last = play.receive(num_prompts)
    assert {request.issue_version for request in last} == {0}
    play.deliver(*(play.answer(request) for request in last))
    assert play.prompts_in(play.batch(1)) == all_samples_of(*last)
    groups = "1 group" if num_prompts == 1 else f"each of {num_prompts} groups"
    assert f"in {groups} all responses scored alike (mean score 1)" in caplog.text
    play.finish_step(1)
    assert play.no_more_comes()
    assert play.controller.status()["prompts"] == {
        "issued": 3 * num_prompts,
        "consumed": num_prompts,
        "dropped": {ZERO_STD: 2 * num_prompts},
        "reissued": 0,
        "open": 0,
    }


def test_active_sampling_replaces_what_is_left_out(make_play: MakePlay) -> None:
    play = make_play(active_sampling=True).start()
    first = play.receive(NUM_PROMPTS)
    scores = [MIXED, SOLVED, MIXED, HOPELESS]
    play.deliver(*(play.answer(request, own) for request, own in zip(first, scores, strict=True)))
    second = play.receive(2)
    assert "step 1" in play.nothing_is_ready()
    play.deliver(play.answer(second[0], SOLVED), play.answer(second[1]))
    [last] = play.receive(1)
    play.deliver(play.answer(last))
    batch = play.batch(1)
    assert play.prompts_in(batch) == all_samples_of(first[0], first[2], second[1], last)
    assert batch.metrics["real_batch_size_ratio"] == 1
    assert batch.metrics["epoch"] == (NUM_PROMPTS + 3) / len(play.datasets[False])
    assert len(play.finish_step(1)) == NUM_PROMPTS + 3
    play.deliver(*map(play.answer, play.receive(NUM_PROMPTS)))
    assert play.batch(2).metrics["epoch"] == (2 * NUM_PROMPTS + 3) / len(play.datasets[False])


def test_prompts_that_were_solved_are_not_sampled_again(
    make_play: MakePlay, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also after a resume, and the passes over the data go on as if the solved rows had never been there."""
    options = {
        "no_resampling_pass_rate": 1.0,
        "filter_zero_std_samples": False,
        "total_episodes": 4 * NUM_PROMPTS * 100,
    }
    play = make_play(**options).start()
    num_rows = len(play.datasets[False])
    solved: set[int] = set()
    for step in range(1, num_rows // NUM_PROMPTS + 1):
        requests = play.receive(NUM_PROMPTS)
        solved |= {request.index for request in requests[:2]}
        play.deliver(*(play.answer(request, SOLVED) for request in requests[:2]), *map(play.answer, requests[2:]))
        play.batch(step)
        play.finish_step(step)
    play.controller.save(0, str(tmp_path / "state.npz"))
    again = make_play(**options)
    again.controller.load(0, str(tmp_path / "state.npz"))
    last = num_rows // NUM_PROMPTS
    for one in (play, again.start(last)):
        requests = one.receive(NUM_PROMPTS)
        assert not solved & {request.index for request in requests}
        one.deliver(*(one.answer(request, SOLVED) for request in requests))
        one.batch(last + 1)
    assert identities(play.received[-NUM_PROMPTS:]) == identities(again.received)


def test_prompts_are_solved_by_rewards_with_their_penalties(make_play: MakePlay) -> None:
    """All answers are right, and none has the form without which a right answer is worth nothing."""
    options = {"no_resampling_pass_rate": 0.5, "filter_zero_std_samples": False, "total_episodes": 6400}
    for shaping, num_solved in (({}, NUM_PROMPTS), ({"apply_r1_style_format_reward": True}, 0)):
        play = make_play(**options, **shaping).start()
        play.deliver(*(play.answer(request, SOLVED) for request in play.receive(NUM_PROMPTS)))
        assert play.batch(1).metrics["batch/no_resampled_prompts"] == num_solved
        assert len(play.controller._requests.solved_rows) == num_solved


# --- a teacher --------------------------------------------------------------------------------------------------------

WITH_TEACHER: dict[str, Any] = {"teacher_model_name_or_path": str(TINY_MODEL), "distillation_top_k": TOP_K}


def test_what_the_teacher_says_lies_on_the_tokens_it_is_about(make_play: MakePlay) -> None:
    play = make_play(teacher=PlayedTeacher(), **WITH_TEACHER).start()
    [batch] = play.run(1, 1)
    micro_batches = [micro for mini in cast("Any", batch.rank_data)[0] for micro in mini.micro_batches]
    assert sum(micro.response_masks.sum() for micro in micro_batches) == batch.num_global_tokens > 0
    for micro in micro_batches:
        mask = micro.response_masks
        expected = said_of(micro.query_responses[mask])
        np.testing.assert_array_equal(micro.teacher_top_ids[mask], expected.top_ids)
        np.testing.assert_array_equal(micro.teacher_top_logprobs[mask], expected.top_logprobs)
        np.testing.assert_array_equal(micro.teacher_logprobs[mask], expected.logprobs)
        assert np.isneginf(micro.teacher_top_logprobs[~mask]).all()


@pytest.mark.parametrize("use_task_rewards", [False, True])
def test_with_a_teacher_every_group_is_trained_on(make_play: MakePlay, *, use_task_rewards: bool) -> None:
    """Groups whose answers are all right or all wrong learn from the teacher; without task rewards, all do so alone."""
    play = make_play(teacher=PlayedTeacher(), use_task_rewards=use_task_rewards, **WITH_TEACHER).start()
    requests = play.receive_admitted()
    scores = [MIXED, SOLVED, HOPELESS, MIXED]
    play.deliver(*(play.answer(request, one) for request, one in zip(requests, scores, strict=True)))
    batch = play.batch(1)
    assert play.prompts_in(batch) == all_samples_of(*requests)
    assert batch.metrics["objective/verifiable_correct_rate"] == 0.5
    assert (batch.metrics["val/advantages_max"] > 0) is use_task_rewards
    assert {fate["fate"] for fate in play.finish_step(1)} == {CONSUMED}


def test_groups_at_the_teacher_and_groups_that_wait_are_saved_and_it_is_asked_again(
    make_play: MakePlay, tmp_path: Path
) -> None:
    expected = content_of(make_play(teacher=PlayedTeacher(), **WITH_TEACHER).start().run(1, 1)[0])

    teacher = PlayedTeacher()
    killed = make_play(teacher=teacher, **WITH_TEACHER).start()
    requests = killed.receive_admitted()
    killed.deliver(killed.answer(requests[0]))
    killed.wait_for(lambda: bool(killed.controller._producer.taken.get(1)))
    teacher.answers = False
    killed.deliver(killed.answer(requests[1]))
    killed.wait_for(lambda: "(1 of them by the teacher)" in killed.controller.describe_progress())
    killed.controller.save(0, str(tmp_path / "state.npz"))
    killed.controller.stop()

    resumed = make_play(teacher=PlayedTeacher(), **WITH_TEACHER)
    resumed.controller.load(0, str(tmp_path / "state.npz"))
    resumed.start()
    issued_again = resumed.receive(NUM_PROMPTS - 2)
    assert identities(issued_again) == identities(requests[2:])
    resumed.deliver(*(resumed.answer(request) for request in issued_again))
    assert content_of(resumed.batch(1)) == expected


def cut_off(result: GenerationResult) -> GenerationResult:
    """The result with every response at its length limit."""
    return ended_by(result, *["length"] * len(result.samples))


@pytest.mark.parametrize("streaming", [False, True])
def test_step_whose_groups_are_all_masked_gets_new_prompts(
    make_play: MakePlay, streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With momentum an optimizer step over no token at all would still move the weights."""
    play = make_play(mask_truncated_completions=True, streaming=streaming).start()
    first = play.receive(NUM_PROMPTS)
    scores = [MIXED, SOLVED, MIXED, MIXED]
    play.deliver(*(cut_off(play.answer(request, own)) for request, own in zip(first, scores, strict=True)))
    more = play.receive(NUM_PROMPTS)  # no batch has come: see the numbers that `partial_batches` checks
    assert "step 1: no token of its 4 groups may be trained on" in caplog.text
    assert "in 1 of them all responses scored alike" in caplog.text
    assert "in 3 every response was cut off" in caplog.text
    play.deliver(cut_off(play.answer(more[0])), *(play.answer(request) for request in more[1:]))
    partial_batches = play.partial_batches(1)
    assert partial_batches[-1].num_global_tokens > 0
    assert partial_batches[-1].metrics["batch/filtered_prompts"] == NUM_PROMPTS + 1
    assert partial_batches[-1].metrics["real_batch_size_ratio"] == 0.75
    assert sorted(one for partial_batch in partial_batches for one in play.prompts_in(partial_batch)) == all_samples_of(
        *more[1:]
    )
    fates = [fate["fate"] for fate in play.finish_step(1)]
    assert fates == [MASKED, ZERO_STD, MASKED, MASKED, MASKED, CONSUMED, CONSUMED, CONSUMED]


# --- rubrics that change ----------------------------------------------------------------------------------------------


class RubricsInThisProcess(VerifiersInThisProcess):
    """Say that `<answer>yes</answer>` is right, and remember by which rubric."""

    labels: ClassVar[list[Any]] = []

    def submit(
        self, dataset: str, truth: object, token_ids: list[list[int]], texts: list[str], queries: list[str]
    ) -> Future[list[Scored]]:
        assert dataset == "rubric"
        self.labels.append(truth)
        scored: Future[list[Scored]] = Future()
        scored.set_result([Scored(float("yes" in text)) for text in texts])
        return scored


def test_criteria_that_a_step_finds_count_later_and_after_a_resume(
    make_play: MakePlay,
    datasets: tuple[PromptDataset, PromptDataset],
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    del make_play  # its patches are needed
    label = {"query": "why", "rubrics": [{"description": "is kind"}], "answer": "yes"}
    row = {"ground_truth": json.dumps(label), "dataset": "rubric"}
    rows = [{"messages": [{"role": "user", "content": f"why {number}"}], **row} for number in range(10)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = load_rows(str(tmp_path / "rows.jsonl"), tokenizer, known_verifiers=["rubric"], check_label=None)
    monkeypatch.setattr(rollout, "VerifierPool", RubricsInThisProcess)
    monkeypatch.setattr(RubricsInThisProcess, "labels", [])
    server = JudgeServer()
    server.answer = lambda body, number: '{"positive_rubrics": [{"description": "gives an example"}]}'
    options = {"apply_evolving_rubric_reward": True, "llm_judge_model": "a-judge", "llm_judge_api_base": server.url}
    play, resumed = (Play(data, datasets[1], tokenizer, room=0, ready_steps=0, **options) for _ in range(2))
    try:
        play.start().run(1, 1)
        rubrics = play.controller._scoring.rubrics
        assert rubrics is not None
        deadline = time.monotonic() + TIMEOUT_S
        while not rubrics.state_dict():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert "is kind" in server.bodies[0]["messages"][0]["content"]
        assert "\nyes\n" in server.bodies[0]["messages"][0]["content"]  # the part that the rubric's judge sees
        [batch] = play.run(2, 2)
        first, second = RubricsInThisProcess.labels[:NUM_PROMPTS], RubricsInThisProcess.labels[NUM_PROMPTS:]
        assert first == [row["ground_truth"]] * NUM_PROMPTS
        found = [[one["description"] for one in read["rubrics"]] for read in second]
        assert found == [["is kind", "gives an example"]] * NUM_PROMPTS
        assert batch.metrics["evolving_rubrics/total_active"] == 1
        play.controller.save(2, str(tmp_path / "state.npz"))
        resumed.controller.load(2, str(tmp_path / "state.npz"))
        again = resumed.controller._scoring.rubrics
        assert again is not None
        assert again.state_dict() == rubrics.state_dict()
    finally:
        for one in (play, resumed):
            one.controller.stop()
        server.close()
