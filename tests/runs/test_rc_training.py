"""Runs with `--rollout_workflow rc`, whole: real engines, real learners."""

import json
from pathlib import Path
from typing import Any

import pytest
from whole_runs import EVALUATION, Process, assert_ledger_balances, command, rows

ROOT = Path(__file__).parents[2]
RC: dict[str, object] = {
    "rollout_workflow": "rc",
    "rc_reasoning_prompt_template": "{problem}{curr_summary}",
    "rc_summarization_prompt_template": "{problem}{existing_summary}{reasoning}",
    "rc_max_summary_tokens": 16,
    "rc_num_reasoning_steps": 2,
    "vllm_enable_prefix_caching": True,
    "async_steps": 0,
}
LONG_BEGINNING = "Work on the sum below, a part at a time: 1 + 2 = 3. " * 4
"""More than a block of the engine's cache (32 tokens on CPU): shorter beginnings are never reused."""


def finish(output_dir: Path, **options: object) -> list[dict[str, Any]]:
    """Rows of the metrics of a run that ends well."""
    code, output = Process(command(output_dir, **(RC | options))).wait()
    assert code == 0, output[-3000:]
    assert_ledger_balances(output_dir)
    return rows(output_dir / "metrics.jsonl")


@pytest.mark.extended
def test_states_are_trained_with_the_prompts_that_the_engine_had(tmp_path: Path) -> None:
    """Whole turns with a new prompt each: engine and learner agree on every token, also after updates, with cached prefixes."""
    metrics = finish(
        tmp_path,
        rc_reasoning_prompt_template=LONG_BEGINNING + "{problem}{curr_summary}",
        max_prompt_token_length=300,
        pack_length=512,
        filter_zero_std_samples=False,
        weight_decay=20.0,  # moves the weights whatever the rewards are
        rc_buffer_size=64,
        rc_max_state_age=2,
        dataset_mixer_list=[
            "reasoning_gym/chain_sum?min_terms=2&max_terms=2&min_digits=2&max_digits=2&size=8&seed=7",
            "1.0",
        ],
        dataset_mixer_eval_list=EVALUATION,
        local_eval_every=4,
        save_traces=True,
    )
    assert len(metrics) == 4
    assert max(row["debug/vllm_vs_local_logprob_diff_max"] for row in metrics) < 1e-3
    assert {"rc/score_reasoning_1", "rc/score_reasoning_2"} <= metrics[0].keys()
    assert metrics[-1]["rc/states_taken"] > 0  # each of 8 problems came at least twice
    assert max(row.get("rc/state_age_max", 0) for row in metrics) <= 2
    evaluated = metrics[-1]
    assert evaluated["eval/pass_at_1"] == evaluated["eval/rc/accuracy_cycle_2"]
    assert "eval/rc/accuracy_cycle_3" not in evaluated
    traces = [json.loads(line) for line in (tmp_path / "samples" / "step_000001.jsonl").read_text().splitlines()]
    assert {one["meta_info"]["turn_type"] for one in traces} == {"reasoning"}
    assert {one["meta_info"]["turn_number"] for one in traces} <= {1, 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra", [{}, {"vllm_num_engines": 2, "streaming": True, "async_steps": 2}], ids=["whole", "streaming"]
)
def test_turns_with_their_summaries(tmp_path: Path, extra: dict[str, object]) -> None:
    metrics = finish(
        tmp_path,
        rc_train_on="turns",
        rc_summary_reward="downstream_mean",
        rc_turn_weights=["reasoning:2=2.0", "summarization=0.5"],
        beta=0.05,
        load_ref_policy=True,
        **extra,
    )
    assert metrics[-1]["rc/tokens_on_the_way"] == 0  # every turn is trained on
    assert {"rc/score_summarization_1", "rc/score_reasoning_2"} <= metrics[-1].keys()
    if not extra:
        assert max(row["debug/vllm_vs_local_logprob_diff_max"] for row in metrics) < 1e-3


@pytest.mark.slow
def test_the_demo_learns_to_use_its_turns(tmp_path: Path) -> None:
    words = ["bash", str(ROOT / "scripts/train/debug/cpu_rc.sh"), "--output_dir", str(tmp_path)]
    code, output = Process(words).wait(600)
    assert code == 0, output[-3000:]
    evaluated = [row for row in rows(tmp_path / "metrics.jsonl") if row.get("eval/pass_at_1") is not None]
    before, after = evaluated[0], evaluated[-1]
    assert after["eval/rc/accuracy_cycle_3"] >= before["eval/rc/accuracy_cycle_3"] + 0.2
    assert after["eval/rc/accuracy_cycle_3"] >= after["eval/rc/accuracy_cycle_1"] + 0.1


@pytest.mark.slow
def test_killed_runs_go_on_with_the_states_they_had(tmp_path: Path) -> None:
    options = RC | {"rc_buffer_size": 64, "checkpoint_state_freq": 1, "total_episodes": 16 * 8, "async_steps": 1}
    first = Process(command(tmp_path, **options))
    first.wait_for_rows(tmp_path / "metrics.jsonl", 3)
    first.popen.kill()
    first.wait()
    code, output = Process(command(tmp_path, **options)).wait()
    assert code == 0, output[-3000:]
    assert_ledger_balances(tmp_path)
    steps = [row["training_step"] for row in rows(tmp_path / "metrics.jsonl")]
    assert steps == list(range(1, 9))
