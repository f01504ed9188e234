import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.data import Order
from trimaran.errors import DataError

seeds = st.integers(0, 2**63 - 1)


@settings(max_examples=60, deadline=None)
@given(num_samples=st.integers(1, 400), seed=seeds, first_epoch=st.integers(0, 1000))
def test_every_epoch_is_a_permutation(num_samples: int, seed: int, first_epoch: int) -> None:
    positions = np.arange(first_epoch * num_samples, (first_epoch + 3) * num_samples)
    epochs, ids = Order(num_samples, seed).at(positions)
    assert (epochs == np.repeat(first_epoch + np.arange(3), num_samples)).all()
    for epoch in ids.reshape(3, num_samples):
        assert sorted(epoch.tolist()) == list(range(num_samples))


@settings(max_examples=40, deadline=None)
@given(num_samples=st.integers(1, 2**61), seed=seeds, data=st.data())
def test_a_position_needs_no_other(num_samples: int, seed: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, 2**62), min_size=1, max_size=20)), np.int64)
    order = Order(num_samples, seed)
    epochs, ids = order.at(positions)
    assert ((ids >= 0) & (ids < num_samples)).all()
    for position, epoch, sample_id in zip(positions, epochs, ids, strict=True):
        assert order.at(np.array([position])) == (epoch, sample_id)


@pytest.mark.parametrize("num_samples", [97, 10**12])
def test_distinct_positions_of_an_epoch_have_distinct_samples(num_samples: int) -> None:
    _, ids = Order(num_samples, seed=3).at(np.arange(97) + 5 * num_samples)
    assert len(set(ids.tolist())) == 97


def test_seeds_and_epochs_differ_and_are_kept_for_good() -> None:
    first, second = Order(1000, 1).at(np.arange(2000))[1].reshape(2, 1000)
    other = Order(1000, 2).at(np.arange(1000))[1]
    assert (first != second).mean() > 0.9
    assert (first != other).mean() > 0.9
    # A changed order would silently change every run that is resumed.
    assert Order(1000, 1).at(np.array([0, 1, 999, 1000, 123456]))[1].tolist() == [820, 357, 111, 136, 147]


def test_the_order_is_mixed() -> None:
    ids = Order(10_000, 0).at(np.arange(10_000))[1]
    assert abs(np.corrcoef(ids, np.arange(10_000))[0, 1]) < 0.05
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 0.05


@pytest.mark.parametrize("num_samples", [3, 5, 6, 7])
def test_small_data_sees_all_its_permutations_alike(num_samples: int) -> None:
    num_epochs = 3000
    ids = Order(num_samples, 11).at(np.arange(num_samples * num_epochs))[1].reshape(num_epochs, num_samples)
    counts = np.array([np.bincount(column, minlength=num_samples) for column in ids.T])
    assert (abs(counts / num_epochs - 1 / num_samples) < 0.03).all()


def test_evaluation_goes_through_the_samples_as_they_stand() -> None:
    epochs, ids = Order(7, shuffle=False).at(np.arange(14))
    assert ids.tolist() == [*range(7), *range(7)]
    assert epochs.tolist() == [0] * 7 + [1] * 7


def test_no_samples_is_an_error() -> None:
    with pytest.raises(DataError, match="no samples"):
        Order(0, 1)
