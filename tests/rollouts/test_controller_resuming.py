# ruff: noqa: F811 - fixtures are imported
"""The controller goes on from a saved state."""

import time
from concurrent.futures import Future
from pathlib import Path

import pytest
from controller_stage import (  # noqa: F401 - fixtures
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
from open_instruct.rollouts.rollout_state import read_state, write_state


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
