"""Prompts read one by one and answered together, against plain `generate`."""

from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from cacheformers.evaluation.longbench.answers import answer, prefill
from cacheformers.evaluation.longbench.prompts import Encoded
from cacheformers.evaluation.longbench.tasks import TASKS

LENGTHS = (2, 40, 17)


def rows():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 128, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.mark.parametrize("spare", [0, 1])
@pytest.mark.parametrize("name", ["llama_gqa", "opt"])
def test_answers_are_those_of_plain_generate(make_base, name, spare):
    model, prompts, longest = make_base(name, torch.float64).eval(), rows(), spare + max(LENGTHS)
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": 12, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    cache = prefill(model, prompts, room=12, spare=spare)
    space = [layer.space[0].data_ptr() for layer in cache.layers]
    ids = torch.tensor([[1] * (longest - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts])
    found = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    for place, row in enumerate(prompts):
        plain = model.generate(torch.tensor([row]), **options)
        assert found.sequences[place, longest:].tolist() == plain.sequences[0, len(row) :].tolist()
        for own, other in zip(found.logits, plain.logits, strict=True):
            assert torch.allclose(own[place], other[0], rtol=0, atol=1e-9)
    # Nothing was copied on the way: the last token's keys lie where space was kept for them.
    assert [layer.keys.data_ptr() for layer in cache.layers] == space
    assert cache.get_seq_length() == longest + 11


def test_the_space_is_kept_from_the_start(make_base):
    model = make_base("llama_gqa", torch.float32).eval()
    cache = prefill(model, rows(), room=5)
    assert isinstance(cache, DynamicCache) and cache.get_seq_length() == max(LENGTHS) - 1
    assert cache.layers[0].space[0].shape[2] == max(LENGTHS) + 5
    assert not cache.layers[0].keys[0, :, : max(LENGTHS) - 2].any()  # the short row's padding


def test_windows_and_single_tokens_are_left_to_generate(make_base):
    """A layer that keeps a window only has no columns to put side by side."""
    assert prefill(make_base("mistral", torch.float32).eval(), rows(), room=5) is None
    assert prefill(make_base("llama_gqa", torch.float32).eval(), [[5], [5, 6]], room=5) is None


@pytest.mark.parametrize(("dtype", "hidden"), [(torch.bfloat16, 1), (torch.float32, 0)])
def test_half_precision_decodes_with_a_mask(make_base, tokenizer, monkeypatch, dtype, hidden):
    """Prompts of one length would have none, and SDPA is several times slower then on a CPU."""
    model, asked = make_base("llama_gqa", dtype).eval(), {}
    generate = model.generate
    monkeypatch.setattr(model, "generate", lambda **given: asked.update(given) or generate(**given))
    prompts = [Encoded(row, 0) for row in ([5, 6, 7, 8], [9, 10, 11, 12])]
    found = answer(model, tokenizer, prompts, replace(TASKS["qasper"], new_tokens=3), remembers=False).ids
    assert asked["attention_mask"].tolist() == [[0] * hidden + [1] * 4] * 2
    assert asked["past_key_values"].get_seq_length() == hidden + 3 + max(map(len, found))
