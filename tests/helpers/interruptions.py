"""Runs that are killed or signalled, and a look at the checkpoints they leave."""

import json

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cacheformers.training.checkpoints import Checkpoints

TOUCHES = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir")
# The process kills itself just before its `moment`-th such event in the checkpoints' folder.
AT_FILES = """
import signal
touched = 0
def watch(event, facts):
    global touched
    if event in {events} and "checkpoints" in str(facts[0]):
        touched += 1
        if rank == {rank} and touched == {moment}:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(watch)
"""
# ... or gets a signal in the middle of a forward, at the `moment`-th call of a module.
IN_FORWARD = """
import torch
calls = 0
def watch(module, inputs):
    global calls
    calls += 1
    if rank == {rank} and calls == {moment}:
        os.kill(os.getpid(), {signal})
torch.nn.modules.module.register_module_forward_pre_hook(watch)
"""


def check_checkpoints(folder, base):
    """Every checkpoint that can be seen is whole. Returns how many there are."""
    paths = Checkpoints(folder / "checkpoints").paths()
    for path in paths:
        contents = json.loads((path / "checkpoint.json").read_text())
        assert contents["contents"]["history"]["losses"]
        assert {file.name for file in path.iterdir()} == {*contents["files"], "checkpoint.json"}
        for name, size in contents["files"].items():
            assert (path / name).stat().st_size == size
        for file in path.glob("*.safetensors"):
            assert load_file(file)
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), path)
        assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
    return len(paths)
