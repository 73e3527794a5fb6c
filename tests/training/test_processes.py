"""Several processes: the same training as one, also when one of them dies."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from interruptions import AT_FILES, IN_FORWARD, TOUCHES, check_checkpoints
from peft import PeftModel
from recipe import Recipe, adapter_weights, arguments, free_port, largest_difference, run, write_documents
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cacheformers import train_adapt

ROOT = Path(__file__).resolve().parents[2]
STEPS = 20
SETTINGS = ("--lanes=4", f"--steps={STEPS}", "--checkpoint_every=5", "--memory_rate=1e-2", "--lora_rate=1e-2")


def in_float64(folder):
    """Save the base in float64: in float32 Adam makes steps of rounding where gradients are nearly 0."""
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float64)
    model.save_pretrained(folder / "base")
    return folder


@pytest.fixture(scope="module")
def alone(built_documents, tmp_path_factory):
    """The same run as one process, which has twice the lanes of each of two."""
    folder = in_float64(shutil.copytree(built_documents, tmp_path_factory.mktemp("alone"), dirs_exist_ok=True))
    train_adapt.main(arguments(folder, *SETTINGS, *evaluated(folder), output="alone"))
    return folder / "alone"


@pytest.fixture(name="documents")
def documents_fixture(documents):
    return in_float64(documents)


def evaluated(folder):
    """Documents of different lengths, which two processes share unequally, and every control."""
    write_documents(folder / "held_out.jsonl", 60, 33, 90, 20, 17)
    controls = ("--controls", "other_document", "shuffled", "longer_window")
    return (f"--valid={folder / 'held_out.jsonl'}", "--valid_rows=2", *controls)


def result_of(folder):
    return json.loads((folder / "train_result.json").read_text())


# The evaluation gets the model without its wrapper; here with it.
DDP = """
from torch.nn.parallel import DistributedDataParallel
from cacheformers import train_adapt
evaluate = train_adapt.evaluate_model
train_adapt.evaluate_model = lambda model, *given: evaluate(DistributedDataParallel(model), *given)
"""


@pytest.mark.parametrize(
    ("sharding", "more"), [("none", ()), ("fsdp2", ()), pytest.param("fsdp2", ("--skip_base",), marks=pytest.mark.slow)]
)
def test_two_processes_equal_one_with_twice_the_lanes(documents, alone, sharding, more):
    """In the evaluation, too: FSDP gathers weights and DDP sends buffers at each forward, and both wait for ever if a
    process makes fewer."""
    options = (f"--sharding={sharding}", *evaluated(documents), *more)
    run(arguments(documents, *SETTINGS, *options), documents / "two.log", 2, DDP if sharding == "none" else "")
    assert largest_difference(documents / "adapter", alone) <= 1e-12
    found, expected = result_of(documents / "adapter"), result_of(alone)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    if more:
        del expected["scores"]["base"]
    assert list(found["scores"]) == list(expected["scores"])
    for name, scores in expected["scores"].items():
        assert found["scores"][name]["nats_by_document"] == pytest.approx(scores["nats_by_document"], rel=1e-4), name
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(documents / "base"), documents / "adapter")
    names = {name for name, parameter in model.named_parameters() if "lora_" in name}
    assert len(names) == len(adapter_weights(documents / "adapter"))


def test_two_processes_start_from_the_same_states(documents):
    settings = (*SETTINGS, "--memory_start=states", "--start_segments=5", "--hit_scores=true")
    train_adapt.main(arguments(documents, *settings, output="alone"))
    # The second process finds directions of the other sign, as a machine of another kind may.
    other = "if rank:\n    from cacheformers.methods.neurocache import start as s; f = s.principal_projection\n"
    other += "    s.principal_projection = lambda *moments: -f(*moments)"
    run(arguments(documents, *settings, "--sharding=fsdp2"), documents / "two.log", 2, other)
    assert largest_difference(documents / "adapter", documents / "alone") <= 1e-4  # gradients of hit scores begin at 0
    train_adapt.main(arguments(documents, *SETTINGS, "--hit_scores=true", output="copies"))
    assert largest_difference(documents / "adapter", documents / "copies") > 1e-2


@pytest.mark.slow
def test_accelerate_launch(documents, alone):
    """With the shipped configuration, on two processes of a machine without a GPU."""
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes=2"]
    command += [f"--config_file={ROOT / 'recipes/accelerate/ddp.yaml'}", f"--main_process_port={free_port()}"]
    command += [str(ROOT / "train_adapt.py"), *arguments(documents, *SETTINGS, "--device=cpu")]
    done = subprocess.run(command, cwd=documents, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert "2 process(es)" in done.stdout
    assert largest_difference(documents / "adapter", alone) <= 1e-12


def test_accumulation_over_two_processes(documents, alone):
    run(arguments(documents, *SETTINGS, "--accumulation=2"), documents / "two.log", processes=2)
    assert largest_difference(documents / "adapter", alone) <= 1e-12


@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_two_processes_stop_and_go_on(documents, alone, sharding):
    settings = (*SETTINGS, f"--sharding={sharding}")
    stopping = IN_FORWARD.format(rank=1, moment=500, signal=15)  # only one of them is asked to stop
    stopped = run(arguments(documents, *settings), documents / "stopped.log", 2, stopping)
    assert "Go on with --resume." in stopped.output()
    assert check_checkpoints(documents / "adapter", documents / "base") > 0
    run(arguments(documents, *settings, "--resume"), documents / "resumed.log", 2)
    assert largest_difference(documents / "adapter", alone) <= 1e-12


def test_two_processes_go_on_with_their_own_random_numbers(documents):
    """Each with its own dropout. One is slow to write, and the checkpoint waits for it."""
    settings = (*SETTINGS, "--steps=4", "--lora_dropout=0.3")
    slow = """
import time
from cacheformers.training import run
write = run.write_own
run.write_own = lambda *given: (time.sleep(0.3 * rank), write(*given))
"""
    run(arguments(documents, *settings, output="whole"), documents / "whole.log", 2)
    run(arguments(documents, *settings, "--stop_after=1e-9"), documents / "stopped.log", 2, slow)
    assert check_checkpoints(documents / "adapter", documents / "base") == 1
    checkpoint = documents / "adapter" / "checkpoints" / "step-00000001"
    one, other = (load_file(checkpoint / f"process-{rank:05}.safetensors")["random.cpu"] for rank in (0, 1))
    assert not torch.equal(one, other)
    run(arguments(documents, *settings, "--resume"), documents / "resumed.log", 2)
    assert largest_difference(documents / "adapter", documents / "whole") == 0


def test_a_checkpoint_of_two_processes_is_refused_by_one(documents, refused):
    run(arguments(documents, *SETTINGS, "--stop_after=1e-9"), documents / "two.log", 2)
    said = refused(train_adapt.main, arguments(documents, *SETTINGS, "--resume"))
    assert "processes (2 in the checkpoint, 1 here)" in said


@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_when_one_process_dies_the_other_stops_and_says_so(documents, sharding):
    recipe = Recipe(
        arguments(documents, *SETTINGS, f"--sharding={sharding}"),
        documents / "dying.log",
        processes=2,
        before=IN_FORWARD.format(rank=1, moment=700, signal=9),
    )
    assert recipe.wait() == [1, -9]
    said = recipe.output(0)
    assert "another process is gone" in said and "--resume" in said
    check_checkpoints(documents / "adapter", documents / "base")


@pytest.mark.slow
# The second process touches a file once for every checkpoint.
@pytest.mark.parametrize(("rank", "moment"), [(0, 2), (0, 6), (0, 12), (1, 1), (1, 3)])
def test_killed_between_two_processes_files(documents, alone, rank, moment):
    recipe = Recipe(
        arguments(documents, *SETTINGS),
        documents / "dying.log",
        processes=2,
        before=AT_FILES.format(rank=rank, moment=moment, events=TOUCHES),
    )
    codes = recipe.wait()
    assert codes[rank] == -9 and 0 not in codes, recipe.output()
    check_checkpoints(documents / "adapter", documents / "base")
    run(arguments(documents, *SETTINGS, "--resume"), documents / "resumed.log", 2)
    assert largest_difference(documents / "adapter", alone) <= 1e-12


@pytest.mark.parametrize("file", ["train", "valid"])
def test_a_loss_of_one_process_that_is_not_finite_stops_both(documents, file):
    base = AutoModelForCausalLM.from_pretrained(documents / "base")
    base.get_input_embeddings().weight.data[3] = float("nan")  # the word w0
    base.save_pretrained(documents / "base")
    texts = ["w1 " * 40, "w2 " * 40, "w3 " * 40, "w4 " * 40]
    for name in ("train", "valid"):
        broken = [*texts[:3], "w4 w0 " + texts[3]] if name == file else texts
        (documents / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in broken))
    given = arguments(documents, *SETTINGS, f"--valid={documents / 'valid.jsonl'}")
    recipe = Recipe(given, documents / "nan.log", processes=2)
    assert recipe.wait() == [1, 1]
    step = 'The loss of step 1 is nan. Read: document 3 ("w4 w0 w4'
    message = {"train": step, "valid": "The loss of document 3 at token 1 is nan"}[file]
    for rank in (0, 1):
        assert message in recipe.output(rank)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--lanes=3"], "lanes 3 must be a multiple of 2 process(es) x accumulation 1"),
        (["--sharding=fsdp2", "--optimizer=adafactor"], "use --optimizer adamw with fsdp2"),
        (["--sharding=fsdp2", "--backprop_segments=2"], "needs backprop_segments 1"),
        (["--sharding=fsdp2", "--distill=0.5", "--distill_all"], "fsdp2 cannot train with --distill"),
        (["--sharding=fsdp2", "--questions=none", "--prompt=hybrid"], "fsdp2 cannot train with --prompt hybrid"),
    ],
)
def test_what_does_not_go_together_is_refused(documents, more, message):
    recipe = Recipe(arguments(documents, *SETTINGS, *more), documents / "refused.log", processes=2)
    assert recipe.wait() == [2, 2]
    assert message in recipe.output()


def test_other_ways_to_start_are_refused(documents, refused, monkeypatch):
    assert "start it with torchrun" in refused(train_adapt.main, arguments(documents, *SETTINGS, "--sharding=fsdp2"))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")  # as accelerate launch sets it
    said = refused(train_adapt.main, arguments(documents, *SETTINGS))
    assert "DeepSpeed is not supported: start with torchrun" in said


@pytest.mark.slow
def test_under_torchrun(documents, alone):
    """As a user starts it. The rank of LoRA is in a recipe file: torchrun takes `--r` for one of its own options."""
    (documents / "recipe.yaml").write_text("r: 4\n")
    options = [option for option in arguments(documents, *SETTINGS) if not option.startswith("--r=")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(ROOT / "train_adapt.py"), str(documents / "recipe.yaml"), *options]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert "2 process(es)" in done.stdout and done.stdout.count("s a step") == 1
    assert largest_difference(documents / "adapter", alone) <= 1e-12
