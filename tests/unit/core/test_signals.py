import signal
import threading

import pytest

from d2plm.core.signals import deferred


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_end_of_the_block(number: int) -> None:
    class StoppedError(Exception):
        pass

    def stop(*_: object) -> None:
        raise StoppedError

    before = signal.signal(number, stop)
    finished = False
    try:
        with pytest.raises(StoppedError), deferred():
            signal.raise_signal(number)
            finished = True
        assert finished
        assert signal.getsignal(number) is stop
        with pytest.raises(ValueError, match="its own"), deferred():
            raise ValueError("its own")
        assert signal.getsignal(number) is stop
    finally:
        signal.signal(number, before)


def test_another_thread_has_nothing_to_hold_back() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    seen = []

    def block() -> None:
        with deferred():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert seen == [handler]
