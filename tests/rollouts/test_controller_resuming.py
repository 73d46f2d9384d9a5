# ruff: noqa: F811 - fixtures are imported
"""The controller goes on from a saved state."""

import json
import time
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from controller_stage import (  # noqa: F401 - fixtures
    HOPELESS,
    NUM_PROMPTS,
    NUM_STEPS,
    QUIET_S,
    JudgesInThisProcess,
    MakePlay,
    Play,
    all_samples_of,
    content_of,
    datasets,
    identities,
    make_play,
    rows_of_two_verifiers,
    step_of,
    tokenizer,
)

from open_instruct.data.prompt_dataset import PromptDataset
from open_instruct.rollouts import controller as rollout
from open_instruct.rollouts import prompt_feeder
from open_instruct.rollouts.prompt_ledger import CONSUMED, ZERO_STD
from open_instruct.rollouts.rollout_state import read_state, write_state
from open_instruct.scored_groups import ScoredGroup


def save_without_groups(play: Play, path: Path) -> None:
    """A state as it is when no group is finished: all that is open has to be generated again."""
    play.controller.save(0, str(path))
    state, _ = read_state(path)
    write_state(path, state, [])


@pytest.mark.parametrize("async_steps", [0, 1, 2])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(make_play: MakePlay, async_steps: int, tmp_path: Path) -> None:
    unbroken = make_play(async_steps=async_steps).start()
    batches = unbroken.run(1, NUM_STEPS)

    killed = make_play(async_steps=async_steps).start()
    killed.run(1, 2)
    killed.receive_admitted()
    save_without_groups(killed, tmp_path / "state.npz")
    killed.controller.stop()
    open_prompts = [request for request in killed.received if step_of(request) > 2]

    resumed = make_play(async_steps=async_steps)
    resumed.controller.load(0, str(tmp_path / "state.npz"))
    resumed.start(2)
    issued_again = resumed.receive_admitted()
    assert identities(issued_again) == identities(open_prompts)
    resumed.deliver(*(resumed.answer(request) for request in issued_again))
    for training_step, expected in zip((3, 4), batches[2:], strict=True):
        assert content_of(resumed.batch(training_step)) == content_of(expected)
        resumed.finish_step(training_step)
        resumed.deliver(*(resumed.answer(request) for request in resumed.receive_admitted()))
    assert resumed.no_more_comes()

    before = [request for request in killed.received if step_of(request) <= 2]
    assert identities(before + resumed.received) == identities(unbroken.received)
    counts = resumed.controller.status()["prompts"]
    assert counts.pop("reissued") == len(open_prompts)
    assert counts == {"issued": 16, "consumed": 16, "dropped": {}, "open": 0}


def test_a_checkpoint_amid_the_issue_of_a_step_resumes_too(
    make_play: MakePlay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(prompt_feeder, "bundles_per_step", lambda _: NUM_PROMPTS)  # one prompt a bundle
    unbroken = make_play(async_steps=1).start()
    unbroken.run(1, NUM_STEPS)
    killed = make_play(async_steps=1, room=1).start()
    time.sleep(QUIET_S)
    killed.controller.save(0, str(tmp_path / "state.npz"))
    assert 0 < read_state(tmp_path / "state.npz")[0]["next_issue_number"] < NUM_PROMPTS
    resumed = make_play(async_steps=1)
    resumed.controller.load(0, str(tmp_path / "state.npz"))
    resumed.start()
    resumed.run(1, NUM_STEPS)
    assert identities(resumed.received) == identities(unbroken.received)


def test_a_prepared_batch_that_was_not_trained_is_made_anew(make_play: MakePlay, tmp_path: Path) -> None:
    killed = make_play(async_steps=1).start()
    requests = killed.receive(2 * NUM_PROMPTS)
    killed.deliver(*(killed.answer(request) for request in requests))
    killed.batch(1)
    killed.batch(2)
    killed.finish_step(1)
    save_without_groups(killed, tmp_path / "state.npz")
    resumed = make_play(async_steps=1)
    resumed.controller.load(0, str(tmp_path / "state.npz"))
    resumed.start(1)
    again = resumed.receive_admitted()
    assert identities(again[:NUM_PROMPTS]) == identities(requests[NUM_PROMPTS:])
    assert {step_of(request) for request in again[NUM_PROMPTS:]} <= {3}


def num_bytes(groups: Iterable[ScoredGroup]) -> int:
    """The memory of the arrays of all samples; an array that repeats one number takes none."""
    arrays = [
        array
        for group in groups
        for sample in group.samples
        for array in (sample.prompt_ids, sample.response_ids, sample.logprobs, sample.loss_mask)
        if array is not None and any(array.strides)
    ]
    return sum(array.nbytes for array in {id(array): array for array in arrays}.values())


def play_until_something_teaches(play: Play, num_rounds: int) -> dict[str, Any]:
    """Rounds in which all answers are wrong, then one that teaches. Returns the metrics that do not depend on clocks."""
    for _ in range(num_rounds):
        play.deliver(*(play.answer(request, HOPELESS) for request in play.receive(NUM_PROMPTS)))
    play.deliver(*map(play.answer, play.receive(NUM_PROMPTS)))
    metrics = play.batch(1).metrics
    clocks = ("time", "latency", "agent_loop/", "tokens_per_second")
    return {name: value for name, value in metrics.items() if not any(clock in name for clock in clocks)}


@pytest.mark.parametrize("options", [{}, {"apply_r1_style_format_reward": True, "additive_format_reward": True}])
def test_step_that_finds_nothing_to_train_on_forgets_tokens(
    make_play: MakePlay, tmp_path: Path, options: dict[str, Any]
) -> None:
    """In memory and in checkpoints it holds the tokens of as many groups as a step has, and its metrics stay the same."""
    unbroken = make_play(**options).start()
    expected = play_until_something_teaches(unbroken, 6)

    killed = make_play(**options).start()
    producer, sizes, files = killed.controller._producer, [], []
    for number in range(1, 5):
        killed.deliver(*(killed.answer(request, HOPELESS) for request in killed.receive(NUM_PROMPTS)))
        killed.wait_for(lambda number=number: len(producer.taken.get(1, ())) == number * NUM_PROMPTS)
        with killed.controller._threads.lock:
            sizes.append(num_bytes(producer.taken[1]))
        path = tmp_path / f"state_{number}.npz"
        killed.controller.save(0, str(path))
        files.append(sum(np.load(path)[name].nbytes for name in ("prompts", "tokens", "logprobs", "masks")))
    assert max(sizes) < 1.5 * sizes[0]
    assert max(files) < 1.5 * files[0]
    killed.controller.stop()

    resumed = make_play(**options)
    resumed.controller.load(0, str(tmp_path / "state_4.npz"))
    resumed.start()
    again = play_until_something_teaches(resumed, 2)
    assert again == expected
    assert again["all_groups/total_prompts"] == 7 * NUM_PROMPTS
    fates = [fate["fate"] for fate in resumed.finish_step(1)]
    assert (fates.count(ZERO_STD), fates.count(CONSUMED)) == (6 * NUM_PROMPTS, NUM_PROMPTS)


def test_traces_from_before_a_resume_stay_though_their_tokens_are_forgotten(
    make_play: MakePlay, tmp_path: Path
) -> None:
    """Each prompt is there once, those too that were written after the checkpoint and come again."""
    options = {"record": True, "save_traces": True, "output_dir": str(tmp_path), "response_length": 64}
    killed = make_play(**options).start()
    producer = killed.controller._producer
    for number in range(1, 5):
        killed.deliver(*(killed.answer(request, HOPELESS) for request in killed.receive(NUM_PROMPTS)))
        killed.wait_for(lambda number=number: len(producer.taken.get(1, ())) == number * NUM_PROMPTS)
        if number == 3:
            killed.controller.save(0, str(tmp_path / "state.npz"))
    transcripts = tmp_path / "transcripts" / "step_000001.txt"
    killed.wait_for(lambda: transcripts.exists() and transcripts.read_text().count("────") == 16 * NUM_PROMPTS)
    killed.controller.stop()

    resumed = make_play(**options)
    resumed.controller.load(0, str(tmp_path / "state.npz"))
    resumed.start()
    play_until_something_teaches(resumed, 1)
    resumed.finish_step(1)
    resumed.controller._record.flush()
    assert not any(
        "Two of them" in warning for warning in resumed.controller.news().warnings
    )  # their tokens are forgotten
    ids = [f"train-{number}" for number in range(5 * NUM_PROMPTS)]
    (rollouts,) = (tmp_path / "rollouts").glob("*_rollouts_000001.jsonl")
    records = [json.loads(line) for line in rollouts.read_text().splitlines()]
    assert [record["prompt_id"] for record in records] == [prompt_id for prompt_id in ids for _ in range(4)]
    assert [record["sample_idx"] for record in records] == list(range(len(records)))
    assert [record["prompt_idx"] for record in records] == [number // 4 for number in range(len(records))]
    assert [record["outcome"] for record in records] == ["zero_std"] * 64 + ["consumed"] * 16
    headlines = [line for line in transcripts.read_text().splitlines() if line.startswith("────")]
    assert [tuple(line.split(", ")[:2]) for line in headlines] == [
        (f"──── {prompt_id}", f"sample {number}") for prompt_id in ids for number in range(4)
    ]
    assert "\n\n\n" not in transcripts.read_text()
    assert transcripts.read_text().count("<answer>no</answer>") == 64 + 8  # also two in each group that teaches


def test_finished_groups_are_saved_and_not_generated_again(make_play: MakePlay, tmp_path: Path) -> None:
    unbroken = make_play(async_steps=1).start()
    expected = unbroken.run(1, NUM_STEPS)

    killed = make_play(async_steps=1).start()
    killed.run(1, 1)
    killed.batch(2)  # its groups have come too, and are not trained on
    requests = killed.receive_admitted()  # of step 3
    killed.deliver(killed.answer(requests[0]))  # waits for the rest of its step
    killed.wait_for(lambda: bool(killed.controller._producer.taken.get(3)))
    killed.controller.save(1, str(tmp_path / "state.npz"))
    killed.controller.stop()

    resumed = make_play(async_steps=1)
    resumed.controller.load(1, str(tmp_path / "state.npz"))
    resumed.start(1)
    issued_again = resumed.receive(NUM_PROMPTS - 1)
    assert identities(issued_again) == identities(requests[1:])
    assert content_of(resumed.batch(2)) == content_of(expected[1])
    resumed.deliver(*(resumed.answer(request) for request in issued_again))
    assert content_of(resumed.batch(3)) == content_of(expected[2])
    assert resumed.no_more_comes()


def test_finished_groups_come_back_with_what_each_verifier_said_and_cost(
    make_play: MakePlay,
    rows_of_two_verifiers: PromptDataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollout, "VerifierPool", JudgesInThisProcess)
    killed, resumed = (make_play(async_steps=1, train=rows_of_two_verifiers) for _ in range(2))
    killed.start().run(1, 1)
    before = killed.batch(2).metrics
    killed.controller.save(1, str(tmp_path / "state.npz"))
    resumed.controller.load(1, str(tmp_path / "state.npz"))
    resumed.start(1)
    after = resumed.batch(2).metrics
    names = {name for name in before if name.startswith(("objective/", "agent_loop/compute_score/"))}
    assert names >= {"objective/gsm8k_reward", "objective/max_length_reward", "objective/verifier_cost"}
    assert {name: after[name] for name in names} == {name: before[name] for name in names}
    assert not [name for name in after if " + " in name]


def test_a_group_that_is_being_scored_is_saved_too(
    make_play: MakePlay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = make_play(output_dir=str(tmp_path)).start()
    requests = killed.receive_admitted()
    monkeypatch.setattr(killed.controller._scoring.verifiers, "submit", lambda *_args: Future())  # never done
    killed.deliver(killed.answer(requests[0]))
    killed.wait_for(lambda: requests[0].prompt_id in killed.controller._preparation.being_scored)
    killed.controller.save(0)
    killed.controller.stop()

    resumed = make_play(output_dir=str(tmp_path))
    resumed.controller.load(0)
    resumed.start()
    issued_again = resumed.receive(NUM_PROMPTS - 1)
    assert identities(issued_again) == identities(requests[1:])
    resumed.deliver(*(resumed.answer(request) for request in issued_again))
    assert resumed.prompts_in(resumed.batch(1)) == all_samples_of(*requests)


def test_a_state_that_was_never_saved_is_told(make_play: MakePlay, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such rollout state"):
        make_play(output_dir=str(tmp_path)).controller.load(7)


def test_an_evaluation_does_not_wait_for_prompts_of_before(make_play: MakePlay, tmp_path: Path) -> None:
    killed = make_play().start()
    killed.run(1, 1)
    killed.receive_admitted()
    resumed = make_play()
    killed.controller.save(1, str(tmp_path / "state.npz"))
    resumed.controller.load(1, str(tmp_path / "state.npz"))
    resumed.controller.start_evaluation(1)
    resumed.start(1)
    assert [request.is_eval for request in resumed.receive(3 + NUM_PROMPTS)] == [True] * 3 + [False] * NUM_PROMPTS
