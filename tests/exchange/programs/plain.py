"""Plain scripts without an event loop."""

import atexit
import sys
import threading
import time

from dfm_async.exchange import AgentOptions, sync

scenario = sys.argv[1]


def show_threads() -> None:
    """What would keep the interpreter from ending."""
    left = [
        thread.name for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()
    ]
    print("threads", left, flush=True)


atexit.register(show_threads)
agent = sync.init(options=AgentOptions(heartbeat_interval=0.1))
assert sync.init() is agent

if scenario == "shuts down":
    while sync.is_running():
        task = sync.receive()
        if task is None:
            break
        assert sync.is_running()
        sync.log({"loss": 0.5}, step=task.round)
        sync.progress(1, 2, "half")
        sync.send({"params": task.data, "metrics": {"loss": 0.5}})
    assert not sync.is_running()
    sync.shutdown()
    sync.shutdown()
    sys.exit(7)

task = sync.receive()
assert task is not None
if scenario == "does not shut down":
    sync.send("done")
    assert sync.receive() is None
elif scenario == "raises":
    raise ValueError("no such data")
elif scenario == "exits with 7 after the end":
    sync.send("done")
    assert sync.receive() is None
    sys.exit(7)
elif scenario == "exits with 7 in the middle":
    sys.exit(7)
elif scenario == "computes":
    end = time.monotonic() + 1.2
    while time.monotonic() < end:
        sum(range(10_000))
    sync.send("done")
elif scenario == "answers in a thread":
    thread = threading.Thread(target=sync.send, args=("done",))
    thread.start()
    thread.join()
    assert sync.receive() is None
else:
    raise AssertionError(scenario)
