"""The snippets of pages of docs/ run, in their order, of pretrained models with a tiny one; or are understood."""

import ast
import re
import runpy
from pathlib import Path

import cacheformers
from cacheformers import CacheFormerConfig, train_adapt
from cacheformers.cli import fetch
from cacheformers.evaluation.passkey.prompts import INTRO, NEEDLES, REPEATED
from cacheformers.evaluation.ruler.tasks import NEW_TOKENS
from cacheformers.methods.cacheformer.configuration import VARIANTS
from cacheformers.modeling.method import METHODS

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"```(bash|python)\n(.*?)```", re.DOTALL)


LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
PAGES = [path for name in ("*.md", "docs/**/*.md") for path in sorted(ROOT.glob(name))]
CARDS = sorted(ROOT.glob("model_cards/*.md"))


def test_pages_link_to_files_that_exist():
    missing = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in [*PAGES, *CARDS]
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert not missing


def test_results_name_no_path_of_one_machine():
    """Commands and settings are to be run elsewhere, so paths in them start where the repository lies."""
    results = sorted((ROOT / "docs" / "results").rglob("*.json"))
    assert results
    absolute = re.compile(r"""(?<=["'= ])/[\w.-]+/""")
    assert not [path.name for path in results if absolute.search(path.read_text(encoding="utf-8"))]


def test_results_are_pages_plots_and_small_json():
    """Under a megabyte together; every plot is shown, and no run keeps lists of its steps, records or cases."""
    files = [path for path in (ROOT / "docs" / "results").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".md", ".png", ".json"}
    assert sum(path.stat().st_size for path in files) < 1_000_000
    shown = {(page.parent / target).resolve() for page in PAGES for target in LINK.findall(page.read_text())}
    assert {path for path in files if path.suffix == ".png"} <= shown
    lists = re.compile(r'"(losses|log|cases|records)": \[')
    assert not [path.name for path in files if path.suffix == ".json" and lists.search(path.read_text())]


def test_pages_with_numbers_of_smollm2_say_where_its_weights_come_from():
    texts = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
    named = {name for name, text in texts.items() if "SmolLM2" in text} - {
        "CHANGELOG.md",
        "docs/train.md",
        "docs/results/estimate.md",
        "docs/share.md",
        "docs/tutorials/share.md",
    }
    assert named == {name for name, text in texts.items() if re.search(r"4-bit (\(Q4_1\) )?GGUF", text)}


def test_the_readme():
    """Python before line 40; 150 lines at most. test_snippets.py runs it."""
    page = (ROOT / "README.md").read_text()
    assert len(page.splitlines()) <= 150 and page[: page.index("```python")].count("\n") < 39


def test_the_quickstart_answers(smollm2, tmp_path, monkeypatch, capsys):
    """With the adapter that ships and its real base: from the memory alone, and not without the memory."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data", smollm2.name).symlink_to(smollm2.resolve())
    fetch.main([])
    names: dict = {}
    page = (ROOT / "README.md").read_text()
    exec(next(text for language, text in BLOCK.findall(page) if language == "python"), names)
    assert capsys.readouterr().out.splitlines()[-1] == "red window"
    model, question = names["model"], names["question"]
    answer = model.generate(question, max_new_tokens=40, do_sample=False)[0, question.shape[1] :]
    assert "window" not in names["tokenizer"].decode(answer)


def page_of(name):
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def test_pages_use_what_their_commands_make():
    """Documents that are made are trained on, and the adapter that is trained is evaluated."""
    for name in ("passkey", "babilong"):
        blocks = [text for _, text in BLOCK.findall(page_of(name))]
        lines = [line.split() for text in blocks for line in text.splitlines() if " " in line]
        [made] = [line for line in lines if line[1].startswith("recipes/make_")]
        [trained] = [line[2:] for line in lines if line[1] == "train_adapt.py"]
        options = train_adapt.Options(*train_adapt.make_parser(trained).parse(trained))
        assert {*options.data.train, *(options.lessons.questions or [])} & {*made}
        assert any(options.train.output in line for line in lines if line[0] == "cacheformers")


def test_the_prompt_in_the_passkey_page_is_the_codes():
    wording = NEEDLES["passkey"]
    for sentence in (INTRO, REPEATED, wording.needle.format(key="12345"), wording.question):
        assert sentence.strip() in page_of("passkey")


def test_tables_in_pages_have_what_there_is():
    """RULER's tasks with their new tokens, the switches and presets of CacheFormer, methods and their recipes."""
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d+) \|$", page_of("ruler"), re.MULTILINE)
    assert {task: int(tokens) for task, tokens in rows} == NEW_TOKENS
    page, fields = page_of("cacheformer"), CacheFormerConfig.__dataclass_fields__
    assert all(f'`"{name}"`' in page for name in VARIANTS)
    for name in re.findall(r"^\| (`.*?) \| ", page.partition("## Switches")[2].partition("\n## ")[0], re.MULTILINE):
        assert all(field.strip("`") in fields for field in name.split(", "))
    section = page_of("train").partition("## Methods")[2].partition("\n## ")[0]
    methods = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    assert methods - {"lora"} <= METHODS.keys()
    assert {path.stem for path in (ROOT / "recipes" / "methods").iterdir()} - {"cacheformer"} < methods


def test_the_readme_has_every_method():
    """`python scripts/tables.py --write` leaves it as it is."""
    assert runpy.run_path(str(ROOT / "scripts" / "tables.py"))["methods_table"]() in (ROOT / "README.md").read_text()


def test_messages_in_troubleshooting_are_those_of_the_source():
    """Each heading in backticks is part of a text of the package, with `...` where something is put in."""
    said = set()
    folders = ("modeling", "methods", "adapters", "training", "common", "cli", "hub", "evaluation")
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
                said.add("".join(parts).replace("......", "..."))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                said.add(node.value)
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = set(re.findall(r"^### `(.*)`$", page, re.MULTILINE)) - {"KeyError: 'NEUROCACHE'"}  # PEFT's
    assert len(quoted) > 40
    assert not {message for message in quoted if not any(message in text for text in said)}


def test_the_reference_has_everything_public():
    site = runpy.run_path(str(ROOT / "scripts" / "site.py"))
    page = site["completed"]((ROOT / "docs" / "api.md").read_text(encoding="utf-8"))
    assert {name for name in re.findall(r"^::: cacheformers\.(\w+)$", page, re.MULTILINE)} == {*cacheformers.__all__}


def test_every_page_is_in_the_navigation():
    """`make docs` refuses a page that is not; scripts/site.py puts methods there, and makes pages of notebooks."""
    named = set(re.findall(r"- ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    pages |= {f"{notebook.stem}.md" for notebook in (ROOT / "docs").glob("*.ipynb")}
    assert {page for page in pages if not page.startswith("methods/")} == named
    assert {page for page in pages if page.startswith("methods/")} <= {f"methods/{name}.md" for name in METHODS}
