"""The first recipe: its model is causal and starts at chance, its baseline counts what the model is judged by."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import trimaran as tm

RECIPE = Path(__file__).parents[3] / "recipes" / "gpt.py"
spec = importlib.util.spec_from_file_location("gpt_recipe", RECIPE)
assert spec is not None
assert spec.loader is not None
gpt = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpt)


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return gpt.GPT(width=32, depth=2, heads=2, seq_len=24)


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1))


def test_one_row_of_256_logits_per_byte(model: torch.nn.Module) -> None:
    assert model(random_bytes(3, 24)).shape == (3, 24, 256)


@pytest.mark.parametrize("length", [1, 2, 3, 17])
def test_windows_shorter_than_seq_len_are_read(model: torch.nn.Module, length: int) -> None:
    assert model(random_bytes(2, length)).shape == (2, length, 256)


@pytest.mark.parametrize("changed", [0, 1, 7, 23])
def test_a_byte_changes_no_earlier_logits_and_all_later_ones(model: torch.nn.Module, changed: int) -> None:
    ids = random_bytes(1, 24)
    other = ids.clone()
    other[0, changed] = (ids[0, changed] + 1) % 256
    moved = (model(ids) != model(other)).any(dim=-1)[0]
    assert not moved[:changed].any()
    assert moved[changed:].all()


def test_rotated_queries_meet_keys_by_distance() -> None:
    attention = gpt.Attention(width=16, heads=1, seq_len=12)
    query, key = torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(1)).expand(2, 12, 16)
    scores = attention.rotate(query) @ attention.rotate(key).T
    torch.testing.assert_close(scores[:-1, :-1], scores[1:, 1:])
    torch.testing.assert_close(scores.diagonal(), (query * key).sum(-1))
    assert not torch.isclose(scores[0, 1:], scores[0, :-1]).any()


def test_attention_sees_the_order_of_what_it_reads() -> None:
    torch.manual_seed(0)
    attention = gpt.Attention(width=16, heads=2, seq_len=12)
    x_BTD = torch.randn(1, 12, 16)
    swapped_BTD = x_BTD[:, [0, 1, 7, 3, 4, 5, 6, 2, 8, 9, 10, 11]]
    assert not torch.allclose(attention(x_BTD)[0, -1], attention(swapped_BTD)[0, -1])


def test_the_loss_at_the_start_is_that_of_chance() -> None:
    torch.manual_seed(0)
    model = gpt.GPT(width=128, depth=4, heads=4, seq_len=64)
    ids = random_bytes(4, 64)
    loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_every_parameter_gets_a_gradient(model: torch.nn.Module) -> None:
    ids = random_bytes(2, 24)
    F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    assert [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()] == []


def test_the_trigram_table_equals_one_counted_by_hand() -> None:
    """The training text "abab" against the window "aba", with two imagined counts.

    P(b) = (2 + 2/256) / (4 + 2). Byte 1 sees one byte: "a" is followed by "b" in 2 of 2. Byte 2 sees two: "ab" is
    followed by "a" in 1 of 1, and "b" by "a" in 1 of 1.
    """
    train, window = (np.frombuffer(text, np.uint8) for text in (b"abab", b"aba"))
    single = (2 + 2 / 256) / 6
    b_after_a = (2 + 2 * single) / 4
    a_after_b = (1 + 2 * single) / 3
    a_after_ab = (1 + 2 * a_after_b) / 3
    nats = gpt.trigram_nats(train, window.astype(np.int64)[None], strength=2.0)
    np.testing.assert_allclose(nats, [[-math.log(b_after_a), -math.log(a_after_ab)]], rtol=1e-12)


@pytest.mark.parametrize("context", [b"th", b"tz", b"zz"])
def test_the_trigram_table_is_a_distribution_over_bytes(context: bytes) -> None:
    """Also after one byte, and where a context was never seen."""
    train = np.frombuffer(b"the cat sat on the mat, the rat sat on the cat", np.uint8)
    after_two = gpt.trigram_nats(train, np.array([[*context, last] for last in range(256)]))[:, 1]
    after_one = gpt.trigram_nats(train, np.array([[context[0], last] for last in range(256)]))[:, 0]
    np.testing.assert_allclose([np.exp(-after_one).sum(), np.exp(-after_two).sum()], 1.0, rtol=1e-12)


def test_the_trigram_table_makes_the_model_s_predictions_and_never_looks_across_windows() -> None:
    train = random_bytes(5000).numpy().astype(np.uint8)
    windows = random_bytes(6, 9)
    nats = gpt.trigram_nats(train, windows.numpy())
    assert nats.size == tm.losses.next_token().weight({"input_ids": windows})
    np.testing.assert_array_equal(nats[2:4], gpt.trigram_nats(train, windows[2:4].numpy()))


def test_the_sample_is_text_that_goes_on_from_the_prompt_past_the_window(model: torch.nn.Module) -> None:
    text = gpt.write_python(model, prompt="import ", length=40)
    assert text.startswith("import ")
    assert len(text) > len("import ")
    assert text == gpt.write_python(model, prompt="import ", length=40)
