"""Hugging Face's figures, segment by segment: tests/golden/README.md says how they were made."""

import pytest
import torch
from golden import read
from theirs import hugging_face_folder

from txl import checkpoint
from txl.interop.__main__ import main


@pytest.mark.parametrize("kind", ["bin", "safetensors"])
def test_an_imported_folder_gives_hugging_faces_figures(tmp_path, kind):
    """Their first memory is mem_len rows of zeros, where ours is empty; so it is given here."""
    tensors, meta = read("hf_transfo_xl")
    assert main([str(hugging_face_folder(tmp_path / "hf", kind)), str(tmp_path / "run")]) == 0
    model = checkpoint.load_model(checkpoint.load(tmp_path / "run" / "best.pt"))
    mems = [torch.zeros_like(tensors["mems.0"]) for _ in model.layers]
    with torch.no_grad():
        for index, segment in enumerate(tensors["tokens"].split(meta["segments"], dim=1)):
            log_probs, mems = model(segment, mems)
            torch.testing.assert_close(log_probs, tensors[f"segment{index}.log_probs"], rtol=0, atol=1e-5)
    for layer, memory in enumerate(mems):
        torch.testing.assert_close(memory, tensors[f"mems.{layer}"], rtol=0, atol=1e-5)


def test_the_order_of_clusters_counts(tmp_path):
    """What the figures would be without the flip, by which the comparison above is one that can fail."""
    tensors, meta = read("hf_transfo_xl")
    assert main([str(hugging_face_folder(tmp_path / "hf")), str(tmp_path / "run")]) == 0
    model = checkpoint.load_model(checkpoint.load(tmp_path / "run" / "best.pt"))
    with torch.no_grad():
        model.softmax.cluster_weight.copy_(model.softmax.cluster_weight.flip(0))
        mems = [torch.zeros_like(tensors["mems.0"]) for _ in model.layers]
        log_probs, _ = model(tensors["tokens"][:, : meta["segments"][0]], mems)
    assert (log_probs - tensors["segment0.log_probs"]).abs().max() > 0.1
