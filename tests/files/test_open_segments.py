"""An open segment of one token, in memory files and in training checkpoints."""

import pytest
import torch
from conftest import METHODS

import cacheformers
from cacheformers.common.files import write_tensors


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_one_open_token_is_saved(make_model, ids, tmp_path, method):
    """Its keys are held twice, for the window and for the memory, and a file shares none."""
    model = make_model("llama_gqa", method=method)
    memory = cacheformers.read(model, ids[:1, :1], flush=False, progress=False)
    write_tensors(tmp_path / "checkpoint.safetensors", memory.state_dict())
    memory.save(tmp_path / "m")
    loaded = cacheformers.load_memory(tmp_path / "m", model)
    assert torch.equal(*(model(ids[:1, 1:20], past_key_values=given).logits for given in (loaded, memory)))
