# ruff: noqa: F811 - fixtures are imported
"""What the driver is told while a step has nothing to train on, and of an evaluation that is complete."""

import json
from pathlib import Path
from typing import Any

from controller_stage import (  # noqa: F401 - fixtures
    HOPELESS,
    MIXED,
    NUM_PROMPTS,
    SOLVED,
    MakePlay,
    Play,
    Scores,
    datasets,
    ids,
    make_play,
    tokenizer,
)

from open_instruct.rollouts.batch_progress import RolloutNews


def all_alike(play: Play, scores: Scores = HOPELESS) -> list[str]:
    """The next prompts are answered so that there is nothing to learn. Returns their ids."""
    requests = play.receive(NUM_PROMPTS)
    producer = play.controller._producer
    num_before = producer.assembly.num_extended if producer.assembly else 0
    play.deliver(*(play.answer(request, scores) for request in requests))
    play.wait_for(lambda: producer.assembly is not None and producer.assembly.num_extended == num_before + 1)
    return ids(requests)


def left_out_of(news: RolloutNews, step: int) -> list[tuple[Any, Any]]:
    return [(row["prompt_id"], row["fate"]) for row in news.left_out.get(step, [])]


def test_prompts_of_a_step_with_nothing_to_train_on_are_reported_at_once_and_once(make_play: MakePlay) -> None:
    play = make_play().start()
    first = all_alike(play)
    news = play.controller.news()
    assert left_out_of(news, 1) == [(prompt_id, "zero_std") for prompt_id in first]
    assert {"prompt_id", "row", "index", "fate"} == news.left_out[1][0].keys()
    assert play.controller.news().left_out == {}
    requests = play.receive(NUM_PROMPTS)
    play.deliver(*(play.answer(request, MIXED) for request in requests))
    play.batch(1)
    assert [fate["prompt_id"] for fate in play.finish_step(1)] == ids(requests)
    assert play.controller.status()["prompts"]["dropped"] == {"zero_std": NUM_PROMPTS}


def test_prompts_of_a_usual_step_are_reported_when_it_is_trained(make_play: MakePlay) -> None:
    play = make_play().start()
    requests = play.receive(NUM_PROMPTS)
    play.deliver(play.answer(requests[0], HOPELESS), *(play.answer(request) for request in requests[1:]))
    play.batch(1)
    assert play.controller.news().left_out == {}
    assert [(fate["prompt_id"], fate["fate"]) for fate in play.finish_step(1)] == [
        (prompt_id, "zero_std" if prompt_id == ids(requests)[0] else "consumed") for prompt_id in ids(requests)
    ]


def test_the_end_of_a_run_reports_what_was_left_out_under_its_reason(make_play: MakePlay) -> None:
    play = make_play().start()
    requests = play.receive(NUM_PROMPTS)
    play.deliver(*(play.answer(request, HOPELESS) for request in requests[:2]))
    play.wait_for(lambda: play.controller.news().progress.num_back == 2)
    counts: Any = play.controller.close_ledger()
    assert counts["dropped"] == {"zero_std": 2, "run_ended": 2}
    assert [row["prompt_id"] for row in counts["left_out"][1]] == ids(requests[:2])


def test_the_first_responses_are_shown_and_a_warning_names_the_cause(make_play: MakePlay) -> None:
    play = make_play().start()
    prompts = all_alike(play)
    producer = play.controller._producer
    play.wait_for(lambda: producer.assembly is not None and producer.assembly.num_warnings == 1)
    news = play.controller.news()
    (shown,) = news.samples
    assert shown.startswith(f"2 of the 4 responses to {prompts[0]}, ")
    assert f"sampled v0  │ {prompts[0]}/0 <answer>no</answer>" in shown
    (warning,) = news.warnings
    headline, *lines = warning.splitlines()
    assert headline.startswith("step 1: in each of 4 groups all responses scored alike (mean score 0)")
    assert " 0 of 16 responses scored above 0 by reasoning_gym. reasoning_gym read an answer in 16 of 16 " in headline
    assert "such as 'no' for " in headline
    assert lines[0].startswith(f"1 of the 4 responses to {prompts[-1]}, ")
    assert "compares the last <answer>…</answer> with its own answer" in warning
    for _ in range(3):  # the next at 16 groups
        assert not play.controller.news().warnings
        all_alike(play)
    play.wait_for(lambda: producer.assembly is not None and producer.assembly.num_warnings == 2)
    news = play.controller.news()
    (second,) = news.warnings
    assert "in each of 16 groups" in second
    assert " 0 of 64 responses scored above 0 by reasoning_gym." in second
    assert not news.samples


def test_right_answers_that_teach_nothing_are_counted_as_such(make_play: MakePlay) -> None:
    play = make_play().start()
    all_alike(play, SOLVED)
    producer = play.controller._producer
    play.wait_for(lambda: producer.assembly is not None and producer.assembly.num_warnings == 1)
    (warning,) = play.controller.news().warnings
    assert "16 of 16 responses scored above 0 by reasoning_gym. Every response is right" in warning
    assert play.controller.news().progress.brief.startswith(
        "4 of 4 groups are back, 0 can be trained on: mean score 1, all 0: 0, all 1: 4"
    )


def test_traces_of_groups_that_are_left_out_are_there_before_their_step_is_trained(
    make_play: MakePlay, tmp_path: Path
) -> None:
    play = make_play(record=True, save_traces=True, output_dir=str(tmp_path), response_length=64)
    left_behind = tmp_path / "transcripts" / "step_000001.txt"  # of a run that was killed
    left_behind.parent.mkdir()
    left_behind.write_text("old")
    play.start()
    prompts = all_alike(play)
    play.wait_for(lambda: len(list((tmp_path / "rollouts").glob("*_rollouts_000001.jsonl"))) == 1)
    (rollouts,) = (tmp_path / "rollouts").glob("*_rollouts_000001.jsonl")
    play.wait_for(lambda: left_behind.read_text() != "old")
    records = [json.loads(line) for line in rollouts.read_text().splitlines()]
    assert {(record["outcome"], record["reward"], record["advantage"]) for record in records} == {
        ("zero_std", 0.0, 0.0)
    }
    text = left_behind.read_text()
    assert text.count("────") == 4 * NUM_PROMPTS
    assert f"──── {prompts[0]}, sample 0, " in text
    assert "reward 0, left out (zero_std), stop" in text
    assert f"sampled v0  │ {prompts[0]}/0 <answer>no</answer>" in text
    assert "trained v0" not in text
    assert text.count("\nground truth│ ") == 4 * NUM_PROMPTS

    requests = play.receive(NUM_PROMPTS)
    play.deliver(*(play.answer(request) for request in requests))
    play.batch(1)
    play.finish_step(1)
    play.controller._record.flush()
    records = [json.loads(line) for line in rollouts.read_text().splitlines()]
    assert [record["sample_idx"] for record in records] == list(range(8 * NUM_PROMPTS))
    assert [record["prompt_idx"] for record in records] == [number // 4 for number in range(8 * NUM_PROMPTS)]
    assert [record["outcome"] for record in records] == ["zero_std"] * 16 + ["consumed"] * 16
    text = left_behind.read_text()
    assert text.count("────") == 8 * NUM_PROMPTS
    assert f"trained v0  │ {requests[0].prompt_id}/0 <answer>" in text


def test_news_say_when_an_evaluation_is_complete(make_play: MakePlay) -> None:
    play = make_play()
    play.controller.start_evaluation(0)
    play.start()
    requests = play.receive(3 + NUM_PROMPTS)[:3]
    news = play.controller.news()
    assert not news.evaluation_is_complete
    assert "evaluation of version 0: 0 of 3 done" in news.progress.brief
    play.deliver(*(play.answer(request, [1]) for request in requests))
    play.wait_for(lambda: play.controller.news().evaluation_is_complete)
    play.controller.eval(0)  # returns at once
    assert play.controller.take_evaluation()["eval/pass_at_1"] == 1.0
    assert not play.controller.news().evaluation_is_complete


def test_of_the_prompts_that_are_waited_for_the_first_are_named_and_all_counted(make_play: MakePlay) -> None:
    """There may be thousands, and the driver asks every second."""
    play = make_play(async_steps=2).start()
    requests = play.receive(3 * NUM_PROMPTS)
    progress = play.controller.news().progress
    assert progress.num_waited_for == 12
    assert progress.first_waited_for == [f"train-{number} (version 0)" for number in range(8)]
    play.deliver(play.answer(requests[1]), play.answer(requests[11]))
    play.wait_for(lambda: play.controller.news().progress.num_waited_for == 10)
    named = play.controller.news().progress.first_waited_for
    assert named == [f"train-{number} (version 0)" for number in (0, 2, 3, 4, 5, 6, 7, 8)]
