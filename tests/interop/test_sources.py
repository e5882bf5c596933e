"""Each code's file is told apart by what is in it, and its parameters arrive bit for bit."""

import json

import pytest
import torch
from theirs import (
    MemTransformerLM,
    OpenAIVocab,
    Unheard,
    authors_file,
    golden_model,
    golden_words,
    hugging_face_folder,
    nvidia_content,
    save,
)

from txl.interop import from_original, sources, vocabularies


def same_model(source, weights, flags):
    """Whether two sets of parameters and arguments are one model."""
    one, other = from_original(source.state, source.flags), from_original(weights, flags)
    assert {name: str(module) for name, module in one.named_modules() if "Dropout" not in str(module)} == {
        name: str(module) for name, module in other.named_modules() if "Dropout" not in str(module)
    }
    assert (one.reach, one.memory.mem_len, one.position.clamp_len) == (
        other.reach,
        other.memory.mem_len,
        other.position.clamp_len,
    )
    states = one.state_dict(), other.state_dict()
    assert states[0].keys() == states[1].keys()
    return all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    "name",
    ["xl_post_norm", "xl_pre_norm", "xl_d_embed", "xl_same_length_clamp", "xl_adaptive", "xl_adaptive_div2", "shaw"],
)
def test_the_authors_model_is_read_with_its_arguments_and_vocabulary(tmp_path, name, legacy):
    source = sources.read(authors_file(tmp_path, name, legacy))
    weights, flags = golden_model(name)
    assert source.code == "the authors' PyTorch model"
    assert same_model(source, weights, flags)
    assert source.flags["dropout"] == 0.1 and source.flags["dropatt"] == 0.2
    assert vocabularies.found(source.vocab).vocab.words == golden_words(flags)
    assert sources.read(tmp_path).code == source.code  # the folder too


def test_untied_weights_are_told_by_their_storages(tmp_path):
    weights, flags = golden_model("xl_post_norm")
    weights["crit.out_layers.0.weight"] = weights["word_emb.emb_layers.0.weight"] + 1
    source = sources.read(save(MemTransformerLM(weights, flags), tmp_path / "model.pt"))
    assert source.flags["tie_weight"] is False and source.vocab is None
    assert same_model(source, weights, {**flags, "tie_weight": False})


@pytest.mark.parametrize("name", ["xl_adaptive_div2", "xl_post_norm", "absolute_per_layer"])
def test_nvidias_checkpoint_is_read_with_its_vocabulary_data_and_step(tmp_path, name):
    content, weights, flags = nvidia_content(name)
    source = sources.read(save(content, tmp_path / "checkpoint_best.pt"))
    assert (source.code, source.data, source.step) == ("NVIDIA's checkpoint", "wikitext103", 400)
    assert same_model(source, weights, flags)
    assert vocabularies.found(source.vocab).vocab.words == golden_words(flags)


def test_nvidias_same_length_sees_one_key_more(tmp_path):
    content, weights, flags = nvidia_content("xl_post_norm", same_length=True)
    source = sources.read(save(content, tmp_path / "x.pt"))
    assert same_model(source, weights, {**flags, "same_length": True, "mem_len": flags["mem_len"] + 1})
    assert "mem_len is one more" in " ".join(source.notes)


def test_tokens_of_gpt_2_ask_for_its_tokenizer(tmp_path):
    content, _, _ = nvidia_content("xl_post_norm")
    path = save({**content, "vocab": OpenAIVocab()}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"GPT-2's; give --vocab tokenizer\.json"):
        vocabularies.found(sources.read(path).vocab)


@pytest.mark.parametrize("kind", ["bin", "safetensors"])
def test_a_hugging_face_folder_or_its_file_is_read(tmp_path, kind):
    folder = hugging_face_folder(tmp_path / "hf", kind)
    file = folder / ("pytorch_model.bin" if kind == "bin" else "model.safetensors")
    whole, single = sources.read(folder), sources.read(file)
    assert whole.code == single.code == "Hugging Face's model"
    assert all(torch.equal(tensor, single.state[name]) for name, tensor in whole.state.items())
    assert (
        whole.flags["n_token"] == 60 and whole.flags["untie_r"] and vocabularies.found(whole.vocab).vocab.n_token == 60
    )


def test_without_untie_r_hugging_face_names_u_and_v_once_more_in_each_layer(tmp_path):
    weights, flags = golden_model("xl_post_norm")
    repeated = {
        f"transformer.layers.{layer}.dec_attn.{name}": weights[name]
        for layer in range(flags["n_layer"])
        for name in ("r_w_bias", "r_r_bias")
    }
    named = {(name if name.startswith("crit.") else f"transformer.{name}"): tensor for name, tensor in weights.items()}
    save(named | repeated, tmp_path / "pytorch_model.bin")
    config = {key: value for key, value in flags.items() if key not in ("batch", "segments")}
    (tmp_path / "config.json").write_text(json.dumps({**config, "untie_r": False, "vocab_size": flags["n_token"]}))
    assert same_model(sources.read(tmp_path), weights, flags)


def test_half_precision_is_read_as_single(tmp_path):
    content, weights, flags = nvidia_content("xl_post_norm")
    content["model_state"] = {name: tensor.half() for name, tensor in content["model_state"].items()}
    source = sources.read(save(content, tmp_path / "x.pt"))
    assert same_model(source, {name: tensor.half().float() for name, tensor in weights.items()}, flags)


def test_files_that_hold_no_model_are_told(tmp_path):
    weights, _ = golden_model("xl_post_norm")
    hold = {
        "parameters alone": weights,
        "surprise.Unheard": Unheard(),
        "holds a list": [1, 2],
        "built otherwise": {"model_state": [], "model_config": {}},
        "its model has no layers": _without(MemTransformerLM(*golden_model("xl_post_norm")), "layers"),
        "built otherwise than such models are": _inside_itself(MemTransformerLM(*golden_model("xl_post_norm"))),
        "its flags or parameters": {"state_dict": 3, "flags": {}},
        "is a run of this project": {"format": "txl-2"},
    }
    for message, value in hold.items():
        path = save(value, tmp_path / "x.pt")
        with pytest.raises(ValueError, match=message) as told:
            sources.read(path)
        assert str(told.value).startswith("FILE: ")


def _inside_itself(model):
    model._modules["again"] = model
    return model


def _without(model, name):
    del model._modules[name]
    return model


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "kind 'gpt2'; only 'transfo-xl'"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon=1e-06 is not supported"),
    ],
)
def test_other_models_of_hugging_face_are_told(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        sources.read(hugging_face_folder(tmp_path / "hf", **changes))


def test_a_folder_without_weights_is_told(tmp_path):
    folder = hugging_face_folder(tmp_path / "hf")
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match=r"but neither of model\.safetensors, pytorch_model\.bin"):
        sources.read(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="holds neither model"):
        sources.read(folder)
    with pytest.raises(ValueError, match="there is no file or folder"):
        sources.read(folder / "none")
    (folder / "pytorch_model.bin").touch()
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="no JSON object"):
        sources.read(folder)


def test_the_rows_of_tokens_in_clusters_keep_their_order():
    weights, flags = golden_model("xl_adaptive")
    source = sources.Source(code="x", state=weights, flags=flags)
    with pytest.raises(ValueError, match="in clusters: their order cannot be changed"):
        sources.in_our_order(source, [1, 0])
