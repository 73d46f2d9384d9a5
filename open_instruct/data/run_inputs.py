"""Tokenizer and data of a run, checked before anything starts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from open_instruct.config.model_checks import load_tokenizer
from open_instruct.config.options import GRPOConfig
from open_instruct.data.dataset_transformation import LoadReport, load_prompts
from open_instruct.data.mixer import DatasetError
from open_instruct.data.prompt_dataset import PromptDataset
from open_instruct.data.run_identity import tokenizer_identity
from open_instruct.option_text import shown
from open_instruct.user_modules import UserModuleError
from open_instruct.verifiers.verifiers import import_verifiers, verifier_names


@dataclass(frozen=True)
class RunInputs:
    """Tokenizer facts and datasets of a run, checked."""

    train_dataset: PromptDataset
    eval_dataset: PromptDataset | None
    pad_token_id: int
    reports: list[LoadReport]
    tokenizer: dict[str, Any]
    """Identity of the tokenizer; see `run_identity.tokenizer_identity`."""

    @property
    def longest_prompt(self) -> int:
        """Length in tokens of the longest prompt in both datasets."""
        return max(dataset.longest_prompt for dataset in (self.train_dataset, self.eval_dataset) if dataset is not None)


def load_inputs(args: GRPOConfig) -> tuple[RunInputs | None, list[str]]:
    """Tokenizer and datasets, or None and the mistakes in them. Prompts of the evaluation are left out of the training data."""
    try:
        import_verifiers(args.verifier_modules, args.verifier_config)
    except UserModuleError as error:
        return None, [f"{shown(args, 'verifier_modules')}: {error}."]
    tokenizer, mistakes = load_tokenizer(args)
    if tokenizer is None:
        return None, mistakes
    eval_dataset, eval_reports = None, []
    if args.dataset_mixer_eval_list:
        eval_dataset, eval_reports = _load(args, tokenizer, mistakes, flag="dataset_mixer_eval_list", exclude=None)
    train_dataset, train_reports = _load(args, tokenizer, mistakes, flag="dataset_mixer_list", exclude=eval_dataset)
    if mistakes or train_dataset is None:
        return None, mistakes
    pad = tokenizer.pad_token_id
    pad_token_id = tokenizer.eos_token_id if pad is None else pad
    identity = tokenizer_identity(tokenizer, args.tokenizer_name)
    return RunInputs(train_dataset, eval_dataset, pad_token_id, train_reports + eval_reports, identity), []


def _load(
    args: GRPOConfig, tokenizer: Any, mistakes: list[str], *, flag: str, exclude: PromptDataset | None
) -> tuple[PromptDataset | None, list[LoadReport]]:
    try:
        system_prompt = Path(args.system_prompt_override_file).read_text() if args.system_prompt_override_file else None
        workflow = args.workflow.make()
    except (OSError, UnicodeDecodeError, UserModuleError):
        return None, []  # this mistake has been reported already
    try:
        dataset, report = load_prompts(
            getattr(args, flag),
            getattr(args, f"{flag}_splits"),
            tokenizer=tokenizer,
            max_prompt_token_length=args.max_prompt_token_length,
            overlong_prompts=args.overlong_prompts,
            messages_key=args.sft_messages_key,
            ground_truths_key=args.ground_truths_key,
            system_prompt_override=system_prompt,
            known_verifiers=verifier_names(),
            exclude=exclude,
            own_prompt=workflow.own_prompt if workflow.has_own_prompts else None,
            flag=f"--{flag}",
        )
    except DatasetError as error:
        mistakes.extend(str(error).splitlines())
        return None, []
    return dataset, [report]
