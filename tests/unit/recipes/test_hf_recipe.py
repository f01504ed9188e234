"""The recipe for `transformers`: where the model, its weights, its tokenizer and the text come from."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

import trimaran as tm
from trimaran.errors import CheckpointError, DataError, JobError

RECIPE = Path(__file__).parents[3] / "recipes" / "hf.py"
spec = importlib.util.spec_from_file_location("hf_recipe", RECIPE)
assert spec is not None
assert spec.loader is not None
hf = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hf)

LETTERS = "abcdefgh \n"


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def text(tmp_path: Path) -> str:
    draw = np.random.default_rng(0)
    file = tmp_path / "text.txt"
    file.write_text("".join(draw.choice(list(LETTERS), 4000)))
    return str(file)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A GPT-2 of ten letters, with weights and a tokenizer, as save_pretrained writes them."""
    config = hf.GPT2Config(
        vocab_size=len(LETTERS), n_embd=8, n_layer=1, n_head=2, n_positions=32, **hf.NO_SPECIAL_TOKENS
    )
    torch.manual_seed(7)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    letters = Tokenizer(WordLevel({letter: at for at, letter in enumerate(LETTERS)}, unk_token="a"))
    letters.pre_tokenizer, letters.decoder = Split("", "isolated"), Fuse()
    PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def build(job: tm.Job, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return job.model()


@pytest.mark.parametrize(("name", "kind"), [("llama", "LlamaForCausalLM"), ("gpt2", "GPT2LMHeadModel")])
def test_a_small_architecture_reads_bytes(name: str, kind: str, text: str) -> None:
    job = hf.job(model=name, text=text, seq_len=64, valid=0.1)
    model = build(job)
    assert type(model).__name__ == kind
    assert not model.config.use_cache
    sample = job.data[3]["input_ids"]
    assert bytes(sample.tolist()) == Path(text).read_bytes()[192:256]
    assert model(input_ids=sample[None]).logits.shape == (1, 64, 256)
    assert not torch.equal(next(build(job, 1).parameters()), next(model.parameters()))


def test_sides_share_no_text_and_the_end_is_held_out(text: str) -> None:
    job = hf.job(text=text, seq_len=16, valid=0.25)
    train, valid = (b"".join(bytes(each["input_ids"].tolist()) for each in side) for side in (job.data, job.valid))
    whole = Path(text).read_bytes()
    middle = whole.index(valid)
    assert whole.startswith(train)
    assert len(train) <= middle
    assert middle == pytest.approx(0.75 * len(whole), abs=200)
    assert whole[middle - 1 : middle] == b"\n"


def test_the_tensor_plan_is_the_models_own(text: str) -> None:
    plan = hf.job(text=text, valid=0.1).tp_plan
    assert plan is hf.LlamaConfig.base_model_tp_plan
    assert plan["layers.*.self_attn.q_proj"] == "colwise"
    assert hf.job(model="gpt2", text=text, valid=0.1).tp_plan is None


def test_a_directory_gives_weights_and_tokenizer(model_dir: Path, text: str) -> None:
    job = hf.job(model=str(model_dir), text=text, seq_len=32, valid=0.1)
    first, second = build(job, 0), build(job, 1)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert first.lm_head.weight is first.transformer.wte.weight
    assert first.dtype is torch.float32
    letters = "".join(LETTERS[token] for token in job.data[2]["input_ids"].tolist())
    assert letters == Path(text).read_text()[64:96]
    assert job.optimizer.describe() != hf.job(text=text, seq_len=32, valid=0.1).optimizer.describe()  # a smaller rate


def test_a_directory_with_a_config_alone_starts_from_first_weights(model_dir: Path, text: str) -> None:
    (model_dir / "model.safetensors").unlink()
    job = hf.job(model=str(model_dir), text=text, seq_len=32, valid=0.1)
    assert not torch.equal(next(build(job, 0).parameters()), next(build(job, 1).parameters()))


def test_weights_that_lack_a_tensor_are_refused(model_dir: Path, text: str) -> None:
    file = str(model_dir / "model.safetensors")
    tensors = load_file(file)
    del tensors["transformer.ln_f.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lack transformer\.ln_f\.weight"):
        build(hf.job(model=str(model_dir), text=text, seq_len=32, valid=0.1))


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.2-1B", "gpt", "no/such/place", ""])
def test_what_is_not_here_is_an_error_and_no_download(name: str, text: str) -> None:
    with pytest.raises(JobError, match="nor a directory with a config") as caught:
        hf.job(model=name, text=text)
    assert repr(name) in caught.value.value
    assert "nothing is downloaded" in caught.value.rule


def test_what_does_not_fit_is_told(model_dir: Path, text: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="has 32 positions") as caught:
        hf.job(model=str(model_dir), text=text)
    assert "--seq-len 32" in caught.value.remedy
    with pytest.raises(DataError, match="fewer than seq_len=256"):
        hf.job(text=text, valid=0.01)
    (model_dir / "tokenizer.json").unlink()
    (model_dir / "tokenizer_config.json").unlink()
    with pytest.raises(JobError, match=r"has the token \d+, and the model 10 tokens"):
        hf.job(model=str(model_dir), text=text, seq_len=32, valid=0.1)


def test_it_writes_a_page(model_dir: Path, text: str) -> None:
    for model, prompt in ((str(model_dir), "abc"), ("llama", "def ")):
        job = hf.job(model=model, text=text, seq_len=32, valid=0.1)
        tokenizer = hf.read_tokenizer(model)
        page = hf.write_text(build(job).eval(), tokenizer, seq_len=32, prompt=prompt)
        assert page.startswith(prompt)
        assert len(page) > len(prompt)
