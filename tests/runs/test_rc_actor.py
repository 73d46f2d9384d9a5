"""`python -m open_instruct.rc_actor` from its command line to its stream, against scripted servers."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from conftest import TINY_MODEL
from rc_fakes import DOCUMENTED, Call, ScriptedServer, completion, polite, problem, settings
from rc_runs import ROOT, TIMEOUT_S, run, start, summary_of, table

from open_instruct import rc_actor
from open_instruct.config.cli import UsageError
from open_instruct.engines.openai_client import ServedModel
from open_instruct.rc.actor_loop import Phase, RunFailed
from open_instruct.rc.options import read_options
from open_instruct.rc.stream import read_stream, read_trajectories
from open_instruct.workflows.rc.types import SUMMARIZATION, TrainingText

MARKED_TEMPLATES = (
    'actor.reasoning_prompt_template="THINK ABOUT {problem} KNOWING {curr_summary}"',
    'actor.summarization_prompt_template="SUM UP {problem} OLD {existing_summary} NEW {reasoning}"',
)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as one:
        yield one


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    return write_problems(tmp_path / "problems.jsonl", 12)


def write_problems(path: Path, number: int) -> Path:
    rows = [{"problem": f"PROBLEM{i}.", "answer": "yes", "dataset": "string_matcher"} for i in range(number)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def words(tmp_path: Path, problems: Path, servers: Sequence[ScriptedServer], *further: str) -> list[str]:
    urls = "+".join(one.url for one in servers)
    return [
        "--config-name",
        "test_rc",
        f"output_dir={tmp_path / 'out'}",
        f"model_path={TINY_MODEL}",
        f"me.llm_urls={urls}",
        f"train_dataset_names=[{problems}]",
        "me.wait_for_server_s=2",
        "actor.retry_base_delay=0.01",
        *MARKED_TEMPLATES,
        *further,
    ]


def processes_of_group(group: int) -> list[str]:
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            state, _, its_group = (directory / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                found.append((directory / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def turns_of(tmp_path: Path) -> list[TrainingText]:
    return list(read_stream(tmp_path / "out" / "streams" / "actor.jsonl"))


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.extended
def test_two_workers_and_two_servers(tmp_path: Path, problems: Path) -> None:
    def forgetful(call: Call) -> Any:
        return web.Response(status=503) if call.number % 11 == 5 else polite(call)

    with ScriptedServer(forgetful, delay_s=0.02) as one, ScriptedServer(delay_s=0.02) as other:
        further = (
            "actor.rollout_workers=2",
            "actor.llm_max_rollouts=3",
            "attempts=2",
            "actor.num_samples_per_problem=2",
        )
        tight = ("actor.problem_queue_size=1", "actor.result_queue_size=1")
        code, output = run(words(tmp_path, problems, [one, other], *further, *tight))
        assert code == 0, output
        assert max(one.max_in_flight, other.max_in_flight) <= 3
        assert min(len(one.calls), len(other.calls)) > 80
    trajectories = list(read_trajectories(tmp_path / "out" / "streams" / "actor.jsonl"))
    assert [table(turns) for turns in trajectories] == [DOCUMENTED] * 48
    assert len({turns[0].trajectory_id for turns in trajectories}) == 48
    assert len({turns[0].group_id for turns in trajectories}) == 24
    attempts = {(turns[0].metadata["rollout_index"], turns[0].metadata["sample_id"]) for turns in trajectories}
    assert attempts == {(0, 0), (0, 1), (1, 0), (1, 1)}
    summary = summary_of(tmp_path)
    assert (summary["trajectories"], summary["turns"], summary["rc/dropped_trajectories"]) == (48, 288, 0)
    assert summary["retries"] > 5
    assert {number: cycle["accuracy"] for number, cycle in summary["cycles"].items()} == {"1": 1, "2": 1, "3": 1}
    assert "trajectory 48/48" in output
    assert "tok/s" in output
    assert "accuracy" in output


@pytest.mark.extended
def test_the_same_seed_gives_the_same_lines(tmp_path: Path, problems: Path) -> None:
    """Byte for byte and for each trajectory, though they run side by side, come in another order and have other failures."""
    first = run_with_failures(tmp_path / "a", problems, "PROBLEM1.", "actor.llm_max_rollouts=4")
    second = run_with_failures(
        tmp_path / "b", problems, "PROBLEM0.", "actor.llm_max_rollouts=7", "actor.rollout_workers=2"
    )
    assert list(first) != list(second), "the runs were meant to differ in their order"
    assert first == second
    assert len(first) == 24
    timed = {"wall_seconds", "tokens_per_second", "retries"}
    summaries = [summary_of(tmp_path / name) for name in ("a", "b")]
    assert len({json.dumps({k: v for k, v in one.items() if k not in timed}) for one in summaries}) == 1
    other = run_with_failures(tmp_path / "c", problems, "PROBLEM0.", "seed=43")
    assert set(other.values()).isdisjoint(first.values())


def run_with_failures(tmp_path: Path, problems: Path, failing: str, *further: str) -> dict[str, bytes]:
    """The lines of each trajectory; the first turns of problem `failing` have to be asked for twice, and come late."""
    seen: set[int] = set()

    def by_prompt_and_seed(call: Call) -> Any:
        seed = call.body["seed"]
        if failing in call.prompt and "KNOWING  " in f"{call.prompt} " and seed not in seen:
            seen.add(seed)
            return web.Response(status=503)
        is_right = call.turn_type == SUMMARIZATION or seed % 2
        return completion(f"{call.prompt[:20]} {seed} <answer>{'yes' if is_right else 'no'}</answer>")

    options = ("actor.retry_base_delay=1.0", "actor.num_samples_per_problem=2", *further)
    with ScriptedServer(
        by_prompt_and_seed, delay_s=0.2
    ) as server:  # longer than a busy machine takes to ask four times
        code, output = run(words(tmp_path, problems, [server], *options))
        assert code == 0, output
        assert server.max_in_flight > 3
    assert len(seen) == 2
    lines: dict[str, bytes] = {}
    for line in (tmp_path / "out" / "streams" / "actor.jsonl").read_bytes().splitlines(keepends=True):
        trajectory = json.loads(line)["trajectory_id"]
        lines[trajectory] = lines.get(trajectory, b"") + line
    return lines


@pytest.mark.extended
@pytest.mark.alone
def test_a_run_that_is_stopped_goes_on(server: ScriptedServer, tmp_path: Path, problems: Path) -> None:
    server.delay_s = 0.05
    arguments = words(tmp_path, problems, [server], "actor.llm_max_rollouts=2")
    process = start(arguments)
    stream = tmp_path / "out" / "streams" / "actor.jsonl"
    deadline = time.monotonic() + TIMEOUT_S
    while not (stream.exists() and stream.read_bytes().count(b"\n") >= 12):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 85, output
    assert "Start the same command again" in output
    done = [turns[0].trajectory_id for turns in read_trajectories(stream)]
    assert 2 <= len(done) < 12
    with open(stream, "ab") as file:
        file.write(b'{"text": "torn')
    server.calls.clear()
    server.delay_s = 0
    code, output = run(arguments)
    assert code == 0, output
    assert len(server.calls) == (12 - len(done)) * 6
    assert [table(turns) for turns in read_trajectories(stream)] == [DOCUMENTED] * 12
    assert stream.read_bytes().count(b"\n") == 72
    assert summary_of(tmp_path)["trajectories"] == 12
    assert run(arguments)[0] == 0
    code, output = run([*arguments, "actor.num_reasoning_steps=2"])
    assert code == 1
    assert "another num_reasoning_steps" in output


@pytest.mark.extended
@pytest.mark.alone
def test_ctrl_c_ends_all_processes(server: ScriptedServer, tmp_path: Path, problems: Path) -> None:
    server.delay_s = 30
    process = start(words(tmp_path, problems, [server], "actor.rollout_workers=2"))
    deadline = time.monotonic() + TIMEOUT_S
    while len(server.calls) < 10:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=15)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    deadline = time.monotonic() + 5
    while left := processes_of_group(process.pid):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.extended
@pytest.mark.alone
@pytest.mark.parametrize(
    ("number", "told"),
    [(signal.SIGKILL, "rc-worker-0 died (exit code -9)"), (signal.SIGSTOP, "rc-worker-0 (process")],
)
def test_a_worker_that_is_killed_or_stopped_ends_the_run_by_name(
    server: ScriptedServer, tmp_path: Path, problems: Path, number: int, told: str
) -> None:
    server.delay_s = 1
    process = start(words(tmp_path, problems, [server]))
    deadline = time.monotonic() + TIMEOUT_S
    while not server.calls:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for child in children:
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
            os.kill(int(child), number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert told in output


@pytest.mark.extended
@pytest.mark.alone
def test_workers_end_when_the_loop_is_killed(server: ScriptedServer, tmp_path: Path, problems: Path) -> None:
    server.delay_s = 30
    process = start(words(tmp_path, problems, [server]))
    deadline = time.monotonic() + TIMEOUT_S
    while not server.calls:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait(10)
    deadline = time.monotonic() + 10
    while left := processes_of_group(process.pid):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.extended
@pytest.mark.alone
def test_a_server_that_stays_away_ends_the_run(server: ScriptedServer, tmp_path: Path, problems: Path) -> None:
    server.script = lambda call: server._loop.stop() if call.number == 20 else polite(call)
    code, output = run(words(tmp_path, problems, [server], "me.max_server_downtime_s=2"))
    assert code == 1
    assert "no server has answered for" in output
    assert "Traceback" not in output


@pytest.mark.extended
@pytest.mark.alone
def test_a_server_that_is_restarted_costs_no_trajectory(tmp_path: Path, problems: Path) -> None:
    with ScriptedServer(delay_s=0.05) as server:

        def restart() -> None:
            while len(server.calls) < 20:
                time.sleep(0.01)
            server.stop()
            time.sleep(2)
            server.start()

        restarting = threading.Thread(target=restart)
        restarting.start()
        code, output = run(words(tmp_path, problems, [server], "actor.max_retries=1"))
        restarting.join()
    assert code == 0, output
    assert "is back after" in output
    summary = summary_of(tmp_path)
    assert (summary["trajectories"], summary["retries"], summary["requeues"], summary["dropped"]) == (12, 0, 0, {})


# --- the user's own parts ---------------------------------------------------------------------------------------------

USERS_PARTS = """
from open_instruct.workflows.rc.policies import to_training_text
from open_instruct.workflows.rc.types import Problem

def load_datasets(names, seed):
    return [Problem(f"{name}-{seed}", f"ABOUT {name}", "42", "gsm8k", name) for name in names]

async def half(turn, score):
    return to_training_text(turn, 0.5, {"mine": True})

async def odd(turn, score):
    if "ABOUT a" in turn.problem.text:
        return to_training_text(turn, float("nan"), {"not JSON": object()})
    return to_training_text(turn, 1.0, {})

async def fails(turn, score):
    raise KeyError("no such thing")

async def leaves(turn, score):
    raise SystemExit(0)

async def cannot_travel(turn, score):
    return to_training_text(turn, 1.0, {"mine": lambda: None})
"""


@pytest.mark.extended
def test_loader_and_policies_of_the_users(server: ScriptedServer, tmp_path: Path, problems: Path) -> None:
    (tmp_path / "mine_rc.py").write_text(USERS_PARTS)
    mine = ("dataset_loader=mine_rc.load_datasets", "train_dataset_names=[a, b]", "seed=5")
    policies = ("actor.solution_rollout_policy=mine_rc.half",)
    code, output = run(
        [*words(tmp_path, problems, [server], *mine, *policies), "--config-path", str(ROOT / "conf")],
        cwd=tmp_path,
        PYTHONPATH=str(ROOT),
    )
    assert code == 0, output
    turns = turns_of(tmp_path)
    assert {turn.trajectory_id for turn in turns} == {"a-5/attempt-0/0", "b-5/attempt-0/0"}
    assert {turn.reward for turn in turns if turn.metadata["turn_type"] != SUMMARIZATION} == {0.5}
    odd = ("actor.solution_rollout_policy=mine_rc.odd", f"output_dir={tmp_path / 'odd' / 'out'}")
    code, output = run([*words(tmp_path, problems, [server], *mine, *odd)], cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert code == 0, output
    assert summary_of(tmp_path / "odd")["dropped"] == {"policy_error": 1}
    code, output = run(
        [*words(tmp_path, problems, [server], "actor.solution_rollout_policy=mine_rc.fails", "output_dir=failing")],
        cwd=tmp_path,
        PYTHONPATH=str(ROOT),
    )
    assert code == 1
    assert "10 trajectories in a row failed" in output
    assert "KeyError: 'no such thing'" in output


@pytest.mark.extended
@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("leaves", "SystemExit: 0"),
        ("cannot_travel", "12 trajectories did not come back from the workers."),
    ],
)
def test_a_policy_that_leaves_or_makes_what_cannot_travel_fails_the_run(
    server: ScriptedServer, tmp_path: Path, problems: Path, policy: str, told: str
) -> None:
    """The first was waited for without end, the second lost its trajectories in silence."""
    (tmp_path / "mine_rc.py").write_text(USERS_PARTS)
    arguments = words(tmp_path, problems, [server], f"actor.solution_rollout_policy=mine_rc.{policy}")
    code, output = run(arguments, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert code == 1, output
    assert told in output


def test_a_stream_of_another_policy_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "streams" / "actor.settings.json"
    phase, model = Phase("actor", [problem()], settings(), num_samples=1, attempts=1), ServedModel("tiny", 4096)
    path.parent.mkdir()
    for _ in range(2):
        rc_actor.check_same_run(path, phase, model, {"solution_rollout_policy": "mine.half"})
    with pytest.raises(RunFailed, match="holds a run with another solution_rollout_policy"):
        rc_actor.check_same_run(path, phase, model, {"solution_rollout_policy": "mine.other"})
    of_before = json.loads(path.read_text())
    del of_before["solution_rollout_policy"]
    path.write_text(json.dumps(of_before))
    rc_actor.check_same_run(path, phase, model, {"solution_rollout_policy": "mine.other"})


# --- mistakes ---------------------------------------------------------------------------------------------------------

MISTAKES = [
    ("actor.num_reasoning_step=3", "Did you mean num_reasoning_steps?"),
    ("actor.num_reasoning_steps=0", "actor.num_reasoning_steps 0: expected 1 or more"),
    ("actor.num_reasoning_steps=two", "actor.num_reasoning_steps two: expected one whole number"),
    ("actor.reasoning_prompt_template=null", "actor.reasoning_prompt_template: missing"),
    ("actor.reasoning_prompt_template=file:nowhere.txt", "nowhere.txt: it cannot be read"),
    ('actor.reasoning_prompt_template="{problem} {curr_summary} {summary}"', "{summary} is no field"),
    ("actor.summarization_style=merge", "actor.summarization_style merge: expected one of replace, append"),
    ("train_dataset_names=[pope_hard_no_guide_test]", "pope_hard_no_guide_test: no file or directory here"),
    ("train_dataset_names=[nowhere.jsonl]", "nowhere.jsonl: there is no such file"),
    ("dataset_loader=nowhere.load", "nowhere.load: it cannot be loaded"),
    ("actor.solution_rollout_policy=open_instruct.nothing", "actor.solution_rollout_policy open_instruct.nothing"),
    ("streams.backend=redis", "streams.backend redis: expected one of files"),
    ("debug.mode=false", "this program has no trainer"),
    ("me.llm_urls=nowhere", "this is not the address"),
    ("eval_every_n_versions=1", "there is nothing to evaluate on"),
    ("actor.one_long_turn=true", "it belongs to an evaluation, and there is none"),
]


@pytest.mark.parametrize(("word", "told"), MISTAKES, ids=[word for word, _ in MISTAKES])
def test_mistakes_are_told_before_anything_starts(
    word: str, told: str, tmp_path: Path, problems: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    started = time.monotonic()
    with pytest.raises(SystemExit) as caught:
        rc_actor.main(words(tmp_path, problems, [ScriptedServer(port=9)], word))
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "1 mistake:" in error, error
    assert told in error
    assert time.monotonic() - started < 15


@pytest.mark.extended
@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("model_path=nowhere/model", "model_path nowhere/model: it has no tokenizer here"),
        ("me.max_model_len=8", ""),
    ],
)
def test_what_a_worker_finds_out(server: ScriptedServer, tmp_path: Path, problems: Path, word: str, told: str) -> None:
    started = time.monotonic()
    code, output = run(words(tmp_path, problems, [server], word))
    assert (
        time.monotonic() - started < 15 + 30
    )  # 30 for a machine that is busy: importing transformers takes 4 CPU seconds
    if told:
        assert code == 1
        assert told in output
    else:
        assert code == 0, output
        assert summary_of(tmp_path)["dropped"] == {"prompt_too_long": 12}


@pytest.mark.extended
@pytest.mark.alone
def test_an_absent_server_is_one_message_in_time(tmp_path: Path, problems: Path) -> None:
    absent = ScriptedServer(port=1)
    started = time.monotonic()
    code, output = run(words(tmp_path, problems, [absent]))
    assert code == 1
    assert "no server answered within 2 s" in output
    assert "Traceback" not in output
    assert time.monotonic() - started < 15


@pytest.mark.extended
def test_a_wrong_key_is_one_message(server: ScriptedServer, tmp_path: Path, problems: Path) -> None:
    server.api_key = "rightrightright"
    named = [*words(tmp_path, problems, [server]), f"me.api_key_urls={server.url}"]
    code, output = run(named, OPENAI_API_KEY="wrongwrongwrong")
    assert code == 1
    assert "refuses the key" in output
    assert "wrongwrongwrong" not in output
    assert run(named, OPENAI_API_KEY="rightrightright")[0] == 0
    assert {call.authorization for call in server.calls} == {"Bearer rightrightright"}


@pytest.mark.extended
def test_the_key_of_openai_goes_to_the_servers_named_for_it_alone(
    server: ScriptedServer, tmp_path: Path, problems: Path
) -> None:
    code, output = run(words(tmp_path, problems, [server]), OPENAI_API_KEY="sk-not-for-you")
    assert code == 0, output
    assert server.calls
    assert {call.authorization for call in server.calls} == {None}


@pytest.mark.extended
def test_an_entry_that_is_too_large_is_dropped(server: ScriptedServer, tmp_path: Path, problems: Path) -> None:
    """And with it the trajectory that it belongs to, not the other samples of the problem."""
    long = threading.Event()

    def script(call: Call) -> Any:
        is_first = "PROBLEM3." in call.prompt and not long.is_set()
        if is_first:
            long.set()
        return completion("x" * 4000 if is_first else "short")

    server.script = script
    options = ("actor.shared_memory_entry_size=4000", "actor.num_samples_per_problem=2")
    code, output = run(words(tmp_path, problems, [server], *options))
    assert code == 0, output
    assert summary_of(tmp_path)["dropped"] == {"entry_too_large": 1}
    turns = turns_of(tmp_path)
    assert len(turns) == 23 * 6
    assert len({turn.trajectory_id for turn in turns if turn.problem_id.endswith("#3")}) == 1


def test_test_data_without_an_evaluation_are_a_mistake_where_there_is_nothing_else_to_do() -> None:
    words = ["train_dataset_names=[]", "test_dataset_names=[x]"]
    with pytest.raises(UsageError) as caught:
        read_options(rc_actor.yaml_door.compose(rc_actor.YAML_PROGRAM, words))
    [mistake] = caught.value.mistakes
    assert mistake.startswith("test_dataset_names: they are worked on in an evaluation alone, and there is none.")
    for further in ("eval_every_n_versions=1", "train_dataset_names=[y]"):
        read_options(rc_actor.yaml_door.compose(rc_actor.YAML_PROGRAM, [*words, further]))


# --- files ------------------------------------------------------------------------------------------------------------


def test_the_base_file_holds_the_documented_keys_and_defaults() -> None:
    config = rc_actor.yaml_door.compose(rc_actor.YAML_PROGRAM, [])
    documented = {
        "num_reasoning_steps": 3,
        "num_samples_per_problem": 1,
        "use_think_tags": False,
        "rollout_workers": 1,
        "llm_max_rollouts": 16,
        "problem_queue_size": 10,
        "result_queue_size": 10,
        "shared_memory_entry_size": 5242880,
        "throughput_window_size": 10,
        "max_retries": 3,
        "retry_base_delay": 1.0,
    }
    assert {key: config["actor"][key] for key in documented} == documented
    assert config["llm"]["parameters"] == {"temperature": 1.0, "max_tokens": 16384, "top_p": 0.95}
    assert config["test_llm"]["parameters"] == {"temperature": 1.0, "max_tokens": 16384, "top_p": 1.0}
    assert (config["seed"], config["attempts"], config["eval_every_n_versions"]) == (42, 1, 0)
    assert config["me"]["llm_urls"] == "http://localhost:8000/v1"
    assert (config["streams"], config["debug"]) == ({"backend": "files"}, {"mode": True})
    assert config["wandb"]["use_wandb"] is False
    template = config["actor"]["reasoning_prompt_template"]
    assert template.startswith(
        "Solve this problem step by step.\n\nProblem: {problem}\n\nPrevious work: {curr_summary}"
    )
    read_options(config)


@pytest.mark.extended
def test_evaluation_uses_the_test_sampling_and_a_stream_of_its_own(
    server: ScriptedServer, tmp_path: Path, problems: Path
) -> None:
    further = ("eval_every_n_versions=1", f"test_dataset_names=[{problems}]", "test_llm.parameters.max_tokens=7")
    code, output = run(words(tmp_path, problems, [server], *further))
    assert code == 0, output
    limits = [call.body["max_tokens"] for call in server.calls if "SUM UP" not in call.prompt]
    assert limits == [7] * 36 + [48] * 36
    assert len(list(read_stream(tmp_path / "out" / "streams" / "eval.jsonl"))) == 72
    measures = json.loads((tmp_path / "out" / "eval_summary.json").read_text())["evaluation"]["overall"]
    assert (measures["problems"], measures["accuracy_by_cycle"]) == (12, [1, 1, 1])
    assert (tmp_path / "out" / "accuracy_by_cycle.png").exists()
    num_calls = len(server.calls)
    code, output = run([*words(tmp_path, problems, [server], *further), "actor.one_long_turn=true"])
    assert code == 0, output
    added = [call.body["max_tokens"] for call in server.calls[num_calls:]]
    assert added == [3 * 7 + 2 * 32] * 12, "the control alone, of an evaluation that is there already"
    again = json.loads((tmp_path / "out" / "eval_summary.json").read_text())["evaluation"]["overall"]
    assert again.items() >= measures.items()
    assert again["one_long_turns"] == 12


@pytest.mark.extended
def test_an_evaluation_against_one_long_turn(tmp_path: Path) -> None:
    """Cycles of 48 and summaries of 32 tokens, hence 208 for one turn; the context ends it earlier for one of the problems."""

    def script(call: Call) -> Any:
        is_long = call.body["max_tokens"] > 48
        if "PROBLEM0." in call.prompt and is_long:  # ends within the budget of the second cycle, not of the first
            return completion("so " * 40 + "<answer>yes</answer>", token_ids=[1] * 100, logprobs=None)
        if "PROBLEM1." in call.prompt and is_long:
            return completion("so", "length", token_ids=[1] * call.body["max_tokens"], logprobs=None)
        is_right = call.turn_type == SUMMARIZATION or "KNOWING GOT IT" in call.prompt
        return completion("GOT IT <answer>yes</answer>" if is_right else "<answer>no</answer>")

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    sets = write_problems(tmp_path / "a" / "problems.jsonl", 2), write_problems(tmp_path / "b" / "problems.jsonl", 1)
    further = (
        "actor.one_long_turn=true",
        "eval_every_n_versions=1",
        f"test_dataset_names=[{sets[0]}, {sets[1]}]",
        "test_llm.parameters.max_tokens=48",
        "actor.max_summary_tokens=32",
        "train_dataset_names=[]",
    )
    models = [{"id": "tiny", "max_model_len": 200}]
    with ScriptedServer(script, models=models) as server:
        code, output = run(words(tmp_path, sets[0], [server], *further))
        assert code == 0, output
        long_calls = [call for call in server.calls if call.body["max_tokens"] > 48]
        for call in long_calls:
            assert call.body["max_tokens"] == 200 - len(call.body["prompt"])
            assert call.prompt.endswith("KNOWING ")
        assert len({call.body["seed"] for call in server.calls}) == len(server.calls) == 3 * 7
    assert output.count("may spend 208 tokens, but the model takes 200") == 1
    evaluation = json.loads((tmp_path / "out" / "eval_summary.json").read_text())["evaluation"]
    overall = evaluation["overall"]
    assert (overall["problems"], overall["trajectories"], overall["one_long_turns"]) == (3, 3, 3)
    assert overall["budget_by_cycle"] == [48, 128, 208]
    assert overall["accuracy_by_cycle"] == [0, 1, 1]
    assert overall["one_long_turn_by_budget"] == pytest.approx([0, 2 / 3, 2 / 3])
    assert overall["one_long_turns_cut_by_context"] == 1
    by_dataset = {
        Path(name).parent.name: one["one_long_turn_by_budget"] for name, one in evaluation["by_dataset"].items()
    }
    assert by_dataset == {"a": [0, 0.5, 0.5], "b": [0, 1, 1]}
    turns = list(read_stream(tmp_path / "out" / "streams" / "eval.jsonl"))
    controls = [turn for turn in turns if turn.metadata.get("control") == "one_long_turn"]
    assert [turn.metadata["turn_type"] for turn in controls] == ["reasoning"] * 3
    assert not {turn.group_id for turn in controls} & {turn.group_id for turn in turns if not turn.is_control}
    assert "1 of 3 long turns were cut by the context" in output
    assert (tmp_path / "out" / "accuracy_by_cycle.png").read_bytes().startswith(b"\x89PNG")
