"""Checks that a run's model and tokenizer can be read, from a directory or the Hugging Face hub, and can be trained here."""

import copy
import dataclasses
import functools
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from open_instruct.chat_templates import UnknownTemplate
from open_instruct.config.attention_calls import take_parts
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.config.model_support import (
    attends_fully,
    attention_that_fits,
    linear_cost,
    model_class,
    why_not_divided,
    why_refused,
)
from open_instruct.option_text import shown
from open_instruct.workflows.base import WORKFLOWS

HUB_TIMEOUT_S = 5.0
"""Longest wait for the Hugging Face hub to say whether it knows a name."""


COMPILERS = "g++", "clang++"
"""C++ compilers. torch needs one of them to compile its generated code for a CPU."""


def model_can_be_read(args: GRPOConfig) -> Iterator[str]:
    if problem := _load("AutoConfig", args.model_name_or_path, args.model_revision, trusted=args.trust_remote_code)[1]:
        yield f"{shown(args, *_model_options(args))}: {problem}"


def model_family_can_be_trained(args: GRPOConfig) -> Iterator[str]:
    config, _ = _load("AutoConfig", args.model_name_or_path, args.model_revision, trusted=args.trust_remote_code)
    if config is None:
        return
    reason = why_refused(
        config,
        device_kind=args.device.kind,
        attn_implementation=_attention(args, config)[0],
        max_sequence_length=args.max_sequence_length,
        trusted=args.trust_remote_code,
    )
    if reason:
        yield f"{shown(args, *_model_options(args))}: a model of type {config.model_type} is not supported, because {reason}"


def with_attention_that_fits(args: GRPOConfig) -> tuple[GRPOConfig, str]:
    """The options, with `--attn_implementation auto` replaced by the attention that fits the model. If that is not the device's
    usual choice, also a sentence that says why; else ""."""
    name, reason = _attention(args, _config(args))
    if not reason:
        return args, ""
    changed = dataclasses.replace(args, attn_implementation=name)  # pyrefly: ignore[bad-argument-type]  # not any text
    return changed, f"{shown(args, 'attn_implementation')} is {name} for this model: {reason}."


def _attention(args: GRPOConfig, config: Any) -> tuple[str, str]:
    """The learners' attention, and why it is not the device's usual choice; "" if it is, or if the user has chosen."""
    if args.attn_implementation != "auto":
        return args.attn_implementation, ""
    return attention_that_fits(config, args.device.attn_implementation, trusted=args.trust_remote_code)


def model_has_enough_positions(args: GRPOConfig) -> Iterator[str]:
    config, _ = _load("AutoConfig", args.model_name_or_path, args.model_revision, trusted=args.trust_remote_code)
    num_positions = getattr(config, "max_position_embeddings", None)
    if num_positions is not None and not _has_scaled_positions(config) and args.max_sequence_length > num_positions:
        options = shown(args, "model_name_or_path", *_length_options(args))
        yield f"{options}: the model reads {num_positions} tokens at most. Set shorter lengths."


def _length_options(args: GRPOConfig) -> tuple[str, ...]:
    """The options that `max_sequence_length` depends on."""
    own = WORKFLOWS[args.rollout_workflow].value.length_options
    names = ("eval_sets",) if args.eval_sets else ()
    return "max_prompt_token_length", "response_length", "eval_response_length", *names, *own


def rows_can_be_divided(args: GRPOConfig) -> Iterator[str]:
    """Sequence parallelism divides the heads of each attention."""
    config, _ = _load("AutoConfig", args.model_name_or_path, args.model_revision, trusted=args.trust_remote_code)
    size = args.sequence_parallel_size
    if config is None or size <= 1:
        return
    text, options = config.get_text_config(), shown(args, "sequence_parallel_size", *_model_options(args))
    if _attention(args, config)[0] == "eager":
        options = shown(args, "sequence_parallel_size", "attn_implementation", *_model_options(args))
        yield f"{options}: sequence parallelism does not divide eager attention. Use sdpa or auto, or set it to 1."
    elif reason := why_not_divided(config, trusted=args.trust_remote_code):
        yield f"{options}: sequence parallelism cannot divide the rows of this model, because {reason}. Set it to 1."
    elif problem := _problem_with_heads(text, size, "learners"):
        yield f"{options}: {problem}"


def layers_can_compute_again(args: GRPOConfig) -> Iterator[str]:
    """Gradient checkpointing is implemented by the model's class, and some classes lack it."""
    config, _ = _load("AutoConfig", args.model_name_or_path, args.model_revision, trusted=args.trust_remote_code)
    if config is None or not args.gradient_checkpointing:
        return
    if not getattr(model_class(config), "supports_gradient_checkpointing", True):
        options = shown(args, "gradient_checkpointing", *_model_options(args))
        yield f"{options}: Transformers has no gradient checkpointing for a model of type {config.model_type}. Leave it out."


def layers_can_be_compiled(args: GRPOConfig) -> Iterator[str]:
    """Only what Transformers knows as layers is compiled. ZeRO 3 and sequence parallelism act inside layers, where torch cannot
    look."""
    if not args.compile_model:
        return
    if args.deepspeed_stage == 3 or args.sequence_parallel_size > 1:
        option = "deepspeed_stage" if args.deepspeed_stage == 3 else "sequence_parallel_size"
        cure = "Leave out compile_model, or set deepspeed_stage to 2 and sequence_parallel_size to 1"
        yield f"{shown(args, 'compile_model', option)}: layers that communicate are not compiled. {cure}."
    if args.device.kind == "cpu" and not any(map(shutil.which, COMPILERS)):
        yield f"{shown(args, 'compile_model')}: there is no C++ compiler ({', '.join(COMPILERS)}). Install one, or leave it out."
    config, _ = _load("AutoConfig", args.model_name_or_path, args.model_revision, trusted=args.trust_remote_code)
    if config is not None and not getattr(model_class(config), "_no_split_modules", None):
        options = shown(args, "compile_model", *_model_options(args))
        yield f"{options}: Transformers does not name the layers of a model of type {config.model_type}. Leave it out."


def engines_can_divide_heads(args: GRPOConfig) -> Iterator[str]:
    """Tensor parallelism divides the heads of each attention among the workers of an engine."""
    model_config, _ = _load("AutoConfig", args.model_name_or_path, args.model_revision, trusted=args.trust_remote_code)
    configs = {"vllm_tensor_parallel_size": model_config}
    if args.teacher_model_name_or_path is not None:
        teacher_config, _ = _load("AutoConfig", args.teacher_model_name_or_path, args.teacher_model_revision)
        configs["teacher_tensor_parallel_size"] = teacher_config
    for option, config in configs.items():
        size = getattr(args, option)
        if config is None or size <= 1:
            continue
        if problem := _problem_with_heads(config.get_text_config(), size, "workers of an engine"):
            yield f"{shown(args, option)}: {problem}"


def _problem_with_heads(text_config: Any, size: int, parts: str) -> str:
    """Why the heads of each attention cannot be divided among `size` of `parts`; empty if they can. If there are fewer key-value
    heads than `size`, each of these heads is held several times."""
    num_heads = getattr(text_config, "num_attention_heads", 0)
    num_key_value_heads = getattr(text_config, "num_key_value_heads", None) or num_heads
    if not num_heads or not (num_heads % size or (num_key_value_heads % size and size % num_key_value_heads)):
        return ""
    return (
        f"the model has {num_heads} attention heads and {num_key_value_heads} of keys and values, which cannot be divided among "
        f"{size} {parts}. Give a number that divides both."
    )


def adapters_have_layers(args: GRPOConfig) -> Iterator[str]:
    """The name of some layer must end in each name in `lora_target_modules`."""
    targets = args.lora_target_modules
    config, _ = _load("AutoConfig", args.model_name_or_path, args.model_revision, trusted=args.trust_remote_code)
    if not args.use_peft or targets == ["all-linear"] or config is None:
        return
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=args.trust_remote_code)
    head, kinds = model.get_output_embeddings(), (torch.nn.Linear, Conv1D)  # GPT-2 has Conv1D layers
    layers = [name for name, module in model.named_modules() if isinstance(module, kinds) and module is not head]
    missing = [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in layers)]
    if missing or not targets:
        names = sorted({name.rpartition(".")[2] for name in layers})
        options = shown(args, "lora_target_modules", *_model_options(args))
        yield (
            f"{options}: the model has no such layer ({', '.join(missing)}). Give all-linear alone or some of "
            f"{', '.join(names)}; the head gets no adapter."
        )


def teacher_fits_the_model(args: GRPOConfig) -> Iterator[str]:
    """The teacher must be readable, have the same id for every token of the model, and accept sequences of the same length."""
    if args.teacher_model_name_or_path is None:
        return
    names = ("teacher_model_name_or_path",) + (("teacher_model_revision",) if args.teacher_model_revision else ())
    teacher = args.teacher_model_name_or_path, args.teacher_model_revision
    config, problem = _load("AutoConfig", *teacher)
    if config is None:
        yield f"{shown(args, *names)}: {problem}"
        return
    num_positions = getattr(config, "max_position_embeddings", None)
    needed = args.max_sequence_length + 1  # vLLM needs room for one sampled token
    if num_positions is not None and not _has_scaled_positions(config) and needed > num_positions:
        options = shown(args, *names, *_length_options(args))
        yield f"{options}: the teacher reads {num_positions} tokens at most, and {needed} are needed. Set shorter lengths."
    if args.distillation_top_k > config.get_text_config().vocab_size:
        options = shown(args, *names, "distillation_top_k")
        yield f"{options}: the teacher knows {config.get_text_config().vocab_size} tokens. Give fewer."
    own, _ = _load("AutoTokenizer", args.tokenizer_name, args.revision_of_tokenizer, trusted=args.trust_remote_code)
    teacher_tokenizer, problem = _load("AutoTokenizer", *teacher)
    if teacher_tokenizer is None:
        yield f"{shown(args, *names)}: its tokenizer cannot be read: {problem}"
    elif own is not None:
        vocabulary = teacher_tokenizer.get_vocab()
        different = sorted(token for token, number in own.get_vocab().items() if vocabulary.get(token) != number)
        if different:
            yield (
                f"{shown(args, *names)}: {len(different)} tokens of the model are others in the teacher's tokenizer, such as "
                f"{different[0]!r}. Choose a teacher with the model's tokenizer."
            )


def vocabulary_size(args: GRPOConfig) -> int:
    """Number of tokens that the model knows. Raises `ValueError` if the model cannot be read."""
    return _text_config(args).vocab_size


def pairs_per_token(args: GRPOConfig) -> float | None:
    """Cost of one token apart from attention, counted in token pairs of attention (`share_prompts`).

    None if the learners cannot share prompts. Sharing needs an attention that accepts the parts of a row
    (`learners/attention.py`), which eager attention does not; a model that passes the parts on to it; and layers that all attend
    to every earlier token. Raises `ValueError` if the model cannot be read.
    """
    config = _config(args)
    text = config.get_text_config()
    if args.device.attn_implementation == "eager" or not attends_fully(text):
        return None
    return linear_cost(text) if take_parts(config, trusted=args.trust_remote_code) else None


def _text_config(args: GRPOConfig) -> Any:
    return _config(args).get_text_config()


def _config(args: GRPOConfig) -> Any:
    config, problem = _load("AutoConfig", args.model_name_or_path, args.model_revision, trusted=args.trust_remote_code)
    if config is None:
        raise ValueError(f"{shown(args, *_model_options(args))}: {problem}")
    return config


def load_tokenizer(args: GRPOConfig) -> tuple[Any | None, list[str]]:
    """The tokenizer and no mistakes, or None and what is wrong with the tokenizer.

    A model that cannot be read is not reported here, because `collect_mistakes` reports it.
    """
    own = args.tokenizer_name_or_path is not None
    config, _ = _load("AutoConfig", args.model_name_or_path, args.model_revision, trusted=args.trust_remote_code)
    if not own and config is None:
        return None, []
    names = ("tokenizer_name_or_path",) if own else _model_options(args)
    tokenizer, problem = _load(
        "AutoTokenizer", args.tokenizer_name, args.revision_of_tokenizer, trusted=args.trust_remote_code
    )
    # From a directory without tokenizer files, Transformers makes a tokenizer without any words.
    if tokenizer is not None and len(tokenizer) <= len(tokenizer.all_special_ids):
        problem = "it holds no tokenizer. Name a tokenizer with --tokenizer_name_or_path."
    if tokenizer is not None and not problem:
        try:
            tokenizer = args.tokenizer_setup.apply(copy.copy(tokenizer))
        except UnknownTemplate as error:
            return None, [f"{shown(args, 'chat_template_name', 'add_bos')}: {error}."]
    if tokenizer is not None and not problem and not tokenizer.chat_template:
        problem = (
            "its tokenizer has no chat template. Give one with --chat_template_name, or a tokenizer that has one with "
            "--tokenizer_name_or_path."
        )
    if tokenizer is not None and config is not None and not problem:
        problem = _problem_with_vocabulary(tokenizer, config.get_text_config())
    return (None, [f"{shown(args, *names)}: {problem}"]) if problem else (tokenizer, [])


def _has_scaled_positions(config: Any) -> bool:
    """Whether rotary embeddings are scaled. Then there are more positions than the config says; the kind of scaling decides."""
    return (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default") != "default"


def _problem_with_vocabulary(tokenizer: Any, config: Any) -> str:
    """What is wrong if the model lacks a token of ordinary text, or a token that begins, ends or pads a sequence; else "".

    Other added tokens may lie outside the model's vocabulary, as the image token of Gemma 3 does for its text-only models.
    """
    used = [tokenizer.vocab_size - 1, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    highest, size = max(token for token in used if token is not None), getattr(config, "vocab_size", None)
    if size is None or highest < size:
        return ""
    return (
        f"its tokenizer makes tokens up to {highest}, and the model knows {size} (vocab_size). Give a model and a tokenizer "
        f"that belong together."
    )


def _model_options(args: GRPOConfig) -> tuple[str, ...]:
    return ("model_name_or_path",) if args.model_revision is None else ("model_name_or_path", "model_revision")


@functools.cache
def _load(
    kind: Literal["AutoConfig", "AutoTokenizer"], name: str, revision: str | None, *, trusted: bool = False
) -> tuple[Any | None, str]:
    """A model's config or tokenizer, or None and the reason. The network is used only for files that are not on this machine."""
    if not name:
        return None, "empty. Name a model."
    path = Path(name)
    is_hub_name = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name) is not None and not os.path.exists(path)
    if not is_hub_name and not os.path.isdir(path):
        return None, "no such directory. Check the path."
    if kind == "AutoConfig" and os.path.isdir(path) and not (path / "config.json").is_file():
        return None, "no config.json in it. Give the directory that save_pretrained wrote."
    return _from_pretrained(kind, name, revision, is_hub_name=is_hub_name, trusted=trusted)


def _from_pretrained(
    kind: str, name: str, revision: str | None, *, is_hub_name: bool, trusted: bool
) -> tuple[Any | None, str]:
    import transformers

    def load(*, local_files_only: bool) -> Any:
        # A model's own code runs only if the user has allowed it, so Transformers need not ask.
        return getattr(transformers, kind).from_pretrained(
            name, revision=revision or "main", local_files_only=local_files_only, trust_remote_code=trusted
        )

    try:
        return load(local_files_only=True), ""
    except Exception as error:  # a broken file can make a parser raise anything; the user has to repair the file
        if not is_hub_name:
            return None, f"it cannot be read: {_first_line(error)}. Save or download it again."
    if problem := _problem_with_hub_name(name, revision):
        return None, problem
    try:
        return load(local_files_only=False), ""
    except Exception as error:
        return None, f"it cannot be loaded from the Hugging Face hub: {_first_line(error)}."


def _problem_with_hub_name(name: str, revision: str | None) -> str:
    """Why the hub cannot provide `name`, or "". A thread asks the hub, because the lookup of a host name has no timeout."""
    import huggingface_hub

    answers: list[str] = []

    def ask() -> None:
        try:
            huggingface_hub.HfApi().model_info(name, revision=revision, timeout=HUB_TIMEOUT_S)
            answers.append("")
        except huggingface_hub.errors.HfHubHTTPError as error:
            answers.append(
                f"no such directory here, and the Hugging Face hub answers: {_first_line(error)}. Check the "
                "name; for a gated model set HF_TOKEN."
            )
        except Exception as error:
            answers.append(unreachable.format(reason=_first_line(error)))

    unreachable = (
        "no such directory here, not in the local cache of the Hugging Face hub, and the hub cannot be reached "
        "({reason}). Check the path, or download the model first."
    )
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_TIMEOUT_S)
    return answers[0] if answers else unreachable.format(reason=f"no answer in {HUB_TIMEOUT_S:.0f} s")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200].rstrip(". ")
