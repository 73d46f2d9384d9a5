"""Names that users write in YAML files and in modules of their own, wherever their code lies."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = {
    "open_instruct.rollout.Rollouter": "open_instruct.rollouts.controller",
    "open_instruct.fully_async_trainer.FullyAsyncTrainer": "open_instruct.run.fully_async_trainer",
    "open_instruct.rc_policies.generate_math_rollout": "open_instruct.workflows.rc.policies",
    "open_instruct.rc_datasets.load_datasets": "open_instruct.rc.datasets",
    "open_instruct.ground_truth_utils.VerifierFunction": "open_instruct.verifiers.registry",
    "open_instruct.ground_truth_utils.VerificationResult": "open_instruct.verifiers.registry",
    "open_instruct.grpo_fast.maybe_evaluate": "open_instruct.run.evaluation_schedule",
    "open_instruct.grpo_fast.sync_weights_and_prepare_prompts": "open_instruct.run.step_loop",
    "open_instruct.vllm_utils3.LLMRayActor": "open_instruct.vllm_utils3",
}


@pytest.mark.parametrize(("name", "module"), NAMES.items())
def test_names_that_users_write_lead_to_the_code(name: str, module: str) -> None:
    named, _, wanted = name.rpartition(".")
    found = getattr(importlib.import_module(named), wanted)
    target = importlib.import_module(module)
    assert found is getattr(target, wanted)


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


def test_mistakes_are_told_before_torch_is_imported() -> None:
    """It takes three seconds, and who mistyped a flag waits for the message."""
    program = "import sys; import open_instruct.grpo_fast; print(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"
