"""Self-play as users write it: kuhn_poker.py with a played policy, real tables, and a ledger for each seat."""

import re
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from played_policy import PlayedPolicy, Say
from transformers import AutoTokenizer

from open_instruct.chat_codec import ChatCodec
from open_instruct.config.checks import options_have_their_entry, workflow_can_use_the_options
from open_instruct.config.cli import UsageError, parse_args, read_lists
from open_instruct.config.extensions import MODULE_OPTIONS, config_class_with, plain_config
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data_types import EVAL, GenerationResult, PromptRequest, Sample, SamplingConfig
from open_instruct.environments.base import ENVIRONMENTS
from open_instruct.registry import option_kinds
from open_instruct.scored_groups import ScoredGroup, split
from open_instruct.user_modules import import_user_module
from open_instruct.workflows.base import WORKFLOWS
from open_instruct.workflows.runner import EngineFacts, RolloutRunner

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "scripts" / "train" / "debug" / "kuhn_poker.py"
TOKENIZER = ROOT / "assets" / "tiny_poker_model"
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def kuhn() -> Iterator[Any]:
    """The example's module. What it registers is there for these tests alone."""
    registries: list[Any] = [WORKFLOWS, ENVIRONMENTS]
    before = [dict(registry._entries) for registry in registries]
    module = import_user_module(str(EXAMPLE))
    WORKFLOWS.register("kuhn_poker", options=module.KuhnPokerOptions)(module.KuhnPoker)
    ENVIRONMENTS.register("kuhn_table")(module.KuhnTable)
    yield module
    for registry, entries in zip(registries, before, strict=True):
        registry._entries = entries


@pytest.fixture(scope="module")
def codec() -> ChatCodec:
    return ChatCodec(AutoTokenizer.from_pretrained(TOKENIZER))


class Table:
    """A runner with the example's workflow."""

    def __init__(
        self, kuhn: Any, codec: ChatCodec, say: Say, *, max_prompt_tokens: int | None = None, **options: Any
    ) -> None:
        self.codec = codec
        self.workflow = kuhn.KuhnPoker(kuhn.KuhnPokerOptions(**options))
        self.policy = PlayedPolicy(say, codec)
        self._results: list[GenerationResult] = []
        self._errors: list[BaseException] = []
        self._arrived = threading.Event()
        facts = EngineFacts(0, 1024, lambda: codec, max_prompt_tokens=max_prompt_tokens)
        self.runner = RolloutRunner(self.workflow, facts, self.policy.submit, self._finish, self._fail)

    def _finish(self, result: GenerationResult) -> None:
        self._results.append(result)
        self._arrived.set()

    def _fail(self, error: BaseException) -> None:
        self._errors.append(error)
        self._arrived.set()

    def play(
        self, *, n: int = 1, seed: int = 1, max_tokens: int = 256, index: int = 0, **fields: Any
    ) -> GenerationResult:
        """The games of one deal."""
        self._arrived.clear()
        messages = [{"role": "user", "content": "Deal 0001."}]
        prompt = np.array(self.codec.encode(self.codec.render(messages, begins_turn=True)), np.int32)
        config = SamplingConfig(max_tokens=max_tokens, n=n, seed=seed)
        request = PromptRequest(prompt, config, index, "train-0", 0, task={"messages": messages}, **fields)
        self.runner.start(request)
        assert self._arrived.wait(TIMEOUT_S), "no result"
        if self._errors:
            raise self._errors[0]
        return self._results[-1]


MakeTable = Callable[..., Table]


@pytest.fixture
def seat(kuhn: Any, codec: ChatCodec) -> Iterator[MakeTable]:
    tables: list[Table] = []

    def make(say: Say, *, chat: ChatCodec | None = None, **options: Any) -> Table:
        tables.append(Table(kuhn, chat or codec, say, **options))
        return tables[-1]

    yield make
    for table in tables:
        table.runner.close()


def says(**by_history: str) -> Say:
    """A policy that answers what stands last on the table: `open`, `check`, `bet`."""

    def say(text: str, _: int) -> str:
        told = re.findall(r"submitted move: '\[(\w+)\]'", text)
        return by_history[told[-1] if told else "open"] + "<end>"

    return say


BETS_AND_CALLS = says(open="[bet]", check="[bet]", bet="[call]")


def text_of(codec: ChatCodec, sample: Sample) -> str:
    return codec.decode_all([*sample.prompt_ids.tolist(), *sample.response_ids.tolist()])


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "stake"),
    [
        (["[check]", "[check]"], 1),
        (["[bet]", "[call]"], 2),
        (["[check]", "[bet]", "I [CALL] you"], 2),
    ],
)
def test_a_showdown_is_won_by_the_higher_card_for_what_was_bet(kuhn: Any, said: list[str], stake: int) -> None:
    for seed in range(8):
        view = kuhn.play(seed, 1, said)
        cards = {seat: card for seat, card, _, _ in view["moves"]}
        winner = max(cards, key=lambda seat: "JQK".index(cards[seat]))
        assert view["done"]
        assert (view["chips"][winner], view["chips"][1 - winner]) == (stake, -stake)
    assert len({tuple(kuhn.play(seed, 1, said)["moves"][0][:2]) for seed in range(12)}) == 3


def test_a_fold_loses_one_chip_whatever_the_cards_are(kuhn: Any) -> None:
    for seed in range(6):
        assert kuhn.play(seed, 1, ["[bet]", "[fold]"])["chips"] == [-1, 1]  # player 1 begins
        assert kuhn.play(seed, 1, ["[check]", "[bet]", "[fold]"])["chips"] == [1, -1]


def test_one_invalid_move_is_forgiven_and_the_second_in_a_row_loses(kuhn: Any) -> None:
    once = kuhn.play(1, 1, ["[call]"])
    assert (once["seat"], once["invalid"], once["moves"]) == (1, [0, 1], [])
    assert "attempted an invalid move" in once["news"]
    view = kuhn.play(1, 1, ["[call]", "hm"])
    assert (view["done"], view["lost_by"], view["invalid"]) == (True, 1, [0, 2])
    view = kuhn.play(1, 1, ["hm", "[check]", "hm", "[check]"])
    assert (view["done"], view["lost_by"], view["invalid"]) == (True, None, [1, 1])


def test_chips_of_several_rounds_are_added_and_players_begin_in_turn(kuhn: Any) -> None:
    view = kuhn.play(5, 3, ["[bet]", "[fold]"] * 3)
    assert view["chips"] == [-1 + 1 - 1, 1 - 1 + 1]
    assert [seat for seat, *_ in view["moves"]] == [1, 0, 0, 1, 1, 0]


# --- what a strategy is worth -----------------------------------------------------------------------------------------


def equilibrium(a: float) -> dict[tuple[str, str], float]:
    """Kuhn's solutions, one for each `a` from 0 to 1/3: how often the first player bets with a knave."""
    first = {("J", ""): a, ("Q", ""): 0.0, ("K", ""): 3 * a}
    first |= {("J", "check bet"): 0.0, ("Q", "check bet"): a + 1 / 3, ("K", "check bet"): 1.0}
    second = {("J", "check"): 1 / 3, ("Q", "check"): 0.0, ("K", "check"): 1.0}
    return first | second | {("J", "bet"): 0.0, ("Q", "bet"): 1 / 3, ("K", "bet"): 1.0}


@pytest.mark.parametrize("a", [0.0, 0.2, 1 / 3])
def test_an_equilibrium_cannot_be_exploited(kuhn: Any, a: float) -> None:
    strategy = equilibrium(a)
    assert kuhn.value(strategy, strategy) == pytest.approx(-1 / 18)
    assert kuhn.exploitability(strategy) == pytest.approx(0.0, abs=1e-12)
    for situation in strategy:
        moved = {**strategy, situation: 1 - round(strategy[situation])}
        assert kuhn.exploitability(moved) > -1e-12
    assert kuhn.exploitability({**strategy, ("K", "bet"): 0.0}) > 0.1


def test_moves_at_random_lose_eleven_parts_of_24_a_round(kuhn: Any) -> None:
    assert kuhn.exploitability(dict.fromkeys(kuhn.SITUATIONS, 0.5)) == pytest.approx(11 / 24)


# --- the workflow -----------------------------------------------------------------------------------------------------


def test_each_seat_is_a_conversation_of_its_own_and_a_group_of_its_own(seat: MakeTable, codec: ChatCodec) -> None:
    table = seat(says(open="[check]", check="I have it [bet]", bet="[call]"))
    result = table.play(n=3)
    assert not result.error
    assert [sample.group for sample in result.samples] == [0, 0, 0, 1, 1, 1]
    for sample in result.samples:
        text = text_of(codec, sample)
        assert f"You are Player {sample.group}" in text
        assert len(re.findall("Your card is", text)) == 1  # its own
        assert sample.loss_mask is not None
        said = codec.decode_all(sample.response_ids[sample.loss_mask].tolist())
        assert said == ("I have it [bet]<|end|>" if sample.group == 0 else "[check]<|end|>[call]<|end|>")
        assert ("I have it" in text) == (sample.group == 0)  # the other seat hears the move, not the thought
        assert text.count("<|end|>") == (
            1 if sample.group == 0 else 2
        )  # what the policy ended, the template does not end again
    rewards = [sample.reward for sample in result.samples]
    assert rewards in ([0.0] * 3 + [1.0] * 3, [1.0] * 3 + [0.0] * 3)
    groups = split(ScoredGroup(result, "passthrough", np.array(rewards, np.float32)))
    assert [len(group.samples) for group in groups] == [3, 3]


def test_no_sampled_token_of_a_seat_changes(seat: MakeTable) -> None:
    table = seat(says(open="[check]", check="[bet]", bet="[call]"))
    result = table.play()
    begun = [prompt for prompt in table.policy.prompts if b"seat" != None]
    first, other, second = begun  # player 1 checks, player 0 bets, player 1 calls
    said = table.policy.completions
    grown = np.concatenate([first, said[0].token_ids])
    assert second[: len(grown)].tolist() == grown.tolist()
    zero, one = result.samples
    assert zero.prompt_ids.tolist() == other.tolist()
    assert one.loss_mask is not None
    assert one.response_ids[one.loss_mask].tolist() == np.concatenate([said[0].token_ids, said[2].token_ids]).tolist()
    logprobs = np.concatenate([said[0].logprobs, said[2].logprobs])
    assert one.logprobs[one.loss_mask].tolist() == logprobs.tolist()
    assert sum(length for _, length in one.version_spans) == len(one.response_ids)


def test_all_games_of_a_prompt_have_its_cards_and_turns_have_seeds_of_their_own(seat: MakeTable) -> None:
    table = seat(BETS_AND_CALLS)
    deals = set()
    for seed in range(6):
        result = table.play(n=4, seed=seed)
        cards = {tuple(sorted((seat, card) for seat, card, *_ in game["moves"])) for game in result.notes}
        assert len(cards) == 1
        deals |= cards
    assert len(deals) > 2
    seeds = [sampling.seed for sampling in table.policy.samplings]
    assert len(set(seeds)) == len(seeds)


def test_a_seat_that_loses_by_invalid_moves_has_0_and_the_other_is_not_scored(seat: MakeTable) -> None:
    table = seat(says(open="[bet]", bet="no idea"))
    result = table.play(n=2)
    assert [sample.reward for sample in result.samples] == [0.0, 0.0, None, None]
    assert table.workflow.rewards(result.samples, [0.0] * 4) == [0.0, 0.0, None, None]
    assert [game["lost_by"] for game in result.notes] == [0, 0]
    assert [game["invalid"] for game in result.notes] == [[2, 0]] * 2


def test_a_forgiven_move_costs_what_the_option_says(seat: MakeTable) -> None:
    def say(text: str, _: int) -> str:
        return "hm<end>" if "invalid move" not in text else "[check]<end>"

    rewards = sorted(sample.reward or 0.0 for sample in seat(say, kuhn_invalid_penalty=0.2).play().samples)
    assert rewards == pytest.approx([0.25 - 0.2, 0.75 - 0.2])


def test_a_turn_that_is_too_long_is_cut_off_and_no_room_loses(seat: MakeTable) -> None:
    table = seat(says(open="one two three four five six [bet]", bet="[call]"), kuhn_turn_tokens=4)
    result = table.play()
    assert {len(one.token_ids) for one in table.policy.completions} == {4}
    assert result.notes[0]["lost_by"] == 1
    result = seat(says(open="hm", bet="[call]")).play(max_tokens=6)
    [sample] = result.samples  # the other seat has not spoken
    assert (sample.finish_reason, sample.reward, sample.group) == ("length", 0.0, 1)
    assert 2 <= len(sample.response_ids) <= 6  # what the game answers is cut off, too


def test_a_game_whose_first_words_do_not_fit_gives_the_prompt_up(seat: MakeTable) -> None:
    result = seat(BETS_AND_CALLS).play(max_tokens=1000)
    assert re.fullmatch(r"the game begins with \d+ tokens: more --max_prompt_token_length", result.error)
    short = seat(BETS_AND_CALLS, max_prompt_tokens=20).play()  # though the engine has room for it
    assert re.fullmatch(r"the game begins with \d+ tokens: more --max_prompt_token_length", short.error)


def test_a_game_that_takes_too_long_gives_the_prompt_up_by_name(seat: MakeTable) -> None:
    result = seat(BETS_AND_CALLS, kuhn_game_timeout_s=1e-9).play()
    assert result.error == "a game took longer than 1e-09 s"
    assert not result.samples


def test_an_evaluation_plays_against_moves_drawn_at_random(seat: MakeTable) -> None:
    table = seat(BETS_AND_CALLS)
    drawn = set()
    for seed in range(12):
        result = table.play(n=2, seed=seed, marker=EVAL, index=3)
        assert [game["drawing"] for game in result.notes] == [1, 0]
        assert [sample.group for sample in result.samples] == [0, 1]
        again = table.play(n=2, seed=seed, marker=EVAL, index=3)
        assert again.notes == result.notes
        drawn |= {move for game in result.notes for mover, _, _, move in game["moves"] if mover == game["drawing"]}
    assert drawn == {"check", "bet", "fold", "call"}
    metrics = table.workflow.evaluation_metrics([ScoredGroup(result, "passthrough", np.zeros(2, np.float32))])
    assert metrics["eval/kuhn/valid_moves"] == 1.0
    assert metrics["eval/kuhn/lost_by_invalid_moves"] == 0.0
    assert -2 <= metrics["eval/kuhn/chips"] <= 2


def test_a_table_that_dies_costs_nothing(seat: MakeTable) -> None:
    def tables() -> Sequence[psutil.Process]:
        children = psutil.Process().children(recursive=True)
        return [child for child in children if child.ppid() != psutil.Process().pid and child.is_running()]

    undisturbed = seat(BETS_AND_CALLS).play()
    before = {child.pid for child in tables()}
    killed: list[int] = []

    def say(text: str, number: int) -> str:
        for child in tables():
            if child.pid not in before and not killed:
                killed.append(child.pid)
                child.kill()
        return BETS_AND_CALLS(text, number)

    result = seat(say).play()
    assert len(killed) == 1
    assert not result.error
    assert result.notes == undisturbed.notes


DROPS_THOUGHTS = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' and not loop.last and '</think>' in m['content'] %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_where_the_template_drops_thoughts_a_seat_goes_on_in_a_second_sample(seat: MakeTable, codec: ChatCodec) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.chat_template = DROPS_THOUGHTS
    thinks = says(
        open="<think>[bet] or</think>[check]", check="<think>well</think>[bet]", bet="<think>so</think>[call]"
    )
    result = seat(thinks, chat=ChatCodec(tokenizer), kuhn_turn_tokens=64).play()
    assert not result.error
    assert [sample.group for sample in result.samples] == [0, 1, 1]
    assert [sample.goes_on for sample in result.samples] == [False, True, False]
    assert result.samples[1].reward == result.samples[2].reward
    shown = text_of(codec, result.samples[2])
    assert "[bet] or" not in shown  # and the game has not read it either: the move is [check]
    assert "[check]<|end|>" in shown
    assert result.notes[0]["moves"][0][3] == "check"
    first_turn = len(result.samples[1].response_ids)
    brief = says(open="<think>[bet] or</think>[check]", check="[bet]", bet="[call]")
    table = seat(brief, chat=ChatCodec(tokenizer), kuhn_turn_tokens=64)
    without_room = table.play(max_tokens=first_turn)
    assert [sample.goes_on for sample in without_room.samples] == [False, False]
    assert [len(sample.response_ids) > 0 for sample in without_room.samples] == [True, True]
    assert (without_room.samples[1].reward, without_room.notes[0]["lost_by"]) == (0.0, 1)


def test_metrics_of_games_are_of_the_policys_seats(kuhn: Any) -> None:
    game: dict[str, Any] = {"drawing": None, "turns": [2, 2], "invalid": [1, 0], "lost_by": None, "chips": [2, -2]}
    game["moves"] = [[1, "Q", "", "bet"], [0, "K", "bet", "call"]]
    lost = {**game, "invalid": [0, 2], "lost_by": 1, "chips": [0, 0], "moves": []}
    metrics = kuhn.metrics_of_games([game, lost], "kuhn")
    assert metrics == {
        "kuhn/valid_moves": 1 - 3 / 8,
        "kuhn/lost_by_invalid_moves": 0.5,
        "kuhn/chips": -2.0,  # of the first mover
        "kuhn/won": 0.0,
    }
    against = kuhn.metrics_of_games([{**game, "drawing": 1}], "eval/kuhn")
    assert (against["eval/kuhn/chips"], against["eval/kuhn/won"]) == (2.0, 1.0)
    assert against["eval/kuhn/valid_moves"] == 0.5
    assert kuhn.metrics_of_games([], "kuhn") == {}


def test_the_options_of_the_example_are_flags(kuhn: Any) -> None:
    argv = ["--model_name_or_path", "x", "--workflow_modules", str(EXAMPLE), "--rollout_workflow", "kuhn_poker"]

    def read(*further: str) -> Any:
        words = [*argv, *further]
        config_cls, mistakes = config_class_with(read_lists(words, MODULE_OPTIONS, option_kinds(GRPOConfig)))
        assert not mistakes
        rules = [options_have_their_entry, workflow_can_use_the_options]
        told = parse_args(words, config_cls, validators=[lambda args: [one for rule in rules for one in rule(args)]])
        return plain_config(told)  # as controller and engines get it

    args = read("--kuhn_rounds", "2", "--num_samples_per_prompt_rollout", "4")
    assert args.workflow.make().options.kuhn_rounds == 2
    assert args.lengths.samples == 2 * 4 * 2 * 4
    with pytest.raises(UsageError, match="--kuhn_rounds 0: it must be above 0"):
        read("--kuhn_rounds", "0")
    with pytest.raises(UsageError, match=r"--kuhn_invalid_penalty 2\.0: it must lie between 0 and 1"):
        read("--kuhn_invalid_penalty", "2")


def test_games_that_run_side_by_side_keep_their_turns_apart(seat: MakeTable, codec: ChatCodec) -> None:
    def say(text: str, number: int) -> str:
        return f"game {number} [{'call' if 'submitted' in text else 'bet'}]<end>"

    result = seat(say).play(n=5)
    for position, sample in enumerate(result.samples):
        assert sample.loss_mask is not None
        said = codec.decode_all(sample.response_ids[sample.loss_mask].tolist())
        assert said.startswith(f"game {position % 5} ")


def test_the_guide_shows_the_code_as_it_is() -> None:
    page = next((ROOT / "docs").rglob("self_play.md")).read_text()
    excerpts = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(excerpts) >= 4
    code = EXAMPLE.read_text()
    for excerpt in excerpts:
        assert any(textwrap.indent(excerpt, " " * width) in code for width in (0, 4, 8)), excerpt
