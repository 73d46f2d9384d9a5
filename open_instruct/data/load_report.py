"""Counts of what became of the rows of each source."""

from dataclasses import dataclass

from open_instruct.system.counted import counted


@dataclass
class SourceReport:
    """What became of the rows of one source: read = kept + overlong + excluded; the dataset has kept + repeated."""

    name: str
    num_rows: int = 0
    num_overlong: int = 0
    num_excluded: int = 0
    num_kept: int = 0
    num_repeated: int = 0
    """Copies of prompts, which are made if more rows are asked for than there are."""
    num_with_special_tokens: int = 0
    """Rows, kept or not, whose messages spell out a special token. The token stays text."""
    first_with_special_tokens: str = ""
    """Place of the first such row."""
    num_with_left_out: int = 0
    """Rows with a system message or a tool's answer that the chat template leaves out."""
    first_with_left_out: str = ""
    num_with_unused_tools: int = 0
    """Rows whose column `tools` names tools although the run has no conversations."""
    first_with_unused_tools: str = ""


@dataclass(frozen=True)
class LoadReport:
    """Counts of `load_prompts`, one report per source in the order of the mixer list."""

    sources: tuple[SourceReport, ...]

    @property
    def num_rows(self) -> int:
        """Rows read."""
        return sum(source.num_rows for source in self.sources)

    @property
    def num_overlong(self) -> int:
        """Rows dropped because their prompts are too long."""
        return sum(source.num_overlong for source in self.sources)

    @property
    def num_excluded(self) -> int:
        """Rows dropped because their prompts are held out."""
        return sum(source.num_excluded for source in self.sources)

    @property
    def why_nothing_is_left(self) -> str:
        """The reason, for a message, why no row was kept."""
        if not self.sources:
            return "it names no data: give names and amounts, such as allenai/rlvr 1.0"
        cure = "name more data, or raise --max_prompt_token_length"
        if self.num_excluded:
            cure += ", or train on the prompts of the evaluation too (--hold_out_eval_prompts False)"
        left_out = f"{counted(self.num_overlong, 'prompt')} too long, {self.num_excluded} held out"
        return f"nothing is left of {counted(self.num_rows, 'row')} ({left_out}): {cure}"

    def warnings(self) -> list[str]:
        """Warnings about the data for the user."""
        unused = [
            f"{source.name}: {source.num_with_unused_tools} of {source.num_rows} rows name tools in a column 'tools' (the first: "
            f"{source.first_with_unused_tools}), and this run has none: --tools names them"
            for source in self.sources
            if source.num_with_unused_tools
        ]
        left_out = [
            f"{source.name}: the chat template leaves out a system message or a tool's answer in {source.num_with_left_out} of "
            f"{source.num_rows} rows (the first: {source.first_with_left_out}), so the model does not see it"
            for source in self.sources
            if source.num_with_left_out
        ]
        spelled_out = [
            f"{source.name}: {source.num_with_special_tokens} of {source.num_rows} rows spell out special tokens of the "
            f"tokenizer, which stay text in the prompt (the first: {source.first_with_special_tokens})"
            for source in self.sources
            if source.num_with_special_tokens
        ]
        return [*unused, *left_out, *spelled_out]
