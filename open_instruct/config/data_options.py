"""Options of model, tokenizer and data; see `options.py`."""

from dataclasses import dataclass, field
from typing import Literal

from open_instruct.option_limits import COUNT, limited


@dataclass(kw_only=True)
class ModelOptions:
    """Model"""

    model_name_or_path: str
    """Model to train: a local directory or a name on the Hugging Face hub."""
    model_revision: str | None = None
    """Branch, tag or commit of a model on the hub, and of its tokenizer if that comes from the same place."""
    trust_remote_code: bool = False
    """Run the code that a model or tokenizer brings along, in learners and engines. It may do anything that you may do."""
    device_type: Literal["auto", "cpu", "cuda"] = "auto"
    """What learners and engines compute on. auto is cuda if the machine on which the command runs has a GPU, else cpu. If only
    the head node of a cluster has no GPU, give cuda there."""
    model_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of weights and activations. auto is bfloat16 on GPU and float32 on CPU."""
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention of the learners. auto is flash_attention_2 on a GPU in bfloat16 (with the kernels of torch), else sdpa; for a
    model that this cannot compute it is sdpa or eager (docs/guides/models.md)."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, about a third more time."""
    compile_model: bool = False
    """Compile the layers of the learners' model with torch.compile. On a GPU micro-batches of a small model take half the time
    (docs/guides/gpu.md), on CPU they take longer. A learner compiles for some 15 seconds when it first gets a kind of batch."""


@dataclass(kw_only=True)
class TokenizerOptions:
    """Tokenizer"""

    tokenizer_name_or_path: str | None = None
    """Tokenizer, if not the model's own: a local directory or a name on the hub."""
    tokenizer_revision: str | None = None
    """Branch, tag or commit of a tokenizer on the hub. By default model_revision if the tokenizer comes with the model."""
    chat_template_name: str | None = None
    """Chat template in place of the tokenizer's own: the name of one that comes with the project (tulu, olmo, r1_simple_chat and
    more: docs/guides/coming_from_open_instruct.md), or a file that holds one in Jinja. A model without a template needs one."""
    add_bos: bool = False
    """Begin each prompt with the tokenizer's token for the beginning of a text, if the chat template does not."""


@dataclass(kw_only=True)
class DataOptions:
    """Data"""

    dataset_mixer_list: list[str] = field(default_factory=lambda: ["ai2-adapt-dev/rlvr_gsm8k_zs", "1.0"])
    """Datasets to train on, each followed by its amount: a share of its rows (0.5), which are drawn at random, or a number of
    rows (200), the first ones; with more than there are (2.0) rows repeat. A configuration or revision of a dataset is named like
    this: `openai/gsm8k?config=main&revision=v1`."""
    dataset_mixer_list_splits: list[str] = field(default_factory=lambda: ["train"])
    """Split of each training dataset, or one split for all of them."""
    dataset_mixer_eval_list: list[str] = field(default_factory=list)
    """Datasets to evaluate on, written like dataset_mixer_list. Several are measured by themselves too, under short names
    (eval/<name>/…); eval_sets gives names and settings. If both are empty, there is no evaluation."""
    eval_sets: list[str] = field(default_factory=list)
    """Datasets to evaluate on, each measured by itself as eval/<name>/…: `plus=data/plus.jsonl minus=data/minus.jsonl`. A further
    word sets how one of them is evaluated: `minus.temperature=0`, top_p, response_length, samples (default: eval_pass_at_k),
    interval (default: local_eval_every), amount, split. In place of dataset_mixer_eval_list."""
    hold_out_eval_prompts: bool = True
    """Leave prompts of the evaluation out of the training data. False: they are trained on too, as in open-instruct."""
    dataset_mixer_eval_list_splits: list[str] = field(default_factory=lambda: ["test"])
    """Split of each evaluation dataset, or one split for all of them."""
    sft_messages_key: str = "messages"
    """Column that holds the chat messages of the prompt. Rows without it may have a column prompt, as in TRL: messages, or a text
    to which no chat template is applied."""
    ground_truths_key: str = "ground_truth"
    """Column that holds the ground truth, with which the verifier compares a response."""
    dataset_local_cache_dir: str | None = None
    """Directory in which checked and tokenized datasets are kept, by their content. By default local_dataset_cache in the cache
    of Hugging Face."""
    dataset_skip_cache: bool = False
    """Check and tokenize the datasets again, and keep nothing of it."""
    cache_dataset_only: bool = False
    """Check, tokenize and keep the datasets, and end with exit code 0."""
    system_prompt_override_file: str | None = None
    """Text file whose content becomes the system prompt of every row, in place of the row's own."""
    max_prompt_token_length: int = limited(256, COUNT)
    """Longest prompt, in tokens. With the workflow rc: the longest prompt of a problem, in either of the two templates."""
    overlong_prompts: Literal["drop", "error"] = "drop"
    """What happens to longer prompts. drop: they are left out and counted; error: they are reported as a mistake before the run
    starts."""
