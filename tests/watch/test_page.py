"""The page in a browser: it draws every state, obeys keys, follows a run that goes on, and shows attacks as text."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Tab, chromium, program
from hostile_records import ATTACKS, make_hostile
from made_records import TINY_MODEL, make_record
from watched_pages import enter, served

from open_instruct.watch import views
from open_instruct.watch.export import export
from open_instruct.watch.runs import Runs

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(program() is None, reason="Chromium is not installed: apt-get install chromium"),
]
STATES = (
    *("#/?list=1", "#/compare?runs=0,1", "#/run/0/curves", "#/run/0/curves?x=time&smooth=0.6&hide=none&zoom=3~9"),
    *("#/run/0/curves?names=engine", "#/run/0/step/4", "#/run/0/step/4?sort=worst&outcome=consumed&min_length=10"),
    *("#/run/0/step/13", "#/run/0/step/99", "#/run/0/step/4/train-16", "#/run/0/step/4/train-16/3?colour=use&token=5"),
    *("#/run/0/step/4/train-15/0?attempt=1&colour=version", "#/run/0/tokens/4", "#/run/0/why", "#/run/0/why/train-15"),
    *(
        "#/run/0/row/data%2Ftrain.jsonl%20line%204",
        "#/run/0/lanes?from=2&to=9",
        "#/run/0/lanes/5",
        "#/run/0/chat",
        "#/run/0/staleness/4",
        "#/run/0/health",
    ),
    *("#/run/0/evaluations?set=plus", "#/run/0/evaluation/plus/5", "#/run/0/evaluation/plus/5/eval-5-2/1"),
    *(
        "#/run/0/cost",
        "#/run/0/options?kind=all",
        "#/run/0/options?other=1",
        "#/run/0/search?text=answer",
        "#/run/0/none",
    ),
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Tab]:
    with chromium() as tab:
        yield tab


@pytest.fixture
def tab(browser: Tab) -> Iterator[Tab]:
    """At 1280 pixels, in light colours. Fails the test that leaves an error on the console."""
    browser.size(1280, 860)
    browser.problems.clear()
    yield browser
    refused = "the server responded with a status of 400"  # a step that is not there
    assert [problem for problem in browser.problems if refused not in problem] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed and resumed, and another that ended."""
    folder = tmp_path_factory.mktemp("runs")
    make_record(folder / "a", end=None)
    make_record(folder / "b", num_steps=6, is_resumed=False)
    return folder


@pytest.fixture(scope="module")
def address(browser: Tab, folder: Path) -> Iterator[str]:
    with served(browser, folder) as address:
        yield address


# --- drawing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_every_state_is_drawn_within_the_window(tab: Tab, address: str, width: int, is_dark: bool) -> None:
    tab.size(width, 800, dark=is_dark)
    enter(tab, address)
    for state in STATES:
        tab.open(address + state)
        assert tab.text("main h1, main .empty"), state
        if not state.endswith(("/99", "/none")):
            assert "cannot be shown" not in tab.text("main"), state
        assert tab.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, f"{state} is wider than {width}"
    background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(16, 21, 27)") == is_dark


def test_curves_are_drawn_and_a_click_opens_the_step(tab: Tab, address: str) -> None:
    enter(tab, address)
    tab.open(address + "#/run/0/curves")
    tab.wait("document.querySelectorAll('.charts canvas').length > 8")
    box = json.loads(tab.evaluate("JSON.stringify(document.querySelector('.chart .u-over').getBoundingClientRect())"))
    x, y = box["left"] + box["width"] * 4 / 11, box["top"] + box["height"] / 2  # step 5 of 1 to 12
    mouse(tab, "mouseMoved", x, y)
    assert tab.text(".readout").startswith("step 5")
    mouse(tab, "mousePressed", x, y)
    mouse(tab, "mouseReleased", x, y)
    tab.settle()
    assert tab.evaluate("location.hash") == "#/run/0/step/5"


def test_dragging_over_a_curve_zooms_all_and_the_address_has_it(tab: Tab, address: str) -> None:
    enter(tab, address)
    tab.open(address + "#/run/0/curves")
    tab.wait("document.querySelectorAll('.charts canvas').length > 8")
    box = json.loads(tab.evaluate("JSON.stringify(document.querySelector('.chart .u-over').getBoundingClientRect())"))
    y = box["top"] + box["height"] / 2
    for kind, share in (
        ("mouseMoved", 2 / 11),
        ("mousePressed", 2 / 11),
        ("mouseMoved", 6 / 11),
        ("mouseReleased", 6 / 11),
    ):
        mouse(tab, kind, box["left"] + box["width"] * share, y)
    tab.settle()
    low, high = tab.evaluate("decodeURIComponent(location.hash).split('zoom=')[1]").split("~")
    assert (round(float(low)), round(float(high))) == (3, 7)
    assert "whole run" in tab.text(".toolbar")


def mouse(tab: Tab, kind: str, x: float, y: float) -> None:
    button = {"button": "left", "clickCount": 1, "buttons": 1} if kind != "mouseMoved" else {"buttons": 1}
    tab.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)
    tab.evaluate("new Promise((done) => setTimeout(done, 50))")


def test_a_bar_of_the_histogram_is_a_filter(tab: Tab, address: str) -> None:
    enter(tab, address)
    tab.open(address + "#/run/0/step/4")
    count = int(tab.evaluate("document.querySelector('.bin:not(:disabled) .count').textContent"))
    assert tab.evaluate("document.querySelectorAll('.samples li').length") == 20
    tab.click(".bin:not(:disabled)")
    assert tab.evaluate("document.querySelectorAll('.samples li').length") == count
    assert "min_reward" in tab.evaluate("location.hash")
    tab.click(".bin[aria-pressed=true]")
    assert tab.evaluate("document.querySelectorAll('.samples li').length") == 20


def test_axis_of_rewards_begins_at_the_lowest(tab: Tab, address: str, folder: Path) -> None:
    enter(tab, address)
    tab.open(address + "#/run/0/step/4")
    labels = tab.evaluate("[...document.querySelectorAll('.bin-edges span')].map((label) => label.textContent)")
    names = tab.evaluate("[...document.querySelectorAll('.bin')].map((bin) => bin.title)")
    lowest = views.answer(Runs([folder / "a"]), "step", {"step": "4", "sort": "worst", "limit": "1"})
    assert float(labels[0].replace("−", "-")) == pytest.approx(lowest["samples"][0]["reward"])
    assert names[0].startswith(f"{labels[0]} to ")


def test_a_step_links_to_the_tokens_that_differ_most(tab: Tab, address: str) -> None:
    enter(tab, address)
    tab.open(address + "#/run/0/step/4")
    tab.click("a[href='#/run/0/tokens/4']")
    assert tab.text("h1") == "Largest differences"


def test_warnings_keep_their_lines_and_rows_their_ends(tab: Tab, tmp_path: Path) -> None:
    make_record(tmp_path / "run")
    with open(tmp_path / "run" / "record" / "events.jsonl", "a") as file:
        file.write(json.dumps({"kind": "warning", "unix": 1.0, "level": "WARNING", "text": "one\ntwo"}) + "\n")
    with served(tab, tmp_path / "run") as place:
        enter(tab, place)
        tab.open(place + "#/run/0/health")
        assert "one\ntwo" in tab.evaluate("document.querySelector('main').innerText")
        tab.open(place + "#/run/0/evaluations")
        text = tab.evaluate(
            "import('./page/dom.js').then(({ middle }) => middle('reasoning_gym/chain_sum?' + 'x'.repeat(90) + ' index 466')"
            ".textContent)"
        )
    assert len(text) == 44
    assert text.startswith("reasoning_gym")
    assert text.endswith("x index 466")


def test_a_token_tells_why_it_is_not_trained_on(tab: Tab, address: str) -> None:
    enter(tab, address)
    tab.open(address + "#/run/0/step/4/train-16/3")  # a tool's answer is in it
    place = tab.evaluate("[...document.querySelectorAll('.turn.aside .token')][0].dataset.at")
    tab.click(f".token[data-at='{place}']")
    detail = tab.text(".token-detail")
    assert "Not trained on: written by a tool, an environment or the chat template." in detail
    tab.press("k")
    assert "Trained on." in tab.text(".token-detail")
    tab.open(address + "#/run/0/step/4/train-19/0?token=1")
    assert "Not trained on: of a group whose responses all scored alike" in tab.text(".token-detail")


def test_keys_move_between_steps_groups_and_samples(tab: Tab, address: str) -> None:
    enter(tab, address)
    tab.open(address + "#/run/0/step/4")
    for key, shift, hash_ in (
        ("ArrowRight", False, "#/run/0/step/5"),
        ("ArrowLeft", False, "#/run/0/step/4"),
        ("ArrowLeft", True, "#/run/0/step/3"),
    ):
        tab.press(key, shift=shift)
        assert tab.evaluate("location.hash") == hash_
    tab.open(address + "#/run/0/step/4/train-16")
    tab.press("ArrowRight")
    assert tab.evaluate("location.hash") == "#/run/0/step/4/train-17"
    tab.open(address + "#/run/0/step/4/train-16/1")
    tab.press("ArrowRight")
    assert tab.text("h1") == "Sample 2"
    tab.press("u")
    assert tab.evaluate("location.hash") == "#/run/0/step/4/train-16"
    tab.press("/")
    assert tab.evaluate("document.activeElement.type + location.hash") == "search#/run/0/search"
    tab.press("Escape")
    tab.press("?")
    assert "light, dark" in tab.text("dialog[open]")
    tab.evaluate("document.querySelector('dialog').close()")
    tab.press("3")
    assert tab.text("h1") == "Evaluations"


def test_the_theme_is_chosen_and_kept(tab: Tab, address: str) -> None:
    enter(tab, address)
    tab.evaluate("localStorage.clear()")
    tab.open(address)
    for theme in ("light", "dark", "system"):
        tab.press("t")
        assert tab.evaluate("document.documentElement.dataset.theme") == theme
    tab.press("t")
    tab.press("t")
    tab.open(address + "#/run/0/cost")
    tab.call("Page.reload")
    tab.settle()
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 21, 27)"
    tab.evaluate("localStorage.clear()")


# --- a run that goes on -----------------------------------------------------------------------------------------------


def test_the_page_follows_a_run_without_losing_what_is_marked(tab: Tab, tmp_path: Path) -> None:
    later = make_record(tmp_path / "later", num_steps=4, is_resumed=False).directory
    live = make_record(tmp_path / "live", num_steps=3, end=None, is_resumed=False).directory
    with served(tab, live) as address:
        enter(tab, address)
        tab.open(address + "#/run/0/curves")
        tab.wait("document.querySelector('.live')?.textContent === 'live'")
        assert "3 of 3" in tab.text("main")
        tab.evaluate("window.sameDocument = true")
        (live / "record/steps/000004.parquet").write_bytes((later / "record/steps/000004.parquet").read_bytes())
        for name in ("metrics.jsonl", "record/events.jsonl"):
            (live / name).write_bytes((later / name).read_bytes())
        tab.wait("document.querySelector('main').innerText.includes('4 of 3')")
        assert tab.evaluate("window.sameDocument") is True
        tab.open(address + "#/run/0/step/4/train-16")
        tab.evaluate("document.querySelector('.answer').dataset.mark = 'the same element'")
        (live / "metrics.jsonl").write_bytes((later / "metrics.jsonl").read_bytes() + b"\n")
        tab.evaluate("new Promise((done) => setTimeout(done, 1200))")
        assert tab.evaluate("document.querySelector('.answer').dataset.mark") == "the same element"


def test_a_run_without_a_trained_step_shows_what_was_sampled(tab: Tab, tmp_path: Path) -> None:
    run = make_record(tmp_path / "young", num_steps=0, end=None, is_resumed=False).directory
    with served(tab, run) as address:
        enter(tab, address)
        tab.open(address + "#/run/0/curves")
        assert "No step is trained yet." in tab.text("main")
        tab.open(address + "#/run/0/step")
        assert "open: being put together" in tab.text("main")
        assert tab.evaluate("document.querySelectorAll('.samples li').length") == 8
        for page in ("lanes", "staleness", "evaluations", "health", "cost", "options", "search"):
            tab.open(f"{address}#/run/0/{page}")
            assert "cannot be shown" not in tab.text("main"), page


# --- attacks ----------------------------------------------------------------------------------------------------------

HOSTILE_STATES = (
    *("#/?list=1", "#/run/0/curves", "#/run/0/step/2", "#/run/0/step/2/train-5", "#/run/0/step/2/train-5/0"),
    *("#/run/0/step/2/train-6", "#/run/0/step/2/train-6/1?colour=use", "#/run/0/why/train-5", "#/run/0/health"),
    *("#/run/0/evaluations?set=plus", "#/run/0/evaluation/plus/0", "#/run/0/options?kind=all", "#/run/0/tokens/2"),
    *(
        "#/run/0/search?text=%3Cimg",
        "#/run/0/row/%3Cscript%3Ewindow.attacked%20%3D%201%3C%2Fscript%3E",
        "#/run/0/lanes",
    ),
    *("#/run/0/%3Cimg%20src%3Dx%20onerror%3D'window.attacked%3D1'%3E", "#/run/0/curves?names=%3Cimg"),
)


@pytest.mark.parametrize("is_exported", [False, True], ids=["served", "exported"])
def test_what_attacks_is_shown_as_text(tab: Tab, tmp_path: Path, is_exported: bool) -> None:
    run = make_hostile(tmp_path / "hostile")
    with served(tab, run) as address:
        if is_exported:
            export(Runs([run]), tmp_path / "run.html")
            address = (tmp_path / "run.html").as_uri()
            tab.open(address)
        else:
            enter(tab, address)
        for state in HOSTILE_STATES:
            tab.open(address + state)
            assert tab.evaluate("window.attacked") is None, state
            assert (
                tab.evaluate("document.querySelectorAll('main script, main img, main iframe, main svg[onload]').length")
                == 0
            )
            assert tab.evaluate("document.querySelectorAll('a[href^=javascript]').length") == 0, state
        tab.open(address + "#/run/0/step/2")
        for attack in ATTACKS[:5]:
            assert attack in tab.text("main"), "the text is there, as it was sampled"
        assert "adminU+202Eexe.txtU+2066" in tab.text("main"), "what turns the order of characters is named"
        assert "\u202e" not in tab.text("main")


# --- the exported file ------------------------------------------------------------------------------------------------

SHARED_STATES = (
    *("#/run/0/step/4?sort=worst", "#/run/0/step/4?outcome=consumed&sort=longest&text=answer", "#/run/0/step/13"),
    *("#/run/0/step/4?min_length=20&verifier=brevity", "#/run/0/step/4/train-16", "#/run/0/step/3/train-15"),
    *("#/run/0/step/7/train-31/3?token=2", "#/run/0/why/train-15", "#/run/0/row/data%2Ftrain.jsonl%20line%204"),
    *(
        "#/run/0/row/data%2Ftest.jsonl%20line%202",
        "#/run/0/tokens/4",
        "#/run/0/staleness/4",
        "#/run/0/lanes?from=1&to=20",
    ),
    *(
        "#/run/0/evaluations?set=plus&flips=lost",
        "#/run/0/evaluation/plus/5",
        "#/run/0/cost",
        "#/run/0/options?kind=all",
    ),
    *("#/run/0/search?text=calculator", "#/run/0/health"),
)
READ = """
[...document.querySelectorAll('main')].map((main) => {
  const copy = main.cloneNode(true);
  copy.querySelectorAll('.command, .step-number, button').forEach((element) => element.remove());
  copy.querySelectorAll('a').forEach((element) => element.textContent.startsWith('tokens on which') && element.remove());
  return copy.textContent;
}).join('')
"""


def test_the_exported_file_says_what_the_server_says(tab: Tab, folder: Path, tmp_path: Path) -> None:
    run = folder / "a"
    export(Runs([run]), tmp_path / "run.html")
    with served(tab, run) as address:
        enter(tab, address)
        for state in SHARED_STATES:
            tab.open(address + state)
            text = tab.evaluate(READ)
            tab.open((tmp_path / "run.html").as_uri() + state)
            text = text.replace("Talk to the modelAsk it here, or:", "").replace(f"{TINY_MODEL.parent}/", "")
            assert tab.evaluate(READ) == text, state
            assert len(text) > 100, state


def test_the_exported_file_tells_what_is_left_out(tab: Tab, folder: Path, tmp_path: Path) -> None:
    export(Runs([folder / "a"]), tmp_path / "run.html")
    tab.open((tmp_path / "run.html").as_uri())
    assert "made: a file without a server" in tab.text(".notice")
    tab.open((tmp_path / "run.html").as_uri() + "#/run/0/evaluation/plus/5/eval-5-2/1")
    assert "Its tokens are not in this file. To see them, open the run" in tab.text("main")
    tab.open((tmp_path / "run.html").as_uri() + "#/run/0/step/12/train-56/1")
    assert (
        "not in this file. To see it, open the run where its files are: python -m open_instruct.watch a."
        in tab.text("main")
    )


ADDED = """
JSON.stringify([...[...document.querySelectorAll('.curves')].find((part) => part.querySelector('h2').textContent === 'Added')
  .querySelectorAll('figcaption')].map((caption) => caption.title))
"""


def test_metrics_that_are_added_by_hand_are_drawn_in_the_file_too(tab: Tab, folder: Path, tmp_path: Path) -> None:
    export(Runs([folder / "a"]), tmp_path / "run.html")
    file = (tmp_path / "run.html").as_uri()
    for names, charts in (
        ("busy", ["engines/busy_share"]),
        ("engine_restarts,optim", ["engine_restarts", "optim/grad_norm"]),
    ):
        tab.open(f"{file}#/run/0/curves?names={names}")
        assert json.loads(tab.evaluate(ADDED)) == charts
    tab.open(f"{file}#/run/0/curves?names=nothing_like_it,busy")
    assert "no metric is named nothing_like_it" in tab.text("main")
    assert json.loads(tab.evaluate(ADDED)) == ["engines/busy_share"]


def test_a_response_that_was_not_scored_says_why(tab: Tab, address: str) -> None:
    tab.open(address + "#/run/0/step/5/train-21")
    assert "not scored: timeout" in tab.text("main")
    tab.open(address + "#/run/0/step/5?outcome=not_scored")
    assert "not scored" in tab.text(".sample-item")


def test_conversations_of_a_step_are_lanes_with_turns_and_tools(tab: Tab, address: str) -> None:
    tab.open(address + "#/run/0/lanes/5")
    legend = tab.text(".legend")
    assert all(kind in legend for kind in ("queue", "turn", "tool", "environment", "verify", "wait"))
    assert "calculator-0" in tab.evaluate("document.querySelector('svg.lanes').textContent")
    assert tab.evaluate(
        "[...document.querySelectorAll('.lane-names a')].map((one) => one.textContent).join(' ')"
    ).split() == [f"train-{number}" for number in (22, 20, 21, 23, 24)]
