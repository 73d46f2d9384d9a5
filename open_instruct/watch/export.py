"""Writes the page of a run as one HTML file, which needs neither server nor network and opens from a disk.

The file holds the page's own scripts, and the views' JSON as packed blocks that are unpacked when they are looked at:

    run-data     curves, options, lanes, evaluations, cost, health
    step-12      all responses of step 12 with texts, verdicts and the life of each prompt
    tokens-12    its responses token by token: of some steps all, of the others the best and the worst

A run of any length becomes a file of at most so many bytes: steps are added until it is full, in an order that covers the run
evenly, and the page says what was left out.
"""

import base64
import gzip
import hashlib
import html
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from open_instruct.report.metrics_file import to_json_value
from open_instruct.storage.atomic_file import write_atomically
from open_instruct.system.counted import counted
from open_instruct.watch import views
from open_instruct.watch.mistakes import Mistake
from open_instruct.watch.runs import Runs
from open_instruct.watch.samples import rows_of, table_of_step, texts_of
from open_instruct.watch.server import PAGE
from open_instruct.watch.torn_files import TornFiles
from open_instruct.watch.views_group import parting
from open_instruct.watch.views_prompt import lives_of_step

LARGEST_BYTES = 5_000_000
SHARE_OF_STEPS = 0.7
"""Of the file at most, so that some of it is left for tokens."""
SHARE_OF_METRICS = 0.8
"""Full share of the file up to which the metrics are added that are in no group of curves."""
METRICS = "metrics"
"""Their block."""
WHOLE_STEPS = 6
"""Steps all of whose responses are there token by token."""
WINDOW = 20
"""Steps of one picture of the lanes."""
ALL = "1000000"
MODULES = ("dom", "address", "exported", "data", "charts", "tokens", "runs", "samples", "system", "main")
"""The page's modules, each after those that it imports."""
SAMPLE_FIELDS = (
    *("prompt_id", "attempt", "sample", "row", "source", "outcome", "reward", "score", "is_right", "advantage"),
    *(
        "environment_reward",
        "num_tokens",
        "finish_reason",
        "age",
        "engine",
        "verdicts",
        "oldest_version",
        "goes_on",
        "kind",
    ),
    "number",
)
DIGITS = 8
"""Significant digits of a number: what a 32-bit float has, so that the page shows the same digits as with a server."""


@dataclass
class PackedFile:
    """Blocks of the file, up to a number of bytes."""

    largest_bytes: int
    hidden: Sequence[str] = ()
    """As `packed`."""
    blocks: dict[str, str] = field(default_factory=dict)
    num_bytes: int = 0

    def add(self, name: str, content: Any, *, limit: float = 1.0) -> bool:
        """Add a block if at most this share of the file is full with it. Returns whether it was added."""
        block = packed(content, self.hidden)
        if self.num_bytes + len(block) > limit * self.largest_bytes:
            return False
        self.blocks[name] = block
        self.num_bytes += len(block)
        return True


def export(runs: Runs, path: Path, *, run: int = 0, largest_bytes: int = LARGEST_BYTES) -> int:
    """Write the page of one run. Returns the exit code.

    Raises `Mistake` if the run has nothing to show, or the file cannot be written.
    """
    if not path.parent.is_dir():
        raise Mistake(
            f"cannot write {path}: there is no directory {path.parent}. Make it, or give another --export FILE."
        )
    page = page_of(_Views(runs, run), largest_bytes=largest_bytes)
    try:
        write_atomically(path, page.encode(errors="replace"))
    except OSError as error:
        raise Mistake(f"cannot write {path}: {error.strerror or error}. Give another --export FILE.") from error
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB. Open it in a browser; it needs no server.")
    return 0


@dataclass(frozen=True)
class _Views:
    """The views of one run, which is run 0 in the file."""

    runs: Runs
    run: int

    def __call__(self, name: str, **arguments: Any) -> Any:
        values = {key: str(value) for key, value in arguments.items()}
        return views.answer(self.runs, name, {"run": str(self.run), **values})

    def about(self) -> dict[str, Any]:
        """The run's row in the list of runs. A path of this machine is nobody else's business."""
        row = views.answer(self.runs, "runs", {})[self.run]
        return row | {"run": 0, "directory": Path(row["directory"]).name}

    def steps(self) -> list[int]:
        """Steps with samples."""
        return self.runs[self.run].steps() if self.runs[self.run].has_record else []


def page_of(view: _Views, *, largest_bytes: int) -> str:
    """The HTML of the file."""
    about, steps = view.about(), view.steps()
    frame = document(about["name"], {})
    hidden = directories_of(view)
    file = PackedFile(largest_bytes - len(frame.encode()), hidden)
    whole = whole_run(view, about)
    file.num_bytes = len(packed(whole, hidden)) + 4000  # and the sentences that are added to it
    torn = TornFiles()
    with_samples = [step for step in spread(steps) if torn.read(lambda step=step: _add_step(view, file, step), False)]
    further = whole["views"].get("curves?run=0", {}).get("others") or []
    content = rounded(view("curves", names=",".join(further))["values"]) if further else {}
    has_metrics = file.add(METRICS, content, limit=SHARE_OF_METRICS)
    with_tokens = [
        step
        for number, step in enumerate(with_samples)
        if file.add(f"tokens-{step}", token_block(view, step, whole=number < WHOLE_STEPS))
    ]
    whole_steps = [step for step in with_tokens if step in with_samples[:WHOLE_STEPS]]
    whole["about"] = {
        "title": f"{about['name']}: a file without a server. What is in it",
        "steps": sorted(with_samples),
        "whole_steps": sorted(whole_steps),
        "left_out": [
            *left_out(steps, with_samples, with_tokens, whole_steps),
            f"{'T' if has_metrics else 'Metrics beside those of the curves, and t'}he tokens of evaluations are left out.",
            *torn.sentences,
            *whole["views"].get("evaluations?run=0", {}).get("torn", []),
        ],
    }
    return document(about["name"], {"run-data": packed(whole, hidden), **file.blocks})


def _add_step(view: _Views, file: PackedFile, step: int) -> bool:
    return file.add(f"step-{step}", step_block(view, step), limit=SHARE_OF_STEPS)


# --- what is in the file ----------------------------------------------------------------------------------------------


def whole_run(view: _Views, about: Mapping[str, Any]) -> dict[str, Any]:
    """What does not belong to one step, by the key under which the page asks for it."""
    answers: dict[str, Any] = {"runs?": [about]}
    names = ("curves", "options", "evaluations", "health", "cost", "staleness")
    answers |= {f"{name}?run=0": content for name in names if (content := _if_any(view, name)) is not None}
    curves = answers.get("curves?run=0", {"step": []})
    windows = [(first, first + WINDOW - 1) for first in range(1, max(curves["step"], default=0) + 1, WINDOW)]
    for first, last in windows:
        if (content := _if_any(view, "lanes", from_step=first, to_step=last)) is not None:
            answers[f"lanes?from_step={first}&run=0&to_step={last}"] = content
    table = answers.get("evaluations?run=0", {"table": []})["table"]
    measured = [(row["set"], row["version"]) for row in table]
    evaluated = {
        f"{name} {version}": view("evaluation", version=version, set=name, limit=ALL) for name, version in measured
    }
    return {"views": rounded(answers), "evaluations": rounded(evaluated), "windows": windows}


def _if_any(view: _Views, name: str, **arguments: Any) -> Any:
    """A view; None if the run has nothing for it."""
    try:
        return view(name, **arguments)
    except Mistake:
        return None


def step_block(view: _Views, step: int) -> dict[str, Any]:
    """A step with all its responses."""
    run, read = view.runs[view.run], table_of_step(view.runs[view.run], step)
    samples = to_json_value(rows_of(read))
    answer = view("step", step=step, limit=1)
    answer.pop("samples")  # their texts are cut
    positions = [sample["at"] for sample in samples]
    prompts, responses = texts_of(run, read, positions, "prompt_ids"), texts_of(run, read, positions)
    groups: dict[tuple[str, int], dict[str, Any]] = {}
    for sample, prompt, response in zip(samples, prompts, responses, strict=True):
        entry = {"prompt_text": prompt, "ground_truth": sample["ground_truth"], "texts": []}
        groups.setdefault((sample["prompt_id"], sample["attempt"]), entry)["texts"].append(response)
    staleness = view("staleness", step=step)
    content = {
        "about": answer,
        "samples": {name: [sample[name] for sample in samples] for name in SAMPLE_FIELDS},
        "groups": [
            {"prompt_id": name, "attempt": attempt, **entry, "parts_at": parting(entry["texts"])}
            for (name, attempt), entry in groups.items()
        ],
        "lives": lives_of_step(run, step),
        "conversations": view("conversations", step=step, limit=ALL),
        "staleness": {key: value for key, value in staleness.items() if key not in ("steps", "mean_age", "max_age")},
    }
    if not answer["is_open"]:
        content["tokens"] = view("tokens", step=step, limit=50)
    return rounded(content)


def token_block(view: _Views, step: int, *, whole: bool) -> list[dict[str, Any]]:
    """Responses of a step token by token: all, or the best and the worst. Tokens are columns, which pack better."""
    limits = {"limit": ALL} if whole else {"limit": 1}
    sorts = ("issue",) if whole else ("best", "worst")
    chosen = [sample for sort in sorts for sample in view("step", step=step, sort=sort, **limits)["samples"]]
    names = dict.fromkeys((sample["prompt_id"], sample["attempt"], sample["sample"]) for sample in chosen)
    samples = [
        view("sample", step=step, prompt_id=prompt, attempt=attempt, sample=number) for prompt, attempt, number in names
    ]
    return rounded([sample | {"tokens": columns(sample["tokens"])} for sample in samples])


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows of the same fields as one list for each field."""
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


def left_out(
    steps: Sequence[int], with_samples: Sequence[int], with_tokens: Sequence[int], whole_steps: Sequence[int]
) -> Iterator[str]:
    """What the reader of the file has to know, as sentences."""
    if not steps:
        yield "The run has no record of samples."
        return
    if len(with_samples) < len(steps):
        yield f"The responses of {len(with_samples)} of {counted(len(steps), 'step')} are in it, spread over the run."
    else:
        yield f"The responses of all {counted(len(steps), 'step')} are in it."
    if whole_steps:
        yield f"All responses of these steps are there token by token: {', '.join(map(str, sorted(whole_steps)))}."
    if rest := len(with_tokens) - len(whole_steps):
        yield f"Of {counted(rest, 'other step')} only the best and the worst response."
    if missing := len(with_samples) - len(with_tokens):
        yield f"Of {counted(missing, 'step')} no response is there token by token."


def spread(steps: Sequence[int]) -> list[int]:
    """The steps in an order each beginning of which covers the run evenly: the last, the first, the middle, the quarters, …"""
    if len(steps) <= 2:
        return list(reversed(steps))
    order = [len(steps) - 1, 0]
    width = len(steps) - 1
    while width > 1:
        width /= 2
        order += [round(at * width) for at in range(1, round((len(steps) - 1) / width))]
    return [steps[at] for at in dict.fromkeys([*order, *range(len(steps))])]


def rounded(value: Any) -> Any:
    """JSON values whose numbers have as many digits as a reader can use."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if abs(value) < 1e6 else value
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list | tuple) else value


def directories_of(view: _Views) -> list[str]:
    """The directories in the run's options and command line, longest first: a file that is sent to others names files,
    and not where they lie on this machine."""
    values = [entry["value"] for entry in _if_any(view, "options") or []]
    words = [word for value in values for word in (value if isinstance(value, list) else [value])]
    words += shlex.split(view.about().get("command") or "")
    paths = {Path(word) for word in words if isinstance(word, str) and word.startswith("/")}
    return sorted({f"{path.parent}/" for path in paths if len(path.parts) > 2}, key=len, reverse=True)


def packed(content: Any, hidden: Sequence[str] = ()) -> str:
    """Base64 of gzip of JSON: letters in which no text of a model can be markup. The texts of `hidden` are left out."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    for part in hidden:
        text = text.replace(part, "")
    return base64.b64encode(gzip.compress(text.encode(errors="replace"), 9, mtime=0)).decode()


# --- the document -----------------------------------------------------------------------------------------------------


def document(title: str, blocks: Mapping[str, str]) -> str:
    """The HTML. Its content security policy names the scripts by their hashes, so that nothing else runs."""
    style = (PAGE / "uPlot.css").read_text() + "\n" + (PAGE / "style.css").read_text()
    library, script = (PAGE / "uPlot.js").read_text(), bundle(MODULES)
    for part in (library, script):
        assert not re.search("</script|<!--", part, re.IGNORECASE), "it would end the element that holds it"
    hashes = " ".join(map(_hash, (library, script)))
    sources = f"default-src 'none'; script-src {hashes}; style-src {_hash(style)}; img-src data:"
    policy = f"{sources}; base-uri 'none'; form-action 'none'"
    data = "\n".join(
        f'<script type="application/octet-stream" id="{name}">{block}</script>' for name, block in blocks.items()
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{html.escape(title)}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<noscript>This file needs JavaScript.</noscript>
{data}
<script>{library}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "\./(\w+)\.js";$', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class) (\w+))", re.MULTILINE)


def bundle(names: Iterable[str]) -> str:
    """The modules as one script: a file from a disk may not import others. Each module is a function that returns its exports."""
    parts = []
    for name in names:
        source = (PAGE / f"{name}.js").read_text()
        exports = EXPORT.findall(source)
        body = EXPORT.sub("", IMPORT.sub(r"const { \1 } = module_\2;", source))
        assert not re.search(r"^(import|export)\b", body, re.MULTILINE), (
            f"{name}.js has an import or export of another form"
        )
        parts.append(f"const module_{name} = (() => {{\n{body}\nreturn {{ {', '.join(exports)} }};\n}})();")
    return "\n".join(parts)
