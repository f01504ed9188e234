"""What a run writes is what `save_pretrained` would: same names, tied tensors once; and what that wrote is read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hf_jobs import VOCABULARY, HFCase, build_job, gpt2, llama, lora, token_samples, vit
from parity_engine import start
from safetensors.torch import load_file, load_model
from torch import nn
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

import trimaran as tm
from trimaran.checkpoint import load_weights, save_trained_weights, save_weights


def bert() -> nn.Module:
    """A bias is tied, too."""
    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12
        )
    )


def t5() -> nn.Module:
    """One embedding under four names."""
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2)
    )


MODELS = {"llama": llama, "tied-llama": partial(llama, tied=True), "gpt2": gpt2, "vit": vit, "bert": bert, "t5": t5}


def build(model: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return model().eval()


def same_state(one: nn.Module, other: nn.Module) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(each, theirs[name]) for name, each in one.state_dict().items())


# Of some architectures, ViT among them, `save_pretrained` writes names of old and `from_pretrained` reads both.
@pytest.mark.parametrize("model", [pytest.param(each, id=name) for name, each in MODELS.items() if name != "vit"])
def test_names_are_those_of_save_pretrained(model: Callable[[], nn.Module], tmp_path: Path) -> None:
    built = build(model, 0)
    built.save_pretrained(tmp_path / "theirs")
    save_weights(built, tmp_path / "model.safetensors")
    theirs, ours = load_file(tmp_path / "theirs" / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_from_pretrained_and_safetensors_read_what_a_run_writes(model: Callable[[], nn.Module], tmp_path: Path) -> None:
    built = build(model, 0)
    built.config.save_pretrained(tmp_path)
    save_weights(built, tmp_path / "model.safetensors")
    read, found = type(built).from_pretrained(tmp_path, local_files_only=True, output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    assert same_state(read, built)
    other = build(model, 1)
    assert not same_state(other, built)
    load_model(other, str(tmp_path / "model.safetensors"))
    assert same_state(other, built)


@pytest.mark.parametrize("shard_size", ["5GB", "1KB"])
def test_a_folder_of_save_pretrained_gives_first_weights(shard_size: str, tmp_path: Path) -> None:
    built = build(gpt2, 0)
    built.save_pretrained(tmp_path, max_shard_size=shard_size)
    other = build(gpt2, 1)
    load_weights(other, tm.Weights(tmp_path))
    assert same_state(other, built)
    assert other.lm_head.weight is other.transformer.wte.weight


def test_the_trained_part_of_an_adapted_model_is_its_adapters(tmp_path: Path) -> None:
    engine, loader, _ = start(build_job(HFCase("lora")), precision="fp32")
    for batch in loader:
        engine.step(batch)
    save_trained_weights(engine.model, tmp_path / "trained.safetensors")
    trained = load_file(tmp_path / "trained.safetensors")
    assert trained.keys() == {name for name, _ in engine.model.named_parameters() if "lora_" in name}
    torch.manual_seed(build_job(HFCase("lora")).seed)
    other = lora().eval()
    _, unexpected = other.load_state_dict(trained, strict=False)
    assert unexpected == []
    ids = token_samples()[0]["input_ids"][None]
    with torch.no_grad():
        assert torch.equal(other(input_ids=ids).logits, engine.model.eval()(input_ids=ids).logits)
