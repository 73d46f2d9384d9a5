"""Verifiers that a user brings in a file: found by name, with weight, query and cost, wherever responses are scored."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from conftest import make_args
from whole_runs import command, rows

from open_instruct.data.run_inputs import load_inputs
from open_instruct.verifiers.pool import VerifierPool
from open_instruct.verifiers.scoring_processes import Scored

PACKAGE = Path(__file__).parents[2]
REWARDS = """
    from open_instruct.ground_truth_utils import VerificationResult, VerifierFunction

    class Echo(VerifierFunction):
        name = "Echo"
        weight = 0.5

        def __call__(self, tokenized_prediction, prediction, label, query=None):
            return VerificationResult(float(label in query), cost=0.25)

    class WrittenForOpenInstruct(VerifierFunction):
        def __init__(self, verifier_config=None):
            super().__init__("longer", weight=2.0, verifier_config=verifier_config)

        def __call__(self, tokenized_prediction, prediction, label, query=None, rollout_state=None):
            return VerificationResult(score=float(len(tokenized_prediction) > int(label)))
"""


@pytest.fixture
def rewards(tmp_path: Path) -> str:
    (tmp_path / "my_rewards.py").write_text(textwrap.dedent(REWARDS))
    return str(tmp_path / "my_rewards.py")


def in_a_process_of_its_own(code: str, cwd: Path) -> str:
    """Verifiers that a process has imported stay there for the tests after this one."""
    code = "from open_instruct.verifiers.registry import *\nimport open_instruct.verifiers.registry as utils\n" + code
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def test_a_file_is_imported_once_by_whatever_path(rewards: str, tmp_path: Path) -> None:
    code = f"""
utils.import_verifiers([{rewards!r}, "my_rewards.py", "./my_rewards.py"])
print(sorted({{"echo", "longer"}} & set(utils.verifier_names())))
print(utils.verifier_weight("ECHO/x"), utils.verifier_weight("longer"))
print(utils.score_response("echo", "4", [], "", "2 + 2 = 4").score, utils.score_response("longer", 2, [1, 2, 3], "").score)
"""
    assert in_a_process_of_its_own(code, tmp_path) == "['echo', 'longer']\n0.5 2.0\n1.0 1.0"


def test_a_module_is_imported_by_its_dotted_name(rewards: str, tmp_path: Path) -> None:
    package = tmp_path / "theirs"
    package.mkdir()
    (package / "__init__.py").touch()
    Path(rewards).rename(package / "rewards.py")
    code = f"""
import sys
sys.path.append({str(tmp_path)!r})
utils.import_verifiers(["theirs.rewards"])
print(utils.verifier_weight("echo"))
"""
    assert in_a_process_of_its_own(code, tmp_path) == "0.5"


BASE = """from open_instruct.verifiers.answer_verifiers import GSM8KVerifier
from open_instruct.verifiers.base import VerifierFunction
"""
CALL = "\n    def __call__(self, *_): ..."


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "mine.py: there is no file /"),
        ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
        ("import surely_not_there", "cannot be imported: ModuleNotFoundError: No module named 'surely_not_there'"),
        ("x = 1", "defines no verifier: it holds no subclass of VerifierFunction"),
        (BASE, "defines no verifier"),
        (f"{BASE}class A(VerifierFunction):\n    name = 'a'", "defines no verifier"),  # it lacks `__call__`
        (f"{BASE}class A(VerifierFunction):{CALL}", "the verifier A of "),
        (f"{BASE}class A(VerifierFunction):{CALL}", 'has no name: set `name = "my_verifier"`, without a slash'),
        (f"{BASE}class A(VerifierFunction):\n    name = 'a/b'{CALL}", "has no name"),
        (
            f"{BASE}class A(VerifierFunction):\n    name = 'GSM8K'{CALL}",
            "has the name 'GSM8K' of GSM8KVerifier: set another",
        ),
        (
            f"{BASE}class A(VerifierFunction):\n    name = 'a'\n    weight = 'x'{CALL}",
            "has weight 'x': set a finite number",
        ),
        (f"{BASE}class A(VerifierFunction):\n    name = 'a'\n    weight = float('nan'){CALL}", "has weight nan"),
        (
            f"{BASE}class A(VerifierFunction):\n    def __init__(self, x): ...{CALL}",
            "cannot be made without further arguments",
        ),
    ],
)
def test_a_module_that_cannot_be_used_is_named(text: str | None, words: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    code = """
try:
    utils.import_verifiers(["mine.py"])
except utils.UserModuleError as error:
    print(error)
"""
    message = in_a_process_of_its_own(code, tmp_path)
    assert words in message
    assert "mine.py" in message


def test_a_mistake_in_a_module_is_one_of_the_options(tmp_path: Path) -> None:
    inputs, mistakes = load_inputs(make_args(verifier_modules=[str(tmp_path / "nope.py")]))
    assert inputs is None
    [mistake] = mistakes
    assert mistake.startswith(f"--verifier_modules {tmp_path}/nope.py: ")


def test_the_jail_scores_by_a_users_file_with_the_prompt_at_hand(rewards: str) -> None:
    with VerifierPool(1, 10.0, ready=["echo"], modules=[rewards]) as pool:
        texts = ["a", "b"]
        assert pool.score_group("echo", "4", [[1]] * 2, texts, "What is 2 + 2? Not 4.") == [Scored(1.0, None, 0.25)] * 2
        assert pool.score_group("echo", "5", [[1]] * 2, texts, "What is 2 + 2?") == [Scored(0.0, None, 0.25)] * 2
        assert pool.score_group("longer", "1", [[1], [1, 2]], texts) == [Scored(0.0), Scored(1.0)]


AS_IN_OPEN_INSTRUCT = """
from dataclasses import dataclass
from open_instruct.ground_truth_utils import (
    GSM8KVerifier, VerificationResult, VerifierConfig, VerifierFunction, normalize_answer, remove_thinking_section,
)

@dataclass
class WordsConfig(VerifierConfig):
    max_length_verifier_max_length: int = 3
    most_words: int = 2

class Words(VerifierFunction):
    def __init__(self, verifier_config: WordsConfig | None = None) -> None:
        super().__init__("words", weight=1.0, verifier_config=verifier_config)

    @classmethod
    def get_config_class(cls) -> type:
        return WordsConfig

    def __call__(self, tokenized_prediction, prediction, label, query=None, rollout_state=None):
        words = normalize_answer(remove_thinking_section(prediction)).split()
        assert type(self.verifier_config) is WordsConfig
        fits = len(words) <= self.verifier_config.most_words
        return VerificationResult(score=float(fits and self.verifier_config.max_length_verifier_max_length == 7))

class Signed(GSM8KVerifier):
    name = "signed"

class Later(VerifierFunction):
    name = "later"

    def __call__(self, tokenized_prediction, prediction, label, query=None):
        return VerificationResult(1.0)

    async def async_call(self, tokenized_prediction, prediction, label, query=None):
        return await super().async_call(tokenized_prediction, prediction, label, query)

class Bare(VerifierFunction):
    name = "bare"

    async def async_call(self, tokenized_prediction, prediction, label, query=None):
        return 1.0
"""


def test_verifiers_of_open_instruct_work_as_they_are_written(tmp_path: Path) -> None:
    """With its helpers, a class of options, verifiers made from others, and `super().async_call`."""
    (tmp_path / "theirs.py").write_text(AS_IN_OPEN_INSTRUCT)
    code = """
from open_instruct.config.verifier_options import VerifierConfig
from open_instruct.verifiers.pool import VerifierPool
utils.import_verifiers(["theirs.py"], VerifierConfig(max_length_verifier_max_length=7))
texts = ["a b c</think>The <answer>red fox</answer>", "one two three"]
print([utils.score_response("words", "", [], text).score for text in texts], utils.score_response("signed", 4, [], "4").score)
config = VerifierConfig(max_length_verifier_max_length=7)
with VerifierPool(1, 20.0, ready=["words"], modules=["theirs.py"], config=config) as pool:
    print([one.score for one in pool.score_group("words", "", [[1]] * 2, texts)])
    print([one.score for one in pool.score_group("later", "", [[1]] * 2, texts)])
    print([one.failure for one in pool.score_group("bare", "", [[1]], ["x"])])
"""
    assert in_a_process_of_its_own(code, tmp_path).splitlines() == [
        "[1.0, 0.0] 1.0",
        "[1.0, 0.0]",
        "[1.0, 1.0]",
        "['error: TypeError: a verifier must give VerificationResult(score), got 1.0']",
    ]


def test_a_file_whose_verifiers_score_no_row_is_named(rewards: str, tmp_path: Path) -> None:
    (tmp_path / "others.py").write_text(
        f"{BASE}class A(VerifierFunction):\n    name = 'a'\n    def __call__(self, *_): ..."
    )
    (tmp_path / "gathered.py").write_text("from others import A")
    code = """
import sys
sys.path.append(".")
files = ["my_rewards.py", "others", "gathered.py"]
utils.import_verifiers(files)
print(utils.unused_modules(files, ["gsm8k", "longer/x"]), utils.unused_modules(files, ["A"]))
"""
    assert in_a_process_of_its_own(code, tmp_path) == "['others', 'gathered.py'] ['my_rewards.py']"


def test_a_verifier_that_gives_no_result_is_refused_before_a_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        f"{BASE}class A(VerifierFunction):\n    name = 'a'\n    def __call__(self, *_): return 1.0"
    )
    code = """
utils.import_verifiers(["mine.py"])
try:
    utils.check_label("a", "4")
except TypeError as error:
    print(error)
"""
    message = in_a_process_of_its_own(code, tmp_path)
    assert message == "a verifier must give VerificationResult(score), got 1.0"


@pytest.mark.slow
def test_a_run_trains_on_the_rewards_of_a_users_file(rewards: str, tmp_path: Path) -> None:
    """Rewards are score x weight x verification_reward, and the bill is in the metrics."""
    data: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": f"{n} + 1 = ?"}], "ground_truth": "+", "dataset": "echo"}
        for n in range(40)
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    words = command(
        tmp_path / "out",
        dataset_mixer_list=[tmp_path / "data.jsonl", "1.0"],
        verifier_modules=[rewards],
        verification_reward=4.0,
        filter_zero_std_samples=False,
        total_episodes=16 * 2,
    )
    process = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    for row in rows(tmp_path / "out" / "metrics.jsonl"):
        assert row["scores"] == row["objective/echo_reward"] == 2.0
        assert row["objective/echo_correct_rate"] == 1.0
        assert row["objective/verifier_cost"] == 16 * 0.25
