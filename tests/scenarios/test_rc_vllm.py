"""Reasoning-cache rollouts against a real vLLM server on CPU."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import TINY_MODEL
from rc_fakes import DOCUMENTED, free_port
from rc_runs import ROOT, run, summary_of, table

from open_instruct.device import current_device
from open_instruct.engines.server_keys import VLLM_KEY_VARIABLE
from open_instruct.engines.vllm_server import ServerFailed, ServerOptions, VllmServer
from open_instruct.rc.stream import read_stream, read_trajectories
from open_instruct.workflows.rc.types import REASONING

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
READY_TIMEOUT_S = 240.0
SUMS = "reasoning_gym/chain_sum?min_terms=2&max_terms=2&min_digits=2&max_digits=2&seed=7"


@pytest.fixture(scope="module", autouse=True)
def key_of_the_servers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VLLM_KEY_VARIABLE, "of-these-tests")
        yield


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    log_path = tmp_path_factory.mktemp("server") / "server.log"
    with VllmServer(ServerOptions(str(TINY_MODEL), free_port(), current_device(kind="cpu")), log_path) as one:
        one.wait_until_ready(READY_TIMEOUT_S)
        yield one


def words(tmp_path: Path, server: VllmServer, size: int, *further: str) -> list[str]:
    return [
        "--config-name=test_rc",
        f"output_dir={tmp_path / 'out'}",
        f"model_path={TINY_MODEL}",
        f"me.llm_urls={server.url.removesuffix('/v1')}/",
        f"train_dataset_names=['{SUMS}&size={size}']",
        *further,
    ]


def test_the_documents_table_and_what_was_sampled(server: VllmServer, tmp_path: Path) -> None:
    code, output = run(words(tmp_path, server, 16))
    assert code == 0, output
    trajectories = list(read_trajectories(tmp_path / "out" / "streams" / "actor.jsonl"))
    assert [table(turns) for turns in trajectories] == [DOCUMENTED] * 16
    cycles = summary_of(tmp_path)["cycles"]
    assert list(cycles) == ["1", "2", "3"]
    assert 0.1 < cycles["1"]["accuracy"] < 0.9  # the model answers as asked in two of five times
    for turn in trajectories[0]:
        assert "exact_tokens" not in turn.metadata
        assert len(turn.logprobs) == len(turn.response_ids) > 0
    assert_log_probs_are_the_models([turn for turns in trajectories[:4] for turn in turns])


def assert_log_probs_are_the_models(turns: list[Any]) -> None:
    """The server's log-probs are those of the model on exactly these token ids, prompt and response."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    for turn in turns:
        ids = torch.tensor([[*turn.prompt_ids.tolist(), *turn.response_ids.tolist()]])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids).logits[0, :-1], dim=-1)
        expected = logprobs.gather(1, ids[0, 1:, None])[len(turn.prompt_ids) - 1 :, 0].numpy()
        np.testing.assert_allclose(turn.logprobs, expected, atol=1e-3)


def test_documents_templates_think_tags_and_a_full_context(server: VllmServer, tmp_path: Path) -> None:
    """The base file's templates; a context so short that prompts have to be shortened."""
    base = ["--config-name=rc_base", *words(tmp_path, server, 4)[1:], "me.max_model_len=400"]
    code, output = run(
        [*base, "actor.use_think_tags=true", "actor.reasoning_for_summary=both", "llm.parameters.max_tokens=200"]
    )
    assert code == 0, output
    turns = list(read_stream(tmp_path / "out" / "streams" / "actor.jsonl"))
    assert len(turns) + 6 * summary_of(tmp_path)["rc/dropped_trajectories"] == 24
    assert all(turn.text.startswith("<think>") for turn in turns if turn.metadata["turn_type"] == REASONING)
    assert all(len(turn.prompt_ids) + len(turn.response_ids) <= 400 for turn in turns)


def test_a_server_that_is_killed_and_started_again(tmp_path: Path) -> None:
    """No trajectory is lost, no finished turn made again, no retry used up while it is away."""
    with VllmServer(
        ServerOptions(str(TINY_MODEL), free_port(), current_device(kind="cpu")), tmp_path / "server.log"
    ) as server:
        server.wait_until_ready(READY_TIMEOUT_S)

        def kill_and_restart() -> None:
            while num_answers(server) < 60:
                time.sleep(0.01)
            server.kill()
            server.start()
            server.wait_until_ready(READY_TIMEOUT_S)

        killer = threading.Thread(target=kill_and_restart)
        killer.start()
        code, output = run(
            words(tmp_path, server, 60, "actor.llm_max_rollouts=4", "actor.max_retries=1"), timeout_s=READY_TIMEOUT_S
        )
        killer.join(READY_TIMEOUT_S)
        assert not killer.is_alive()
        assert code == 0, output
        assert "is back after" in output
        summary = summary_of(tmp_path)
        assert (summary["trajectories"], summary["turns"], summary["dropped"]) == (60, 360, {})
        assert (summary["retries"], summary["requeues"]) == (0, 0)
        # An answer that was logged may have been lost on its way when the server died: at most one a slot.
        assert num_answers(server) <= 360 + 4


def num_answers(server: VllmServer) -> int:
    return server.log_path.read_text().count('"POST /v1/completions HTTP/1.1" 200')


# --- the script that starts servers -----------------------------------------------------------------------------------


def test_the_script_starts_and_ends_servers(tmp_path: Path) -> None:
    process = start_script(tmp_path, "--num_servers", "2")
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert summary_of(tmp_path)["trajectories"] == 24
    assert_no_server_is_left(tmp_path)
    logs = [(tmp_path / "out" / "logs" / f"server-{number}.log").read_text() for number in (0, 1)]
    assert all('"POST /v1/completions HTTP/1.1" 200' in log for log in logs)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_script_ends_servers_when_it_is_interrupted(tmp_path: Path, number: signal.Signals) -> None:
    process = start_script(tmp_path)
    log = tmp_path / "out" / "logs" / "server-0.log"
    deadline = time.monotonic() + 60
    while not log.exists() or not log.stat().st_size:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode in (130, 143), output
    assert_no_server_is_left(tmp_path)


def test_the_script_shows_the_log_of_a_server_that_does_not_come_up(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text(json.dumps({"model_type": "nothing", "architectures": ["Nothing"]}))
    process = start_script(tmp_path, f"model_path={broken}")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "ended with code" in output
    assert "The end of" in output
    assert "Nothing" in output or "nothing" in output
    assert_no_server_is_left(tmp_path)


def test_a_server_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerFailed, match="was not ready after 1 s"),
        VllmServer(
            ServerOptions(str(TINY_MODEL), free_port(), current_device(kind="cpu")), tmp_path / "server.log"
        ) as server,
    ):
        server.wait_until_ready(1)


def start_script(tmp_path: Path, *further: str) -> "subprocess.Popen[str]":
    arguments = ["--config-name=test_rc", f"output_dir={tmp_path / 'out'}", f"--first_port={free_port()}", *further]
    command = [sys.executable, str(ROOT / "scripts" / "test_rc_actor.py"), *arguments]
    env = os.environ | {"HF_HUB_OFFLINE": "1", MARK: str(tmp_path)}
    return subprocess.Popen(
        command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


MARK = "OPEN_INSTRUCT_RC_TEST"


def assert_no_server_is_left(tmp_path: Path) -> None:
    deadline = time.monotonic() + 10
    while left := [one.pid for one in psutil.process_iter() if _is_marked(one, str(tmp_path))]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError):
        return False
