"""Next-token loss and accuracy: against plain torch, and the same however the batch is cut."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.errors import LossError
from trimaran.job import Loss
from trimaran.losses import next_token, token_accuracy

B, T, V = 5, 7, 11


def ragged(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, and a batch whose rows have 7, 4, 1, 0 labels and holes."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(B, T, V, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(V, (B, T), generator=generator)
    for row, length in enumerate((T, 4, 1, 0, T)):
        labels[row, length:] = -100
    labels[4, 2:4] = -100
    return logits, {"input_ids": labels.clamp(min=0), "labels": labels}


def by_hand(logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0) -> tuple[float, int]:
    total, count = 0.0, 0
    for row in range(labels.shape[0]):
        for at in range(labels.shape[1] - 1):
            label = int(labels[row, at + 1])
            if label != -100:
                log_p = logits[row, at].log_softmax(-1)
                total += float(-(1 - smoothing) * log_p[label] - smoothing * log_p.mean())
                count += 1
    return total, count


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_total_and_weight_are_those_counted_by_hand(smoothing: float) -> None:
    logits, batch = ragged()
    loss = next_token(label_smoothing=smoothing)
    total, count = by_hand(logits, batch["labels"], smoothing)
    weight = loss.weight(batch)
    assert (weight.item(), weight.dtype, weight.shape) == (count, torch.float64, ())
    assert loss.total(logits, batch).item() == pytest.approx(total, rel=1e-12)


def test_mean_is_the_shifted_cross_entropy_of_plain_torch_with_the_same_gradient() -> None:
    logits, batch = ragged(dtype=torch.float32)
    ours, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = next_token()
    (loss.total(ours, batch) / loss.weight(batch)).backward()
    F.cross_entropy(plain[:, :-1].reshape(-1, V), batch["labels"][:, 1:].reshape(-1)).backward()
    torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-6, atol=1e-9)
    assert not ours.grad[:, -1].any()


@settings(max_examples=30, deadline=None)
@given(cut=st.integers(0, B), seed=st.integers(0, 5), loss=st.sampled_from([next_token(), token_accuracy()]))
def test_parts_add_up_to_the_whole(cut: int, seed: int, loss: Loss) -> None:
    logits, batch = ragged(seed)
    parts = [
        (logits[rows], {key: value[rows] for key, value in batch.items()}) for rows in (slice(0, cut), slice(cut, B))
    ]
    assert sum(loss.weight(b).item() for _, b in parts) == loss.weight(batch).item()
    assert sum(loss.total(o, b).item() for o, b in parts) == pytest.approx(loss.total(logits, batch).item(), rel=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_batch_of_ignored_labels_weighs_and_teaches_nothing(smoothing: float) -> None:
    logits = torch.randn(2, 3, V, requires_grad=True)
    batch = {"labels": torch.full((2, 3), -100)}
    loss = next_token(label_smoothing=smoothing)
    total = loss.total(logits, batch)
    total.backward()
    assert (loss.weight(batch).item(), total.item()) == (0.0, 0.0)
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_one_position_has_no_next() -> None:
    batch = {"input_ids": torch.tensor([[3]])}
    assert next_token().weight(batch).item() == 0
    assert next_token().total(torch.randn(1, 1, V), batch).item() == 0


def test_labels_come_before_inputs_and_inputs_serve_without_them() -> None:
    ids = torch.tensor([[1, 2, 3]])
    assert next_token().weight({"input_ids": ids}).item() == 2
    assert next_token().weight({"input_ids": ids, "labels": torch.tensor([[-100, -100, 3]])}).item() == 1
    assert next_token(inputs="bytes").weight({"bytes": ids}).item() == 2


def test_small_integer_labels_are_not_mistaken_for_ignored_ones() -> None:
    ids = torch.tensor([[0, 156, 155]], dtype=torch.uint8)  # as uint8, -100 is 156
    logits = torch.randn(1, 3, 256)
    assert next_token().weight({"input_ids": ids}).item() == 2
    expected = F.cross_entropy(logits[0, :2], torch.tensor([156, 155]), reduction="sum")
    torch.testing.assert_close(next_token().total(logits, {"input_ids": ids}), expected)


def test_ignore_index_may_be_a_padding_token() -> None:
    batch = {"input_ids": torch.tensor([[5, 6, 0, 0]])}
    assert next_token(ignore_index=0).weight(batch).item() == 1
    total = next_token(ignore_index=0).total(torch.zeros(1, 4, V), batch)
    assert total.item() == pytest.approx(torch.tensor(V).log().item())


@pytest.mark.parametrize("wrap", [lambda x: SimpleNamespace(logits=x), lambda x: {"loss": None, "logits": x}])
def test_logits_are_found_in_an_object_or_mapping(wrap: object) -> None:
    logits, batch = ragged()
    assert torch.equal(next_token().total(wrap(logits), batch), next_token().total(logits, batch))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_halves_are_summed_in_float32(half: torch.dtype) -> None:
    logits, batch = ragged(dtype=half)
    total = next_token().total(logits, batch)
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(by_hand(logits.double(), batch["labels"])[0], rel=1e-6)


def test_the_sum_of_many_tokens_is_accurate_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(100, 1001, 8, generator=generator)
    batch = {"input_ids": torch.randint(8, (100, 1001), generator=generator)}
    exact = next_token().total(logits.double(), batch).item()
    assert next_token().total(logits, batch).item() == pytest.approx(exact, rel=3e-7)


def test_accuracy_counts_right_tokens_that_count() -> None:
    labels = torch.tensor([[9, 1, 2, -100], [9, 3, -100, 4]])
    guesses = torch.tensor([[1, 5, 0, 0], [3, 2, 4, 0]])  # right, wrong, ignored, none · right, ignored, right, none
    batch = {"labels": labels}
    total = token_accuracy().total(F.one_hot(guesses, V).float(), batch)
    assert (total.item(), token_accuracy().weight(batch).item()) == (3.0, 4.0)


def test_both_keep_the_protocol_and_read_the_same_in_every_run() -> None:
    assert isinstance(next_token(), Loss)
    assert isinstance(token_accuracy(), Loss)
    assert next_token() == next_token()
    expected = "next_token(labels='labels', inputs='input_ids', ignore_index=-100, label_smoothing=0.1)"
    assert repr(next_token(label_smoothing=0.1)) == expected


IDS = torch.tensor([[1, 2, 3]])
GOOD = torch.zeros(1, 3, V)


@pytest.mark.parametrize(
    ("output", "batch", "words"),
    [
        (GOOD, {"input_id": IDS}, ["'input_ids'", "the batch has 'input_id'", "mean 'input_id'"]),
        (GOOD, {}, ["no keys"]),
        (GOOD, {"labels": [1, 2]}, ["a list", "collate"]),
        (GOOD, {"labels": IDS.float()}, ["torch.float32", "whole numbers"]),
        (GOOD, {"labels": IDS[0]}, ["[3]", "[samples, positions]"]),
        (GOOD[:, :2], {"labels": IDS}, ["[1, 2, 11]", "[1, 3]"]),
        (GOOD[0], {"labels": IDS}, ["[3, 11]"]),
        ((GOOD, None), {"labels": IDS}, ["a tuple of Tensor, NoneType", "tm.losses.custom"]),
        ({"hidden": GOOD}, {"labels": IDS}, ["a dict with 'hidden'", "tm.losses.custom"]),
        (SimpleNamespace(loss=1.0), {"labels": IDS}, ["a SimpleNamespace", ".logits"]),
        (None, {"labels": IDS}, ["returned None"]),
        (GOOD.argmax(-1), {"labels": IDS}, ["torch.int64", "floating point"]),
        (GOOD, {"labels": IDS + V - 3}, ["the label 11", "11 classes", "0 to 10"]),
    ],
)
def test_what_cannot_be_read_is_said(output: object, batch: dict[str, torch.Tensor], words: list[str]) -> None:
    with pytest.raises(LossError) as caught:
        next_token().total(output, batch)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("loss", [next_token(), token_accuracy()])
def test_a_negative_label_is_caught_by_the_weight(loss: Loss) -> None:
    with pytest.raises(LossError, match="the label -1") as caught:
        loss.weight({"labels": torch.tensor([[0, 1, -1]])})
    assert "ignore_index=-1" in caught.value.remedy


def test_a_labels_key_that_was_named_is_not_replaced_by_the_inputs() -> None:
    with pytest.raises(LossError, match="'targets'"):
        next_token(labels="targets").weight({"input_ids": IDS})


@pytest.mark.parametrize(
    "options", [{"labels": ""}, {"inputs": None}, {"ignore_index": 1.5}, {"label_smoothing": 1.0}, {"labels": 3}]
)
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(LossError, match=next(iter(options))):
        next_token(**options)
