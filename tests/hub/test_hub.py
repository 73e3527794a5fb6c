"""Pushing to a Hub and loading from it, over HTTP, each time in processes of their own; and the model cards."""

import json
import os
import subprocess
import sys

import pytest
import torch
from hub_server import Repo, running_hub
from huggingface_hub import ModelCard
from recipe import arguments, make_text

from cacheformers.hub.card import MARK, NAME, UNRECORDED, is_local, refresh_card, saved_card

BEGIN = """
import json, os, sys, warnings
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
import cacheformers
folder = sys.argv[1]
ids = torch.randint(3, 128, (2, 75), generator=torch.Generator().manual_seed(2))
"""


hub = pytest.fixture(running_hub)


@pytest.fixture
def fresh(hub, tmp_path):
    """Run code in a new process with an empty cache; its last line of output is JSON."""
    homes = iter(range(100))

    def run(code, folder, token="hf_me", begin=BEGIN, **environment):
        given = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        given |= {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(tmp_path / f"home{next(homes)}"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1,localhost",
            **({} if token is None else {"HF_TOKEN": token}),
            **environment,
        }
        command = [sys.executable, "-c", begin + code, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=given, cwd=folder)
        assert done.returncode == 0, done.stderr[-3000:]
        return {"stderr": done.stderr, **json.loads(done.stdout.strip().splitlines()[-1])}

    return run


def snippet(card):
    """The card's code for users."""
    code = card.partition("```python\n")[2].partition("\n```")[0]
    assert code.startswith("import cacheformers")
    return code


CONFIG = """
config = cacheformers.NeurocacheAdapterConfig(
    segment_tokens=16, cache_size=40, topk=4, retrieval_map={1: 1}, search="exact", r=4, task_type="CAUSAL_LM"
)
def opened(model, name):
    torch.manual_seed(1)
    for key, parameter in model.named_parameters():
        if "gate.weight" in key and "mem" in key or "lora_mem_gate" in key or "lora_B" in key:
            parameter.data.normal_(0, 0.5)
    with torch.no_grad():
        torch.save(model.eval()(input_ids=ids).logits, f"{folder}/{name}.pt")
    return model
"""
# What is pushed, and how: code that has a `base` from the Hub and a `config`, and pushes to "me/NAME". Every row is
# loaded by AutoModelForCausalLM, an adapter by PeftModel too. PEFT's and transformers' own methods write an empty card.
PUSHED = {
    "by-peft": "opened(get_peft_model(base, config), 'by-peft').push_to_hub('me/by-peft')",
    "by-transformers": "base.add_adapter(config); opened(base, 'by-transformers').push_to_hub('me/by-transformers')",
    "by-function": "cacheformers.push_to_hub(opened(get_peft_model(base, config), 'by-function'), 'me/by-function', "
    "license='mit')",
    "model-by-class": "tokenizer.push_to_hub('me/model-by-class'); "
    "options = dict(segment_tokens=16, cache_size=40, topk=4, retrieval_map={1: 1}, search='exact'); "
    "model = cacheformers.NeurocacheForCausalLM.from_base(base, **options); "
    "opened(model, 'model-by-class').push_to_hub('me/model-by-class')",
    "model": "tokenizer.push_to_hub('me/model'); cacheformers.push_to_hub(opened(base, 'model'), 'me/model')",
}


@pytest.mark.slow
def test_what_is_pushed_is_loaded_in_another_process(hub, fresh, folder):
    code = f"""{CONFIG}
AutoModelForCausalLM.from_pretrained(f"{{folder}}/base").push_to_hub("me/base")
tokenizer = AutoTokenizer.from_pretrained(f"{{folder}}/base")
tokenizer.push_to_hub("me/base")
for row in {list(PUSHED.values())!r}:
    base = AutoModelForCausalLM.from_pretrained("me/base")
    exec(row)
print("{{}}")
"""
    fresh(code, folder)
    snippets = dict.fromkeys(PUSHED, "import cacheformers")
    for name in PUSHED:
        files = hub.repos[f"me/{name}"].files
        assert sum(path.endswith(".safetensors") for path in files) == 1
        if name in ("by-peft", "by-transformers"):
            continue
        card = ModelCard(hub.text(f"me/{name}", "README.md"))
        assert MARK in card.text and NAME not in card.text and "cacheformers" in card.data.tags
        assert "[More Information Needed]" not in card.text and str(folder) not in card.content
        assert card.data.library_name == ("transformers" if name.startswith("model") else "peft")
        if not name.startswith("model"):
            assert card.data.base_model == "me/base" and "me/base" in card.text
        if name != "model":
            assert "| `topk` | `4` |" in card.text and "arXiv 2407.02486" in card.text and "up to 40" in card.text
        assert card.data.license == ("mit" if name == "by-function" else None)
        snippets[name] = snippet(card.text)

    (folder / "book.txt").write_text(make_text(50))
    code = f"""
differences, asked = {{}}, []
for name, snippet in {snippets!r}.items():
    models = [AutoModelForCausalLM.from_pretrained(f"me/{{name}}").eval()]
    if name.startswith("by-"):
        models.append(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("me/base"), f"me/{{name}}").eval())
    with torch.no_grad():
        found = [model(input_ids=ids).logits for model in models]
    expected = torch.load(f"{{folder}}/{{name}}.pt")
    differences[name] = max(float((logits - expected).abs().max()) for logits in found)
    scope = {{}}
    exec(snippet, scope)
    asked += [name] if "question" in scope else []
print(json.dumps({{"differences": differences, "asked": asked}}))
"""
    found = fresh(code, folder, token=None)
    assert found["asked"] == list(PUSHED)[2:] and found["differences"] == dict.fromkeys(PUSHED, 0.0)


@pytest.mark.slow
def test_a_folder_with_a_local_base_is_pushed_with_a_warning_that_says_how_to_mend_it(hub, fresh, folder):
    code = (
        CONFIG
        + """
model = opened(get_peft_model(AutoModelForCausalLM.from_pretrained(f"{folder}/base"), config), "expected")
AutoModelForCausalLM.from_pretrained(f"{folder}/base").push_to_hub("me/base")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    cacheformers.push_to_hub(model, "me/it")
    model.save_pretrained(f"{folder}/saved")
    os.mkdir(f"{folder}/saved/checkpoints")
    open(f"{folder}/saved/checkpoints/state.safetensors", "w").write("large")
    AutoTokenizer.from_pretrained(f"{folder}/base").save_pretrained(f"{folder}/saved")
    cacheformers.push_to_hub(f"{folder}/saved", "it2")
told = [str(warning.message) for warning in caught if "local folder" in str(warning.message)]
with warnings.catch_warnings():
    warnings.simplefilter("error")
    url = cacheformers.push_to_hub(f"{folder}/saved", "me/it3", base_model="me/base", private=True)
print(json.dumps({"told": told, "url": url}))
"""
    )
    found = fresh(code, folder)
    assert len(found["told"]) == 2 and all('base_model="owner/name"' in text for text in found["told"])
    for name in ("me/it", "me/it2"):
        card = ModelCard(hub.text(name, "README.md"))
        assert "nobody else can load" in card.text and card.data.get("base_model") is None
    assert found["url"].endswith(f"me/it3/commit/{hub.repos['me/it3'].sha}") and hub.repos["me/it3"].private
    card = ModelCard(hub.text("me/it3", "README.md"))
    assert "nobody else can load" not in card.text and card.data.base_model == "me/base"
    assert "checkpoints/state.safetensors" not in hub.repos["me/it3"].files
    assert json.loads(hub.text("me/it3", "adapter_config.json"))["base_model_name_or_path"] == "me/base"
    assert json.loads((folder / "saved" / "adapter_config.json").read_text())["base_model_name_or_path"] != "me/base"
    code = """
model = AutoModelForCausalLM.from_pretrained("me/it3").eval()
with torch.no_grad():
    difference = float((model(input_ids=ids).logits - torch.load(f"{folder}/expected.pt")).abs().max())
print(json.dumps({"difference": difference, "tokenizer": len(AutoTokenizer.from_pretrained("me/it3"))}))
"""
    found = fresh(code, folder)
    assert found["difference"] == 0 and found["tokenizer"] == 128


@pytest.mark.slow
def test_a_push_deletes_only_the_weights_that_it_replaces_and_names_them(hub, fresh, folder):
    """Adapters in sub-folders, other variants and a repository of the other kind stay whole."""
    code = """
base = AutoModelForCausalLM.from_pretrained(f"{folder}/base")
base.save_pretrained(f"{folder}/shards", max_shard_size="20KB")
cacheformers.push_to_hub(f"{folder}/shards", "me/model")
adapted = get_peft_model(base, cacheformers.NeurocacheAdapterConfig(segment_tokens=16, cache_size=40, topk=4))
adapted.save_pretrained(f"{folder}/saved")
cacheformers.push_to_hub(f"{folder}/saved", "me/adapter", base_model="me/model")
print("{}")
"""
    fresh(code, folder)
    names = ("a/adapter_model.safetensors", "b/model.safetensors", "model.fp16.safetensors", "extra.safetensors")
    others = {name: b"other" for name in names}
    for repo in hub.repos.values():
        repo.commit({**repo.files, **others})
    own = "---\nlicense: mit\n---\n\n# Mine\n"
    hub.repos["me/model"].commit({**hub.repos["me/model"].files, "README.md": own.encode()})
    shards = {path for path in hub.repos["me/model"].files if path.startswith("model-") or path.endswith("index.json")}
    assert len(shards) > 2
    code = """
def told(*arguments, **options):
    try:
        cacheformers.push_to_hub(*arguments, base_model="me/model", **options)
    except cacheformers.hub.HubError as error:
        return str(error)
from contextlib import redirect_stdout
from io import StringIO
refused = [told(f"{folder}/saved", "me/model"), told(f"{folder}/shards", "me/adapter")]
with redirect_stdout(StringIO()) as printed:
    cacheformers.push_to_hub(AutoModelForCausalLM.from_pretrained(f"{folder}/base"), "me/model")
    cacheformers.push_to_hub(f"{folder}/saved", "me/adapter", base_model="me/model")
    told(f"{folder}/saved", "me/model", allow_mixed=True)
print(json.dumps({"refused": refused, "printed": printed.getvalue()}))
"""
    commits = len(hub.repos["me/model"].commits)
    found = fresh(code, folder)
    adapter_over_model, model_over_adapter = found["refused"]
    assert "me/model holds a model" in adapter_over_model and "allow_mixed=True" in adapter_over_model
    assert "me/adapter holds an adapter" in model_over_adapter and "allow_mixed=True" in model_over_adapter
    assert found["printed"].splitlines() == [f"Deleted from me/model: {', '.join(sorted(shards))}"]
    assert len(hub.repos["me/model"].commits) == commits + 2
    weights = {name: {path for path in repo.files if "safetensors" in path} for name, repo in hub.repos.items()}
    assert hub.text("me/model", "README.md") == own
    assert weights["me/model"] == {*others, "model.safetensors", "adapter_model.safetensors"}
    assert weights["me/adapter"] == {*others, "adapter_model.safetensors"}


@pytest.mark.slow
def test_refusals_say_what_to_do(hub, fresh, folder):
    code = """
def told(action, *arguments, **options):
    try:
        action(*arguments, **options)
    except Exception as error:
        causes = [error]
        while causes[-1].__context__ is not None:  # as a traceback shows them
            causes.append(causes[-1].__context__)
        return [type(error).__name__, " / ".join(map(str, causes))]
base = AutoModelForCausalLM.from_pretrained(f"{folder}/base")
cacheformers.push_to_hub(base, "me/secret", private=True)
load = AutoModelForCausalLM.from_pretrained
print(json.dumps({
    "wrong token": told(cacheformers.push_to_hub, base, "me/it", token="hf_wrong"),
    "another's name": told(cacheformers.push_to_hub, base, "other/it"),
    "bad name": told(cacheformers.push_to_hub, base, "me/it/here"),
    "nothing there": told(cacheformers.push_to_hub, folder, "me/it"),
    "missing": told(load, "me/missing"),
    "private": told(load, "me/secret", token="hf_other"),
    "private adapter": told(PeftModel.from_pretrained, base, "me/secret", token="hf_other"),
}))
"""
    found = fresh(code, folder)
    assert [found[name][0] for name in ("wrong token", "another's name")] == ["HubError", "HubError"]
    assert "hf auth login" in found["wrong token"][1] and "under your own name" in found["another's name"][1]
    assert "me/it/here" in found["bad name"][1] and "adapter_config.json" in found["nothing there"][1]
    assert all("hf auth login" in found[name][1] for name in ("missing", "private"))
    assert "If you are trying to access a private" in found["private adapter"][1]
    assert list(hub.repos) == ["me/secret"]

    code = """
base = AutoModelForCausalLM.from_pretrained(f"{folder}/base")
def told():
    try:
        cacheformers.push_to_hub(base, "me/it")
    except cacheformers.hub.HubError as error:
        return str(error)
print(json.dumps({"told": told()}))
"""
    assert "hf auth login" in fresh(code, folder, token=None)["told"]
    assert "HF_HUB_OFFLINE is set" in fresh(code, folder, HF_HUB_OFFLINE="1")["told"]


RECIPE = """
import json, sys
import torch
torch.set_num_threads(1)
from cacheformers.train_adapt import main
try:
    main(json.loads(open("arguments.json").read()))
    code = 0
except SystemExit as stopped:
    code = stopped.code
print("\\n" + json.dumps({"code": code}))
"""


@pytest.mark.slow
def test_a_recipe_pushes_what_it_trained(hub, fresh, folder, tokenizer):
    def run(*more, token="hf_me"):
        given = arguments(folder, "--push_to_hub", "me/books", *more)
        (folder / "arguments.json").write_text(json.dumps(given))
        return fresh("", folder, token=token, begin=RECIPE)

    refused = run()
    assert refused["code"] == 2 and "--hub_base_model owner/name" in refused["stderr"]
    refused = run("--hub_base_model", "me/base", token="hf_wrong")
    assert refused["code"] == 2 and "hf auth login" in refused["stderr"]
    assert not hub.repos and not (folder / "adapter" / "adapter_config.json").exists()
    hub.repos["me/books"] = Repo(private=False)
    hub.repos["me/books"].commit({"config.json": b"{}", "model.safetensors": b"a model"})
    refused = run("--hub_base_model", "me/base")
    assert refused["code"] == 2 and "--hub_allow_mixed" in refused["stderr"]
    del hub.repos["me/books"]

    hub.broken_commits = 1
    named = ("--hub_base_model", "me/base", "--checkpoint_every", "2", "--valid", str(folder / "valid.jsonl"))
    broken = run(*named)
    assert "cacheformers.push_to_hub(" in broken["code"] and "base_model='me/base'" in broken["code"]
    assert len(hub.repos["me/books"].commits) == 1

    assert run(*named, "--resume")["code"] == 0
    files = hub.repos["me/books"].files
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer_config.json", "README.md"} <= set(files)
    assert not any(path.startswith("checkpoints") for path in files)
    result = json.loads(hub.text("me/books", "train_result.json"))
    card = ModelCard(hub.text("me/books", "README.md"))
    assert card.data.base_model == "me/base" and NAME not in card.text and "nobody else can load" not in card.text
    assert all(f"| {name} | {run['perplexity']:.3f} |" in card.text for name, run in result["scores"].items())
    assert "python train_adapt.py" in card.text and f"commit {result['environment']['commit']}" in card.text
    assert "| `steps` | `5` |" in card.text and 'from_pretrained("me/books")' in snippet(card.text)


@pytest.mark.slow
def test_smollm2_is_fetched_from_the_hub_where_it_can_be_reached(hub, fresh, folder):
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    hub.users["hf_me"] = "HuggingFaceTB"
    code = f"""
cacheformers.push_to_hub(AutoModelForCausalLM.from_pretrained(f"{{folder}}/base"), {name!r})
AutoTokenizer.from_pretrained(f"{{folder}}/base").push_to_hub({name!r})
print("{{}}")
"""
    fresh(code, folder)
    hub.repos[name].commit({**hub.repos[name].files, "onnx/config.json": b"{}"})
    code = """
from cacheformers.cli.fetch import main
main(["--out", f"{folder}/fetched"])
with torch.no_grad():
    logits = [AutoModelForCausalLM.from_pretrained(f"{folder}/{name}")(ids).logits for name in ("base", "fetched")]
files = sorted(os.listdir(f"{folder}/fetched"))
origin = json.load(open(f"{folder}/fetched/origin.json"))
print(json.dumps({"files": files, "same": torch.equal(*logits), **origin}))
"""
    found = fresh(code, folder, token=None)
    assert found["same"] and found["origin"] == f"{name} from the Hub, revision {hub.repos[name].sha}"
    assert {"config.json", "model.safetensors", "tokenizer.json"} < {*found["files"]}
    assert not {".cache", "onnx", "README.md"} & {*found["files"]}


# Cards


def test_saving_an_adapter_writes_a_true_card(make_model, tmp_path):
    model = make_model("llama_gqa", torch.float32)
    model.save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert snippet(card.text) and UNRECORDED in card.text and "| `cache_size` | `40` |" in card.text
    own = "---\nlicense: mit\n---\n\n# Mine\n"
    (tmp_path / "README.md").write_text(own)
    refresh_card(tmp_path)
    assert (tmp_path / "README.md").read_text() == own


def test_a_folder_without_weights_has_no_card(tmp_path):
    with pytest.raises(ValueError, match="holds neither"):
        saved_card(tmp_path)


def test_local_bases_are_known(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert all(map(is_local, ("/data/base", "../base", "models/llama/7b", "./base", "here")))
    assert not any(map(is_local, ("gpt2", "HuggingFaceTB/SmolLM2-135M-Instruct", "a/b.c_d")))
