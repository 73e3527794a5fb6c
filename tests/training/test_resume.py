"""A run that is killed, at whatever moment, and resumed ends with the weights of one that never stopped."""

import json
import os
import random
import shutil
import time

import pytest
import torch
from interruptions import AT_FILES, IN_FORWARD, TOUCHES, check_checkpoints
from recipe import Recipe, adapter_weights, arguments, largest_difference, run, write_documents
from safetensors.torch import load_file

from cacheformers import train_adapt
from cacheformers.common.files import write_tensors
from cacheformers.training.checkpoints import CheckpointError, Checkpoints

STEPS = 8
SETTINGS = (
    *("--lanes=4", "--accumulation=2", f"--steps={STEPS}", "--checkpoint_every=2", "--memory_rate=1e-2"),
    *("--lora_rate=1e-2", "--lora_dropout=0.1", "--log_every=3"),
)

# Needs the local keys, the kept columns and the number of closed segments that a checkpoint holds.
WINDOW = ("--local_window=sliding", "--window_tokens=10", "--sink_tokens=3")


@pytest.fixture(scope="module")
def uninterrupted(built_documents):
    train_adapt.main(arguments(built_documents, *SETTINGS, output="whole"))
    return built_documents / "whole"


MOMENTS = {
    **{f"file {n}": AT_FILES.format(rank=0, moment=n, events=TOUCHES) for n in (9, 21, 1, 3, 7, 13, 17, 25, 40)},
    # The fourth also takes an old checkpoint away.
    **{f"rename {n}": AT_FILES.format(rank=0, moment=n, events=("os.rename",)) for n in (2, 4)},
    **{f"forward {n}": IN_FORWARD.format(rank=0, moment=n, signal=9) for n in (30, 700)},
}
FAST = ("file 9", "file 21")


@pytest.mark.parametrize("moment", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in MOMENTS])
def test_killed_at_a_file_or_in_a_forward(documents, uninterrupted, moment):
    """What it leaves is whole, and another run goes on from it to the end."""
    recipe = Recipe(arguments(documents, *SETTINGS), documents / "killed.log", before=MOMENTS[moment])
    assert recipe.wait() == [-9], recipe.output()
    check_checkpoints(documents / "adapter", documents / "base")
    assert not (documents / "adapter" / "adapter_config.json").exists()
    run(arguments(documents, *SETTINGS, "--resume"), documents / "resumed.log")
    assert largest_difference(documents / "adapter", uninterrupted) <= 1e-6


@pytest.mark.slow
def test_killed_at_any_time_again_and_again(documents, uninterrupted):
    """Killed by the clock until it comes through; each run goes on from what the one before has left."""
    delays = random.Random(0)
    for attempt in range(6):
        recipe = Recipe(arguments(documents, *SETTINGS, "--resume"), documents / f"{attempt}.log")
        started = time.monotonic()
        while recipe.processes[0].is_alive() and "Training:" not in recipe.output():
            assert time.monotonic() < started + 60, recipe.output()
            time.sleep(0.01)
        time.sleep(delays.uniform(0, 0.3))
        recipe.kill()
        check_checkpoints(documents / "adapter", documents / "base")
    run(arguments(documents, *SETTINGS, "--resume"), documents / "last.log")
    assert largest_difference(documents / "adapter", uninterrupted) <= 1e-6


def test_stopped_and_resumed(documents, uninterrupted, capsys):
    """A run that may train for no time at all makes one step each time that it is started."""
    for step in range(1, STEPS):
        train_adapt.main(arguments(documents, *SETTINGS, "--resume", "--stop_after=1e-9"))
        assert f"Stopped after step {step} of {STEPS}. Go on with --resume." in capsys.readouterr().out
    train_adapt.main(arguments(documents, *SETTINGS, "--resume"))
    assert largest_difference(documents / "adapter", uninterrupted) == 0
    ours, other = (
        json.loads((path / "train_result.json").read_text()) for path in (documents / "adapter", uninterrupted)
    )
    assert ours["losses"] == other["losses"] and ours["tokens"] == other["tokens"]
    assert [entry["step"] for entry in ours["log"]] == [3, 6, STEPS]


def test_asked_to_stop_by_a_signal(documents, uninterrupted):
    """SIGTERM, as batch systems send it, and Ctrl-C let the step end and write a checkpoint."""
    for number in (15, 2):
        before = IN_FORWARD.format(rank=0, moment=300, signal=number)
        stopped = run(arguments(documents, *SETTINGS, "--resume"), documents / "stopped.log", before=before)
        assert "Go on with --resume." in stopped.output()
    assert check_checkpoints(documents / "adapter", documents / "base") == 2
    train_adapt.main(arguments(documents, *SETTINGS, "--resume"))
    assert largest_difference(documents / "adapter", uninterrupted) == 0


@pytest.mark.parametrize(
    "more",
    [
        ("--method=lora",),
        ("--stream", "--shuffle_block=4"),
        *(("--dtype=bfloat16", "--device=cpu", f"--quantize={kind}") for kind in ("none", "nf4", "int8")),
        ("--optimizer=adafactor",),
        ("--activation_checkpointing",),
        ("--hit_scores=true", "--memory_start=states"),
        WINDOW,
    ],
)
def test_other_runs_resume_too(documents, more):
    train_adapt.main(arguments(documents, *SETTINGS, *more, output="whole"))
    for _ in range(3):
        train_adapt.main(arguments(documents, *SETTINGS, *more, "--resume", "--stop_after=1e-9"))
    checkpoint = Checkpoints(documents / "adapter" / "checkpoints").newest()
    assert checkpoint is not None and checkpoint.name == "step-00000003"
    assert all("lora_" in name for name in load_file(checkpoint / "adapter_model.safetensors"))
    train_adapt.main(arguments(documents, *SETTINGS, *more, "--resume"))
    assert largest_difference(documents / "adapter", documents / "whole") == 0


# What is refused


def test_other_settings_are_refused(documents, refused):
    train_adapt.main(arguments(documents, *SETTINGS))
    said = refused(train_adapt.main, arguments(documents, *SETTINGS, "--resume", "--topk=5", "--memory_rate=2e-2"))
    assert "memory_rate (0.01 in the checkpoint, 0.02 here), topk (4 in the checkpoint, 5 here)" in said
    (documents / "base").rename(documents / "moved")
    moved = (*SETTINGS, "--resume", f"--base={documents / 'moved'}")
    train_adapt.main(arguments(documents, *moved))
    config = json.loads((documents / "moved" / "config.json").read_text())
    (documents / "moved" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    write_documents(documents / "train.jsonl", 60, 90)
    said = refused(train_adapt.main, arguments(documents, *moved))
    assert "base (" in said and "documents (" in said and "memory_rate" not in said


def test_an_output_folder_with_checkpoints_is_not_overwritten_by_chance(documents, refused):
    train_adapt.main(arguments(documents, *SETTINGS, "--stop_after=1e-9"))
    said = refused(train_adapt.main, arguments(documents, *SETTINGS))
    assert "holds checkpoints: add --resume to go on" in said
    said = refused(train_adapt.main, arguments(documents, *SETTINGS, "--resume", "--overwrite"))
    assert "Choose one of" in said
    train_adapt.main(arguments(documents, *SETTINGS, "--overwrite"))
    assert adapter_weights(documents / "adapter")
    train_adapt.main(arguments(documents, *SETTINGS, "--overwrite", "--stop_after=1e-9"))
    assert [path.name for path in Checkpoints(documents / "adapter" / "checkpoints").paths()] == ["step-00000001"]


def test_everything_is_on_disk_before_a_checkpoint_can_be_seen(tmp_path, monkeypatch):
    events = []
    sync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda file: (events.append(os.readlink(f"/proc/self/fd/{file}")), sync(file)))
    monkeypatch.setattr(os, "rename", lambda one, other: (events.append("rename"), rename(one, other)))
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(3, lambda folder: write_tensors(folder / "a.safetensors", {"a": torch.zeros(2)}), {})
    draft = tmp_path / "checkpoints" / ".writing-step-00000003"
    files = [str(draft / "a.safetensors"), str(draft / "checkpoint.json"), str(draft)]
    assert events == [*files, "rename", str(tmp_path / "checkpoints")]


@pytest.mark.parametrize("more", [("--stop_after=1e-9",), ("--steps=1",)])
def test_a_run_whose_last_checkpoint_fails_says_so(documents, monkeypatch, more):
    """Also where it is asked to stop: its work would be lost without a word."""

    def save(*arguments):
        raise CheckpointError("The disk is full.")

    monkeypatch.setattr(Checkpoints, "save", save)
    with pytest.raises(SystemExit, match="The disk is full"):
        train_adapt.main(arguments(documents, *SETTINGS, *more))


def test_two_runs_do_not_share_a_folder(documents, refused):
    checkpoints = Checkpoints(documents / "adapter" / "checkpoints")
    checkpoints.claim()
    assert "Another run writes into" in refused(train_adapt.main, arguments(documents, *SETTINGS))
    del checkpoints
    train_adapt.main(arguments(documents, *SETTINGS))


def test_a_damaged_checkpoint_is_passed_over(documents, uninterrupted):
    train_adapt.main(arguments(documents, *SETTINGS, "--stop_after=1e-9"))
    train_adapt.main(arguments(documents, *SETTINGS, "--resume", "--stop_after=1e-9"))
    older, newer = Checkpoints(documents / "adapter" / "checkpoints").paths()
    file = newer / "process-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="step-00000002 is damaged .process-00000.safetensors.: it is not used"):
        assert Checkpoints(documents / "adapter" / "checkpoints").newest() == older
    with pytest.warns(UserWarning, match="damaged"):
        train_adapt.main(arguments(documents, *SETTINGS, "--resume"))
    assert largest_difference(documents / "adapter", uninterrupted) == 0


def test_what_was_passed_over_does_not_push_good_checkpoints_out(documents):
    """Damaged checkpoints of later steps stand in the folder while a run goes on from an earlier one."""
    for _ in range(4):
        train_adapt.main(arguments(documents, *SETTINGS, "--resume", "--stop_after=1e-9", "--keep_checkpoints=4"))
    checkpoints = Checkpoints(documents / "adapter" / "checkpoints")
    first, second, *later = checkpoints.paths()
    shutil.rmtree(second)
    for path in later:
        (path / "optimizer.safetensors").write_bytes(b"")
    train_adapt.main(arguments(documents, *SETTINGS, "--resume", "--stop_after=1e-9"))
    assert checkpoints.newest() == second


def test_damaged_checkpoints_alone_are_not_thrown_away(documents, refused):
    train_adapt.main(arguments(documents, *SETTINGS, "--stop_after=1e-9"))
    (path,) = Checkpoints(documents / "adapter" / "checkpoints").paths()
    (path / "optimizer.safetensors").write_bytes(b"")
    assert "--overwrite" in refused(train_adapt.main, arguments(documents, *SETTINGS, "--resume")) and path.exists()


def test_a_full_disk(documents):
    """After the first checkpoint no file may grow beyond what the optimizer's needs; later there is room again."""
    before = """
import resource
def watch(event, facts):
    if event == "os.rename" and str(facts[1]).endswith("step-00000002"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
sys.addaudithook(watch)
"""
    recipe = Recipe(arguments(documents, *SETTINGS), documents / "full.log", before=before)
    assert recipe.wait() == [1]
    said = recipe.output()
    assert "step-00000004 was not written (process 0:" in said and "Training goes on" in said
    assert said.rstrip().splitlines()[-1].startswith("The checkpoint step-00000008 was not written")
    assert [path.name for path in Checkpoints(documents / "adapter" / "checkpoints").paths()] == ["step-00000002"]
    check_checkpoints(documents / "adapter", documents / "base")
    assert [path.name for path in (documents / "adapter" / "checkpoints").iterdir()] == ["step-00000002"]
    train_adapt.main(arguments(documents, *SETTINGS, "--resume"))
    assert adapter_weights(documents / "adapter")
