"""A door: verifiers of users' files import their base from here, as with open-instruct."""

from open_instruct.config.verifier_options import VerifierConfig
from open_instruct.verifiers.base import NotScored, VerificationResult, VerifierFunction
from open_instruct.verifiers.verifiers import build_all_verifiers

__all__ = ["NotScored", "VerificationResult", "VerifierConfig", "VerifierFunction", "build_all_verifiers"]
