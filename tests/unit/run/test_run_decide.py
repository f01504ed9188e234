"""Signals: before the weights are saved they ask, after it they end what remains."""

from __future__ import annotations

import os
import signal

import pytest

from trimaran.run.decide import StopRequest, stop_on_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_to_save_and_leave(number: signal.Signals) -> None:
    request = StopRequest()
    with stop_on_signals(request):
        os.kill(os.getpid(), number)
    assert request.reason == number.name


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_once_the_weights_are_saved_a_signal_ends_what_remains(number: signal.Signals) -> None:
    request = StopRequest()
    request.is_saved = True
    with pytest.raises(KeyboardInterrupt), stop_on_signals(request):
        os.kill(os.getpid(), number)
    assert request.reason == ""


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signals(StopRequest()):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
