"""What the chat template does to the prompts of a run is told at its start."""

import json
import shutil
from pathlib import Path
from typing import Any

from conftest import TINY_MODEL, make_args

from open_instruct.data.run_inputs import load_inputs


def warnings(tmp_path: Path, *texts: str, **options: Any) -> list[str]:
    rows = [
        {"messages": [{"role": "user", "content": text}], "ground_truth": "2", "dataset": "gsm8k"} for text in texts
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    args = make_args(
        dataset_mixer_list=[str(path), "1.0"], dataset_mixer_eval_list=[], dataset_skip_cache=True, **options
    )
    inputs, mistakes = load_inputs(args)
    assert inputs is not None, mistakes
    return list(inputs.warnings)


CALCULATOR: dict[str, Any] = {"rollout_workflow": "conversation", "tools": ["calculator"]}


def test_tools_that_no_prompt_names_are_told_if_the_template_ignores_them(tmp_path: Path) -> None:
    [warning] = warnings(tmp_path, "1 + 1 =", **CALCULATOR)
    assert warning.startswith(
        "the chat template does not describe tools, and the first prompt with tools names none of "
    )
    assert "(calculator), so the model is never told that it may call them" in warning
    assert "--chat_template_name" in warning
    assert warnings(tmp_path, "You have a calculator. 1 + 1 =", **CALCULATOR) == []
    assert warnings(tmp_path, "1 + 1 =", **CALCULATOR, pass_tools_to_chat_template=False) == []
    assert warnings(tmp_path, "1 + 1 =") == []


def test_a_system_prompt_of_the_models_own_template_is_told(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(TINY_MODEL, model)
    own = "You are Qwen, a helpful assistant."
    (model / "chat_template.jinja").write_text(
        "{% if messages[0]['role'] != 'system' %}<|user|>" + own + "<|end|>{% endif %}"
        "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    options: dict[str, Any] = {"model_name_or_path": str(model), "max_prompt_token_length": 256}
    [warning] = warnings(tmp_path, "1 + 1 =", **options)
    assert f"adds a system prompt wherever a row has none ({own!r})" in warning
    brief = tmp_path / "system.txt"
    brief.write_text("Be brief, as if every word cost you something.")
    assert warnings(tmp_path, "1 + 1 =", **options, system_prompt_override_file=str(brief)) == []
    assert warnings(tmp_path, "1 + 1 =", chat_template_name="olmo_thinker", max_prompt_token_length=256) == []
