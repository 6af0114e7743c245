"""Threads that the process does not wait for when it ends: a decoder or a model that hangs holds nothing up."""

import queue
from collections.abc import Callable
from concurrent.futures import Executor, Future
from threading import Thread
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Daemons(Executor):
    """A pool of daemon threads; ThreadPoolExecutor's are joined at the interpreter's end, whatever they do."""

    def __init__(self, count: int, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        for i in range(count):
            Thread(target=self._work, name=f"{name}_{i}", daemon=True).start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def call() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:  # whoever waits for it decides
                    future.set_exception(error)

        self._calls.put(call)
        return future

    def _work(self) -> None:
        while True:
            self._calls.get()()
