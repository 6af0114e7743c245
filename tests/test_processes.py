"""What processes say to each other: on the right device, without a wait for a GPU, in one place."""

import ast
import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

from kd import fit_to_machine, processes
from kd.errors import RunError, UserError
from kd.tasks import MultiLabel
from scripts import house
from tests._forks import skip_forks_beside_a_gpu
from tests._helpers import refuses

COLLECTIVES = {
    "all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "broadcast", "broadcast_object_list",
    "gather", "gather_object", "reduce", "reduce_scatter", "scatter", "scatter_object_list", "send", "recv", "isend",
    "send_object_list", "recv_object_list", "reduce_boolean_decision",
}  # fmt: skip
SPEAK_FIRST = {("kd.fit_to_machine", "_tune")}
"""Functions in which the first process prints a line alone, and computes nothing, before it sends."""
OF_THE_TRAINING = {
    "kd.losses.ranks": "batches of all processes, for losses that compare them",
    "kd.losses.targets": "a loss's own buffers, and means over its batch",
    "kd.tasks.base": "a metric's flag, on the metric's device",
    "kd.monitor.loop": "a plain loop, which has no strategy",
    "kd.monitor.ring": "times all-reduces of the training's device",
}


def collectives_of(tree: ast.AST) -> list[str]:
    """Calls ``dist.X(...)``, ``torch.distributed.X(...)``, ``...strategy.X(...)`` of a collective."""
    calls = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = ast.unparse(node.func.value).split(".")[-1]
        if node.func.attr in COLLECTIVES and owner in ("dist", "distributed", "strategy"):
            calls.append(ast.unparse(node.func))
    return calls


def test_collectives_have_one_place() -> None:
    callers = {name: collectives_of(house.tree_of(path)) for name, path in house.sources().items()}
    callers = {name: calls for name, calls in callers.items() if calls}
    assert set(callers) == {"kd.processes", *OF_THE_TRAINING}


@pytest.mark.parametrize(
    "line",
    [
        "trainer.strategy.reduce(torch.tensor(missing), reduce_op='sum')",
        "dist.all_gather_object(a, b)",
        "torch.distributed.broadcast(x, 0)",
    ],
)
def test_a_collective_is_recognised(line: str) -> None:
    assert collectives_of(ast.parse(line))


class OnAnotherDevice(SingleDeviceStrategy):
    """Its device refuses the host's tensors, as NCCL does."""

    def __init__(self) -> None:
        super().__init__(device=torch.device("meta"))
        self.devices: list[str] = []

    def reduce(self, tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        self.devices.append(tensor.device.type)
        return torch.ones(())


def test_what_is_summed_is_on_the_device() -> None:
    strategy = OnAnotherDevice()
    processes.total(strategy, 3)
    processes.largest(strategy, 0.5)
    processes.total_of_tensors(strategy, torch.ones(2))
    assert strategy.devices == ["meta"] * 3


def test_alone_each_answer_is_ones_own() -> None:
    strategy = SingleDeviceStrategy(device=torch.device("cpu"))
    assert processes.total(strategy, 3) == 3 and processes.largest(strategy, 2.5) == 2.5
    assert processes.any_process(strategy, True) and not processes.any_process(strategy, False)
    assert processes.all_processes(strategy, True) and not processes.all_processes(strategy, False)
    assert processes.from_first(strategy, {"a": 1}) == {"a": 1}
    assert processes.of_all_processes("mine") == ["mine"]
    assert processes.merged_at_first(strategy, "mine", str.__add__) == "mine"


def in_processes(work: Callable[[int, str], None], folder: Path, count: int = 2) -> None:
    """Calls ``work(rank, folder)`` in forks, which have imported what this process has."""
    skip_forks_beside_a_gpu()
    mp.start_processes(work, args=(str(folder),), nprocs=count, start_method="fork")


def joined(
    rank: int, folder: str, limit: timedelta = timedelta(minutes=5), count: int = 2
) -> Strategy:
    """The strategy of a process that has joined the others of its test."""
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count, timeout=limit)
    strategy = DDPStrategy(parallel_devices=[torch.device("cpu")] * count, timeout=limit)
    strategy._local_rank = rank
    return strategy


def without_pictures(rank: int, folder: str) -> None:
    joined(rank, folder)
    task = MultiLabel()
    task.build(1)
    if rank == 0:
        task.update(torch.tensor([[3.0], [-2.0]]), torch.tensor([[1.0], [0.0]]), None)
    assert task.compute()["map"] == 1


def test_a_process_without_a_picture_computes_too(tmp_path: Path) -> None:
    """What torchmetrics keeps of each picture it gathers only where all processes have kept some."""
    in_processes(without_pictures, tmp_path)


def test_who_decides_for_others_tells_them_of_its_failure() -> None:
    """What the first process alone does before it calls ``from_first`` may fail: ``by_first`` sends that too."""
    offenders = []
    for name, path in house.sources().items():
        for function in ast.walk(house.tree_of(path)):
            if not isinstance(function, ast.FunctionDef):
                continue
            alone, sent = [], []
            for node in ast.walk(function):
                if isinstance(node, ast.If) and "is_global_zero" in ast.unparse(node.test):
                    alone.append(node.lineno)
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("from_first"):
                    sent.append(node.lineno)
            decides = name != "kd.processes" and alone and sent and min(alone) < max(sent)
            if decides and (name, function.name) not in SPEAK_FIRST:
                offenders.append(f"{name}.{function.name}")
    assert offenders == []


def fail_alone(rank: int, folder: str) -> None:
    """Two processes, of which one fails while the other would wait; both of them, one after the other."""
    strategy = joined(rank, folder)

    def fails(error: Exception, on: int) -> int:
        if rank == on:
            raise error
        return rank

    assert processes.by_first(strategy, lambda: rank) == 0
    assert processes.in_each(lambda: rank) == rank
    by_first = partial(processes.by_first, strategy)
    for share, failing in ((by_first, 0), (processes.in_each, 0), (processes.in_each, 1)):
        with refuses("^data.batch_size: planted$"):
            share(partial(fails, UserError("data.batch_size: planted"), failing))
        expected = (
            (OSError, "^planted") if rank == failing else (RunError, f"^rank {failing}: planted$")
        )
        with pytest.raises(expected[0], match=expected[1]):
            share(partial(fails, OSError("planted\nin two lines"), failing))
    dist.destroy_process_group()


def test_an_error_of_one_process_reaches_all(tmp_path: Path) -> None:
    in_processes(fail_alone, tmp_path)


def take_long(rank: int, folder: str) -> None:
    """The first process computes for longer than the others may wait in a collective."""
    strategy = joined(rank, folder, timedelta(seconds=2))
    for error in (None, UserError("planted")):

        def compute(error: UserError | None = error) -> str:
            time.sleep(3.5)
            if error is not None:
                raise error
            return "done"

        if error is None:
            assert processes.by_first(strategy, compute) == "done"
        else:
            with refuses("^planted$"):
                processes.by_first(strategy, compute)
    dist.destroy_process_group()


def test_what_the_first_process_computes_may_take_longer_than_a_collective(tmp_path: Path) -> None:
    """The fit of a start on the cores of one machine, say, in a run with rank_timeout_s=600."""
    in_processes(take_long, tmp_path)


def decide_and_fail(rank: int, folder: str) -> None:
    """The choice of the cache, whose measuring fails on the first process."""
    strategy = joined(rank, folder)
    trainer = SimpleNamespace(strategy=strategy, is_global_zero=rank == 0)

    def fails(*_: object) -> None:
        raise UserError("data.source.root: planted")

    run = SimpleNamespace(trainer=trainer)
    teacher = SimpleNamespace(cache_modes={"auto"}, is_shared_out=False)
    with (
        mock.patch.object(fit_to_machine, "cache_pays", fails),
        refuses("^data.source.root: planted$"),
    ):
        fit_to_machine._choose_cache(run, teacher, None)  # type: ignore[arg-type]
    dist.destroy_process_group()


def test_a_choice_that_fails_ends_both(tmp_path: Path) -> None:
    in_processes(decide_and_fail, tmp_path)


def ask_all(rank: int, folder: str) -> None:
    """One of two processes asks everything, by the training's group and by one of the hosts' own."""
    strategy = joined(rank, folder)
    for backend in ("gloo", "nccl", "smddp"):
        dist_backend = dist.get_backend
        dist.get_backend = lambda *_, name=backend: name  # type: ignore[assignment]
        group = processes._host_group(strategy)
        answers = [
            processes.any_process(strategy, rank == 1),
            processes.any_process(strategy, False),
            processes.all_processes(strategy, rank == 1),
            processes.all_processes(strategy, True),
            processes.from_first(strategy, {"rank": rank}),
        ]
        dist.get_backend = dist_backend
        assert answers == [True, False, False, True, {"rank": 0}], (backend, answers)
        expected = {"gloo": dist.group.WORLD, "smddp": None}
        if backend in expected:
            assert group is expected[backend]
        else:  # a group of its own, made once
            assert (
                group not in (None, dist.group.WORLD)
                and group is processes._host_groups[dist.group.WORLD]
            )
    assert processes.total(strategy, rank + 1) == 3 and isinstance(
        processes.total(strategy, 1), int
    )
    assert processes.largest(strategy, rank + 0.5) == 1.5
    mine = torch.tensor([rank, 1])
    assert processes.total_of_tensors(strategy, mine).tolist() == [1, 2] and mine.tolist() == [
        rank,
        1,
    ]
    assert processes.of_all_processes(rank) == [0, 1]
    dist.destroy_process_group()


def meet_though_one_host_has_no_address(rank: int, folder: str) -> None:
    """Gloo fails at once on rank 1, whose collective then waits for rank 0 for no longer than the training's limit."""
    strategy = joined(rank, folder, timedelta(seconds=8))
    if rank == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "no-such-interface"
    dist.get_backend = lambda *_: "nccl"  # type: ignore[assignment]
    assert processes._host_group(strategy) is None
    assert processes.any_process(strategy, rank == 1) and not processes.any_process(strategy, False)
    assert processes.from_first(strategy, {"rank": rank}) == {"rank": 0}
    dist.destroy_process_group()


def test_where_one_host_can_not_make_the_group_all_do_without_it(tmp_path: Path) -> None:
    in_processes(meet_though_one_host_has_no_address, tmp_path)


def test_two_processes_agree(tmp_path: Path) -> None:
    in_processes(ask_all, tmp_path)


PROCESSES = 5
"""Neither a power of two nor even: the tree and the rounds have a rest."""


def meet_in_rounds(rank: int, folder: str) -> None:
    """Each of five processes hears of each other's answer in three messages; what they hold is merged by rank."""
    strategy = joined(rank, folder, count=PROCESSES)
    sent = []
    isend, all_reduce = dist.isend, dist.all_reduce

    def counted(*args: Any, **words: Any) -> Any:
        sent.append(words["group_dst"])
        return isend(*args, **words)

    def not_called(*_: Any, **__: Any) -> None:
        raise AssertionError("a ring of all processes")

    dist.isend, dist.all_reduce = counted, not_called  # type: ignore[assignment]
    for speaker in range(PROCESSES):
        assert processes.any_process(strategy, rank == speaker)
        assert not processes.all_processes(strategy, rank != speaker)
    assert not processes.any_process(strategy, False) and processes.all_processes(strategy, True)
    dist.isend, dist.all_reduce = isend, all_reduce
    assert len(sent) == 3 * (2 * PROCESSES + 2)

    merged = processes.merged_at_first(strategy, [rank], lambda low, high: low + high)
    if rank == 0:
        assert merged == list(range(PROCESSES))
    dist.destroy_process_group()


def test_five_processes_agree_in_three_messages_each(tmp_path: Path) -> None:
    in_processes(meet_in_rounds, tmp_path, PROCESSES)


@pytest.mark.parametrize(
    ("usable", "own", "others", "expected"),
    [
        (8, range(8), [range(8 * n, 8 * n + 8) for n in range(1, 8)], 8),  # each rank has its own
        (8, range(8), [range(8)] * 7, 1),  # all share them
        (64, range(64), [range(64)] * 7, 8),
        (8, range(8), [range(8), range(8, 16), range(8, 16)], 4),  # two share a socket
        (8, range(64), [range(64)] * 7, 1),  # the container's quota
        (2, range(2), [range(2)] * 7, 1),
        (8, None, [None], 4),
    ],
)
def test_cores_to_which_a_rank_is_bound_are_not_divided_again(
    monkeypatch: pytest.MonkeyPatch, usable: int, own: Any, others: list[Any], expected: int
) -> None:
    own_ids = None if own is None else list(own)
    here = [("here", None if ids is None else list(ids)) for ids in others]
    monkeypatch.setattr("kd.processes.socket.gethostname", lambda: "here")
    monkeypatch.setattr("kd.processes.core_ids", lambda: own_ids)
    monkeypatch.setattr("kd.processes.cores", lambda: usable)
    elsewhere = ("another host", own_ids)
    monkeypatch.setattr("kd.processes.of_all_processes", lambda mine: [mine, *here, elsewhere])
    assert processes.cores_of_rank() == expected
