"""Pauses of garbage collection end, whoever makes them."""

import gc
import threading

import pytest

from cohort.processes.this_process import gc_paused


def test_it_is_on_again_after_the_last_of_several_threads_and_after_errors():
    assert gc.isenabled()
    inside, leave = threading.Event(), threading.Event()

    def pause() -> None:
        with gc_paused():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=pause)
    with gc_paused():
        thread.start()
        assert inside.wait(60) and not gc.isenabled()
    assert not gc.isenabled(), "the other thread is still inside"
    leave.set()
    thread.join(60)
    assert gc.isenabled()
    with pytest.raises(ValueError, match="no"), gc_paused():
        raise ValueError("no")
    assert gc.isenabled()


def test_where_it_is_off_it_stays_off():
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
