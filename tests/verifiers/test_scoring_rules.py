"""What a verifier says about the responses that it scores above 0, for messages to the user."""

from open_instruct.verifiers.base import VerifierFunction
from open_instruct.verifiers.registry import build_all_verifiers, scoring_rule

LABELS: dict[str, object] = {
    "reasoning_gym": '{"question": "?", "answer": "154", "metadata": {"source_dataset": "chain_sum"}}'
}


def test_every_verifier_says_in_one_sentence_what_it_looks_for() -> None:
    own = [
        name
        for name, verifier in build_all_verifiers().items()
        if type(verifier).__module__.startswith("open_instruct.")
    ]
    for name in own:
        rule = scoring_rule(name, LABELS.get(name, "154"))
        assert 20 < len(rule) < 200, (name, rule)
        assert "Scores one response" not in rule  # the docstring of the base class says nothing about this verifier


def test_the_rule_of_re_search_names_its_tags() -> None:
    rule = scoring_rule("re_search", "154")
    assert rule.startswith("1 if the first `<finish>…</finish>`")
    assert rule.endswith("equals one of the labels.")


def test_the_rule_of_math_names_the_answer_in_a_solution() -> None:
    assert "\\boxed{…}" in scoring_rule("math", "We add: \\boxed{154}")
    assert scoring_rule("math", "We add: \\boxed{154}").endswith("equals 154")
    assert "Final Answer" in scoring_rule("strict_math", "154")


def test_the_rule_of_a_reasoning_gym_task_names_its_answer() -> None:
    rule = scoring_rule("reasoning_gym/chain_sum", LABELS["reasoning_gym"])
    assert rule == "chain_sum compares the last <answer>…</answer> with its own answer, 154"


def test_a_verifier_of_a_user_may_have_a_docstring_of_its_own_or_none() -> None:
    class Documented(VerifierFunction):
        """1 if the response names
        the label. Case does not matter."""

    class Labelled(Documented):
        def scoring_rule(self, label: object) -> str:
            return f"{label} at the end"

    class Undocumented(VerifierFunction):
        pass

    assert Documented("x").scoring_rule("7") == "1 if the response names the label."
    assert Labelled("x").scoring_rule("7") == "7 at the end"
    assert Undocumented("x").scoring_rule("7") == ""
