"""Agent programs as a user starts them: the whole pipeline, with a program that uses the `openai` package, and one that uses
`verifiers`."""

import subprocess
import sys
from pathlib import Path

import pytest
from played_agents import AgentStage, program_in_documents
from whole_runs import Process, assert_ledger_balances, command, rows, shared_memory

ROOT = Path(__file__).parents[2]
TOOLS_MODEL = ROOT / "assets" / "tiny_tools_model"

ROUNDING = 5e-5
"""With this model single precision is up to 8e-6 from double precision on either side; a token out of place makes far more."""

AGENT = '''
"""Two turns about the row, a question beside them, and one more with exact ids."""

import json, os, sys
from openai import OpenAI

row = json.loads(sys.stdin.readline())
client, model = OpenAI(), os.environ["OPEN_INSTRUCT_MODEL"]

def say(messages):
    reply = client.chat.completions.create(
        model=model, messages=messages, max_tokens=12, extra_body={"return_token_ids": True}
    )
    return reply.choices[0].message.model_dump(exclude_none=True), reply

first, _ = say(row["messages"])
say([{"role": "user", "content": "What is 1 + 2?"}])
_, last = say([*row["messages"], first, {"role": "user", "content": "And <|end|> Stra\\u00dfe?"}])
ids = last.prompt_token_ids + last.choices[0].token_ids + row["prompt_token_ids"]
body = {"model": model, "token_ids": ids, "sampling_params": {"max_tokens": 6}}
reply = client.post(os.environ["OPEN_INSTRUCT_GENERATE_URL"], body=body, cast_to=object)
print(json.dumps({"reward": len(reply["choices"][0]["token_ids"]) / 6, "metrics": {"turns": 4}}))
'''


@pytest.mark.slow
def test_engine_and_learner_agree_on_what_an_agent_program_does(tmp_path: Path) -> None:
    """On every sampled token, after every update: masks, positions and the tokens between requests are right."""
    (tmp_path / "agent.py").write_text(AGENT)
    before = shared_memory()
    process = Process(
        command(
            tmp_path / "out",
            model_name_or_path=TOOLS_MODEL,
            rollout_workflow="agent_program",
            agent_command=f"python {tmp_path / 'agent.py'}",
            agent_prints_reward=True,
            agent_max_concurrent=4,
            num_unique_prompts_rollout=2,
            num_samples_per_prompt_rollout=4,
            total_episodes=8 * 4,
            response_length=120,
            pack_length=600,
            async_steps=0,
            filter_zero_std_samples=False,
        )
    )
    code, output = process.wait(500)
    assert code == 0, output[-3000:]
    assert_ledger_balances(tmp_path / "out")
    metrics = [row for row in rows(tmp_path / "out" / "metrics.jsonl") if row["training_step"] > 0]
    assert len(metrics) == 4
    assert max(row["debug/vllm_vs_local_logprob_diff_max"] for row in metrics) < ROUNDING
    for row in metrics:
        assert (row["agents/requests"], row["agents/samples"], row["env/agent/turns"]) == (4.0, 2.0, 4.0)
        assert (row["agents/restarts"], row["agents/refused"], row["agents/reward_rate"]) == (0.0, 0.0, 1.0)
        assert row["objective/environment_reward"] > 0
    process.assert_nothing_is_left(before)


# --- verifiers --------------------------------------------------------------------------------------------------------

VERIFIERS = "verifiers==0.4.0"
INSTALL_S = 400


@pytest.fixture(scope="session")
def verifiers_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of a virtual environment with `verifiers`, whose packages conflict with ours."""
    directory = tmp_path_factory.mktemp("verifiers")
    python = directory / "venv" / "bin" / "python"
    uv = Path(sys.executable).with_name("uv")
    steps = (
        [uv, "venv", "--python", sys.executable, directory / "venv"],
        [uv, "pip", "install", "--python", python, VERIFIERS],
    )
    for words in steps:
        done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=INSTALL_S, check=False)
        if done.returncode != 0:
            pytest.skip(f"{VERIFIERS} cannot be installed here: {done.stderr.strip()[-300:]}")
    return str(python)


TASKSET = '''
"""A taskset for verifiers, which knows nothing of where it runs."""

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumsData(vf.TaskData):
    answer: str


class SumsTask(vf.Task[SumsData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def says_the_sum(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)


class SumsTaskset(vf.Taskset[SumsTask, vf.TasksetConfig]):
    def load(self):
        for number in range(10):
            data = SumsData(prompt=f"{number} + 34 =", answer=str(number + 34))
            yield SumsTask(data, self.config.task)
'''


@pytest.mark.slow
def test_a_taskset_of_verifiers_runs_unchanged(
    verifiers_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sums.py").write_text(TASKSET)
    (tmp_path / "agent.py").write_text(program_in_documents("my_verifiers_agent.py"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    stage = AgentStage(tmp_path, "", lambda *_: "it is 37<end>", timeout_s=INSTALL_S, prints_reward=True)
    stage.workflow.options.agent_command = f"{verifiers_python} {tmp_path / 'agent.py'}"
    try:
        result = stage.roll_out(limit_s=INSTALL_S + 60, env_config={"taskset": "sums", "task": 3})
    finally:
        stage.close()
    assert not result.error, result.error
    [sample], [said] = result.samples, stage.policy.completions
    assert sample.response_ids.tolist() == said.token_ids.tolist()
    assert sample.logprobs.tolist() == said.logprobs.tolist()
    assert stage.chat.decode_all(sample.prompt_ids.tolist()) == "<|user|>3 + 34 =<|assistant|>"
    assert sample.environment_reward == 0.5
    assert (sample.finish_reason, result.notes[0]["num_refused"]) == ("stop", 0)
