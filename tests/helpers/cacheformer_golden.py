"""Recorded runs of the published long-short code and of an independent CacheFormer, and the model they are of."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from cacheformers.methods.cacheformer.cacheformer import CacheFormerParts, Projected, make_parts

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "golden" / "cacheformer"
PARTS = {"to_dynamic_proj": "pool", "local_norm": "local_norm", "global_norm": "global_norm"}
TINY = {"heads": 4, "kv_heads": 4, "head_dim": 16, "window_tokens": 16, "pool_tokens": 4, "pool_vectors": 2}
LONG_SHORT = {"overlap": False, "cache": False}
MODES = {
    "cf_ls_A": {**LONG_SHORT, "aggregation": "separate"},
    "cf_ov_B": {"cache": False},
    "cf_ov_A": {"cache": False, "aggregation": "separate"},
    "cf_cacheP8k2u1_ov_B": {"select_rows": 8, "topk": 2},
    "cf_cacheP8k2u3_noov_B": {"select_rows": 8, "topk": 2, "neighbors": 3, "overlap": False},
    "cf_cacheP4k3u2_ov_A": {"select_rows": 4, "topk": 3, "neighbors": 2, "aggregation": "separate"},
    "cf_cacheTok_k2u1_ov_B": {"selection": "token", "topk": 2},
    "cf_cachePaperP16k2u1_ov_B_LEAKY": {"selection": "paper_block", "select_rows": 16, "topk": 2},
}


def needs_golden(path):
    """A file of the folder, or a skip."""
    if not (FOLDER / path).is_file():
        pytest.skip(f"{path} is not in ../shared/golden/cacheformer")
    return FOLDER / path


def recorded(pattern):
    """A test parameter for every recorded run whose name begins so."""
    names = [path.stem for path in sorted(FOLDER.glob(f"{pattern}*.safetensors")) if not path.stem.endswith("weights")]
    absent = pytest.mark.skip(reason=f"no recorded run {pattern}* is in ../shared/golden/cacheformer")
    return names or [pytest.param("", id="none", marks=absent)]


def selection_cases():
    path = FOLDER / "selection_cases.json"
    if not path.is_file():
        absent = pytest.mark.skip(reason="selection_cases.json is not in ../shared/golden/cacheformer")
        return [pytest.param({}, id="none", marks=absent)]
    return [pytest.param(case, id=case["note"]) for case in json.loads(path.read_text())]


class TinyModel:
    """The backbone of section 1 over recorded weights, with any attention put in."""

    def __init__(self, options, attend, dtype):
        weights = load_file(needs_golden("ls_tiny_weights.safetensors"))
        self.options, self.attend = options, attend
        self.weights = {name: weight.to(dtype).requires_grad_() for name, weight in weights.items()}
        self.layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))
        self.attended = []

    def parts(self, layer):
        modules = make_parts(self.options)
        for theirs, ours in PARTS.items():
            for side in ("weight", "bias"):
                name = f"layers.{layer}.0.fn.{theirs}.{side}"
                if name in self.weights:
                    del modules[ours]._parameters[side]
                    setattr(modules[ours], side, self.weights[name])
        return CacheFormerParts(**modules)

    def __call__(self, ids):
        """Logits `[rows, time, vocabulary]`."""
        w, options = self.weights, self.options
        hidden = w["token_emb.weight"][ids]
        self.attended = []

        def norm(vectors, name):
            return F.layer_norm(vectors, vectors.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])

        def heads(vectors):
            split = vectors.unflatten(-1, (options.heads, options.head_dim)).transpose(1, 2)
            return rotate_pairs(split, torch.arange(ids.shape[1])[None])

        for layer in range(self.layers):
            name = f"layers.{layer}"
            inputs = norm(hidden, f"{name}.0.norm")
            q, k = (heads(inputs @ w[f"{name}.0.fn.{side}.weight"].T) for side in ("to_q", "to_kv"))
            read = self.attend(options, self.parts(layer), Projected(q, k)).transpose(1, 2).flatten(2)
            attended = F.linear(read, w[f"{name}.0.fn.to_out.weight"], w[f"{name}.0.fn.to_out.bias"])
            self.attended.append(attended)
            hidden = hidden + attended
            inputs = norm(hidden, f"{name}.1.norm")
            inner = F.gelu(F.linear(inputs, w[f"{name}.1.fn.net.0.weight"], w[f"{name}.1.fn.net.0.bias"]))
            hidden = hidden + F.linear(inner, w[f"{name}.1.fn.net.3.weight"], w[f"{name}.1.fn.net.3.bias"])
        return F.linear(norm(hidden, "to_logits.0"), w["to_logits.1.weight"], w["to_logits.1.bias"])


def rotate_pairs(vectors, positions):
    """Rotary positions over interleaved pairs, `[rows, heads, time, head_dim]` at `[rows, time]`."""
    width = vectors.shape[-1]
    frequency = 10000.0 ** (-torch.arange(0, width, 2, dtype=vectors.dtype) / width)
    angle = (positions[..., None].to(vectors.dtype) * frequency)[:, None]
    even, odd = vectors[..., ::2], vectors[..., 1::2]
    turned = (even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos())
    return torch.stack(turned, -1).flatten(-2)
