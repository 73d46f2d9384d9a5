"""A name for users: verifiers of users' files import their base, and what they build upon, from here, as with open-instruct."""

from open_instruct.config.verifier_options import VerifierConfig
from open_instruct.verifiers.answer_reading import normalize_answer
from open_instruct.verifiers.answer_verifiers import (
    GSM8KVerifier,
    MathVerifier,
    StrictMathVerifier,
    StringMatcherVerifier,
)
from open_instruct.verifiers.base import NotScored, VerificationResult, VerifierFunction
from open_instruct.verifiers.registry import build_all_verifiers
from open_instruct.verifiers.text_verifiers import FlanVerifier, PuzzleVerifier, StringF1Verifier
from open_instruct.verifiers.text_verifiers import behind_thoughts as remove_thinking_section

F1Verifier, PuzzleMatcherVerifier = StringF1Verifier, PuzzleVerifier

__all__ = [
    "F1Verifier",
    "FlanVerifier",
    "GSM8KVerifier",
    "MathVerifier",
    "NotScored",
    "PuzzleMatcherVerifier",
    "StrictMathVerifier",
    "StringMatcherVerifier",
    "VerificationResult",
    "VerifierConfig",
    "VerifierFunction",
    "build_all_verifiers",
    "normalize_answer",
    "remove_thinking_section",
]
