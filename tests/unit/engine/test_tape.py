"""init="by_name": values follow from seed and name alone, mean what the constructor means, and cost one tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode

from trimaran.engine.history import History
from trimaran.engine.init import build_model, record_model
from trimaran.errors import JobError

SEED = 7
Constructor = Callable[[], nn.Module]


class Custom(nn.Module):
    """What constructors do: initialise twice, in place, by slices; tie, freeze, copy; compute buffers."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width, padding_idx=0)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(width, 4, 2 * width) for _ in range(2)])
        self.norm = nn.BatchNorm1d(width)
        self.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.truncated = nn.Parameter(torch.Tensor(30, 40))
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(8, 12)))
        self.apply(self._initialise)
        nn.init.trunc_normal_(self.truncated, std=0.02)
        self.embed.weight.data[0].zero_()
        self.chain = nn.Parameter(torch.randn(40, 30).mul_(0.1).add_(3).t())
        self.gains = nn.Parameter(torch.tensor([1.0, 2.0]), requires_grad=False)
        self.of_numpy = nn.Parameter(torch.from_numpy(np.arange(3.0)).float() / 3)
        self.wide = nn.Parameter(torch.rand(4, 8)[:, :5])
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.embed.weight
        steps = torch.arange(9).float()
        rates = 1.0 / 10000 ** (torch.arange(0, 8, 2, dtype=torch.int64).to(torch.float) / 8)
        self.register_buffer("angles", torch.outer(steps, rates), persistent=False)
        self.register_buffer("causal", torch.tril(torch.ones(9, 9, dtype=torch.bool)))
        self.register_buffer("waves", torch.polar(torch.ones(9, 4), self.angles).conj())
        self.register_buffer("imaginary", self.waves.imag.clone())
        self.register_buffer("shared", self.angles)
        self.plain = torch.full((3,), 2.0)
        self.listed = [torch.ones(2), self.gains]
        self.drop_rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.counts = torch.arange(3).tolist()

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class WeightNormed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            parametrizations.weight_norm(nn.Linear(30, 20)),
            parametrizations.spectral_norm(nn.Linear(20, 10)),
            nn.utils.weight_norm(nn.Linear(10, 20)),
        )


class Flat(nn.Module):
    """Weights that are views of one memory, drawn as a whole and then written one by one."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.randn(600)
        self.first = nn.Parameter(memory[:200].view(10, 20))
        self.second = nn.Parameter(memory[200:].view(20, 20))
        with torch.no_grad():
            self.second.mul_(0.5)


MODELS: dict[str, Constructor] = {
    "custom": Custom,
    "attention": lambda: nn.MultiheadAttention(16, 4, kdim=8, vdim=8),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2),
    "weight-normed": WeightNormed,
    "flat": Flat,
    "lstm": lambda: nn.LSTM(8, 12, num_layers=2),
    "half": lambda: nn.Sequential(nn.Linear(20, 20), nn.LayerNorm(20)).to(torch.bfloat16),
}


def named(model: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


@pytest.mark.parametrize("constructor", MODELS.values(), ids=MODELS)
def test_nothing_has_a_value_before_it_is_asked_for(constructor: Constructor) -> None:
    recorded, plain = named(record_model(constructor, SEED).model), named(build_model(constructor, SEED))
    assert list(recorded) == list(plain)
    for name, tensor in recorded.items():
        assert tensor.is_meta
        assert (tensor.shape, tensor.dtype) == (plain[name].shape, plain[name].dtype)
        assert type(tensor) is type(plain[name])


@pytest.mark.parametrize("constructor", MODELS.values(), ids=MODELS)
def test_the_model_is_the_plain_constructors_but_for_what_is_drawn(constructor: Constructor) -> None:
    filled, plain = record_model(constructor, SEED).fill(), build_model(constructor, SEED)
    actual, expected = named(filled), named(plain)
    other = named(build_model(constructor, SEED + 1))
    assert filled.state_dict().keys() == plain.state_dict().keys()
    assert [*actual] == [*expected]
    for name, tensor in actual.items():
        want = expected[name]
        assert (tensor.device.type, tensor.dtype, tensor.shape) == ("cpu", want.dtype, want.shape), name
        assert (tensor.stride(), tensor.requires_grad, type(tensor)) == (want.stride(), want.requires_grad, type(want))
        if torch.equal(want, other[name]):
            assert torch.equal(tensor, want), name
        else:
            assert not torch.equal(tensor, want)
            assert _spread(tensor) == pytest.approx(_spread(want), rel=5 / math.sqrt(want.numel())), name


def _spread(tensor: Tensor) -> float:
    return float(tensor.detach().double().square().mean().sqrt())


@pytest.mark.parametrize("constructor", MODELS.values(), ids=MODELS)
def test_values_depend_on_the_name_alone(constructor: Constructor) -> None:
    """In whatever order, one of them alone, twice, with other draws before: the same bits."""
    filled = named(record_model(constructor, SEED).fill())
    recorded = record_model(constructor, SEED)
    for name in reversed(filled):
        torch.rand(3)
        assert torch.equal(recorded.replay(name), filled[name]), name
    last = next(reversed(filled))
    alone = record_model(constructor, SEED)
    assert torch.equal(alone.replay(last), filled[last])
    assert torch.equal(alone.replay(last), filled[last])


def test_a_layer_in_front_leaves_the_others_as_they_were() -> None:
    def build(*names: str) -> nn.Module:
        return nn.ModuleDict({name: nn.Linear(3, 3) for name in names})

    one, both = record_model(lambda: build("b"), SEED), record_model(lambda: build("a", "b"), SEED)
    assert torch.equal(one.replay("b.weight"), both.replay("b.weight"))
    assert not torch.equal(both.replay("a.weight"), both.replay("b.weight"))


def test_another_seed_draws_other_values() -> None:
    one, other = (record_model(lambda: nn.Linear(3, 3), seed).replay("weight") for seed in (1, 2))
    assert not torch.equal(one, other)


def test_a_replay_leaves_torchs_generator_and_default_type_alone() -> None:
    recorded = record_model(lambda: nn.Linear(3, 3), SEED)
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        value = recorded.replay("weight")
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert value.dtype == torch.float32
    assert torch.equal(torch.get_rng_state(), state)


def test_the_default_type_is_that_of_the_time() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow = nn.Parameter(torch.arange(3) / 3)
            torch.set_default_dtype(torch.float64)
            try:
                self.wide = nn.Parameter(torch.arange(3) / 3)
                self.drawn = nn.Parameter(torch.rand(3))
            finally:
                torch.set_default_dtype(torch.float32)

    model = record_model(Wide, SEED).fill()
    assert [each.dtype for each in model.parameters()] == [torch.float32, torch.float64, torch.float64]
    assert torch.equal(model.wide, torch.arange(3, dtype=torch.float64) / 3)


def test_ties_attributes_and_lists_are_kept() -> None:
    class Marked(Custom):
        def __init__(self) -> None:
            super().__init__()
            self.gains.no_decay = True

    recorded = record_model(Marked, SEED)
    assert recorded.model.head.weight is recorded.model.embed.weight
    assert torch.equal(recorded.replay("head.weight"), recorded.replay("embed.weight"))
    model = recorded.fill()
    assert model.head.weight is model.embed.weight
    assert model.shared is model.angles
    assert model.listed[1] is model.gains
    assert model.gains.no_decay
    assert not model.gains.requires_grad
    assert torch.equal(model.plain, torch.full((3,), 2.0))
    assert torch.equal(model.listed[0], torch.ones(2))
    assert model.drop_rates == pytest.approx([0, 0.05, 0.1])
    assert model.counts == [0, 1, 2]
    assert not model.embed.weight[0].any()
    assert model.embed.weight[1].any()


def test_the_weights_of_an_lstm_are_those_it_computes_with() -> None:
    model = record_model(lambda: nn.LSTM(3, 4), SEED).fill()
    model(torch.rand(5, 3))
    assert all(one is other for one, other in zip(model._flat_weights, model.parameters(), strict=True))


def test_truncated_normals_are_drawn_within_their_bounds() -> None:
    class Truncated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.middle = nn.Parameter(nn.init.trunc_normal_(torch.empty(100, 100), std=0.02, a=-0.03, b=0.03))
            self.tail = nn.Parameter(nn.init.trunc_normal_(torch.empty(100, 100), a=2.0, b=3.0))
            self.part = nn.Parameter(torch.zeros(2, 5000))
            nn.init.trunc_normal_(self.part[1])

    recorded = record_model(Truncated, SEED)
    middle, tail, part = (recorded.replay(name) for name in ("middle", "tail", "part"))
    assert 0.029 < float(middle.abs().max()) <= 0.03
    assert 2.0 <= float(tail.min()) < float(tail.max()) <= 3.0
    assert not part[0].any()
    assert float(part[1].std()) == pytest.approx(0.88, abs=0.05)
    assert torch.nn.init._no_grad_trunc_normal_.__module__ == "torch.nn.init"


def test_one_draw_in_two_parameters_is_one_value() -> None:
    class Twins(nn.Module):
        def __init__(self, both: bool = True) -> None:
            super().__init__()
            drawn = torch.randn(4, 4)
            self.own = nn.Parameter(torch.randn(4, 4))
            self.one = nn.Parameter(drawn.clone())
            drawn.mul_(2)
            if both:
                self.other = nn.Parameter(torch.empty(4, 4))
                self.other.data.copy_(drawn.t())

    recorded = record_model(Twins, SEED)
    other, one = recorded.replay("other"), recorded.replay("one")
    assert torch.equal(other, 2 * one.t())
    assert not torch.equal(recorded.replay("own"), one)
    assert torch.equal(record_model(lambda: Twins(both=False), SEED).replay("one"), one)


def test_two_draws_in_one_parameter_are_two() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2, 9))
            for row in self.weight.data:
                row.normal_()

    first, second = record_model(Twice, SEED).replay("weight")
    assert not torch.equal(first, second)


def test_a_kernel_that_orders_memory_otherwise_gives_the_same_values() -> None:
    history, values = History(), torch.arange(6.0).view(3, 2).t()
    result = torch.empty(2, 3, device="meta")
    history.keep([result])
    history.append(lambda: values, ((), {}), reads=[], writes=[result], outputs=result, is_random=False)
    assert torch.equal(history.value(history.view(result)), values)


def test_copied_layers_begin_alike_as_in_plain_torch() -> None:
    model = record_model(MODELS["encoder"], SEED).fill()
    assert torch.equal(model.layers[0].linear1.weight, model.layers[1].linear1.weight)


def test_what_is_never_written_is_zero_on_every_rank() -> None:
    def build() -> nn.Module:
        model = nn.Linear(2, 2)
        model.extra = nn.Parameter(torch.empty(1000))
        return model

    assert not record_model(build, SEED).replay("extra").any()


def test_a_module_built_on_meta_by_the_constructor_is_recorded_too() -> None:
    value = record_model(lambda: nn.Linear(30, 30, device="meta"), SEED).replay("weight")
    assert float(value.std()) == pytest.approx((1 / 30) ** 0.5 / 3**0.5, rel=0.2)


def test_numbers_of_python_and_numpy_are_those_of_the_plain_constructor() -> None:
    class Numbers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drawn = nn.Linear(2, 2)
            self.of_numpy = nn.Parameter(torch.tensor(np.random.rand(3)))
            self.moved = nn.Parameter(torch.tensor(np.random.rand(3), device=self.drawn.weight.device))
            self.like = nn.Parameter(self.drawn.weight.new_tensor([1.0, 2.0]))
            self.assigned = nn.Linear(2, 2, bias=False)
            self.assigned.weight.data = torch.from_numpy(np.random.rand(2, 2)).t()
            table = torch.zeros(2, 3)
            table[1] = torch.from_numpy(np.random.rand(3))
            self.register_buffer("table", table)
            self.register_buffer("written", torch.tensor([1.0, 2.0]))
            self.written.add_(torch.arange(2))

    plain, recorded = named(build_model(Numbers, SEED)), record_model(Numbers, SEED)
    assert not torch.equal(plain["drawn.weight"], recorded.replay("drawn.weight"))
    for name in ("of_numpy", "moved", "like", "assigned.weight", "table", "written"):
        assert torch.equal(plain[name], recorded.replay(name)), name


def test_a_constant_keeps_its_value_however_often_it_is_replayed() -> None:
    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            numbers = torch.tensor([1.0, 2.0])
            self.sum = nn.Parameter(torch.ones(2) + numbers)
            numbers.mul_(5)
            self.later = nn.Parameter(torch.ones(2) * numbers)

    recorded = record_model(Added, SEED)
    for _ in range(2):
        recorded.replay("sum").zero_()
        recorded.replay("later").zero_()
        assert recorded.replay("sum").tolist() == [2.0, 3.0]
        assert recorded.replay("later").tolist() == [5.0, 10.0]


def test_a_value_in_place_is_what_was_made_of_it() -> None:
    recorded = record_model(Custom, SEED)
    whole = {name: recorded.replay(name) for name in named(recorded.model)}
    seen = []

    def first_half(name: str, value: Tensor, tensor: Tensor) -> Tensor:
        assert tensor.is_meta
        seen.append(name)
        return value[: len(value) // 2].clone() if isinstance(tensor, nn.Parameter) else value

    model = recorded.fill(first_half)
    assert len(seen) == len(set(seen))
    assert "head.weight" not in seen  # tied: placed once
    for name, tensor in model.named_parameters():
        assert isinstance(tensor, nn.Parameter)
        assert torch.equal(tensor, whole[name][: len(whole[name]) // 2])


class Calls(TorchDispatchMode):
    """The names of the operations that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_what_was_overwritten_is_not_drawn_again() -> None:
    def build() -> nn.Module:
        layer = nn.Linear(3, 3)  # which draws its weights uniformly
        nn.init.normal_(layer.weight)
        with torch.no_grad():
            layer.bias[1:].normal_()
        return layer

    recorded = record_model(build, SEED)
    with Calls() as calls:
        recorded.replay("weight")
    assert (calls.names.count("uniform_"), calls.names.count("normal_")) == (0, 1)
    with Calls() as calls:
        recorded.replay("bias")
    assert (calls.names.count("uniform_"), calls.names.count("normal_")) == (1, 1)


class Counting(TorchDispatchMode):
    """The most bytes that storages made inside hold at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, Any] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not result.is_meta:
            self.alive.setdefault(result.untyped_storage()._cdata, result.untyped_storage()._weak_ref())
        self.alive = {address: each for address, each in self.alive.items() if not torch.UntypedStorage._expired(each)}
        sizes = [torch.UntypedStorage._new_with_weak_ptr(each).nbytes() for each in self.alive.values()]
        self.peak = max(self.peak, sum(sizes))
        return result


def test_a_replay_costs_the_largest_tensor_and_no_more() -> None:
    num_bytes = 4 * 64 * 64

    def build() -> nn.Module:
        layers = [nn.Linear(64, 64) for _ in range(20)]
        for layer in layers:
            nn.init.normal_(layer.weight, std=0.02)
        return nn.Sequential(*layers)

    recorded = record_model(build, SEED)
    with Counting() as counting:
        recorded.fill(lambda name, value, tensor: value.sum())
    assert num_bytes <= counting.peak < 1.5 * num_bytes


def test_temporaries_go_as_soon_as_nothing_needs_them() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            value = torch.randn(64, 64)
            for _ in range(10):
                value = value * 0.9
            self.weight = nn.Parameter(value)

    recorded = record_model(Chain, SEED)
    with Counting() as counting:
        recorded.replay("weight")
    assert counting.peak < 3.5 * 4 * 64 * 64


class Looking(nn.Module):
    """Looks at, or does, what a record cannot follow."""

    def __init__(self, look: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        look(self.weight.data)


@pytest.mark.parametrize(
    ("look", "said"),
    [
        (lambda weight: weight.sum().item(), r"_local_scalar_dense of a tensor of shape \(\)"),
        (lambda weight: bool((weight > 0).any()), "_local_scalar_dense"),
        (lambda weight: float(weight[0, 0]), "_local_scalar_dense"),
        (lambda weight: weight.tolist(), r"tolist of a tensor of shape \(4, 4\)"),
        (lambda weight: weight.numpy(), "numpy of a tensor"),
        (np.asarray, "__array__ of a tensor"),
        (lambda weight: torch.equal(weight, weight), "equal of a tensor"),
        (lambda weight: weight[weight > 0], "index of a tensor"),
        (lambda weight: weight.nonzero(), "nonzero of a tensor"),
        (lambda weight: weight.data_ptr(), "address in memory"),
        (lambda weight: weight.normal_(generator=torch.Generator()), "normal_ its own generator"),
        (lambda weight: torch.manual_seed(3), "seeds torch's generator"),
        (lambda weight: nn.init.normal_(torch.tensor([1.0, 2.0])), "normal_ writes into a tensor made from"),
        (lambda weight: torch.tensor([1.0]).add_(weight[0, 0]), "add_ of a tensor"),
        (lambda weight: setattr(torch.tensor([1.0]), "data", weight), "incompatible tensor type"),
        (lambda weight: weight + torch.tensor(1.0, device="meta"), "on the meta device that it has not computed"),
        (lambda weight: weight.to_sparse(), "needs values: aten::_to_sparse"),
    ],
)
def test_what_cannot_be_replayed_is_refused_by_name(look: Callable[[Tensor], Any], said: str) -> None:
    with pytest.raises(JobError, match=said) as caught:
        record_model(lambda: Looking(look), SEED)
    assert 'init="by_name"' in caught.value.value
    assert 'init="whole"' in caught.value.remedy


def test_an_array_that_is_written_to_is_refused() -> None:
    with pytest.raises(ValueError, match="read-only"):
        record_model(lambda: Looking(lambda _: torch.zeros(3).numpy().fill(1.0)), SEED)


def test_a_fault_of_the_constructors_own_is_shown_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="broadcast"):
        record_model(lambda: Looking(lambda weight: weight + torch.ones(3)), SEED)
    with pytest.raises(TypeError, match="no meaning"):
        record_model(lambda: Looking(lambda _: _raise(TypeError("no meaning"))), SEED)


def _raise(error: Exception) -> None:
    raise error


def _tied_by_data() -> nn.Module:
    module = nn.ModuleDict({"embed": nn.Embedding(3, 2), "head": nn.Linear(2, 3)})
    module["head"].weight.data = module["embed"].weight.data
    return module


def _with_lost_values() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("lost", torch.tensor([1.0], device="meta"))
    return module


@pytest.mark.parametrize(
    ("constructor", "message"),
    [
        (lambda: "a model", "returned str"),
        (lambda: nn.Linear(2, 2).requires_grad_(False), "no parameter that requires a gradient"),
        (lambda: nn.LazyLinear(3), "no shape yet"),
        (_tied_by_data, "embed.weight and head.weight are two"),
        (_with_lost_values, "lost is on the meta device"),
    ],
)
def test_what_has_no_weights_of_its_own_is_refused(constructor: Constructor, message: str) -> None:
    with pytest.raises(JobError, match=message):
        record_model(constructor, SEED)


def test_the_model_computes_what_its_values_say() -> None:
    model = record_model(Flat, SEED).fill()
    x = torch.rand(3, 20)
    assert torch.equal(F.linear(x, model.first), x @ model.first.t())
    assert model.first.untyped_storage().data_ptr() != model.second.untyped_storage().data_ptr()
