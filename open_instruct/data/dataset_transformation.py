"""Turns mixer lists into tokenized prompts, and checks every row before anything starts.

    mixer list ─► rows (sources) ─► check ─► chat template, tokenizer ─► length, held out ─► PromptDataset

Rows are processed in batches, so memory grows only with the finished prompts. While a batch is tokenized, which takes all cores,
the next batch is read, checked and rendered.
"""

import itertools
import json
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from open_instruct.chat_codec import LITERAL, ChatCodec, hidden_in, show_special_tokens, special_tokens
from open_instruct.data.load_report import LoadReport, SourceReport
from open_instruct.data.mixer import Amount, DatasetError, Mistakes, parse_mixer_list, rows_of_amount, splits_of_names
from open_instruct.data.prompt_dataset import PromptDataset, PromptDatasetBuilder, prompt_key
from open_instruct.data.row_checks import MESSAGE_KEYS, CheckedRow, RowError, RowReader, RowRules, check_row
from open_instruct.data.sources import BATCH_ROWS, RawRow, SourceError, iter_rows, source_name
from open_instruct.verifiers.registry import check_label as check_label_of_verifier

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = ("system", "user", "assistant", "tool")
"""Roles whose messages a chat template may leave out on purpose."""
TOLD = ("system", "tool")
"""Roles whose omitted messages are reported. Assistant messages are not, because many templates leave out their thoughts."""
CHARACTERS_OF_A_TOKEN = 100
"""More characters than one token of any tokenizer has. Example: with a limit of 256 tokens, a prompt of over 25,600 characters is
too long. Such a prompt is not even tokenized, because that may take minutes."""


Prompt = tuple[CheckedRow, str, list[int], int]
"""A row, its prompt's text and token ids, and the length that counts against the limit."""


def load_prompts(
    mixer_list: Sequence[str],
    splits: Sequence[str],
    *,
    tokenizer: "PreTrainedTokenizerBase",
    max_prompt_token_length: int,
    overlong_prompts: Literal["drop", "error"],
    messages_key: str,
    ground_truths_key: str,
    system_prompt_override: str | None = None,
    known_verifiers: Collection[str],
    exclude: PromptDataset | None = None,
    check_label: Callable[[str, object], None] | None = check_label_of_verifier,
    reader: RowReader | None = None,
    remap: Mapping[str, str] | None = None,
    default_verifier: str | None = None,
    keeps_columns: bool = False,
    cache_dir: str | None = None,
    flag: str = "--dataset_mixer_list",
) -> tuple[PromptDataset, LoadReport]:
    """Reads, checks and tokenizes the sources that a mixer list names. `check_row` describes the columns of a row.

    Args:
        known_verifiers: names that the `dataset` column may have.
        exclude: prompts that are left out, such as the prompts of an evaluation set.
        check_label: raises `ValueError` if a verifier cannot use a ground truth; None: ground truths are not checked.
        reader, remap, default_verifier, keeps_columns: as in `RowRules`.
        cache_dir: where `datasets` keeps its copies of hub data sets.
        flag: name of the mixer list in messages.

    Raises:
        DatasetError: there are mistakes. The message lists all of them, by source and row.
    """
    _check_chat_template(tokenizer)
    rules = RowRules(
        messages_key=messages_key,
        ground_truths_key=ground_truths_key,
        system_prompt_override=system_prompt_override,
        known_verifiers=known_verifiers,
        check_label=check_label,
        max_prompt_token_length=max_prompt_token_length,
        overlong_prompts=overlong_prompts,
        held_out=frozenset(exclude.prompt_keys() if exclude is not None else ()),
        special_tokens=special_tokens(tokenizer),
        reader=reader or RowReader(),
        remap=remap or {},
        default_verifier=default_verifier,
        keeps_columns=keeps_columns,
    )
    mistakes, builder, reports = Mistakes(), PromptDatasetBuilder(), []
    for name, amount, split in _parse(mixer_list, splits, flag):
        source = _Source(name, split, amount, rules, mistakes, cache_dir)
        source.load_into(builder, tokenizer)
        builder.end_entry()
        reports.append(source.report)
    report = LoadReport(tuple(reports))
    if not mistakes.count and not len(builder):
        mistakes.add(f"{flag}: {report.why_nothing_is_left}")
    mistakes.raise_any()
    return builder.build(), report


def _check_chat_template(tokenizer: "PreTrainedTokenizerBase") -> None:
    if not getattr(tokenizer, "chat_template", None):
        raise DatasetError(
            "the tokenizer has no chat template: give one with --chat_template_name, or a tokenizer with one by "
            "--tokenizer_name_or_path"
        )


def _parse(mixer_list: Sequence[str], splits: Sequence[str], flag: str) -> list[tuple[str, Amount, str]]:
    """Name, amount and split of each source."""
    try:
        pairs = parse_mixer_list(mixer_list, flag)
        splits = splits_of_names(splits, len(pairs), f"{flag}_splits")
    except ValueError as err:
        raise DatasetError(str(err)) from err
    return [(name, amount, split) for (name, amount), split in zip(pairs, splits, strict=True)]


@dataclass
class _Source:
    """Loads one source into the dataset."""

    name: str
    split: str
    amount: Amount
    rules: RowRules
    mistakes: Mistakes
    cache_dir: str | None
    report: SourceReport = field(init=False)
    longest: tuple[int, str, str] = (0, "", "")
    """The longest overlong prompt: its number of tokens, its place, and " or more" if the number is a lower bound."""

    def __post_init__(self) -> None:
        self.report = SourceReport(self.name)
        self._numbers = array("q")  # numbers of the kept rows, in the dataset's order from `_first` on
        self._first = 0

    def load_into(self, builder: PromptDatasetBuilder, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._first = len(builder)
        make_prompts = self._templated if self.rules.reader.own_prompt is None else self._own
        waiting: Iterator[Prompt] = iter(())  # prompts of the previous batch, which may still be in tokenization
        try:
            rows = iter(self._checked(self._rows()))
            with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as thread:
                while batch := list(itertools.islice(rows, BATCH_ROWS)):
                    prompts = make_prompts(batch, tokenizer, thread)
                    self._take(waiting, builder)
                    waiting = prompts
                self._take(waiting, builder)
        except SourceError as err:
            self.mistakes.add(f"{self.name}: {err}")
            return
        self._check_count()
        self._repeat(builder)
        if self.report.num_overlong and self.rules.overlong_prompts == "error":
            self.mistakes.add(
                f"{self.name}: {self.report.num_overlong} of {self.report.num_rows} prompts are longer than "
                f"--max_prompt_token_length {self.rules.max_prompt_token_length}, the longest {self.longest[0]}"
                f"{self.longest[2]} ({self.longest[1]}): raise the limit, or drop these prompts with --overlong_prompts drop"
            )

    def _rows(self) -> Iterator[RawRow]:
        """Each row that `amount` asks for, once: all, the first ones, or a random share."""

        def read() -> Iterator[RawRow]:
            return iter_rows(self.name, self.split, self.rules.columns, self.cache_dir)

        if isinstance(self.amount, int):
            return itertools.islice(read(), self.amount)
        if self.amount >= 1.0:
            return read()
        num_rows = sum(1 for _ in read())
        _, drawn = rows_of_amount(num_rows, int(self.amount * num_rows)) if num_rows else (0, [])
        return (row for row, is_drawn in zip(read(), np.isin(np.arange(num_rows), drawn), strict=False) if is_drawn)

    def _repeat(self, builder: PromptDatasetBuilder) -> None:
        """Repeat rows if `amount` asks for more than there are. Rows that were left out count too, and are left out again."""
        num_rows = self.report.num_rows
        total = self.amount if isinstance(self.amount, int) else int(self.amount * num_rows)
        if total <= num_rows or not num_rows:
            return
        repeats, drawn = rows_of_amount(num_rows, total)
        numbers = np.frombuffer(self._numbers, np.int64)
        places = np.searchsorted(numbers, drawn[np.isin(drawn, numbers)])
        for place in itertools.chain(*[range(len(numbers))] * (repeats - 1), places.tolist()):
            builder.add_again(self._first + place)
            self.report.num_repeated += 1

    def _check_count(self) -> None:
        if not self.report.num_rows:
            self.mistakes.add(
                f"{self.name}: has no rows" + ("" if self.amount == 1.0 else f" in a fraction of {self.amount}")
            )

    def _checked(self, rows: Iterator[RawRow]) -> Iterator[CheckedRow]:
        for row in rows:
            self.report.num_rows += 1
            try:
                checked = check_row(row, self.rules)
            except RowError as err:
                self.mistakes.add_row(self.name, row.place, str(err))
                continue
            if checked.names_unused_tools:
                self.report.num_with_unused_tools += 1
                self.report.first_with_unused_tools = self.report.first_with_unused_tools or str(row.place)
            checked = self._hide_special_tokens(checked)
            num_characters = sum(len(message["content"]) for message in checked.messages) + len(checked.rendered or "")
            if num_characters > CHARACTERS_OF_A_TOKEN * self.rules.max_prompt_token_length:
                self.report.num_overlong += 1
                self.longest = max(self.longest, (num_characters // CHARACTERS_OF_A_TOKEN, str(row.place), " or more"))
            else:
                checked.number = self.report.num_rows - 1
                yield checked

    def _hide_special_tokens(self, row: CheckedRow) -> CheckedRow:
        """The row, with special tokens in its messages hidden from the tokenizer, so that they stay text. Only the template may
        add special tokens. In the messages themselves they are a mistake or an attack, so rows with such messages are counted."""
        text = "\n".join(part for message in row.messages for part in _texts_of(message))
        if LITERAL in text:
            row = self._hidden(row)
        for token in self.rules.special_tokens:  # a comprehension takes four times as long
            if token in text:
                self.report.num_with_special_tokens += 1
                self.report.first_with_special_tokens = self.report.first_with_special_tokens or str(row.place)
                if self.rules.reader.own_prompt is not None:  # a workflow with prompts of its own removes them
                    return row
                return self._hidden(row)
        return row

    def _hidden(self, row: CheckedRow) -> CheckedRow:
        return replace(row, messages=[hidden_in(message, self.rules.special_tokens) for message in row.messages])

    def _take(self, prompts: Iterator[Prompt], builder: PromptDatasetBuilder) -> None:
        """Add prompts to the dataset, or count them as left out."""
        for row, text, token_ids, length in prompts:
            if not token_ids:
                self.mistakes.add_row(self.name, row.place, "the chat template turns it into an empty prompt")
            elif length > self.rules.max_prompt_token_length:
                self.report.num_overlong += 1
                self.longest = max(self.longest, (length, str(row.place), ""))
            elif self.rules.held_out and prompt_key(token_ids) in self.rules.held_out:
                self.report.num_excluded += 1
            else:
                self._numbers.append(row.number)
                self.report.num_kept += 1
                builder.add(
                    token_ids=token_ids,
                    ground_truth=row.ground_truth,
                    dataset=row.dataset,
                    raw_query=text,
                    facts=row.facts,
                    columns=row.columns,
                    source=source_name(self.name, self.split),
                    place=row.place,
                )

    def _templated(
        self, rows: list[CheckedRow], tokenizer: "PreTrainedTokenizerBase", thread: Executor
    ) -> Iterator[Prompt]:
        """Each row with the text, token ids and length of its prompt. `thread` tokenizes while the next batch is read."""
        rows, texts = self._with_all_roles(*self._render(rows, tokenizer))
        codec = ChatCodec(tokenizer)
        tokens = thread.submit(codec.encode_all, texts)

        def prompts() -> Iterator[Prompt]:
            for row, text, token_ids in zip(rows, texts, tokens.result(), strict=True):
                if LITERAL in text:
                    token_ids = codec.encode_hidden(text)
                    text = show_special_tokens(text, self.rules.special_tokens)
                yield row, text, token_ids, len(token_ids)

        return prompts()

    def _with_all_roles(self, rows: list[CheckedRow], texts: list[str]) -> tuple[list[CheckedRow], list[str]]:
        """The rows and texts, without rows with a message that the template leaves out because it does not know the role."""
        kept_rows, kept_texts = [], []
        for row, text in zip(rows, texts, strict=True):
            if (role := _left_out(row, text, lambda role: role not in ROLES)) is None:
                if _left_out(row, text, lambda role: role in TOLD):
                    self.report.num_with_left_out += 1
                    self.report.first_with_left_out = self.report.first_with_left_out or str(row.place)
                kept_rows.append(row)
                kept_texts.append(text)
            else:
                problem = (
                    f"the chat template leaves out what the role {role!r:.40} says. It may know {', '.join(ROLES)}."
                )
                self.mistakes.add_row(self.name, row.place, problem)
        return kept_rows, kept_texts

    def _own(self, rows: list[CheckedRow], tokenizer: "PreTrainedTokenizerBase", _thread: Executor) -> Iterator[Prompt]:
        """Each row with the prompt that the workflow makes from it."""
        make = self.rules.reader.own_prompt
        assert make is not None
        codec = ChatCodec(tokenizer)
        for row in rows:
            try:
                own = make(row.messages, codec)
            except ValueError as err:
                self.mistakes.add_row(self.name, row.place, str(err))
            except Exception as err:  # a chat template is a program and may raise anything
                self.mistakes.add_row(self.name, row.place, f"the chat template refuses it: {err}")
            else:
                yield row, own.text, own.token_ids, own.num_tokens

    def _render(
        self, rows: list[CheckedRow], tokenizer: "PreTrainedTokenizerBase"
    ) -> tuple[list[CheckedRow], list[str]]:
        """The rows that the chat template accepts, and their prompts as text."""
        if not any(row.rendered or row.schemas for row in rows):
            with suppress(Exception):  # the template refuses one of the rows; the loop below finds out which
                texts_at_once = tokenizer.apply_chat_template(
                    [row.messages for row in rows], tokenize=False, add_generation_prompt=True
                )
                return rows, list(map(str, texts_at_once))
        rendered: list[CheckedRow] = []
        texts: list[str] = []
        for row in rows:
            tools = {"tools": list(row.schemas)} if row.schemas else {}
            try:
                text = row.rendered or tokenizer.apply_chat_template(
                    row.messages, tokenize=False, add_generation_prompt=True, **tools
                )
            except Exception as err:  # a template is a program and may raise anything
                self.mistakes.add_row(self.name, row.place, f"the chat template refuses it: {err}")
                continue
            rendered.append(row)
            texts.append(str(text))
        return rendered, texts


def _texts_of(message: Mapping[str, Any]) -> tuple[str, ...]:
    """All texts in a message: role, content, and, if there are more fields, the whole message as JSON."""
    if len(message) == len(MESSAGE_KEYS):  # nearly always true
        return message["role"], message["content"]
    return message["role"], message["content"], json.dumps(message, ensure_ascii=False, default=str)


def _left_out(row: CheckedRow, text: str, concerns: Callable[[str], bool]) -> str | None:
    """The first role for which `concerns` is true and whose message is missing in `text`, the prompt that the template wrote."""
    messages = (message for message in row.messages if concerns(message["role"]))
    return next((message["role"] for message in messages if message["content"].strip() not in text), None)
