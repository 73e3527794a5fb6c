"""What other libraries define, and the private methods of a user's model, are as they were."""

import subprocess
import sys

import pytest

LOOK = """
import sys, types
import peft, torch, transformers
from peft import LoraConfig, PEFT_TYPE_TO_CONFIG_MAPPING, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

LIBRARIES = ("torch.nn.modules", "transformers", "peft", "accelerate")
CODE = (type, types.FunctionType, classmethod, staticmethod, property)
IDS = torch.arange(3, 43)[None]


def base():
    sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=32)
    return LlamaForCausalLM(LlamaConfig(**sizes))


def definitions():
    '''Every function, method and class of the libraries, by where it is found.'''
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith(LIBRARIES):
            classes = [value for value in list(vars(module).values()) if isinstance(value, type)]
            for owner in (module, *(kind for kind in classes if kind.__module__.startswith(LIBRARIES))):
                for key, value in list(vars(owner).items()):
                    if isinstance(value, CODE):
                        found[name, owner.__name__, key] = value
    return found


def private_methods(model):
    return {(id(module), key) for module in model.modules() for key, value in vars(module).items()
            if key[0] == "_" and callable(value)}


get_peft_model(base(), LoraConfig()).generate(IDS, max_new_tokens=2)  # libraries load parts of themselves when used
before = definitions()
assert len(before) > 1000
import cacheformers
from cacheformers.modeling.method import METHODS

for name, method in METHODS.items():
    model = base()
    private = private_methods(model)
    settings = {"segment_tokens": 16, **method.test_settings}
    adapted = get_peft_model(model, PEFT_TYPE_TO_CONFIG_MAPPING[name.upper()](**settings)).eval()
    assert private_methods(model) == private, name
    adapted.generate(IDS, max_new_tokens=2)
PATCH
after = definitions()
changed = [place for place, value in before.items() if after.get(place) is not value]
assert not changed, changed
print("unchanged")
"""


@pytest.mark.slow
@pytest.mark.parametrize("patch", ["", "peft.PeftModel.save_pretrained = lambda *_: None"])
def test_libraries_are_as_they_were(patch):
    look = subprocess.run([sys.executable, "-c", LOOK.replace("PATCH", patch)], capture_output=True, text=True)
    assert ("unchanged" in look.stdout) == (patch == ""), look.stderr[-2000:]
