"""What must be the same when a run resumes from a checkpoint: options, data row by row, tokenizer, system prompt.

A checkpoint refers to rows by their numbers, and it holds samples that are not trained on yet. With one row more in the data,
every prompt would have another place in the order of the epoch, so some prompts would be issued twice and others never. Therefore
each checkpoint contains the run's identity: everything that gives rows and samples their meaning. A run with another identity is
refused before anything starts, with a message that names the differences.

Data are compared by their rows. The names of their sources do not count, because a project may move, and a job may be submitted
from another directory.
"""

import hashlib
import json
import operator
import os
import tempfile
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct.config.engine_arguments import arguments_that_change_samples
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data.mixer import Amount, parse_mixer_list, splits_of_names
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
_CHANGE_GROUND_TRUTHS = "ground_truths_key", "rollout_workflow"
"""A workflow reads more of a row than the label, and the fingerprint of ground truths covers all of that."""
_DATA = {"train": "training", "eval": "evaluation"}
_MIXER_LISTS = {"train": "dataset_mixer_list", "eval": "dataset_mixer_eval_list"}
_OF_SOURCES = {f"{name}{ending}" for name in _MIXER_LISTS.values() for ending in ("", "_splits")}
_CONTENTS = {"prompts": "prompts", "ground_truths": "ground truths", "verifiers": "verifiers", "columns": "columns"}
_TOKENIZER_PARTS = {
    "words": "other words",
    "rules": "other rules, such as merges or a normalizer, by which it cuts text into words",
    "chat_template": "another chat template",
    "special": "other special tokens",
}


def run_identity(args: GRPOConfig, inputs: "RunInputs | None" = None) -> dict[str, Any]:
    """The identity of a run, as JSON values. Without `inputs` (the data could not be read) the identity holds only options."""
    workflow = WORKFLOWS[args.rollout_workflow]
    own = options_of(args, workflow.options)
    identity: dict[str, Any] = {
        "options": {name: getattr(args, name) for name in OPTIONS}
        # However the evaluation data are named, because `--eval_sets` may name the same rows.
        | {"dataset_mixer_eval_list": args.eval_mixer.words, "dataset_mixer_eval_list_splits": args.eval_mixer.splits}
        # The type that auto means on this device, because DeepSpeed reads no checkpoint of another type.
        | {"model_dtype": args.device.dtype}
        | {"vllm_engine_args": arguments_that_change_samples(args.vllm_engine_args)}
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
    """Hashes of everything that decides how a tokenizer turns text into tokens and back. The content is hashed and not the path,
    because a directory may move. This takes half a second for 150,000 words.

    Checkpoints of earlier versions have no `rules` and no `libraries`. Their runs can still be resumed: the parts that they have
    are compared, and so are the prompts in tokens. `rules` are compared only if `libraries` are the same, because a library may
    write the same rules in another form after an upgrade. `rules` is None (not known) if the tokenizer contains Python code that
    the library cannot write.
    """
    template = json.dumps(tokenizer.chat_template, sort_keys=True)
    special = [
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        sorted(tokenizer.all_special_ids),
    ]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return {
        "name": name,
        "words": short_hash(json.dumps(sorted(tokenizer.get_vocab().items())).encode()),
        "rules": _rules_of_files(tokenizer) if backend is None else _rules_of_backend(backend),
        "libraries": ", ".join(f"{library} {version(library)}" for library in ("tokenizers", "transformers")),
        "chat_template": short_hash(template.encode()),
        "special": short_hash(json.dumps(special).encode()),
        # Some models' templates write the date into each prompt, so tomorrow the same rows will have other tokens.
        "date": date.today().isoformat() if "strftime_now" in template else None,
    }


def _rules_of_backend(backend: Any) -> str | None:
    """A hash of all parts of a fast tokenizer except truncation and padding, which change with each call."""
    parts = (backend.model, backend.normalizer, backend.pre_tokenizer, backend.post_processor, backend.decoder)
    try:
        states = [b"" if part is None else part.__getstate__() for part in parts]
    except Exception:  # tokenizers (0.23) raises a plain Exception for a part that is written in Python
        return None
    added = [(number, token.__getstate__()) for number, token in sorted(backend.get_added_tokens_decoder().items())]
    return short_hash(b"".join(hashlib.sha256(state).digest() for state in states) + json.dumps(added).encode())


def _rules_of_files(tokenizer: Any) -> str:
    """A hash of the saved files of a tokenizer without a backend: settings, vocabulary, merges, and the code that came with it.
    The chat template is compared separately."""
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        files = sorted(path for path in Path(directory).rglob("*") if path.is_file())
        contents = [
            (str(path.relative_to(directory)), short_hash(path.read_bytes()))
            for path in files
            if not path.name.startswith("chat_template")
        ]
    return short_hash(json.dumps([type(tokenizer).__name__, contents]).encode())


def short_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def says_which_data(saved: dict[str, Any]) -> bool:
    """Whether a checkpoint's identity contains the data. Identities of an earlier version of this program hold only options."""
    return "train" in saved


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Differences from a checkpoint's run, in words. Parts that only one of the two identities contains are not compared."""
    before = saved.get("options", saved)
    options = _different_options(before, now["options"])
    if not (says_which_data(saved) and says_which_data(now)):
        # The checkpoint may contain only the names of the data. Data that cannot be read now are reported elsewhere.
        same = _any_names if says_which_data(saved) else operator.eq
        sources = (_different_sources(flag, before, now["options"], same=same) for flag in _MIXER_LISTS.values())
        return [*options.values(), *(line for lines in sources for line in lines)]
    texts = _different_texts(saved["texts"], now["texts"])
    tokenizer = _different_tokenizer(saved["tokenizer"], now["tokenizer"])
    explained = bool(texts or tokenizer or options.keys() & set(_CHANGE_PROMPTS))
    dates = {saved["tokenizer"]["date"], now["tokenizer"]["date"]}
    passes_over_prompts = explained or len(dates) > 1
    passed_over = {"prompts"} if passes_over_prompts else set()
    passed_over |= {"ground_truths"} if options.keys() & set(_CHANGE_GROUND_TRUTHS) else set()
    data = [line for key in _DATA for line in _different_data(key, saved, now, passed_over=passed_over)]
    return [*options.values(), *texts, *tokenizer, *data]


def _different_options(saved: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """Options that differ, without the options that name data: see `_different_sources`."""
    return {
        name: f"--{name} was {saved[name]!r}, now {now[name]!r}"
        for name in now
        if name in saved
        and name not in _OF_SOURCES
        and saved[name] != now[name]
        and not (name == "model_name_or_path" and _is_same_model(saved, now))
    }


def _is_same_model(saved: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether both options name the same model directory, even if one is a relative path."""
    paths = saved["model_name_or_path"], now["model_name_or_path"]
    return all(map(os.path.isdir, paths)) and os.path.samefile(*paths)


def _different_texts(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    templates = {
        (True, True): "--{name} holds another text now",
        (True, False): "--{name} was given, now it is not",
        (False, True): "--{name} was not given, now it is",
    }
    return [
        templates[saved[name] is not None, now[name] is not None].format(name=name)
        for name in sorted(saved.keys() & now.keys())  # a workflow may have texts of its own
        if saved[name] != now[name]
    ]


def _different_tokenizer(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    compared = set(_TOKENIZER_PARTS)
    has_rules = saved.get("rules") is not None and now["rules"] is not None
    if not has_rules or saved.get("libraries") != now["libraries"] or saved["words"] != now["words"]:
        compared.remove("rules")  # other words have other rules
    changed = [text for part, text in _TOKENIZER_PARTS.items() if part in compared and saved[part] != now[part]]
    return [f"the tokenizer ({saved['name']} then, {now['name']} now) has {', '.join(changed)}"] if changed else []


def _different_data(key: str, saved: dict[str, Any], now: dict[str, Any], *, passed_over: set[str]) -> list[str]:
    """How the rows and the mixer lists differ. If the rows differ, other names are reported too, so that the user sees why. If
    prompts are passed over, files must at least have the same name, in any directory."""
    rows = _different_rows(key, saved[key], now[key], passed_over=passed_over)
    same = operator.eq if rows else _same_last_part if "prompts" in passed_over else _any_names
    sources = _different_sources(_MIXER_LISTS[key], saved.get("options", saved), now["options"], same=same)
    return [*sources, *([rows] if rows else [])]


def _different_sources(
    flag: str, saved: dict[str, Any], now: dict[str, Any], *, same: Callable[[str, str], bool]
) -> list[str]:
    """How a mixer list differs: its length, its amounts, the split of each source, and names that are not `same`."""
    saved = now | saved  # an option that an earlier version did not save counts as the same
    sources_then, sources = _sources(saved, flag), _sources(now, flag)
    if sources_then is None or sources is None or len(sources_then) != len(sources):
        names = flag, f"{flag}_splits"
        return [f"--{name} was {saved[name]!r}, now {now[name]!r}" for name in names if saved[name] != now[name]]
    lines = []
    if not all(same(source_then[0], source[0]) for source_then, source in zip(sources_then, sources, strict=True)):
        lines.append(f"--{flag} was {saved[flag]!r}, now {now[flag]!r}")
    for (_, amount_then, split_then), (name, amount, split) in zip(sources_then, sources, strict=True):
        if repr(amount_then) != repr(amount):  # 1 is one row, and 1.0 is all rows
            lines.append(f"--{flag}: the amount of {name} was {amount_then!r}, now {amount!r}")
        if split_then != split:
            lines.append(f"--{flag}_splits: the split of {name} was {split_then!r}, now {split!r}")
    return lines


def _sources(options: dict[str, Any], flag: str) -> list[tuple[str, Amount, str]] | None:
    """Name, amount and split of each source; None if the lists cannot be read, which is reported elsewhere."""
    try:
        pairs = parse_mixer_list(options[flag])
        splits = splits_of_names(options[f"{flag}_splits"], len(pairs))
    except (ValueError, TypeError):  # the file may have been edited by hand
        return None
    return [(name, amount, split) for (name, amount), split in zip(pairs, splits, strict=True)]


def _any_names(_saved: str, _now: str) -> bool:
    return True


def _same_last_part(saved: str, now: str) -> bool:
    return os.path.basename(saved) == os.path.basename(now)


def _different_rows(key: str, saved: Any, now: Any, *, passed_over: set[str]) -> str:
    """How the rows differ, or "". The contents in `passed_over` are not compared, because they differ for a reason that is
    reported already, or because prompts contain the date."""
    if saved is None or now is None:
        return "" if saved is now else f"the {_DATA[key]} data: {_rows(saved)} then, {_rows(now)} now"
    if saved["rows"] != now["rows"]:
        return f"the {_DATA[key]} data: {_rows(saved)} then, {_rows(now)} now"
    compared = {part for part in _CONTENTS if part in saved and part in now} - passed_over
    if "prompts" in passed_over:
        compared.discard("columns")  # they hold the prompt too
    changed = [name for part, name in _CONTENTS.items() if part in compared and saved[part] != now[part]]
    if not changed:
        return ""
    return f"the {_DATA[key]} data: {_rows(now)} as then, but with other {' and '.join(changed)} or in another order"


def _rows(fingerprint: dict[str, Any] | None) -> str:
    if fingerprint is None:
        return "none"
    return "1 row" if fingerprint["rows"] == 1 else f"{fingerprint['rows']} rows"
