"""Names that users write in YAML files and in modules of their own, wherever their code lies."""

import importlib
import shutil
import subprocess
import sys
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from conftest import make_args
from ray.util.queue import Queue

from open_instruct import grpo_fast
from open_instruct.system.signals import Signals

NAMES = {
    "open_instruct.rollout.Rollouter": "open_instruct.rollouts.controller",
    "open_instruct.fully_async_trainer.FullyAsyncTrainer": "open_instruct.run.fully_async_trainer",
    "open_instruct.rc_policies.generate_math_rollout": "open_instruct.workflows.rc.policies",
    "open_instruct.rc_datasets.load_datasets": "open_instruct.rc.datasets",
    "open_instruct.ground_truth_utils.VerifierFunction": "open_instruct.verifiers.registry",
    "open_instruct.ground_truth_utils.VerificationResult": "open_instruct.verifiers.registry",
    "open_instruct.grpo_fast.maybe_evaluate": "open_instruct.run.evaluation_schedule",
    "open_instruct.grpo_fast.start_queue_processing_on_actors": "open_instruct.run.step_loop",
    "open_instruct.grpo_fast.sync_weights_and_prepare_prompts": "open_instruct.run.step_loop",
    "open_instruct.vllm_utils3.LLMRayActor": "open_instruct.vllm_utils3",
}


@pytest.mark.parametrize(("name", "module"), NAMES.items())
def test_names_that_users_write_lead_to_the_code(name: str, module: str) -> None:
    named, _, wanted = name.rpartition(".")
    found = getattr(importlib.import_module(named), wanted)
    target = importlib.import_module(module)
    assert found is getattr(target, wanted)


def test_grpo_fast_creates_both_queues_as_ray_queues_and_passes_them_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    created: list[Queue] = []
    passed_on: list[tuple[Queue, Queue]] = []

    class RecordedQueue(grpo_fast.PickledQueue):
        def __init__(self, maxsize: int, actor_options: dict[str, Any]) -> None:
            self.maxsize, self.actor_options = maxsize, actor_options
            created.append(self)

    class EndOfTest(Exception):
        """What was to be seen has been seen."""

    def create_rollout_manager(*_: Any, queues: tuple[Queue, Queue], **__: Any) -> None:
        passed_on.append(queues)
        raise EndOfTest

    monkeypatch.setattr(grpo_fast, "PickledQueue", RecordedQueue)
    monkeypatch.setattr(grpo_fast, "queue_actor_options", lambda: {"num_cpus": 0})
    monkeypatch.setattr(grpo_fast, "create_rollout_manager", create_rollout_manager)
    for part in ("create_message_queue", "create_placement_groups", "create_actor_group"):
        monkeypatch.setattr(grpo_fast, part, MagicMock())
    for part in ("node_ids", "check_storage"):
        monkeypatch.setattr(grpo_fast, part, lambda *_: [])
    monkeypatch.setattr(grpo_fast, "ray_cluster", lambda *_: nullcontext(Signals()))
    inputs: Any = SimpleNamespace(
        reports=[], template=SimpleNamespace(text="the chat template"), warnings=[], eval_dataset=None
    )
    args = make_args(output_dir=str(tmp_path), vllm_num_engines=3, num_unique_prompts_rollout=8, async_steps=1)
    with pytest.raises(EndOfTest):
        grpo_fast.run(args, inputs)
    assert issubclass(grpo_fast.PickledQueue, Queue)
    assert [tuple(created)] == passed_on
    assert [queue.maxsize for queue in created] == [
        2 * 3,
        4 * 2 * 8,
    ]  # two bundles an engine; four times what may be under way


@pytest.mark.parametrize("step", ["data_preparation_thread", "load_data_from_packing_thread"])
def test_steps_of_a_run_have_open_instructs_names_in_grpo_fast(step: str) -> None:
    assert getattr(grpo_fast, step).__name__ == step
    assert step in grpo_fast.__all__


@pytest.mark.parametrize("program", ["grpo_fast.py", "fully_async_main.py"])
def test_a_python_without_the_packages_is_told_where_they_are(program: str) -> None:
    """`-S`: without what is installed. As a user starts it who has not activated the environment."""
    path = Path(__file__).parents[1] / "open_instruct" / program
    done = subprocess.run(
        [sys.executable, "-S", "-E", str(path), "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "lacks the packages of this project. Do `source .venv/bin/activate`" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("program", ["grpo_fast.py", "fully_async_main.py"])
def test_a_script_of_another_checkout_does_not_run_the_code_that_is_installed(tmp_path: Path, program: str) -> None:
    """Otherwise the driver's options would be those of one checkout, and its actors the code of the other."""
    package = Path(__file__).parents[1] / "open_instruct"
    other = tmp_path / "open_instruct"
    other.mkdir()
    for name in ("__init__.py", program):
        shutil.copy(package / name, other)
    done = subprocess.run(
        [sys.executable, other / program, "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert f"{other / program} would run the code of {package}" in done.stderr
    assert done.stdout == ""


def test_mistakes_are_told_before_torch_is_imported() -> None:
    """It takes three seconds, and who mistyped a flag waits for the message."""
    program = "import sys; import open_instruct.grpo_fast; print(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"


def test_grpo_fast_tells_the_story_from_top_to_bottom() -> None:
    """Queues, places, learners, controller and engines, then the loop with its steps, on one page each."""
    text = (Path(grpo_fast.__file__)).read_text()
    assert len(text.splitlines()) <= 300
    steps = [
        *("read_options_and_data(", "param_prompt_Q = ", "inference_results_Q = ", "create_placement_groups(args"),
        *("create_actor_group(args", "create_rollout_manager(", "resume(run)", "start_queue_processing_on_actors(run)"),
        *(".load_data_from_packing_thread(", "trainer.train(", "maybe_evaluate(run)"),
        *("sync_weights_and_prepare_prompts(run", "save_if_due(run)"),
    ]
    story = text[text.index("def main(") :]
    places = [story.index(step) for step in steps]
    assert places == sorted(places)


@pytest.mark.skipif(not version("torch").endswith("+cpu"), reason="torch is asked whether there is a GPU")
def test_a_mistyped_flag_is_told_without_an_import_of_torch() -> None:
    program = (
        "import sys; from open_instruct import grpo_fast; sys.argv += ['--nonsense', '3']\n"
        "try: grpo_fast.main()\nfinally: print(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "--nonsense: no such option" in done.stderr
    assert done.stdout == "[]\n"
