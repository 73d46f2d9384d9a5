"""Runs whose rewards come from programs in the jail, and from judges over HTTP: the reward rises in all.

The verifiers, the jail, the judges' protocol and the runs are real. The opinion of one judge is a rule: whether the response is
the sum and nothing else. The other judge is a model that vLLM serves.
"""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from judges import JudgeServer
from whole_runs import Process, command, rows

from open_instruct.verifiers.reasoning_gym_data import reasoning_gym_rows

SUMS = "reasoning_gym/chain_sum?min_terms=2&max_terms=2&min_digits=2&max_digits=2&size=2000&seed=7"
NUM_STEPS = 40
SUM_PROGRAMS = '''
from open_instruct.verifiers.code_verifiers import CodeStdioVerifier

class SumProgram(CodeStdioVerifier):
    """What stands in a response's answer tags becomes the argument of `print`; the program must write the sum."""

    name = "sum_program"

    async def async_call(self, tokens, prediction, label, query=None):
        tests = [{"input": "", "output": label}]
        argument = prediction.removeprefix("<answer>").removesuffix("</answer>")
        return await super().async_call(tokens, f"```python\\nprint({argument})\\n```", tests, query)

    def check_label(self, label):
        int(label)
'''


def train(tmp_path: Path, dataset: str, **options: Any) -> list[dict[str, Any]]:
    """The rows of metrics of a run on sums."""
    data = tmp_path / "sums.jsonl"
    with data.open("w") as file:
        for row in reasoning_gym_rows(SUMS):
            answer = json.loads(str(row["ground_truth"]))["answer"]
            line = {"messages": row["messages"], "ground_truth": answer, "dataset": dataset}
            file.write(json.dumps(line) + "\n")
    settings: dict[str, Any] = {
        "dataset_mixer_list": [data, "1.0"],
        "num_unique_prompts_rollout": 32,
        "num_samples_per_prompt_rollout": 8,
        "total_episodes": 32 * 8 * NUM_STEPS,
        "response_length": 24,
        "learning_rate": 2e-4,
        "filter_zero_std_samples": False,
        "output_dir": tmp_path / "out",
    }
    run = Process(command(**settings | options))
    code, output = run.wait(900)
    assert code == 0, output[-3000:]
    return rows(tmp_path / "out" / "metrics.jsonl")


def assert_learned(table: list[dict[str, Any]], name: str) -> None:
    rewards = [row["all_groups/scores"] for row in table]
    print(name, [round(reward, 2) for reward in rewards])
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.2
    assert sum(row["objective/not_scored"] for row in table) == 0


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_programs_in_the_jail(tmp_path: Path) -> None:
    (tmp_path / "sum_programs.py").write_text(SUM_PROGRAMS)
    assert_learned(train(tmp_path, "sum_program", verifier_modules=tmp_path / "sum_programs.py"), "code")


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_judge_over_http(tmp_path: Path) -> None:
    def judge(body: dict[str, Any], number: int) -> str:
        told = body["messages"][0]["content"]
        wanted = re.search(r"A reference answer[^\n]*\n(-?\d+)\n", told)
        is_right = wanted is not None and told.rpartition("\n\n")[0].splitlines()[-2] == wanted[1]
        return f'{{"REASONING": "compared", "SCORE": {10 if is_right else 0}}}'

    server = JudgeServer()
    server.answer = judge
    try:
        table = train(
            tmp_path,
            "general-quality_ref",
            llm_judge_model="a-judge",
            llm_judge_api_base=server.url,
            llm_judge_price_per_million_tokens=[1.0, 5.0],
        )
    finally:
        server.close()
    assert_learned(table, "judge")
    assert table[-1]["objective/verifier_cost"] == pytest.approx(32 * 8 * 0.002)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_model_as_judge(tmp_path: Path) -> None:
    """The demo: the grades of held-out answers rise, and so does the share of those that are as the judge likes them best."""
    script = Path(__file__).parents[2] / "scripts" / "train" / "debug" / "cpu_judge.sh"
    words = ["bash", str(script), "--output_dir", str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    table = rows(tmp_path / "out" / "metrics.jsonl")
    assert sum(row.get("objective/not_scored", 0) for row in table) == 0
    before, *_, after = [row for row in table if "eval/scores" in row]
    assert after["eval/scores"] > before["eval/scores"] + 0.2
    assert share_of_bare_sums(tmp_path / "out", 0) + 0.3 < share_of_bare_sums(tmp_path / "out", after["training_step"])


def share_of_bare_sums(output_dir: Path, step: int) -> float:
    """Of the answers of an evaluation: those that give the right sum in tags, and nothing else."""
    answers = rows(output_dir / "completions" / f"step_{step:06d}.jsonl")
    bare = [f"<answer>{one['ground_truth']}</answer>" == one["response"].removesuffix("<|end|>") for one in answers]
    return float(np.mean(bare))
