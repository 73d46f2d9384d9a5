"""Nothing secret reaches a log, a message or a tracker."""

import logging
from pathlib import Path

import pytest

from open_instruct.config.cli import fail_with
from open_instruct.report.log_files import setup_logging
from open_instruct.system.secret_masking import MASK, masked, without_secrets


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://user:s3cret@host:8000/v1", "http://***@host:8000/v1"),
        ("http://host/v1?api_key=s3cret&n=1", "http://host/v1?***&n=1"),
        ("http://host/v1?n=1&access_token=s3cret", "http://host/v1?n=1&***"),
        ("token hf_abcdefgh12345", "token ***"),
        ("sk-abcdefgh-12345 is wrong", "*** is wrong"),
        ("Authorization: Bearer abc.def-123456", "Authorization: Bearer ***"),
        ("http://user:pa@ssWORDx@host:9/v1", "http://***@host:9/v1"),
        ("http://user:pa/ssWORDx@host:9/v1", "http://***@host:9/v1"),
        ("s3://AKIA1234567890:secretsecret@bucket", "s3://***@bucket"),
        ("http://host/v1?auth=abc&pwd=def&pass=ghi&passage=2", "http://host/v1?***&***&***&passage=2"),
        ("Authorization: Basic dXNlcjpwdw==", "Authorization: Basic ***"),
        ("{'X-Api-Key': 'abc', 'n': 1}", "{'X-Api-Key': '***', 'n': 1}"),
        ("ghs_abcdefgh1234, AIzaabcdefgh1234 and npm_abcdefgh1234", "***, *** and ***"),
        ("at http://host:8000/v1/models, mail me@host", "at http://host:8000/v1/models, mail me@host"),
        ("a word, a path/to/model, --seed 3", "a word, a path/to/model, --seed 3"),
        ("step 1: 640 tokens at http://host:8000/v1", "step 1: 640 tokens at http://host:8000/v1"),
    ],
)
def test_what_looks_like_a_secret_is_masked(text: str, expected: str) -> None:
    assert without_secrets(text) == expected


def test_values_of_variables_that_are_secret_by_name_are_masked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MY_SERVICE_PASSWORD", "correct horse")
    monkeypatch.setenv("SHORT_KEY", "abc")
    monkeypatch.setenv("HARMLESS", "a harmless value")
    monkeypatch.setenv("SSH_KEY_FILE", str(tmp_path))  # a path is no secret
    monkeypatch.setenv("DB_PASS", "battery staple")
    monkeypatch.setenv("HTTPS_PROXY", "http://user:proxypassword@proxy:3128")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    text = f"correct horse, abc, a harmless value, {tmp_path}, battery staple, proxypassword, disabled"
    assert without_secrets(text) == f"{MASK}, abc, a harmless value, {tmp_path}, {MASK}, {MASK}, disabled"


def test_options_are_masked_on_their_way_to_a_tracker() -> None:
    options = {"urls": ["http://me:pw123456@host"], "seed": 3, "deep": {"key": ("hf_abcdefgh12345", None)}}
    assert masked(options) == {"urls": ["http://***@host"], "seed": 3, "deep": {"key": ("***", None)}}


def test_logs_and_messages_hold_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = setup_logging(tmp_path)
    logger = logging.getLogger("open_instruct.test")
    logger.warning("%s does not answer", "http://me:pw123456@host")
    try:
        raise ValueError("http://host?api_key=pw123456")
    except ValueError:
        logger.exception("failed")
    with pytest.raises(SystemExit):
        fail_with(["http://me:pw123456@host is no address"])
    assert "pw123456" not in path.read_text() + "".join(capsys.readouterr())
    assert "failed" in path.read_text()
