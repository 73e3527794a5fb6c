"""The command that draws gates, and that fixes heads by them."""

import html
import json
import re

import pytest
import torch
from conftest import save_adapter
from peft import PeftModel
from recipe import make_text
from transformers import AutoModelForCausalLM, AutoTokenizer

import cacheformers
from cacheformers.adapters.export import export
from cacheformers.evaluation.gates import main

TOKENS = 60  # of the tiny base's 64 positions


@pytest.fixture
def save(folder):
    """Save an adapter whose gates differ from token to token, and a text in `text.txt`."""
    (folder / "text.txt").write_text(f"{make_text(20)}\n  <b> {make_text(50, seed=1)} ")

    def build(method, **options):
        save_adapter(folder / "base", folder / method, method=method, **options)
        return folder / method

    return build


def draw(model, *more):
    main([str(model), f"--output={model.parent / 'out'}", *more])
    return model.parent / "out"


def test_shares_of_infini_attention(save, capsys):
    pytest.importorskip("matplotlib")
    adapter = save("infini_attention", layers=[0, 2])
    out = draw(adapter)
    assert {path.name for path in out.iterdir()} == {"shares.json", "shares.png"}
    result = json.loads((out / "shares.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(adapter)
    betas = [p for name, p in model.named_parameters() if "mem_beta" in name]
    torch.testing.assert_close(torch.tensor(result["shares"]), torch.sigmoid(torch.stack(betas)).detach())
    assert result["layers"] == [0, 2] and len(result["shares"][0]) == 4
    assert "Share of the memory: mean" in capsys.readouterr().out

    log = [
        {"step": step, "share_mean": 0.5, "share_min": 0.4, "share_max": 0.6, "share_histogram": [0, 8] + [0] * 8}
        for step in (1, 2)
    ]
    (adapter / "train_result.json").write_text(json.dumps({"log": log}))
    assert (draw(adapter) / "shares_history.png").is_file()


@pytest.mark.parametrize("gate_per", ["layer", "head"])
def test_gates_of_a_text(save, gate_per):
    """Segment by segment as in one pass; the page holds the text, and the gate of every token that has one."""
    pytest.importorskip("matplotlib")
    adapter = save("gated_attention", gate_per=gate_per)
    text = adapter.parent / "text.txt"
    out = draw(adapter, "--text", str(text), str(text), f"--tokens={TOKENS}")
    assert {path.name for path in out.iterdir()} == {"gates.json", "gates.png", "text_0.html", "text_1.html"}
    result = json.loads((out / "gates.json").read_text())

    model = AutoModelForCausalLM.from_pretrained(adapter).eval()
    ids = AutoTokenizer.from_pretrained(adapter.parent / "base")(text.read_text(), return_tensors="pt").input_ids
    memory = cacheformers.new_memory(model, 1)
    with torch.no_grad():
        model(ids[:, :TOKENS], past_key_values=memory)
    read, gates = result["texts"][0], memory.state.last.gates
    assert result["texts"][1] == read and read["counted"] == [False] * 6 + [True] * (TOKENS - 6)
    for layer in range(3):
        torch.testing.assert_close(torch.tensor(read["gates"][str(layer)]), gates[layer][0].mean(0), atol=1e-4, rtol=0)
        expected = gates[layer][0, :, 6:].mean(1)
        torch.testing.assert_close(torch.tensor(result["means"][str(layer)]), expected, atol=1e-5, rtol=1e-5)
    every = torch.cat([layer[0, :, 6:].flatten() for layer in gates.values()])
    assert sum(result["histogram"]) == 2 * len(every)
    assert sum(result["histogram"][:5]) == 2 * int((every < 0.5).sum())
    assert result["below_threshold"] == pytest.approx(float((every < 0.5).double().mean()))

    shown = (out / "text_0.html").read_text().partition("<main>")[2].partition("</main>")[0]
    assert html.unescape(re.sub(r"</?span[^>]*>", "", shown)) == "".join(read["pieces"])
    assert text.read_text().startswith("".join(read["pieces"]).rstrip()) and "&lt;b&gt;" in shown
    titles = [float(title) for title in re.findall(r'title="([\d.]+)"', shown)]
    means = torch.stack([torch.tensor(layer) for layer in read["gates"].values()]).mean(0)[6:]
    torch.testing.assert_close(torch.tensor(titles), means, atol=1e-3, rtol=0)


def test_gates_beyond_the_positions(save):
    """With `far_distance` a text may be longer than the base's 64 positions."""
    pytest.importorskip("matplotlib")
    adapter = save("gated_attention", far_distance=20)
    out = draw(adapter, "--text", str(adapter.parent / "text.txt"), "--tokens=70")
    (read,) = json.loads((out / "gates.json").read_text())["texts"]
    assert len(read["counted"]) == 70


@pytest.mark.parametrize("kind", ["adapter", "model"])
def test_fixed_heads_drop_what_is_far(save, kind):
    """The saved model loads, sees what the means say, and holds less after a text longer than many windows."""
    adapter = save("gated_attention", gate_per="kv_head", window_tokens=2)
    place, fixed = adapter, adapter.parent / "fixed"
    if kind == "model":
        place = export(adapter, adapter.parent / "model")
    text = adapter.parent / "text.txt"
    out = draw(place, f"--text={text}", "--fix-heads=0.5", f"--save={fixed}")
    result = json.loads((out / "gates.json").read_text())
    expected = {
        layer: [head for head, mean in enumerate(means) if mean >= 0.5] for layer, means in result["means"].items()
    }
    assert result["far_heads"] == expected and 0 < sum(map(len, expected.values())) < 6

    if kind == "adapter":
        base = AutoModelForCausalLM.from_pretrained(adapter.parent / "base")
        loaded = PeftModel.from_pretrained(base, fixed).eval()
    else:
        loaded = AutoModelForCausalLM.from_pretrained(fixed).eval()
    gated = AutoModelForCausalLM.from_pretrained(adapter).eval()
    ids = AutoTokenizer.from_pretrained(fixed)(make_text(64), return_tensors="pt").input_ids
    sizes = []
    for model in (gated, loaded):
        memory = cacheformers.new_memory(model, 1)
        with torch.no_grad():
            for token in ids.split(1, 1):
                model(token, past_key_values=memory)
        sizes.append(memory.nbytes)
    far = sum(map(len, expected.values())) / 6
    assert sizes[1] < (far + (1 - far) * 8 / 64) * sizes[0]
    with pytest.raises(SystemExit):
        main([str(fixed), f"--output={out}", f"--text={text}"])  # no gate is left


@pytest.mark.parametrize(
    ("method", "more", "message"),
    [
        ("infini_attention", ["--text={folder}/text.txt"], "the same for every text"),
        ("infini_attention", ["--fix-heads=0.5", "--save={folder}/fixed"], "the same for every text"),
        ("neurocache", [], "has the memory neurocache: this command is for infini_attention and gated_attention"),
        ("base", [], "has no memory: this command is for"),
        ("nowhere", [], "nowhere"),
        ("gated_attention", [], "Gates depend on the text: give --text FILE"),
        ("gated_attention", ["--text={folder}/missing.txt"], "missing.txt"),
        ("gated_attention", ["--text={folder}/text.txt", "--tokens=6"], "all within the window of 6"),
        ("gated_attention", ["--text={folder}/text.txt", "--tokens=65"], "--tokens must be at most 64"),
        ("gated_attention", ["--text={folder}/text.txt", "--tokens=0"], "--tokens must be at least 1"),
        ("gated_attention", ["--text={folder}/text.txt", "--fix-heads=0.5"], "--fix-heads and --save go together"),
        ("gated_attention", ["--text={folder}/text.txt", "--fix-heads=1", "--save={folder}/base"], "exists already"),
    ],
)
def test_what_is_refused(save, folder, refused, method, more, message):
    place = save(method) if method not in ("base", "nowhere") else folder / method
    given = [str(place), f"--output={folder / 'out'}", *(word.format(folder=folder) for word in more)]
    assert message in refused(main, given)
    assert not (folder / "out").exists()


def test_a_base_that_is_not_found(save, folder, refused):
    place = save("infini_attention")
    named = json.loads((place / "adapter_config.json").read_text())
    for base, message in ((str(folder / "gone"), "there is no folder"), (None, "does not name its base model")):
        (place / "adapter_config.json").write_text(json.dumps({**named, "base_model_name_or_path": base}))
        answer = refused(main, [str(place), f"--output={folder / 'out'}"])
        assert message in answer and "into base_model_name_or_path of its adapter_config.json" in answer
