"""Self-play as a workflow in one file: two seats of one policy at TextArena's Kuhn poker.

    python open_instruct/grpo_fast.py … --workflow_modules scripts/train/debug/kuhn_poker.py --rollout_workflow kuhn_poker

    prompt = a deal ──► G games ──► seat 0: a conversation, its ledger, a sample of group 0  ┐ the same cards in all G games,
                              └──► seat 1: a conversation, its ledger, a sample of group 1  ┘ so a group is its own baseline

The table is a process that plays a game anew from its seed and from what was said so far. So it keeps nothing between two calls,
and a table that dies costs one call. The reward of a seat is what it wins or loses in chips, brought into [0, 1].

TextArena 0.7.4 tells players that a bet adds a chip to the pot, and then never adds it, so by its own result nobody should ever
fold. Chips are therefore counted here, as the players are told: 1 for a round without a call, 2 with one.

An evaluation seats the policy in turn against a player that draws its legal moves at random.
"""

import asyncio
import itertools
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from open_instruct.chat_codec import END_THINK
from open_instruct.data_types import PromptRequest, Sample
from open_instruct.environments.base import (
    ENVIRONMENTS,
    EnvironmentSpec,
    Message,
    Schema,
    ToolCall,
    ToolEnvironment,
    Turn,
    schema,
    user_message,
)
from open_instruct.environments.processes import EnvironmentFailed, EnvironmentPool
from open_instruct.registry import options_of
from open_instruct.scored_groups import ScoredGroup
from open_instruct.workflows.base import WORKFLOWS, Context, Lengths, RolloutFailed, Tool, Trajectory, Workflow
from open_instruct.workflows.conversations.bridge import Bridge, CannotBridge
from open_instruct.workflows.conversations.ledger import Ledger

if TYPE_CHECKING:
    from open_instruct.data.prompt_dataset import PromptRow

SEATS = (0, 1)
NUM_TABLES = 2
"""Processes of tables on an engine. A call takes about a millisecond."""
CALL_S, WAIT_S = 30.0, 180.0
"""Longest time that a table may take to play, and that a call may take with the wait for a table."""
_MOVE = re.compile(r"\[(check|bet|fold|call)\]", re.IGNORECASE)


@dataclass(kw_only=True)
class KuhnPokerOptions:
    """Kuhn poker"""

    kuhn_rounds: int = 1
    """Rounds of a game. TextArena's KuhnPoker-v0 has 3."""
    kuhn_turn_tokens: int = 16
    """Longest turn of the policy, in tokens. A longer one is cut off, and the game reads what there is."""
    kuhn_invalid_penalty: float = 0.1
    """What an invalid move costs that the game forgives. The second one in a row loses the game."""
    kuhn_game_timeout_s: float = 600.0
    """Longest time for a game."""


# --- the table, in a process of its own -------------------------------------------------------------------------------


@ENVIRONMENTS.register("kuhn_table")
class KuhnTable(ToolEnvironment):
    """Plays games from their beginning."""

    is_stateless = True

    @classmethod
    def prepare(cls) -> None:
        import textarena  # noqa: F401

    @classmethod
    def schemas(cls, config: Mapping[str, Any]) -> list[Schema]:
        return [schema("play", "Plays a game of Kuhn poker up to where it is")]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return json.dumps(play(**arguments))


def play(seed: int, rounds: int, said: Sequence[str]) -> dict[str, Any]:
    """The game after these turns, as JSON values.

    Returns:
        `done`, and if it is not: the `seat` that is to move, the `news` for it and its `legal` moves. Of each seat the `chips`
        that it has won and its `invalid` moves; the seat that has `lost_by` them. `moves` are `[seat, card, moves of the round
        before, move]`.
    """
    import textarena

    game = textarena.make("KuhnPoker-v0-raw", max_rounds=rounds)
    game.reset(num_players=2, seed=seed % 2**32)
    state = game.state
    view: dict[str, Any] = {"done": False, "chips": [0, 0], "invalid": [0, 0], "moves": [], "lost_by": None}
    history = ""
    for text in said:
        assert not view["done"], "a turn after the end of the game"
        game.get_observation()  # what the seat has seen by now
        seat, cards = state.current_player_id, dict(state.game_state["player_cards"])
        number, lead, num_turns = _round(state), _lead(state), state.turn
        view["done"], _ = game.step(text)
        if state.game_info[seat]["invalid_move"]:
            view["lost_by"] = seat
        if view["lost_by"] is not None or state.turn == num_turns:
            view["invalid"][seat] += 1
            continue
        found = _MOVE.search(text)
        assert found is not None, "the game has found a move"
        move = found[1].lower()
        view["moves"].append([seat, "JQK"[cards[seat]], history, move])
        history = f"{history} {move}".strip()
        if view["done"] or _round(state) != number:
            winner = 0 if _lead(state) > lead else 1
            for one in SEATS:
                view["chips"][one] += (1 if one == winner else -1) * (2 if move == "call" else 1)
            history = ""
    if view["done"]:
        return view
    seat, seen = game.get_observation()
    texts = [
        text.strip() for sender, text, _ in seen if sender < 0
    ]  # the game's own words, not what the other seat thought
    legal = [f"[{move}]" for move in state.game_state["current_legal_action_tree"]]
    return {**view, "seat": seat, "news": "\n".join(dict.fromkeys(texts)), "legal": legal}


def _round(state: Any) -> int:
    return int(state.game_state["current_round"])


def _lead(state: Any) -> int:
    chips = state.game_state["player_chips"]
    return int(chips[0] - chips[1])


# --- a seat -----------------------------------------------------------------------------------------------------------


@dataclass
class Seat:
    """One side of a game: a conversation with its own ledger."""

    number: int
    name: str
    """Of its effects."""
    messages: list[Message]
    ledger: Ledger | None = None
    samples: list[Sample] = field(default_factory=list)
    """Where the chat template has changed earlier turns: the samples before the ledger's."""
    num_turns: int = 0
    num_tokens: int = 0
    finish_reason: str = "stop"
    _ending: str = ""

    async def speak(self, news: str, request: PromptRequest, ctx: Context, bridge: Bridge, most: int) -> str | None:
        """The policy's turn of at most `most` tokens, after what the game has said; None if there is no room for it."""
        sampling = request.generation_config
        self._hear([user_message(news)], ctx, bridge, sampling.max_tokens)
        assert self.ledger is not None, "heard first"
        ids = self.ledger.token_ids
        longest = min(ctx.max_model_len, ctx.max_prompt_tokens + sampling.max_tokens)
        room = min(sampling.max_tokens - self.num_tokens, longest - len(ids), most)
        if room < 1:
            self.finish_reason = "length"
            return None
        seed = random.Random(f"{ctx.seed} {self.name} {self.num_turns}").getrandbits(62)
        (said,) = await ctx.generate(ids, replace(sampling, n=1, max_tokens=room, seed=seed), name=self.name)
        self.num_turns += 1
        self.num_tokens += len(said.token_ids)
        self.ledger.sampled(said)
        turn = bridge.read_turn(said.token_ids.tolist())
        self._ending = turn.ending
        self.messages.append({"role": "assistant", "content": turn.content})
        return turn.raw.rpartition(END_THINK)[2]

    def _hear(self, messages: list[Message], ctx: Context, bridge: Bridge, most: int) -> None:
        """Put what the game has said behind the policy's last turn, as far as the seat's `most` tokens allow."""
        if self.ledger is None or bridge.drops_thoughts(self.messages, messages):
            if self.ledger is not None:
                self.samples.append(self.ledger.sample(finish_reason="stop", goes_on=True))
            self.messages += messages
            self.ledger = Ledger(self._render(ctx))
            num_tokens = len(self.ledger.prompt_ids)
            if not self.samples and num_tokens > min(ctx.max_prompt_tokens, ctx.max_model_len - most):
                raise RolloutFailed(f"the game begins with {num_tokens} tokens: more --max_prompt_token_length")
            return
        try:
            inserted = bridge.suffix(messages, self._ending)[: max(0, most - self.num_tokens)]
        except CannotBridge as error:
            raise RolloutFailed(str(error)) from error
        self.messages += messages
        self.ledger.inserted(inserted)
        self.num_tokens += len(inserted)

    def _render(self, ctx: Context) -> list[int]:
        """The prompt for all messages so far. Only what the policy said may hold control tokens."""
        shown = [one if one["role"] == "assistant" else ctx.codec.hidden(one) for one in self.messages]
        return ctx.codec.encode_hidden(ctx.codec.render(shown, begins_turn=True))

    def scored(self, reward: float | None) -> list[Sample]:
        """The seat's samples, all of which have the game's reward. None: what happened says nothing about this seat."""
        if self.ledger is None or not self.num_turns:
            return []
        samples = list(self.samples)
        if self.ledger.num_sampled_tokens:
            samples.append(self.ledger.sample(finish_reason=self.finish_reason))
        else:  # a prompt made anew left no room for a turn, so the sample before is the last
            samples[-1] = replace(samples[-1], finish_reason=self.finish_reason, goes_on=False, is_judged=True)
        return [replace(sample, reward=reward, group=self.number) for sample in samples]


# --- the workflow -----------------------------------------------------------------------------------------------------


@WORKFLOWS.register("kuhn_poker", options=KuhnPokerOptions)
class KuhnPoker(Workflow):
    """G games of each deal. The samples of a seat are compared with those of the same seat in the other games."""

    prompts_are_of_the_data = False
    length_options = ("kuhn_rounds",)

    def __init__(self, options: KuhnPokerOptions) -> None:
        super().__init__(options)
        self._pool: EnvironmentPool | None = None
        self._bridge: Bridge | None = None

    @classmethod
    def mistakes(cls, args: Any) -> Iterator[str]:
        options = options_of(args, KuhnPokerOptions)
        for name in ("kuhn_rounds", "kuhn_turn_tokens", "kuhn_game_timeout_s"):
            if getattr(options, name) <= 0:
                yield f"--{name} {getattr(options, name)}: it must be above 0."
        if not 0 <= options.kuhn_invalid_penalty <= 1:
            yield f"--kuhn_invalid_penalty {options.kuhn_invalid_penalty}: it must lie between 0 and 1."

    @classmethod
    def lengths(cls, args: Any) -> Lengths:
        """A seat moves at most twice in a round. Each move may follow one that was forgiven, and may be a sample of its own where
        the chat template changes earlier turns."""
        lengths = super().lengths(args)
        rounds = options_of(args, KuhnPokerOptions).kuhn_rounds
        num_samples = len(SEATS) * 4 * rounds * args.num_samples_per_prompt_rollout
        return replace(lengths, prompt=lengths.trained, samples=num_samples)

    # --- in the controller --------------------------------------------------------------------------------------------

    def row_facts(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Nothing but the row's messages is needed, which stand before the game's."""
        return {}

    def task(
        self, row: "PromptRow", row_number: int, *, prompt_id: str, version: int, seed: int, is_eval: bool
    ) -> dict[str, Any]:
        return dict(row.facts or {})

    def rewards(self, samples: Sequence[Sample], scores: Sequence[float | None]) -> list[float | None]:
        """What the game says. The rows' verifier, `passthrough`, says nothing."""
        return [sample.reward for sample in samples]

    def metrics(self, rollouts: Sequence[ScoredGroup], groups: Sequence[ScoredGroup]) -> dict[str, float]:
        return metrics_of_games(_games(rollouts), "kuhn")

    def evaluation_metrics(self, rollouts: Sequence[ScoredGroup]) -> dict[str, float]:
        return metrics_of_games(_games(rollouts), "eval/kuhn")

    # --- in an engine -------------------------------------------------------------------------------------------------

    async def run(self, request: PromptRequest, ctx: Context) -> Trajectory:
        num_games = request.generation_config.n
        async with asyncio.TaskGroup() as group:
            games = [group.create_task(self._play(request, ctx, number)) for number in range(num_games)]
        ended = [game.result() for game in games]
        samples = [sample for seat in SEATS for by_seat, _ in ended for sample in by_seat[seat]]
        return Trajectory(samples, [note for _, note in ended])

    async def _play(
        self, request: PromptRequest, ctx: Context, number: int
    ) -> tuple[list[list[Sample]], dict[str, Any]]:
        """One game: the samples of each seat, and what is to be known of the game."""
        if self._bridge is None:
            self._bridge = Bridge(ctx.codec)
        seats = [Seat(seat, f"{number}-seat-{seat}", list(request.task["messages"])) for seat in SEATS]
        drawing = (request.index + number) % 2 if request.is_eval else None
        began, said = ctx.now(name=f"{number}-now"), list[str]()
        while not (view := await self._ask(ctx, number, said))["done"]:
            if ctx.now(name=f"{number}-now") - began > self.options.kuhn_game_timeout_s:
                raise RolloutFailed(f"a game took longer than {self.options.kuhn_game_timeout_s:g} s")
            seat = view["seat"]
            if seat == drawing:
                said.append(ctx.random(name=f"{number}-drawn").choice(view["legal"]))
                continue
            most = self.options.kuhn_turn_tokens
            text = await seats[seat].speak(view["news"], request, ctx, self._bridge, most)
            if text is None:  # no room is left for its turn
                view["lost_by"] = seat
                break
            said.append(text)
        rewards = [self._reward(view, seat) for seat in SEATS]
        samples = [[] if seat == drawing else seats[seat].scored(rewards[seat]) for seat in SEATS]
        note = {key: view[key] for key in ("chips", "lost_by", "moves", "invalid")}
        return samples, {**note, "drawing": drawing, "turns": [one.num_turns for one in seats]}

    async def _ask(self, ctx: Context, number: int, said: Sequence[str]) -> dict[str, Any]:
        game = {"seed": ctx.seed, "rounds": self.options.kuhn_rounds, "said": list(said)}
        view: dict[str, Any] = await ctx.call("table", game, timeout_s=WAIT_S, name=f"{number}-table")
        return view

    def _reward(self, view: Mapping[str, Any], seat: int) -> float | None:
        """0 for a seat that lost by invalid moves. The other seat's reward would be a present that no move of its own has earned,
        so it has none."""
        if view["lost_by"] is not None:
            return 0.0 if view["lost_by"] == seat else None
        most = 2 * self.options.kuhn_rounds
        share = (view["chips"][seat] + most) / (2 * most)
        return max(0.0, share - self.options.kuhn_invalid_penalty * view["invalid"][seat])

    def engine_tools(self) -> Mapping[str, Tool]:
        return {"table": self._serve}

    async def _serve(self, game: dict[str, Any]) -> dict[str, Any]:
        """Play a game up to where it is. A table that fails has lost nothing, so another one is asked."""
        if self._pool is None:
            self._pool = EnvironmentPool(NUM_TABLES, modules=[__file__], targets=["kuhn_table"])
        try:
            answer = await self._ask_table(self._pool, game)
        except EnvironmentFailed:
            answer = await self._ask_table(self._pool, game)
        view: dict[str, Any] = json.loads(answer)
        return view

    async def _ask_table(self, pool: EnvironmentPool, game: dict[str, Any]) -> str:
        lease = await pool.lease(EnvironmentSpec("kuhn_table", "kuhn_table"), CALL_S)
        try:
            observation = await lease.step(Turn("", (ToolCall("play", game),)), CALL_S)
        finally:
            await pool.give_back(lease)
        return str(observation.messages[0]["content"])

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


# --- what games came to -----------------------------------------------------------------------------------------------


def _games(rollouts: Sequence[ScoredGroup]) -> list[dict[str, Any]]:
    return [game for rollout in rollouts for game in rollout.result.notes or ()]


def metrics_of_games(games: Sequence[Mapping[str, Any]], prefix: str) -> dict[str, float]:
    """Of the policy's seats. Shares and means over turns or games; a figure that no game bears on is left out."""
    turns = invalid = 0
    chips, by_situation = [], defaultdict(list)
    for game in games:
        for seat in SEATS:
            if seat != game["drawing"]:
                turns += game["turns"][seat]
                invalid += game["invalid"][seat]
        for seat, card, history, move in game["moves"]:
            if seat != game["drawing"]:
                by_situation[card, history].append(move in ("bet", "call"))
        if game["lost_by"] is None:
            # in self-play both seats are the policy's, so what the first mover wins is told
            seat = game["moves"][0][0] if game["drawing"] is None else 1 - game["drawing"]
            chips.append(game["chips"][seat])
    metrics: dict[str, float] = {}
    if turns:
        metrics[f"{prefix}/valid_moves"] = 1 - invalid / turns
    if games:
        metrics[f"{prefix}/lost_by_invalid_moves"] = sum(game["lost_by"] is not None for game in games) / len(games)
    if chips:
        metrics[f"{prefix}/chips"] = sum(chips) / len(chips)
        metrics[f"{prefix}/won"] = sum(one > 0 for one in chips) / len(chips)
    if len(by_situation) == len(SITUATIONS):
        metrics[f"{prefix}/exploitability"] = exploitability(
            {situation: sum(moves) / len(moves) for situation, moves in by_situation.items()}
        )
    return metrics


Situation = tuple[str, str]
"""A card, and the moves of the round so far."""
FIRST, SECOND = ("", "check bet"), ("check", "bet")
SITUATIONS = [(card, history) for history in (*FIRST, *SECOND) for card in "JQK"]


def value(first: Mapping[Situation, float], second: Mapping[Situation, float]) -> float:
    """Chips that the first mover wins in a round on average.

    Args:
        first, second: for each situation of the player the probability that it bets or calls.
    """
    total = 0.0
    for mine, theirs in itertools.permutations("JQK", 2):
        wins = 1 if "JQK".index(mine) > "JQK".index(theirs) else -1
        called = second[theirs, "bet"]
        after_bet = called * 2 * wins + (1 - called)
        calls, bets = first[mine, "check bet"], second[theirs, "check"]
        after_check = bets * (calls * 2 * wins - (1 - calls)) + (1 - bets) * wins
        total += first[mine, ""] * after_bet + (1 - first[mine, ""]) * after_check
    return total / 6


def exploitability(strategy: Mapping[Situation, float]) -> float:
    """Chips a round that a player who knows the strategy wins against it, mean over both seats. At the equilibrium 0, and 11/24
    against moves drawn at random.

    The best answer to a strategy is one of the 64 that never draw, so all of them are tried.
    """
    as_first = max(value(answer, strategy) for answer in _answers(FIRST))
    as_second = max(-value(strategy, answer) for answer in _answers(SECOND))
    return (as_first + as_second) / 2


def _answers(turns: Sequence[str]) -> Iterator[dict[Situation, float]]:
    situations: list[Situation] = [(str(card), history) for history in turns for card in "JQK"]
    for moves in itertools.product((0.0, 1.0), repeat=len(situations)):
        yield dict(zip(situations, moves, strict=True))
