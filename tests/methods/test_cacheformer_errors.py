"""What CacheFormer refuses, and what it says then."""

import pytest
import torch
from cacheformer_models import random_ids, tiny_model

import cacheformers
from cacheformers import CacheFormerConfig


def test_a_preset_has_no_other_fields():
    with pytest.raises(ValueError, match="has no field top_k, windows_tokens"):
        CacheFormerConfig.preset("23m", top_k=3, windows_tokens=64)


@pytest.mark.parametrize(
    "kind", [CacheFormerConfig, cacheformers.CacheFormerOnBaseConfig, cacheformers.NeurocacheConfig]
)
def test_a_configuration_is_printed_whole(kind):
    shown = str(kind())
    assert f'"model_type": "{kind.model_type}"' in shown and "hidden_size" in shown and '"topk"' in shown


@pytest.mark.parametrize(("shape", "message"), [((1, 0), "empty"), ((0, 9), "empty"), ((9,), r"tensor \[rows, time\]")])
def test_ids_are_rows_of_tokens(make_model, shape, message):
    ids = torch.zeros(shape, dtype=torch.long)
    for model in (tiny_model(), make_model("llama_gqa", method="cacheformer_on_base")):
        with torch.no_grad(), pytest.raises(ValueError, match=message):
            model(ids)
    with pytest.raises(ValueError, match=message):
        tiny_model().generate(ids, max_new_tokens=1)


def test_positions_are_as_many_as_tokens():
    with pytest.raises(ValueError, match=r"position_ids has shape \(1, 9\), but there are 20 tokens"):
        tiny_model()(random_ids(1, 20), position_ids=torch.arange(9)[None])


def test_a_model_of_its_own_has_no_memory_to_read_into():
    with pytest.raises(ValueError, match="a model of its own: its memory is .* past_key_values"):
        cacheformers.read(tiny_model(), random_ids(1, 20), progress=False)
