"""`transformers` models are models like any other: on any number of ranks they train as plain PyTorch does."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from hf_jobs import BUILDERS, HFCase, Name, build_job, engine_run, plain_run
from parity_engine import assert_close, assert_same_bits, assert_state_close, start
from parity_plain import Trace

from pool import Pool
from trimaran.engine import try_micro_batch

TOLERANCE = 1e-12  # docs/numerics.md, float64

plain = cache(plain_run)


def reference(case: HFCase) -> Trace:
    return plain(HFCase(case.name, adam=case.adam))


@pytest.mark.parametrize(
    "case",
    [
        *(HFCase(name, dp=1, micro_batch=2) for name in BUILDERS),
        *(HFCase(name, dp=2, adam=True) for name in BUILDERS),
        *(HFCase(name, dp=3, micro_batch=1) for name in BUILDERS),
    ],
    ids=str,
)
def test_three_steps_equal_plain_pytorch_in_float64(pool: Pool, case: HFCase) -> None:
    check(pool, case)


def check(pool: Pool, case: HFCase) -> None:
    traces = pool.run(engine_run, case.dp * case.tp, case)
    assert_same_bits(traces)
    actual, expected = traces[0], reference(case)
    assert_close(actual.first_gradients, expected.first_gradients, TOLERANCE, "first gradient")
    assert actual.norms == pytest.approx(expected.norms, rel=TOLERANCE, abs=0)
    assert actual.losses == pytest.approx(expected.losses, rel=TOLERANCE, abs=0)
    assert_close(actual.weights, expected.weights, TOLERANCE, "weight")
    assert_state_close(actual.state, expected.state, TOLERANCE)


@pytest.mark.parametrize(
    "case",
    [
        HFCase("llama", tp=2, micro_batch=2),
        HFCase("llama", tp=2, layout="sp=true", adam=True),
        HFCase("llama", dp=2, tp=2, micro_batch=2, layout="sp=true zero=3"),
    ],
    ids=str,
)
def test_tensor_parallelism_by_their_own_plan(pool: Pool, case: HFCase) -> None:
    check(pool, case)


def written(layout: str) -> list[int]:
    """What an untrained Llama writes, with its cache of keys and values."""
    model = start(build_job(HFCase("llama")), layout=layout)[0].model
    with torch.no_grad():
        ids = model.generate(
            torch.tensor([[1, 2, 3]]), max_new_tokens=6, do_sample=False, use_cache=True, pad_token_id=0
        )
    return list(ids[0].tolist())


def test_a_cut_model_writes_what_the_whole_one_does(pool: Pool) -> None:
    assert pool.run(written, 2, "tp=2 sp=true") == [written("")] * 2


def test_tied_weights_stay_tied_and_learn() -> None:
    engine, loader, _ = start(build_job(HFCase("gpt2")))
    before = engine.model.lm_head.weight.clone()
    for batch in loader:
        engine.step(batch)
    assert engine.model.lm_head.weight is engine.model.transformer.wte.weight
    assert not torch.equal(engine.model.lm_head.weight, before)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_logits_in_bf16_are_summed_in_float32(name: Name) -> None:
    engine, loader, _ = start(build_job(HFCase(name)), precision="bf16")
    computed_in = []
    engine.model.lm_head.register_forward_hook(lambda module, inputs, logits: computed_in.append(logits.dtype))
    tensors = engine.to_device(next(iter(loader)).micro_batches[0])
    output = engine.forward(tensors)
    assert computed_in == [torch.bfloat16]
    total = engine.loss.total(output, tensors)
    assert total.dtype is torch.float32
    logits, labels = output.logits[:, :-1].flatten(0, 1), tensors["labels"][:, 1:].flatten()
    expected = F.cross_entropy(logits.double(), labels, ignore_index=-100, reduction="sum")
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("name", BUILDERS)
def test_a_dry_micro_batch_finds_nothing_to_complain_about(name: Name) -> None:
    job = build_job(HFCase(name))
    engine, loader, _ = start(job, precision="fp32")
    trial = try_micro_batch(engine, next(iter(loader)).micro_batches[0], job.input_keys)
    assert trial.unused_parameters == ()
    assert trial.flops_per_sample > 0


def adapters_and_communication() -> dict[str, list[str]]:
    """What has state, what is summed over the ranks, what changed, after one step of the adapted model."""
    engine, loader, _ = start(build_job(HFCase("lora")))
    named = dict(engine.model.named_parameters())
    before = {name: each.detach().clone() for name, each in named.items()}
    engine.step(next(iter(loader)))
    assert engine._replicas is not None
    summed = {id(each) for bucket in engine._replicas.buckets for each in bucket.parameters}
    return {
        "state": [name for name, each in named.items() if each in engine.optimizer.state],
        "summed": [name for name, each in named.items() if id(each) in summed],
        "gradient": [name for name, each in named.items() if each.grad is not None],
        "changed": [name for name, each in named.items() if not torch.equal(each, before[name])],
        "adapters": [name for name in named if "lora_" in name],
    }


def test_what_is_frozen_has_no_state_no_communication_and_no_change(pool: Pool) -> None:
    for found in pool.run(adapters_and_communication, 2):
        adapters = found.pop("adapters")
        assert len(adapters) == 8  # two factors, two projections, two layers
        assert found == dict.fromkeys(found, adapters)
