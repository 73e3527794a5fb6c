"""Recorded runs of the published long-short code and of an independent CacheFormer, and the model they are of."""

import json
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "golden" / "cacheformer"
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


def rotate_pairs(vectors, positions):
    """Rotary positions over interleaved pairs, `[rows, heads, time, head_dim]` at `[rows, time]`."""
    width = vectors.shape[-1]
    frequency = 10000.0 ** (-torch.arange(0, width, 2, dtype=vectors.dtype) / width)
    angle = (positions[..., None].to(vectors.dtype) * frequency)[:, None]
    even, odd = vectors[..., ::2], vectors[..., 1::2]
    turned = (even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos())
    return torch.stack(turned, -1).flatten(-2)
