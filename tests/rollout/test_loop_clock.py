"""The clock of a thread: 1. it goes while the thread sleeps or works; 2. it never goes faster than time."""

import threading
import time

from areal_agent.rollout.loop_clock import clock_of_thread


def test_it_goes_with_the_thread_and_never_faster_than_time() -> None:
    now = clock_of_thread(threading.get_native_id())
    began_s, real_s = now(), time.monotonic()
    while now() - began_s < 0.02:
        pass
    assert time.monotonic() - real_s >= 0.02
