"""What must be the same when a run resumes from a checkpoint: options, data row by row, tokenizer, system prompt.

A checkpoint names rows by their numbers, and it holds samples that are not trained on yet. With one row more, every prompt would
have another place in the order of the epoch, so some prompts would be issued twice and others never. Therefore each checkpoint
contains the run's identity: everything that gives rows and samples their meaning. A run with another identity is refused before
anything starts, with a message that names the differences.
"""

import hashlib
import json
import os
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.registry import options_of
from open_instruct.workflows.base import WORKFLOWS, identity_options

if TYPE_CHECKING:
    from open_instruct.data.run_inputs import RunInputs

OPTIONS = (
    "seed",
    "model_name_or_path",
    "model_revision",
    "dataset_mixer_list",
    "dataset_mixer_list_splits",
    "dataset_mixer_eval_list",  # its prompts are left out of training, which changes the row numbers
    "dataset_mixer_eval_list_splits",
    "sft_messages_key",
    "ground_truths_key",
    "max_prompt_token_length",
    "num_unique_prompts_rollout",
    "num_samples_per_prompt_rollout",
    "temperature",
    "vllm_top_p",
    "response_length",
    "stop_strings",
    "rollout_workflow",
    "num_learners_per_node",
    "deepspeed_stage",
    "use_peft",
    "lora_r",
    "lora_alpha",
    "lora_target_modules",
    "use_rslora",
)
"""Options that must stay the same. Other options, such as the learning rate or the number of engines, may change."""
_CHANGE_PROMPTS = "sft_messages_key", "rollout_workflow"
_DATA = {"train": "training", "eval": "evaluation"}
_CONTENTS = {"prompts": "prompts", "ground_truths": "ground truths", "verifiers": "verifiers"}
_TOKENIZER_PARTS = {"words": "other words", "chat_template": "another chat template", "special": "other special tokens"}


def run_identity(args: GRPOConfig, inputs: "RunInputs | None" = None) -> dict[str, Any]:
    """The identity of a run, as JSON values. Without `inputs` (the data could not be read) the identity holds only options."""
    workflow = WORKFLOWS[args.rollout_workflow]
    own = options_of(args, workflow.options)
    identity: dict[str, Any] = {
        "options": {name: getattr(args, name) for name in OPTIONS}
        | {name: getattr(own, name) for name in identity_options(args.rollout_workflow)}
    }
    if inputs is None:
        return identity
    system_prompt = args.system_prompt_override_file
    return identity | {
        "texts": {
            **{name: short_hash(text.encode()) for name, text in workflow.value.identity_texts(own).items()},
            "system_prompt_override_file": system_prompt and short_hash(Path(system_prompt).read_bytes()),
        },
        "tokenizer": inputs.tokenizer,
        "train": inputs.train_dataset.fingerprint(),
        "eval": None if inputs.eval_dataset is None else inputs.eval_dataset.fingerprint(),
    }


def tokenizer_identity(tokenizer: Any, name: str) -> dict[str, Any]:
    """Everything that decides into which tokens a tokenizer turns a text, as a few hashes. They are hashes of the content, not of
    the path, because a directory may move."""
    template = json.dumps(tokenizer.chat_template, sort_keys=True)
    special = [
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        sorted(tokenizer.all_special_ids),
    ]
    return {
        "name": name,
        "words": short_hash(json.dumps(sorted(tokenizer.get_vocab().items())).encode()),
        "chat_template": short_hash(template.encode()),
        "special": short_hash(json.dumps(special).encode()),
        # The templates of some models write the date into each prompt, so tomorrow the same rows have other tokens.
        "date": date.today().isoformat() if "strftime_now" in template else None,
    }


def short_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def says_which_data(saved: dict[str, Any]) -> bool:
    """Whether a checkpoint's identity contains the data. Identities of an earlier version of this program hold only options."""
    return "train" in saved


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Differences from the run of a checkpoint, in words. Parts that only one of the two identities contains are not compared."""
    options = _different_options(saved.get("options", saved), now["options"])
    if not (says_which_data(saved) and says_which_data(now)):
        return list(options.values())
    texts = _different_texts(saved["texts"], now["texts"])
    tokenizer = _different_tokenizer(saved["tokenizer"], now["tokenizer"])
    explained = bool(texts or tokenizer or options.keys() & set(_CHANGE_PROMPTS))
    dates = {saved["tokenizer"]["date"], now["tokenizer"]["date"]}
    data = [
        told
        for key in _DATA
        if (told := _different_data(key, saved[key], now[key], passes_over_prompts=explained or len(dates) > 1))
    ]
    return [*options.values(), *texts, *tokenizer, *data]


def _different_options(saved: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    return {
        name: f"--{name} was {saved[name]!r}, now {now[name]!r}"
        for name in now
        if name in saved
        and saved[name] != now[name]
        and not (name == "model_name_or_path" and _is_same_model(saved, now))
    }


def _is_same_model(saved: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether both name the same directory of a model, one of them by a relative path perhaps."""
    paths = saved["model_name_or_path"], now["model_name_or_path"]
    return all(map(os.path.isdir, paths)) and os.path.samefile(*paths)


def _different_texts(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    told = {
        (True, True): "--{name} holds another text now",
        (True, False): "--{name} was given, now it is not",
        (False, True): "--{name} was not given, now it is",
    }
    return [
        told[saved[name] is not None, now[name] is not None].format(name=name)
        for name in sorted(saved.keys() & now.keys())  # a workflow may have texts of its own
        if saved[name] != now[name]
    ]


def _different_tokenizer(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    changed = [text for part, text in _TOKENIZER_PARTS.items() if saved[part] != now[part]]
    return [f"the tokenizer ({saved['name']} then, {now['name']} now) has {', '.join(changed)}"] if changed else []


def _different_data(key: str, saved: Any, now: Any, *, passes_over_prompts: bool) -> str:
    """`passes_over_prompts`: prompts are not compared, because their tokens differ for a reason that is reported already, or
    because of the date in them."""
    if saved is None or now is None:
        return "" if saved is now else f"the {_DATA[key]} data: {_rows(saved)} then, {_rows(now)} now"
    if saved["rows"] != now["rows"]:
        return f"the {_DATA[key]} data: {_rows(saved)} then, {_rows(now)} now"
    passed_over = {"prompts"} if passes_over_prompts else set()
    changed = [name for part, name in _CONTENTS.items() if saved[part] != now[part] and part not in passed_over]
    if not changed:
        return ""
    return f"the {_DATA[key]} data: {_rows(now)} as then, but with other {' and '.join(changed)} or in another order"


def _rows(fingerprint: dict[str, Any] | None) -> str:
    if fingerprint is None:
        return "none"
    return "1 row" if fingerprint["rows"] == 1 else f"{fingerprint['rows']} rows"
