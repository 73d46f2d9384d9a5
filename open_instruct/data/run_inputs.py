"""Tokenizer and data of a run, checked before anything starts."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from open_instruct.chat_codec import ChatCodec
from open_instruct.config.checks import collect_mistakes
from open_instruct.config.data_names import Mixer, short_names
from open_instruct.config.evaluation_sets import EvaluationSet
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.config.model_checks import load_tokenizer
from open_instruct.data.dataset_cache import WORTH_KEEPING_S, DatasetCache, cache_key, default_directory
from open_instruct.data.dataset_transformation import load_prompts
from open_instruct.data.load_report import LoadReport
from open_instruct.data.mixer import DatasetError, parse_mixer_list, splits_of_names
from open_instruct.data.prompt_dataset import PromptDataset
from open_instruct.data.reward_trial import mistakes_of_functions
from open_instruct.data.row_checks import RowError, RowReader, check_ground_truth
from open_instruct.data.run_identity import tokenizer_identity
from open_instruct.data.template_audit import TemplateAudit, audit_template
from open_instruct.option_limits import NEVER
from open_instruct.option_text import shown
from open_instruct.system.counted import counted
from open_instruct.user_modules import UserModuleError
from open_instruct.verifiers.registry import import_verifiers, unused_modules, verifier_names
from open_instruct.verifiers.row_verifiers import checks_of_row, names_of_verifiers
from open_instruct.workflows.base import Workflow

ROWS_TO_LOOK_AT = 100
"""Rows in which a prompt with tools is looked for."""


@dataclass(frozen=True)
class RunInputs:
    """The checked datasets of a run, and facts about its tokenizer."""

    train_dataset: PromptDataset
    eval_dataset: PromptDataset | None
    pad_token_id: int
    reports: list[LoadReport]
    tokenizer: dict[str, Any]
    """Identity of the tokenizer; see `run_identity.tokenizer_identity`."""
    template: TemplateAudit
    warnings: tuple[str, ...] = ()
    """Warnings about the chat template, and about verifier files that the run does not use."""

    @property
    def longest_prompt(self) -> int:
        """Length in tokens of the longest prompt in both datasets."""
        return max(dataset.longest_prompt for dataset in (self.train_dataset, self.eval_dataset) if dataset is not None)


def names_of_data(args: GRPOConfig, inputs: RunInputs) -> list[str]:
    """For the log: the sources and evaluation sets that have metrics of their own, each with its name."""
    entries, lines = args.train_mixer.words[::2], []
    if len(entries) > 1:
        for entry, (name, data) in enumerate(zip(short_names(entries), entries, strict=True)):
            num_rows = len(inputs.train_dataset.rows_of_entry(entry))
            lines.append(f"source/{name}: {data}, {counted(num_rows, 'prompt')}")
    if inputs.eval_dataset is not None and args.measures_sets_apart:
        for entry, evaluation_set in enumerate(args.evaluation_sets):
            num_rows = len(inputs.eval_dataset.rows_of_entry(entry))
            data = f"{evaluation_set.data}, {counted(num_rows, 'prompt')}"
            lines.append(f"eval/{evaluation_set.name}: {data}, {_how_evaluated(evaluation_set)}")
    return lines


def _how_evaluated(evaluation_set: EvaluationSet) -> str:
    sampling = evaluation_set.sampling
    when = (
        "only before the first step"
        if evaluation_set.interval == NEVER
        else f"every {counted(evaluation_set.interval, 'step')}"
    )
    top_p = "" if sampling.top_p == 1 else f", top_p {sampling.top_p:g}"
    return (
        f"{when}, {counted(sampling.n, 'response')} each of up to {counted(sampling.max_tokens, 'token')}, temperature "
        f"{sampling.temperature:g}{top_p}"
    )


def load_inputs(args: GRPOConfig) -> tuple[RunInputs | None, list[str]]:
    """Tokenizer and datasets, or None and the mistakes in them. Evaluation prompts are left out of the training data."""
    try:
        import_verifiers(args.verifier_modules, args.verifier_config)
    except UserModuleError as error:
        return None, [f"{shown(args, 'verifier_modules')}: {error}."]
    tokenizer, mistakes = load_tokenizer(args)
    if tokenizer is None:
        return None, mistakes
    try:
        workflow = args.workflow.make()
    except (OSError, UnicodeDecodeError, UserModuleError):
        return None, mistakes  # this mistake has been reported already
    except (
        ValueError
    ) as error:  # already reported too, unless it comes from options that the workflow does not check itself
        is_reported = bool(collect_mistakes(args))
        return None, mistakes + ([] if is_reported else [f"{shown(args, 'rollout_workflow')}: {error}."])
    if tokenizer.chat_template:
        mistakes += workflow.template_mistakes(ChatCodec(tokenizer))
    eval_dataset, eval_reports = None, []
    if args.eval_mixer.words:
        eval_dataset, eval_reports = _load(args, tokenizer, workflow, mistakes, args.eval_mixer, exclude=None)
        mistakes += _empty_sets(args, eval_dataset)
    held_out = eval_dataset if args.hold_out_eval_prompts else None
    train_dataset, train_reports = _load(args, tokenizer, workflow, mistakes, args.train_mixer, exclude=held_out)
    if train_dataset is not None and not mistakes:
        mistakes += mistakes_of_functions(args, train_dataset, eval_dataset)
    if mistakes or train_dataset is None:
        return None, mistakes
    pad = tokenizer.pad_token_id
    pad_token_id = tokenizer.eos_token_id if pad is None else pad
    identity = tokenizer_identity(tokenizer, args.tokenizer_name)
    audit = audit_template(tokenizer)
    warnings = _notes_on_template(args, tokenizer, workflow, train_dataset, audit)
    warnings += _notes_on_verifiers(args, [train_dataset, *([eval_dataset] if eval_dataset is not None else [])])
    reports = train_reports + eval_reports
    return RunInputs(train_dataset, eval_dataset, pad_token_id, reports, identity, audit, warnings), []


def _empty_sets(args: GRPOConfig, dataset: PromptDataset | None) -> list[str]:
    """A mistake for each evaluation set of which no prompt is left, because it would have no metrics."""
    if dataset is None:
        return []  # these mistakes have been reported already
    sets = enumerate(args.evaluation_sets)
    empty = [evaluation_set.name for entry, evaluation_set in sets if not dataset.rows_of_entry(entry)]
    option, cure = shown(args, args.eval_mixer.flag), "Raise --max_prompt_token_length, or leave it out"
    return [f"{option}: nothing is left of {name}, because every prompt is too long. {cure}." for name in empty]


def _notes_on_template(
    args: GRPOConfig, tokenizer: Any, workflow: Workflow, dataset: PromptDataset, audit: TemplateAudit
) -> tuple[str, ...]:
    """What the chat template does to the first prompt, or to the first prompt with tools if one of the first rows has tools."""
    row, tools = dataset[0], []
    if workflow.reads_rows:
        for number in range(min(len(dataset), ROWS_TO_LOOK_AT)):
            schemas = workflow.row_schemas(dataset[number].facts or {})
            if schemas:
                row, tools = dataset[number], [str(schema["function"]["name"]) for schema in schemas]
                break
    prompt = ChatCodec(tokenizer).decode_all(row.prompt.tolist())
    wants_form, was_chosen = args.apply_r1_style_format_reward, args.chat_template_name is not None
    return tuple(audit.warnings(wants_form=wants_form, prompt=prompt, was_chosen=was_chosen, tools=tools))


def _notes_on_verifiers(args: GRPOConfig, datasets: Sequence[PromptDataset]) -> tuple[str, ...]:
    """Notes on files whose verifiers score no row, because rows or `--remap_verifier` were probably forgotten."""
    names = {name for dataset in datasets for entry in dataset.dataset_names for name in names_of_verifiers(entry)}
    cure = "the column 'dataset' of a row, --default_verifier or --remap_verifier would name one"
    unused = unused_modules(args.verifier_modules, names)
    return tuple(f"--verifier_modules {module}: its verifiers score no row; {cure}" for module in unused)


def remapped_verifiers(args: GRPOConfig) -> dict[str, str]:
    """`--remap_verifier math_dapo=math` as a mapping, with names in lower case. `checks.py` has reported other forms."""
    pairs = (pair.partition("=") for pair in args.remap_verifier)
    return {old.strip().lower(): new.strip() for old, equals, new in pairs if equals}


def _load(
    args: GRPOConfig,
    tokenizer: Any,
    workflow: Workflow,
    mistakes: list[str],
    mixer: Mixer,
    *,
    exclude: PromptDataset | None,
) -> tuple[PromptDataset | None, list[LoadReport]]:
    try:
        system_prompt = Path(args.system_prompt_override_file).read_text() if args.system_prompt_override_file else None
    except (OSError, UnicodeDecodeError):
        return None, []  # this mistake has been reported already
    cache = _cache(args)
    key = _cache_key(args, tokenizer, mixer, system_prompt, exclude)
    if key is not None and (entry := cache.find(key)) is not None:
        if refused := _refused_here(entry[0]):
            mistakes.extend(f"{shown(args, mixer.flag)}: {reason}" for reason in refused)
            return None, []
        return entry[0], [entry[1]]
    started = time.monotonic()
    try:
        dataset, report = load_prompts(
            mixer.words,
            mixer.splits,
            tokenizer=tokenizer,
            max_prompt_token_length=args.max_prompt_token_length,
            overlong_prompts=args.overlong_prompts,
            messages_key=args.sft_messages_key,
            ground_truths_key=args.ground_truths_key,
            system_prompt_override=system_prompt,
            known_verifiers=verifier_names(),
            exclude=exclude,
            remap=remapped_verifiers(args),
            default_verifier=args.verifier_of_unnamed_rows,
            keeps_columns=bool(args.reward_funcs),
            reader=RowReader.of(workflow),
            flag=f"--{mixer.flag}",
        )
    except DatasetError as error:
        mistakes.extend(str(error).splitlines())
        return None, []
    if key is not None and (args.cache_dataset_only or time.monotonic() - started > WORTH_KEEPING_S):
        cache.keep(key, dataset, report)
    return dataset, [report]


def _refused_here(dataset: PromptDataset) -> list[str]:
    """Why this machine cannot score rows of a cached dataset. Another machine, with a newer kernel or a judge's key, may have
    written the cache."""
    reasons = []
    for row in dataset.first_rows():
        for name, truth in checks_of_row(row.dataset, row.ground_truth):
            try:
                check_ground_truth(name, truth)
            except RowError as error:
                reasons.append(str(error))
    return list(dict.fromkeys(reasons))


def _cache(args: GRPOConfig) -> DatasetCache:
    if args.dataset_skip_cache:
        return DatasetCache(None)
    return DatasetCache(Path(args.dataset_local_cache_dir) if args.dataset_local_cache_dir else default_directory())


def _cache_key(
    args: GRPOConfig, tokenizer: Any, mixer: Mixer, system_prompt: str | None, exclude: PromptDataset | None
) -> str | None:
    """The key of a dataset in the cache; None if a source cannot be read, or the tokenizer is not fully known."""
    workflow, identity = args.workflow, tokenizer_identity(tokenizer, args.tokenizer_name)
    if identity["rules"] is None:
        return None
    try:
        pairs = parse_mixer_list(mixer.words)
        splits = splits_of_names(mixer.splits, len(pairs))
    except ValueError:
        return None  # `load_prompts` says what is wrong
    facts = {
        "tokenizer": identity,
        "exclude": exclude and exclude.fingerprint(),
        "system_prompt": system_prompt,
        "verifier_config": asdict(args.verifier_config),
        "workflow": asdict(workflow),
        **{name: getattr(args, name) for name in ("max_prompt_token_length", "overlong_prompts", "sft_messages_key")},
        **{name: getattr(args, name) for name in ("ground_truths_key", "remap_verifier")},
        "default_verifier": args.verifier_of_unnamed_rows,
        "keeps_columns": bool(args.reward_funcs),
    }
    sources = [(name, amount, split) for (name, amount), split in zip(pairs, splits, strict=True)]
    return cache_key(sources, facts, [*args.verifier_modules, *workflow.modules, *_files_in(workflow.options)])


def _files_in(options: Mapping[str, Any]) -> list[str]:
    """The files and modules that a workflow's options name: `my_tools.py:lookup`, a template, a list of words."""
    modules = [module for name, value in options.items() if name.endswith("_modules") for module in value]
    texts = [text for value in options.values() for text in (value if isinstance(value, list) else [value])]
    names = [text.partition(":")[0] for text in texts if isinstance(text, str)]
    return [*modules, *(name for name in names if os.path.isfile(name))]
