"""The page of a run as one file: what is in it is what the views say, it is never too large, and no text in it is markup."""

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hostile_records import ATTACKS, make_hostile
from made_records import TINY_MODEL, MadeRecord, make_record

from open_instruct.run.options_file import OPTIONS_FILE
from open_instruct.watch import views
from open_instruct.watch.export import (
    LARGEST_BYTES,
    MODULES,
    bundle,
    document,
    export,
    left_out,
    packed,
    rounded,
    spread,
)
from open_instruct.watch.mistakes import Mistake
from open_instruct.watch.runs import Runs
from open_instruct.watch.server import PAGE

BLOCK = re.compile(r'<script type="application/octet-stream" id="([\w-]+)">([A-Za-z0-9+/=]*)</script>')


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeRecord:
    return make_record(tmp_path_factory.mktemp("run") / "made")


@pytest.fixture(scope="module")
def page(made: MadeRecord, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "run.html"
    assert export(Runs([made.directory]), path) == 0
    return path.read_text()


def blocks(page: str) -> dict[str, Any]:
    """The JSON that the file carries."""
    return {name: json.loads(gzip.decompress(base64.b64decode(content))) for name, content in BLOCK.findall(page)}


def test_every_step_has_all_its_samples_as_the_view_gives_them(made: MadeRecord, page: str) -> None:
    runs, content = Runs([made.directory]), blocks(page)
    steps = runs[0].steps()
    assert content["run-data"]["about"]["steps"] == steps
    for step in steps:
        block = content[f"step-{step}"]
        samples = views.answer(runs, "step", {"step": str(step), "limit": "1000"})["samples"]
        shown = [text for group in block["groups"] for text in group["texts"]]
        for name in block["samples"].keys() & samples[0].keys():
            values = block["samples"][name]
            assert values == rounded([sample[name] for sample in samples]), name
        assert [text[:300] for text in shown] == [sample["text"] for sample in samples]


def test_tokens_are_those_of_the_view(made: MadeRecord, page: str) -> None:
    runs, content = Runs([made.directory]), blocks(page)
    block = content["tokens-7"]
    assert len(block) == 20, "all samples of a step in the middle"
    assert len(content["tokens-12"]) == 2, "the best and the worst of others"
    for sample in block:
        arguments = {name: str(sample[name]) for name in ("step", "prompt_id", "attempt", "sample")}
        expected = rounded(views.answer(runs, "sample", arguments))
        tokens = sample["tokens"]
        assert [dict(zip(tokens, values, strict=True)) for values in zip(*tokens.values(), strict=True)] == expected[
            "tokens"
        ]
        assert {**sample, "tokens": None} == {**expected, "tokens": None}


def test_what_belongs_to_no_step_is_what_the_views_say(made: MadeRecord, page: str) -> None:
    runs, content = Runs([made.directory]), blocks(page)["run-data"]
    for key, value in content["views"].items():
        name, _, query = key.partition("?")
        arguments = dict(part.split("=") for part in query.split("&") if part)
        expected = rounded(views.answer(runs, name, arguments))
        if name == "runs":
            expected[0]["directory"] = "made"
        directories = f"{TINY_MODEL.parent}/"  # of this machine; the file has names alone
        assert value == json.loads(json.dumps(expected).replace(directories, "")), key
    assert {key.partition("?")[0] for key in content["views"]} >= {"curves", "options", "evaluations", "cost", "lanes"}
    assert content["evaluations"].keys() == {"plus 0", "minus 0", "plus 5", "minus 5"}


def test_no_path_of_the_run_s_machine_is_in_the_list_of_runs(made: MadeRecord, page: str) -> None:
    assert str(made.directory) not in json.dumps(blocks(page)["run-data"]["views"]["runs?"])


def test_directories_of_the_run_s_machine_are_nowhere_in_the_file(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    make_record(directory)
    options = json.loads((directory / OPTIONS_FILE).read_text())
    secret = "/home/somebody/secret_project"
    options["in_force"] |= {
        "dataset_mixer_list": [f"{secret}/data/train.jsonl", "1.0"],
        "output_dir": f"{secret}/out/run",
    }
    (directory / OPTIONS_FILE).write_text(json.dumps(options))
    path = tmp_path / "page.html"
    export(Runs([directory]), path)
    unpacked = json.dumps(blocks(path.read_text()))
    assert "train.jsonl" in unpacked
    assert "somebody" not in unpacked


# --- size -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.9, 0.6, 0.3, 0.0])
def test_a_file_is_not_larger_than_it_may_be_and_says_what_is_left_out(
    made: MadeRecord, tmp_path: Path, share: float
) -> None:
    runs, path = Runs([made.directory]), tmp_path / "run.html"
    export(runs, path)
    frame = len(document("", {}).encode()) + len(packed(blocks(path.read_text())["run-data"])) + 5000
    limit = int(frame + share * (path.stat().st_size - frame))
    export(runs, path, largest_bytes=limit)
    assert path.stat().st_size <= limit
    content = blocks(path.read_text())
    about = content["run-data"]["about"]
    in_file = [step for step in runs[0].steps() if f"step-{step}" in content]
    assert about["steps"] == in_file
    with_tokens = [step for step in in_file if f"tokens-{step}" in content]
    assert len(with_tokens) < 13
    assert about["left_out"][:-1] == [*left_out(runs[0].steps(), in_file, with_tokens, about["whole_steps"])]
    assert ("all 13 steps" if len(in_file) == 13 else f"of {len(in_file)} of 13 steps") in about["left_out"][0]


def test_the_sentences_tell_of_all_that_is_missing() -> None:
    sentences = [*left_out([1, 2, 3, 4], [4, 1, 2], [4, 1], [4])]
    assert sentences[:4] == [
        "The responses of 3 of 4 steps are in it, spread over the run.",
        "All responses of these steps are there token by token: 4.",
        "Of 1 other step only the best and the worst response.",
        "Of 1 step no response is there token by token.",
    ]
    assert [*left_out([], [], [], [])] == ["The run has no record of samples."]


@pytest.mark.parametrize("number", [0, 1, 2, 3, 7, 160])
def test_each_beginning_of_the_order_covers_the_run_evenly(number: int) -> None:
    steps = list(range(1, number + 1))
    order = spread(steps)
    assert sorted(order) == steps
    for count in range(2, number + 1):
        chosen = sorted(order[:count])
        assert {1, number} <= set(chosen)
        gaps = [after - before for before, after in pairwise(chosen)]
        assert max(gaps) <= 2 * (number - 1) / (count - 1) + 1.5


def test_a_run_without_a_trained_step_becomes_a_file(tmp_path: Path) -> None:
    run = make_record(tmp_path / "made", num_steps=0, end=None, is_resumed=False).directory
    export(Runs([run]), tmp_path / "run.html")
    content = blocks((tmp_path / "run.html").read_text())
    assert content["run-data"]["about"]["steps"] == [1]
    assert len(content["step-1"]["samples"]["reward"]) == 8


def test_a_file_that_cannot_be_written_is_a_mistake(made: MadeRecord, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Mistake, match=r"cannot write .*give another --export FILE"):
        export(Runs([made.directory]), tmp_path / "file" / "run.html")


# --- markup -----------------------------------------------------------------------------------------------------------


class Elements(HTMLParser):
    """Counts what a browser would make of the file."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}


def test_texts_that_attack_are_no_markup_in_the_file(tmp_path: Path) -> None:
    run = make_hostile(tmp_path / "hostile")
    export(Runs([run]), tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    content = blocks(page)
    texts = [text for group in content["step-2"]["groups"] for text in group["texts"]]
    assert all(any(text.startswith(attack) for text in texts) for attack in ATTACKS), (
        "the attacks are in the file, as data"
    )
    elements = Elements(page)
    assert elements.tags.count("script") == len(content) + 2
    assert not {"img", "svg", "a", "iframe"} & set(elements.tags)
    assert not {name for name in elements.attributes if name.startswith("on")}
    assert "window.attacked" not in BLOCK.sub("", re.sub(r"<title>.*</title>", "", page))


def test_the_policy_names_exactly_the_scripts_and_the_style_of_the_file(page: str) -> None:
    policy = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)[0]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    sources = re.findall(
        r"<script>(.*?)</script>|<script type=\"module\">(.*?)</script>|<style>(.*?)</style>", page, re.S
    )
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(''.join(s).encode()).digest()).decode()}'" for s in sources}
    assert set(re.findall(r"'sha256-[^']*'", policy)) == hashes


def test_every_module_of_the_page_is_in_the_file_after_those_that_it_imports() -> None:
    assert set(MODULES) == {path.stem for path in PAGE.glob("*.js")} - {"uPlot"}
    for at, name in enumerate(MODULES):
        imports = re.findall(r'from "\./(\w+)\.js"', (PAGE / f"{name}.js").read_text())
        assert set(imports) <= set(MODULES[:at]), name


def test_a_bundle_has_neither_imports_nor_exports() -> None:
    assert re.findall(r"^(?:import|export)\b.*", bundle(MODULES), re.MULTILINE) == []


def test_the_file_asks_for_nothing_from_outside(page: str) -> None:
    assert re.findall(r'(?:src|href)="(?!data:,")[^"]*"', re.sub(r"<script.*?</script>", "", page, flags=re.S)) == []


@pytest.mark.extended
@pytest.mark.timeout(1800)
def test_a_run_as_large_as_the_demo_is_at_most_5_mb(tmp_path: Path) -> None:
    from demo_records import make_demo

    export(Runs([make_demo(tmp_path / "demo")]), tmp_path / "run.html")
    assert (tmp_path / "run.html").stat().st_size <= LARGEST_BYTES
    assert blocks((tmp_path / "run.html").read_text())["run-data"]["about"]["steps"] == list(range(1, 161))
