"""Any causal language model of `transformers`, small from its config or from a local directory.

    trimaran train recipes/hf.py --procs 2
    trimaran train recipes/hf.py --model gpt2 --text notes.txt
    trimaran train recipes/hf.py --model path/to/model

It needs the extra `hf`, and downloads nothing. `--model` is the name of a small architecture, which reads
bytes, or a directory with a config.json: weights (safetensors) and a tokenizer there are used, as `save_pretrained`
writes them. The text is the source of the interpreter's own standard library, or the file given by `--text`. It ends
with the validation loss (nats per token, on text unseen in training) and a page of what the model writes.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig
from transformers.utils import logging

import trimaran as tm

logging.disable_progress_bar()  # every process would show its own

LOCAL = {"local_files_only": True, "trust_remote_code": False}
NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LINES_PER_PIECE = 500


def small_config(architecture: str) -> Any:
    """A model for minutes on a CPU: 256 tokens (bytes), width 128, 4 layers. None where the name is unknown."""
    if architecture == "llama":
        return LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            **NO_SPECIAL_TOKENS,
        )
    if architecture == "gpt2":
        return GPT2Config(vocab_size=256, n_embd=128, n_layer=4, n_head=4, n_positions=1024, **NO_SPECIAL_TOKENS)
    return None


def read_config(model: str) -> Any:
    """The config of a small architecture or of a local directory."""
    config = small_config(model)
    if config is not None:
        return config
    if not Path(model, "config.json").is_file():
        raise tm.errors.JobError(
            f"model={model!r} is neither llama, nor gpt2, nor a directory with a config.json.",
            "A model comes from this machine: nothing is downloaded.",
            "Correct the path, or write the model to a directory first: model.save_pretrained(DIR).",
        )
    return AutoConfig.from_pretrained(model, **LOCAL)


def build_model(model: str, config: Any) -> nn.Module:
    """The model with the directory's weights where there are some, else with first ones; float32 either way."""
    if not has_weights(model):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    built, found = AutoModelForCausalLM.from_pretrained(
        model, config=config, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **LOCAL
    )
    if missing := sorted(found["missing_keys"]):
        raise tm.errors.CheckpointError(
            f"the weights in {model} lack {', '.join(missing[:5])}" + (", …" if missing[5:] else "") + ".",
            "A model starts from all its weights: what is missing would silently be random.",
            "Give the directory of the whole model.",
        )
    return built


def has_weights(model: str) -> bool:
    return any(Path(model).glob("*.safetensors"))


def read_tokenizer(model: str) -> Any:
    """The directory's tokenizer; None where it has none, and text is then read byte by byte."""
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    there = any(Path(model, name).is_file() for name in files)
    return AutoTokenizer.from_pretrained(model, **LOCAL) if there else None


def read_text(file: str | None, valid: float) -> tuple[bytes, bytes]:
    """(train, valid): whole files of the standard library go to either side; of one file the end is held out."""
    if file is None:
        train, held_out = tm.data.python_source().split(valid=valid)
        return train.tokens.tobytes(), held_out.tokens.tobytes()
    text = Path(file).read_bytes()
    middle = text.rfind(b"\n", 0, round((1 - valid) * len(text))) + 1
    return text[:middle], text[middle:]


def encode(text: bytes, tokenizer: Any) -> np.ndarray:
    """Token ids [tokens]: those of the tokenizer, or the bytes themselves."""
    if tokenizer is None:
        return np.frombuffer(text, np.uint8)
    lines = text.decode(errors="replace").splitlines(keepends=True)
    pieces = ["".join(lines[at : at + LINES_PER_PIECE]) for at in range(0, len(lines), LINES_PER_PIECE)]
    ids = tokenizer(pieces, add_special_tokens=False, verbose=False)["input_ids"]
    return np.concatenate([np.asarray(piece, np.int32) for piece in ids]) if ids else np.zeros(0, np.int32)


def windows(ids: np.ndarray, seq_len: int, vocab_size: int) -> Dataset:
    """Non-overlapping windows as a data set with the column input_ids [seq_len]; a shorter rest is left out."""
    if len(ids) < seq_len:
        raise tm.errors.DataError(
            f"the text of one side has {len(ids)} tokens, fewer than seq_len={seq_len}.",
            "A sample is a window of seq_len tokens; the end of the text is held out.",
            "Give a longer text, a larger --valid, or a smaller --seq-len.",
        )
    if ids.max() >= vocab_size:
        raise tm.errors.JobError(
            f"the text has the token {ids.max()}, and the model {vocab_size} tokens.",
            "Without a tokenizer in the model's directory, a token is a byte.",
            "Put the model's own tokenizer there: tokenizer.save_pretrained(DIR).",
        )
    rows = ids[: len(ids) // seq_len * seq_len].reshape(-1, seq_len)
    return Dataset.from_dict({"input_ids": rows}).with_format("torch")


def write_text(model: Any, tokenizer: Any, seq_len: int, prompt: str = "def ") -> str:
    """`prompt` and what the model adds, drawn from its predictions."""
    ids = torch.tensor(encode(prompt.encode(), tokenizer).astype(np.int64), device=model.device)[None]
    written = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=seq_len - ids.shape[1],
        do_sample=True,
        temperature=0.6,
        pad_token_id=0,
        use_cache=True,
    )[0].tolist()
    return bytes(written).decode(errors="replace") if tokenizer is None else tokenizer.decode(written)


def job(
    model: str = "llama",
    text: str | None = None,
    seq_len: int = 256,
    lr: float | None = None,
    valid: float = 0.01,
) -> tm.Job:
    """A causal language model of transformers. lr left out: 3e-3 from first weights, 1e-4 from pretrained ones."""
    config, tokenizer = read_config(model), read_tokenizer(model)
    config.use_cache = False  # training keeps no keys and values for later tokens
    longest = getattr(config, "max_position_embeddings", seq_len)
    if longest < seq_len:
        raise tm.errors.JobError(
            f"seq_len={seq_len}, and {model} has {longest} positions.",
            "A sample is no longer than what the model can read.",
            f"Give --seq-len {longest} or less.",
        )
    train_ids, valid_ids = (encode(part, tokenizer) for part in read_text(text, valid))
    if lr is None:
        lr = 1e-4 if has_weights(model) else 3e-3
    return tm.Job(
        model=partial(build_model, model, config),
        data=windows(train_ids, seq_len, config.vocab_size),
        valid=windows(valid_ids, seq_len, config.vocab_size),
        inputs=("input_ids",),
        loss=tm.losses.next_token(),
        metrics={"accuracy": tm.losses.token_accuracy()},
        optimizer=tm.optim.adamw(lr=lr, weight_decay=0.1, at_batch=16),
        clip=1.0,
        schedule=tm.optim.cosine(warmup=0.05),
        global_batch=16,
        steps=300,
        sample=partial(write_text, tokenizer=tokenizer, seq_len=seq_len),
        tp_plan=config.base_model_tp_plan,
    )
