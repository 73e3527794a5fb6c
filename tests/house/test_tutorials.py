"""The tutorials work as they are printed, in order, in an empty folder; and the Quickstart as a notebook."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from hub_server import running_hub
from nbclient import NotebookClient

from cacheformers.cli import fetch

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BASE = ROOT / "data" / "smollm2-135m-instruct"
BLOCK = re.compile(r"```(bash|python|text)\n(.*?)```", re.DOTALL)

pytestmark = pytest.mark.slow
hub = pytest.fixture(running_hub)


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """An empty folder to work in, with this environment's commands first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


@pytest.fixture
def with_base(alone, smollm2):
    """The same with the real base, which `cacheformers fetch` then finds there."""
    (alone / "data").mkdir()
    (alone / "data" / smollm2.name).symlink_to(smollm2.resolve())
    return alone


def follow(page, environment=None):
    """Do what a page says, compare what it prints with the page's blocks of text, and count these."""
    names, printed, compared = {}, "", 0
    for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if kind == "bash":
            command = ["bash", "-euo", "pipefail", "-c", text]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
            assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
            printed = done.stdout
        elif kind == "python":
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(text, names)
            printed = output.getvalue()
        else:
            words = (re.escape(word).replace(r"\.\.\.", ".*?") for word in text.split())
            shown = r"\s+".join(words).replace(r"\s+.*?\s+", r"\s.*?")  # a line of dots may stand for nothing
            assert re.search(shown, printed, re.DOTALL), f"{text}\n---\n{printed}"
            compared += 1
    return compared


def test_every_tutorial_is_followed():
    assert {page.stem for page in TUTORIALS} == {"answer", "adapt", "evaluate", "scratch", "share"}


@pytest.mark.parametrize("name", ["answer", "evaluate"])
def test_tutorials_with_the_real_base(name, with_base):
    assert follow(ROOT / "docs" / "tutorials" / f"{name}.md") > 0


def test_the_tutorial_of_adapting(with_base):
    follow(ROOT / "docs" / "tutorials" / "adapt.md")
    assert all((with_base / "runs" / run / "train_result.json").exists() for run in ("manual", "manual_lora"))


def test_the_tutorial_from_scratch(alone):
    follow(ROOT / "docs" / "tutorials" / "scratch.md")
    assert (alone / "runs" / "tiny" / "train_result.json").exists()


def test_the_tutorial_of_sharing(alone, hub, make_base, tokenizer, monkeypatch):
    """With a small base, on a Hub on loopback."""
    hub.users["hf_base"] = "HuggingFaceTB"
    monkeypatch.setenv("HF_TOKEN", "hf_me")
    base = make_base("llama_gqa", torch.float32, max_position_embeddings=2048)
    base.save_pretrained(f"data/{BASE.name}")
    tokenizer.save_pretrained(f"data/{BASE.name}")
    online = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(alone / "home"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": "hf_me",
        "NO_PROXY": "127.0.0.1,localhost",
    }
    code = "from transformers import AutoModelForCausalLM as M\nM.from_pretrained('data/{0}').push_to_hub('{1}')"
    code = code.format(BASE.name, fetch.REPOSITORY)
    subprocess.run([sys.executable, "-c", code], check=True, env={**online, "HF_TOKEN": "hf_base"})
    page = (ROOT / "docs" / "tutorials" / "share.md").read_text()
    blocks = BLOCK.findall(page)  # all in processes of their own, which find this Hub
    steps = "".join(f"python - <<'END'\n{text}END\n" if kind == "python" else text for kind, text in blocks)
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", steps], capture_output=True, text=True, env=online)
    assert done.returncode == 0, done.stderr[-3000:]
    assert hub.repos["me/mine"].private and "adapter_model.safetensors" in hub.repos["me/mine"].files
    assert "model.safetensors" in hub.repos["me/model"].files


def test_the_notebook(with_base):
    """It runs from top to bottom, is kept without outputs, and its code is README's Quickstart."""
    notebook = nbformat.read(ROOT / "docs" / "quickstart.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    fetch.main([])
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute(cwd=str(with_base))
    printed = "".join(output.get("text", "") for cell in code for output in cell.outputs)
    assert "red window" in printed
    quickstart = next(text for kind, text in BLOCK.findall((ROOT / "README.md").read_text()) if kind == "python")
    assert "\n".join(cell.source for cell in code if not cell.source.startswith("!")).split() == quickstart.split()
