"""Lanes, loss, rates, and `train_adapt.py` as a user runs it."""

import dataclasses
import functools
import json
import math
import re

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import get_peft_model
from recipe import adapter_weights, arguments, largest_difference, make_text
from transformers import AutoModelForCausalLM, AutoTokenizer

import cacheformers
from cacheformers import train_adapt
from cacheformers.common.base_model import StartOptions
from cacheformers.common.documents import DataOptions, Documents
from cacheformers.common.loss import IGNORED, token_losses
from cacheformers.training import attach
from cacheformers.training.adapter import adapter_config
from cacheformers.training.lanes import Lanes
from cacheformers.training.methods import options_of
from cacheformers.training.optim import OPTIMIZERS, Rates, make_optimizer, make_schedule, parameter_groups
from cacheformers.training.run import trained_state
from cacheformers.training.settings import TrainOptions, check_resumable, resumed_settings


@pytest.fixture
def make_documents(tokenizer):
    def build(*lengths, min_tokens=2):
        return Documents([make_text(length, seed) for seed, length in enumerate(lengths)], tokenizer, min_tokens)

    return build


# Lanes


def read_documents(lanes, steps):
    """What lanes put out, cut at resets: (document, inputs, labels), by the order in which documents end."""
    ended, running = [], {}
    for _ in range(steps):
        step = lanes.step()
        assert step.input_ids.shape == step.labels.shape == step.attention_mask.shape
        for row, document in enumerate(step.documents):
            if step.reset[row]:
                if row in running:
                    ended.append(running[row])
                running[row] = (document, torch.tensor([], dtype=torch.long), torch.tensor([], dtype=torch.long))
            real = step.attention_mask[row].bool()
            assert bool(real.any()) and torch.equal(real, real.sort(descending=True).values)
            assert bool((step.labels[row][~real] == IGNORED).all()) and bool((step.labels[row][real] >= 0).all())
            assert running[row][0] == document
            running[row] = (
                document,
                torch.cat([running[row][1], step.input_ids[row][real]]),
                torch.cat([running[row][2], step.labels[row][real]]),
            )
    return ended


@pytest.mark.parametrize("count", [1, 3, 9])
def test_lanes_read_every_document_once_an_epoch_and_in_order(make_documents, count):
    """Whatever the number of lanes; labels reach across the cuts between segments."""
    documents = make_documents(2, 17, 33, 1, 40, 16, 18)
    ended = read_documents(Lanes(documents, count, 8, seed=3), 120)
    for document, inputs, labels in ended:
        tokens = documents.tokens(document)
        assert torch.equal(inputs, tokens[:-1])
        assert torch.equal(labels, tokens[1:])
    read = [document for document, _, _ in ended]
    assert min(read.count(document) for document in (0, 1, 2, 4, 5, 6)) > 1
    assert 3 not in read  # one token predicts nothing
    if count == 1:
        epochs = [tuple(read[i : i + 6]) for i in range(0, 24, 6)]
        assert all(sorted(epoch) == [0, 1, 2, 4, 5, 6] for epoch in epochs)
        assert len(set(epochs)) > 1


def test_a_document_belongs_to_its_place_modulo_the_lanes(make_documents):
    documents = make_documents(*[20] * 10)
    order = [document for document, _, _ in read_documents(Lanes(documents, 1, 32, seed=5), 31)]
    for count in (2, 3):
        lanes = Lanes(documents, count, 32, seed=5)
        assert [lanes.step().documents for _ in range(5)] == [order[i * count : (i + 1) * count] for i in range(5)]


@pytest.mark.parametrize("steps", [0, 1, 6, 31])
def test_lanes_go_on_where_they_were(make_documents, steps):
    documents = make_documents(17, 33, 1, 40, 18)
    lanes = Lanes(documents, 3, 8, seed=1)
    for _ in range(steps):
        lanes.step()
    state = json.loads(json.dumps(lanes.state_dict()))
    resumed = Lanes(documents, 3, 8, seed=1)
    resumed.load_state_dict(state)
    for _ in range(12):
        expected, step = lanes.step(), resumed.step()
        for name in ("input_ids", "labels", "attention_mask", "reset"):
            assert torch.equal(getattr(step, name), getattr(expected, name))
        assert step.documents == expected.documents


# Loss, rates


def test_loss_counts_labels_only():
    logits = torch.randn(2, 5, 11, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, 11, (2, 5))
    labels[1, 2:] = IGNORED
    losses = token_losses(logits, labels)
    assert losses.dtype == torch.float32
    assert bool((losses[1, 2:] == 0).all())
    expected = F.cross_entropy(logits.float()[labels != IGNORED], labels[labels != IGNORED], reduction="none")
    torch.testing.assert_close(losses[labels != IGNORED], expected)


def rates_from(optimizer, done):
    """The highest rate of each of ten steps, after `done` steps."""
    schedule = make_schedule(optimizer, steps=10, warmup_steps=2, done=done)
    rates = []
    for _ in range(done, 10):
        rates.append(max(group["lr"] for group in optimizer.param_groups))
        optimizer.step()
        schedule.step()
    return rates


def test_gates_memory_and_lora_have_their_own_rates(make_base, config_factory):
    model = get_peft_model(make_base("opt"), config_factory(hit_scores=True))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, Rates(weights=1.0, memory=2.0, gate=60.0, weight_decay=0.1))
    seen = [names[id(parameter)] for group in groups for parameter in group["params"]]
    assert sorted(seen) == sorted(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    for group in groups:
        for name in (names[id(parameter)] for parameter in group["params"]):
            gate = "mem_gate" in name or "mem_scores" in name
            kind = "gate" if gate else "memory" if "lora_mem_" in name else "weights"
            assert group["lr"] == {"gate": 60.0, "memory": 2.0, "weights": 1.0}[kind]
            assert group["weight_decay"] == (0.0 if kind == "gate" or "mem_norm" in name else 0.1)
    rates = rates_from(make_optimizer(model, Rates(1.0, 2.0, 60.0)), done=0)
    assert rates[0] == 0 and max(rates) == rates[2] == 60.0 and rates[-1] < 5
    assert rates_from(make_optimizer(model, Rates(1.0, 2.0, 60.0), "adafactor"), done=4) == rates[4:]


def test_lora_of_lower_layers_is_kept(make_base, config_factory):
    torch.manual_seed(0)
    model = get_peft_model(make_base("opt"), config_factory(hit_scores=True))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    make_optimizer(model, Rates(1e-3, 1e-3, 1e-2, weight_decay=0.1, lowest=2)).step()
    same = {name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])}
    lora = {name for name in before if "lora_A" in name or "lora_B" in name}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    below = {name for name in lora if ".layers.0." in name or ".layers.1." in name}
    assert below and lora - below and trained & same == below


# The recipe


def test_what_is_trained_leaves_tied_weights_of_the_base_out(make_base, config_factory):
    model = get_peft_model(make_base("llama_gqa", torch.float32, tie_word_embeddings=True), config_factory())
    assert trained_state(model).keys() == {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(("least", "lengths"), [((), [70, 50]), (("--valid_min_tokens=60",), [70])])
def test_short_held_out_documents_can_be_left_out(folder, least, lengths):
    given = arguments(folder, f"--valid={folder / 'valid.jsonl'}", *least)
    options = train_adapt.Options(*train_adapt.make_parser().parse(given))
    assert [len(document.ids) for document in train_adapt.make_plan(options).valid] == lengths


def losses_of(folder, *more):
    train_adapt.main(arguments(folder, "--overwrite", *more))
    return json.loads((folder / "adapter" / "train_result.json").read_text())["losses"]


@pytest.fixture
def exact(folder, make_base, monkeypatch):
    """A base in float64, and an optimizer whose steps are proportional to the gradients."""
    make_base("llama_gqa").save_pretrained(folder / "base")
    monkeypatch.setitem(OPTIMIZERS, "adamw", functools.partial(torch.optim.SGD, momentum=0.9))
    return folder


def weights_of(folder, *more):
    options = ("--overwrite", "--lora_rate=0.1", "--memory_rate=0.1", "--lanes=2", "--steps=8", "--clip=1e9", *more)
    train_adapt.main(arguments(folder, *options))
    return adapter_weights(folder / "adapter")


def assert_equal(weights, others):
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        assert tensor.dtype == torch.float64
        assert float((tensor - others[name]).abs().max()) <= 1e-12, name


def test_accumulation_equals_a_larger_batch(exact):
    assert_equal(weights_of(exact, "--accumulation=2"), weights_of(exact))


@pytest.mark.parametrize("window", [(), ("--local_window=sliding", "--window_tokens=10", "--sink_tokens=3")])
def test_activation_checkpointing_of_two_segments_changes_nothing(exact, window):
    """With a ring that is full before the second segment is written."""
    options = ("--backprop_segments=2", "--cache_size=12", *window)
    assert_equal(weights_of(exact, *options, "--activation_checkpointing"), weights_of(exact, *options))


def test_a_run_is_a_plain_loop(folder, make_base):
    """Rates, weight decay, warm-up, clipping and the mean over tokens, written out; in float64, as Adam amplifies."""
    make_base("llama_gqa").save_pretrained(folder / "base")
    given = arguments(folder, "--lora_rate=2e-2", "--memory_rate=1e-2", "--gate_factor=3", "--warmup=0.4", "--clip=0.5")
    given.append("--weight_decay=0.1")
    train_adapt.main(given)

    options = train_adapt.Options(*train_adapt.make_parser().parse(given))
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    torch.manual_seed(0)
    model = get_peft_model(base, adapter_config(base.config, options.train, options.memory)[0]).train()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    rates = {name: 3e-2 if "mem_gate" in name else 1e-2 if "lora_mem_" in name else 2e-2 for name in trained}
    optimizers = {name: torch.optim.AdamW([p], weight_decay=0.1 if p.dim() > 1 else 0.0) for name, p in trained.items()}
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    lanes = Lanes(Documents([make_text(length, length) for length in (60, 90, 20)], tokenizer), 2, 16, seed=0)
    memory = cacheformers.new_memory(model, 2)
    for step, factor in enumerate([0, 0.5, 1, 0.75, 0.25]):
        read = lanes.step()
        memory.reset(read.reset.nonzero()[:, 0].tolist())
        logits = model(read.input_ids, attention_mask=read.attention_mask, past_key_values=memory).logits
        loss = F.cross_entropy(logits.flatten(0, 1), read.labels.flatten(), ignore_index=IGNORED)
        gradients = torch.autograd.grad(loss, list(trained.values()))
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        assert float(norm) > 0.5 or step
        for (name, parameter), gradient in zip(trained.items(), gradients, strict=True):
            parameter.grad = gradient * min(1.0, 0.5 / float(norm))
            optimizers[name].param_groups[0]["lr"] = factor * rates[name]
            optimizers[name].step()
    saved = adapter_weights(folder / "adapter")
    assert len(saved) == len(trained)
    for name, parameter in trained.items():
        torch.testing.assert_close(saved[name.replace(".default", "")], parameter.detach(), atol=1e-6, rtol=1e-5)


def test_without_lora(folder, refused):
    losses_of(folder, "--lora_targets", "none")
    config = cacheformers.NeurocacheAdapterConfig.from_pretrained(str(folder / "adapter"))
    assert config.retrieval_map == {1: 1}
    assert "none" in refused(
        train_adapt.main, arguments(folder, "--lora_targets", "none", "--method", "lora", output="b")
    )


@pytest.mark.parametrize("method", ["neurocache", "lora"])
def test_lora_in_all_layers(folder, refused, method):
    """Also where the memory has fewer; it may start from LoRA that is put under an untrained memory."""
    given = functools.partial(arguments, folder, f"--method={method}")
    losses_of(folder, "--lora_layers=all", f"--method={method}")
    layers = {
        int(name.split(".layers.")[1].split(".")[0]) for name in adapter_weights(folder / "adapter") if "lora_A" in name
    }
    assert layers == {0, 1, 2}
    if method == "lora":
        options = ["--method=neurocache", "--retrieval_map=1", "--segment_tokens=16", "--cache_size=40", "--topk=4"]
        lora = f"--lora={folder / 'adapter'}"
        attach.main([f"--base={folder / 'base'}", *options, lora, f"--output={folder / 'both'}"])
        go_on = ["--method=neurocache", f"--start_from={folder / 'both'}"]
        train_adapt.main(given(*go_on, "--lora_layers=all", "--lora_rate=0", "--memory_rate=0", output="more"))
        assert largest_difference(folder / "more", folder / "both") == 0
        message = refused(train_adapt.main, given(*go_on, output="never"))
        assert "layers_to_transform [0, 1, 2] there, [1, 2] here" in message


def test_a_start_must_train_the_same_parts(folder, refused):
    """A setting may decide what there is to train, and yet differ between a memory and its model."""
    given = ["--base", str(folder / "base"), "--method=retrieval_heads", "--segment_tokens=16"]
    attach.main([*given, f"--output={folder / 'untrained'}"])
    learn = [f"--train={folder / 'train.jsonl'}", "--retrieval_weight=1", f"--start_from={folder / 'untrained'}"]
    message = refused(train_adapt.main, [*given, *learn, f"--output={folder / 'never'}"])
    assert "trained parts [] there, ['query'] here" in message


@pytest.mark.parametrize("method", ["neurocache", "lora"])
def test_starting_from_an_earlier_adapter(folder, refused, method):
    """With rates of zero nothing changes; what may differ between a memory and its model may differ here, too."""
    given = functools.partial(arguments, folder, f"--method={method}")
    train_adapt.main(given(output="first"))
    start = f"--start_from={folder / 'first'}"
    train_adapt.main(given("--lora_rate=0", "--memory_rate=0", "--cache_size=24", "--memory_start=states", start))
    assert largest_difference(folder / "adapter", folder / "first") == 0
    train_adapt.main(given("--steps=1", start, output="other"))
    assert largest_difference(folder / "other", folder / "first") > 0
    train_adapt.main(given("--steps=1", "--lora_from_layer=2", "--memory_rate=0", start, output="upper"))
    first, upper = (adapter_weights(folder / name) for name in ("first", "upper"))
    learned = [name for name in first if not torch.equal(first[name], upper[name])]
    assert learned and all(".layers.2." in name for name in learned)
    other = {"neurocache": "lora", "lora": "neurocache"}[method]
    for more, message in (
        (["--r=2", start], "was trained with other options: r 4 there, 2 here"),
        (["--lora_targets=up_proj", start], "['down_proj', 'gate_proj', 'up_proj'] there, ['up_proj'] here"),
        ([f"--method={other}", start], f"is an adapter of {method.upper()}, not of {other.upper()}"),
        ([f"--start_from={folder / 'base'}"], "there is no adapter (adapter_config.json)"),
        *[(["--hit_scores", start], "hit_scores False there, True here")][: method == "neurocache"],
    ):
        assert message in refused(train_adapt.main, given(*more, output="never"))
    assert not (folder / "never").exists()


def test_accelerates_environment_changes_nothing_and_the_seed_does(folder, monkeypatch):
    plain = losses_of(folder, "--memory_rate=1e-2")
    assert losses_of(folder, "--memory_rate=1e-2", "--seed", "1") != pytest.approx(plain, rel=1e-3)
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert losses_of(folder, "--memory_rate=1e-2") == plain
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("segments", [1, 2])
def test_a_loss_that_is_not_finite_stops_the_run(folder, segments):
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    base.lm_head.weight.data[5] = float("inf")
    base.save_pretrained(folder / "base")
    with pytest.raises(SystemExit, match="(?s)The loss of step 1 is .*Read: document .*no checkpoint yet"):
        train_adapt.main(arguments(folder, f"--backprop_segments={segments}"))
    assert not (folder / "adapter" / "adapter_config.json").exists()


def test_a_gradient_that_is_not_finite_stops_the_run(folder, monkeypatch):
    monkeypatch.setattr(Accelerator, "clip_grad_norm_", lambda *given: torch.tensor(math.nan))
    with pytest.raises(SystemExit, match="(?s)The gradient of step 1 is not finite .its loss is .*Read: document"):
        train_adapt.main(arguments(folder))
    assert not (folder / "adapter" / "adapter_config.json").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--stepz", "3"], "unknown option '--stepz': did you mean 'steps'?"),
        (["--method", "nerocache"], "method 'nerocache' is not registered"),
        (["--steps", "0"], "steps must be greater than 0"),
        (["--lora_from_layer", "3"], "--lora_from_layer 3: the base's layers are 0 to 2"),
        (["--retrieval_map", "top"], "'top' is neither a layer"),
        (["--lora_targets", "fc9"], "fc9"),
        (["--train", "{folder}/empty"], "holds no documents"),
        (["--output", "{folder}/taken"], "already holds an adapter"),
        (["--output", "{folder}/train.jsonl/adapter"], "train.jsonl"),
        (["--clip", "nan"], "clip"),
        (["--lora_targets", "none", "q_proj"], "none"),
        (["--trackers", "tensorboard"], "tensorboard"),  # not installed here
        (["--train", "{folder}/segment.jsonl"], "nothing would ever be remembered"),
        (["--estimate", "--lanes", "1", "--estimate_processes", "8"], "multiple of 8 process(es)"),
        (["--accumulation", "3"], "lanes 2 must be a multiple of 1 process(es) x accumulation 3"),
        (["--trackers", "swanlab"], "Run: pip install swanlab"),
    ],
)
def test_bad_options(folder, refused, more, message):
    (folder / "empty").mkdir()
    (folder / "segment.jsonl").write_text(json.dumps({"text": make_text(17)}))
    (folder / "taken").mkdir()
    (folder / "taken" / "adapter_config.json").write_text("{}")
    given = arguments(folder, *(word.format(folder=folder) for word in more))
    assert message in refused(train_adapt.main, given)
    assert not (folder / "adapter" / "adapter_config.json").exists()


@pytest.mark.parametrize(
    ("name", "recipe", "message"),
    [
        ("a.yaml", "cachesize: 3", "unknown option 'cachesize': did you mean 'cache_size'?"),
        ("a.yaml", "steps: many", "invalid int value: 'many'"),
        ("a.yaml", "controls: []", "controls has no values: give some, or leave the line out."),
        ("a.json", "{}", "is no recipe"),
        ("a.yaml", None, "does not exist"),
    ],
)
def test_bad_recipes(folder, refused, name, recipe, message):
    if recipe is not None:
        (folder / name).write_text(recipe)
    assert message in refused(train_adapt.main, [str(folder / name), *arguments(folder)])


def test_each_option_is_listed_once_and_both_spellings_are_understood(capsys):
    parser = train_adapt.make_parser()
    listed = re.findall(r"^  (-.*?)(?:  |$)", parser.format_help(), re.MULTILINE)
    assert len(listed) == len(parser._actions) and [line for line in listed if line.count("--") != 1] == []
    assert "-h, --help" in listed and "--lora_rate LORA_RATE" in listed
    for spelling in ("--lora_rate", "--lora-rate"):
        options = parser.parse(["--base=a", "--train=a", "--output=a", spelling, "0.5"])
        assert next(given for given in options if isinstance(given, TrainOptions)).lora_rate == 0.5


def test_what_a_resumed_run_must_share():
    kinds = [StartOptions, DataOptions, TrainOptions, options_of("neurocache")]
    options = train_adapt.make_parser().parse(["--base=a", "--train=a", "--output=a"])
    chosen = [given for given in options if type(given) in kinds]
    assert len(chosen) == 4
    names = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    here = resumed_settings(*chosen, processes=1)
    assert here.keys() == names - {"base", "train", "output", "device", "init"} | {"processes"}
    for name in here:
        with pytest.raises(ValueError, match=rf"other settings: {name} \("):
            check_resumable(here, {**here, name: "another"}, "checkpoint")


# Rows that never reach the memory

NOT_TRAINED = "The memory is not being trained"
NEAR = {"gated_attention": 6}  # tokens before the memory is read; for the others a segment of 16


@pytest.mark.parametrize("method", ["neurocache", "memorizing", "gated_attention"])
def test_rows_that_never_reach_the_memory(make_base, config_factory, ids, method):
    """No weight of the memory gets a gradient, and training says so, once."""
    model = get_peft_model(make_base("llama_gqa", torch.float32), config_factory(method)).train()
    rows = ids[:, : NEAR.get(method, 16) + 1]
    with pytest.warns(UserWarning, match=NOT_TRAINED) as caught:
        for _ in range(10):
            model(rows, labels=rows).loss.backward()
    learned = {name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}
    assert any("lora_B" in name for name in learned) and not any("lora_mem_" in name for name in learned)
    (warning,) = [str(entry.message) for entry in caught if NOT_TRAINED in str(entry.message)]
    assert "in the first 8 training forwards" in warning and "train_adapt.py" in warning


def test_training_that_reaches_the_memory_gives_no_warning(make_model, ids, documents, recwarn):
    """A loop that carries a memory, lanes, generation while training, and rows of which one is long."""
    model = make_model("llama_gqa", torch.float32).train()
    with torch.no_grad():
        for _ in range(10):
            model(ids[:, :16])
    for _ in range(7):
        model(ids[:, :16], use_cache=False)
    mask = torch.ones(2, 18, dtype=torch.long)
    mask[0, :10] = 0
    model(ids[:, :18], attention_mask=mask)
    for _ in range(10):
        model(ids[:, :16])

    carried = make_model("llama_gqa", torch.float32).train()
    for _ in range(10):
        memory = carried(ids[:, :16]).past_key_values
        carried(ids[:, 16:32], past_key_values=memory)
    train_adapt.main(arguments(documents, "--steps=10"))
    assert not [each for each in recwarn if re.search(NOT_TRAINED, str(each.message))]
