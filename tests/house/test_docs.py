"""The snippets of pages of docs/ run, in their order, of pretrained models with a tiny one; or are understood."""

import ast
import gzip
import re
import runpy
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from lm_eval.api.registry import get_model
from peft import get_peft_model
from recipe import make_text
from transformers import AutoModelForCausalLM

import cacheformers
from cacheformers import CacheFormerConfig, train_adapt
from cacheformers.adapters.export import main
from cacheformers.cli import fetch
from cacheformers.common.base_model import ModelOptions
from cacheformers.common.recipe import RecipeParser
from cacheformers.evaluation import gates, harness, segments, text_perplexity
from cacheformers.evaluation.babilong.main import BabilongOptions
from cacheformers.evaluation.longbench.methods import LongBenchOptions
from cacheformers.evaluation.passkey.main import PasskeyOptions
from cacheformers.evaluation.passkey.prompts import INTRO, NEEDLES, REPEATED
from cacheformers.evaluation.ruler.main import RulerOptions
from cacheformers.evaluation.ruler.tasks import NEW_TOKENS
from cacheformers.hub import results
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


def test_the_quickstart_answers(tmp_path, monkeypatch, capsys):
    """With the adapter that ships and its real base: from the memory alone, and not without the memory."""
    monkeypatch.chdir(tmp_path)
    base = ROOT / "data" / "smollm2-135m-instruct"
    if not base.exists():
        pytest.skip("SmolLM2 is not there: cacheformers fetch")
    Path("data").mkdir()
    Path("data", base.name).symlink_to(base.resolve())
    fetch.main([])
    names: dict = {}
    page = (ROOT / "README.md").read_text()
    exec(next(text for language, text in BLOCK.findall(page) if language == "python"), names)
    assert capsys.readouterr().out.splitlines()[-1] == "red window"
    model, question = names["model"], names["question"]
    answer = model.generate(question, max_new_tokens=40, do_sample=False)[0, question.shape[1] :]
    assert "window" not in names["tokenizer"].decode(answer)


def test_models_page(make_base, config_factory, tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    base = make_base("llama_gqa", torch.float32, max_position_embeddings=2048)
    for folder in ("data/smollm2-135m-instruct", "runs/base"):
        base.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    get_peft_model(AutoModelForCausalLM.from_pretrained("runs/base"), config_factory()).save_pretrained(
        "runs/quickstart"
    )
    names = {}
    for language, text in BLOCK.findall((ROOT / "docs" / "models.md").read_text()):
        if language == "bash":
            command = text.split()
            if command[:2] != ["cacheformers", "convert"]:  # tests/adapters/test_convert.py runs it
                assert command[:2] == ["cacheformers", "export"]
                main(command[2:])
        else:
            exec(text, names)
    assert names["answer"].shape[1] > names["question"].input_ids.shape[1]
    assert "Call me Ishmael." in capsys.readouterr().out
    assert names["model"].config.text_config.num_hidden_layers == 8


def test_trainer_and_training_free_pages(make_base, tokenizer, tmp_path, monkeypatch):
    """Gates are logged; what is attached trains nothing."""
    monkeypatch.chdir(tmp_path)

    def load(name, **more):
        return make_base("llama_gqa", torch.float32, max_position_embeddings=2048)

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", load)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda name: tokenizer)
    found = {}
    for page in ("training_free", "trainer"):
        blocks = BLOCK.findall((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))
        names: dict = {}
        for kind, text in blocks:
            if kind == "python":
                exec(text, names)
        found[page] = names
    assert not [name for name, _ in found["training_free"]["model"].named_parameters() if "lora" in name]
    assert "gate_max" in found["trainer"]["trainer"].state.log_history[0]
    assert "eval_loss" in found["trainer"]["trainer"].state.log_history[-1]


def test_cacheformer_page(make_base, tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_base("llama_gqa", torch.float32, max_position_embeddings=2048).save_pretrained("data/smollm2-135m-instruct")
    tokenizer.save_pretrained("data/smollm2-135m-instruct")
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    page = (ROOT / "docs" / "cacheformer.md").read_text()
    names = {}
    scratch = []
    for language, text in BLOCK.findall(page):
        if "train_adapt.py" in text:
            understood(text)
            scratch.append(text)
        elif language == "bash":
            command = text.split()
            assert command[:2] == ["cacheformers", "segments"]
            segments.main(command[2:])
        else:
            exec(text, names)
    assert scratch
    assert names["text"].shape[1] == names["ids"].shape[1] + 8
    assert names["more"].shape[1] == names["ids"].shape[1] + 8
    assert "CacheFormerCache(tokens_read=[259]" in capsys.readouterr().out
    assert torch.allclose(names["output"].logits, names["model"](names["ids"]).logits[:, -1:], atol=1e-4)
    assert names["memory"].tokens_read == [names["book"].shape[1]] and names["book"].shape[1] > 2 * 128
    assert names["answer"].shape[1] == names["question"].shape[1] + 8
    assert {path.name for path in Path("runs/segments").iterdir()} == {"segments.json", "segments.png"}
    for name in VARIANTS:
        assert f'`"{name}"`' in page
    fields = CacheFormerConfig.__dataclass_fields__
    for name in re.findall(r"^\| (`.*?) \| ", page.partition("## Switches")[2].partition("\n## ")[0], re.MULTILINE):
        assert all(field.strip("`") in fields for field in name.split(", "))


def understood(text):
    """Commands that train and measure have options and files that exist."""
    for line in text.splitlines():
        command = [word.replace("recipes/", f"{ROOT}/recipes/") for word in line.partition("#")[0].split()]
        if "train_adapt.py" in command:
            options = train_adapt.Options(*train_adapt.make_parser(command[2:]).parse(command[2:]))
            assert options.scratch.model_config is None or (ROOT / options.scratch.model_config).is_file()
        elif "eval_longbench.py" in command:
            RecipeParser([ModelOptions, LongBenchOptions], "").parse(command[2:])
        else:
            assert command[:2] == ["cacheformers", "perplexity"]
            RecipeParser([ModelOptions, text_perplexity.PerplexityOptions], "").parse(command[2:])


def test_passkey_page(monkeypatch):
    """Its commands have options that exist, in forms that are understood; its prompt is that of the code."""
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "passkey.md").read_text()
    lines = [line.split() for _, text in BLOCK.findall(page) for line in text.splitlines()]
    asked = [line[2:] for line in lines if line[:2] == ["cacheformers", "passkey"]]
    parser = RecipeParser([ModelOptions, PasskeyOptions], "")
    lengths = [parser.parse(line)[1].tokens for line in asked if line != ["--help"]]
    assert max(max(tokens) for tokens in lengths) == 65536  # 64K
    [made] = [line[2] for line in lines if line[1] == "recipes/make_passkeys.py"]
    [trained] = [line[2:] for line in lines if line[1] == "train_adapt.py"]
    data = train_adapt.Options(*train_adapt.make_parser().parse(trained)).data
    assert data.train == [made] and data.label_field == "answers"
    wording = NEEDLES["passkey"]
    for sentence in (INTRO, REPEATED, wording.needle.format(key="12345"), wording.question):
        assert sentence.strip() in page


def test_babilong_page():
    """Its commands have options that exist, in forms that are understood."""
    lines = [
        line.split()
        for _, text in BLOCK.findall((ROOT / "docs" / "babilong.md").read_text(encoding="utf-8"))
        for line in text.splitlines()
    ]
    asked = [line[2:] for line in lines if line[:2] == ["cacheformers", "babilong"] and line[2:] != ["--help"]]
    parser = RecipeParser([ModelOptions, BabilongOptions], "")
    options = [parser.parse(line)[1] for line in asked]
    assert [each.tokens[-1] for each in options] == [4096, 131072, 4096, 16384]
    [trained] = [line for line in lines if line[:2] == ["python", "train_adapt.py"]]
    understood(" ".join(trained))
    [made] = [line for line in lines if line[:2] == ["python", "recipes/make_babi.py"]]
    recipe = train_adapt.Options(*train_adapt.make_parser(trained[2:]).parse(trained[2:]))
    assert recipe.train.output == options[1].adapter and recipe.lessons.questions == [made[-1]]
    assert len(lines) == len(asked) + 3


def test_ruler_page():
    """Its commands, and the one of the results, have options that exist; its table has every task with its tokens."""
    page, results = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("ruler.md", "results/ruler.md"))
    lines = [line.split() for _, text in BLOCK.findall(page + results) for line in text.splitlines()]
    asked = [line[2:] for line in lines if line[:2] == ["cacheformers", "ruler"] and line[2:] != ["--help"]]
    parser = RecipeParser([ModelOptions, RulerOptions], "")
    options = [parser.parse(line)[1] for line in asked]
    assert [each.tokens[-1] for each in options] == [4096, 131072, 4096, 4096, 4096, 4096]
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d+) \|$", page, re.MULTILINE)
    assert {task: int(tokens) for task, tokens in rows} == NEW_TOKENS


def test_methods_in_the_training_page(capsys):
    """The commands of its section have options that exist, on recipes that ship."""
    section = (ROOT / "docs" / "train.md").read_text().partition("## Methods")[2].partition("\n## ")[0]
    lines = [line.split()[2:] for _, text in BLOCK.findall(section) for line in text.splitlines()]
    trained = [[line[0].replace("recipes", str(ROOT / "recipes")), *line[1:]] for line in lines if ".yaml" in line[0]]
    chosen = [train_adapt.make_parser(line).parse(line)[-1].method for line in trained]
    assert set(chosen) == {"infini_attention", "gated_attention", "neurocache"}
    with pytest.raises(SystemExit):
        train_adapt.main(next(line for line in lines if "--help" in line))
    assert "InfiniAttentionAdapterConfig" in capsys.readouterr().out
    rows = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    assert rows - {"lora"} <= METHODS.keys()
    assert {path.stem for path in (ROOT / "recipes" / "methods").iterdir()} - {"cacheformer"} < rows


def test_the_readme_has_every_method():
    """`python scripts/tables.py --write` leaves it as it is."""
    assert runpy.run_path(str(ROOT / "scripts" / "tables.py"))["methods_table"]() in (ROOT / "README.md").read_text()


def test_evaluation_page(folder, config_factory, make_base, tokenizer, monkeypatch):
    """Every command of docs/evaluate.md; of lm-eval's, which wants the Hub, what it makes of the arguments."""
    monkeypatch.chdir(folder)
    make_base("llama_gqa", torch.float32, max_position_embeddings=2048).save_pretrained("data/smollm2-135m-instruct")
    tokenizer.save_pretrained("data/smollm2-135m-instruct")
    base = AutoModelForCausalLM.from_pretrained("data/smollm2-135m-instruct")
    get_peft_model(base, config_factory()).save_pretrained("runs/books")
    for method in ("infini_attention", "gated_attention"):
        base = AutoModelForCausalLM.from_pretrained("data/smollm2-135m-instruct")
        get_peft_model(base, config_factory(method)).save_pretrained(f"runs/{method}")
    Path("book.txt").write_text(make_text(100))
    Path("wiki.test.raw.gz").write_bytes(gzip.compress(make_text(1500).encode()))
    commands = {
        "perplexity": text_perplexity.main,
        "gates": gates.main,
        "results": results.main,
        "lm-eval": parsed_by_lm_eval,
    }
    blocks = BLOCK.findall((ROOT / "docs" / "evaluate.md").read_text())
    lines = [line.split() for language, text in blocks for line in text.splitlines()]
    assert {verb for _, verb, *_ in lines} == commands.keys()
    for name, verb, *arguments in lines:
        assert name == "cacheformers"
        commands[verb](arguments)
    assert len(ModelCard.load("runs/books/README.md").data.eval_results) == 4


def parsed_by_lm_eval(arguments):
    from lm_eval._cli.harness import HarnessCLI  # private: a new release may move it, and takes this test alone along

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["harness", *arguments])
        parsed = HarnessCLI().parse_args()
    assert parsed.model == "cacheformers" and parsed.model_args == {"pretrained": "runs/books"}
    assert get_model("cacheformers") is harness.MemoryLM


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
