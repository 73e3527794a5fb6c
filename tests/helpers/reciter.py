"""A model that says a text, whatever else it reads."""

from transformers import AutoModelForCausalLM, AutoTokenizer


def make_reciter(folder, text):
    """Turn the base into a bigram model that goes from letter to letter of a text; whatever else it reads is lost."""
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    for parameter in base.parameters():
        parameter.data.zero_()
    base.model.norm.weight.data.fill_(1)
    ids = tokenizer(text).input_ids
    assert len(set(ids)) == len(ids) <= base.config.hidden_size
    for place, (letter, following) in enumerate(zip(ids, ids[1:], strict=False)):
        base.model.embed_tokens.weight.data[letter, place] = 1
        base.lm_head.weight.data[following, place] = 1
    base.save_pretrained(folder / "base")
