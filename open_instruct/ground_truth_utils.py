"""A door: verifiers of users' files import their base from here, as with open-instruct."""

from open_instruct.verifiers.verifiers import (
    VerificationResult,
    VerifierFunction,
    build_all_verifiers,
)

__all__ = ["VerificationResult", "VerifierFunction", "build_all_verifiers"]
