"""Who makes which batch of the data tier: its book-keeping alone, without a cluster."""

import random
import sys

import pytest

from kd.data.tier import cluster
from kd.data.tier.schedule import DEPTH, Machine, Made, Scheduler, Stream
from kd.data.tier.schedule import Worker as TierMaker
from kd.errors import needs_extra
from kd.settings import TierSpec
from tests._helpers import Command, refuses


def hire(scheduler: Scheduler) -> None:
    """Starts the makers that are missing; they are ready at once."""
    for machine in scheduler.missing():
        scheduler.makers.append(TierMaker(machine, None, ready=True))


class Storm:
    """A tier to which things happen by chance, one a turn.

    Args:
        seed: of the chance.
    """

    def __init__(self, seed: int) -> None:
        self.chance, self.scheduler, self.now = random.Random(seed), Scheduler(), 0.0
        self.nodes = {"a": ("a", 2), "b": ("b", 3)}
        self.streams = [Stream(work, ([(i, 0)] for i in range(60)), most=500) for work in (0, 1)]
        self.scheduler.streams += self.streams
        self.got: list[list[int]] = [[], []]
        self.hung: set[Machine] = set()
        self.look()

    def look(self) -> None:
        """Who is there; what has gone is lost."""
        for gone in self.scheduler.present(self.nodes):
            for maker in [m for m in self.scheduler.makers if m.machine is gone]:
                self.scheduler.lost(maker)
        hire(self.scheduler)
        self.hung &= set(self.scheduler.working)
        if len(self.hung) == len(self.scheduler.working):  # somebody must be well
            self.hung.clear()

    def happen(self) -> None:
        """A machine comes, goes or hangs, a maker ends."""
        event, scheduler = self.chance.random(), self.scheduler
        if event < 0.01:
            self.nodes[f"new{self.now}"] = ("new", 2)
        elif event < 0.02 and len(self.nodes) > 1:
            self.nodes.pop(self.chance.choice(sorted(self.nodes)))
        elif (
            event < 0.04
            and scheduler.makers
            and not any(m.machine.failures > 2 for m in scheduler.makers)
        ):
            scheduler.lost(self.chance.choice(scheduler.makers), memory=self.chance.random() < 0.5)
        elif event < 0.05:
            self.hung.add(self.chance.choice(scheduler.working))
        self.look()

    def work(self) -> None:
        """Somebody makes a batch; training takes what is there."""
        while self.scheduler.give(self.now):
            pass
        busy = [
            maker
            for maker in self.scheduler.makers
            if maker.jobs and maker.machine not in self.hung
        ]
        if busy and self.chance.random() < 0.7:
            maker = self.chance.choice(busy)
            job = maker.jobs[0]
            self.scheduler.done(maker, job, Made({"view": job.keys[0][0]}, 100, 0.1), self.now)
        for stream, got in zip(self.streams, self.got, strict=True):
            batch = self.scheduler.take(stream) if self.chance.random() < 0.8 else None
            if batch is not None:
                got.append(batch["view"])


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_doubled_or_out_of_order_whatever_happens_to_machines(seed: int) -> None:
    """Two passes at once; what is asked for and not used stays below its bound all the time."""
    storm = Storm(seed)
    while not all(stream.ended for stream in storm.streams):
        storm.now += 0.1
        assert storm.now < 400, storm.got
        storm.work()
        assert all(len(maker.jobs) <= DEPTH for maker in storm.scheduler.makers)
        assert all(stream.asked - stream.used <= 5 for stream in storm.streams)
        storm.happen()
    assert storm.got == [list(range(60))] * 2


def test_every_process_gets_its_share_of_the_cores() -> None:
    """8 cores on two machines for 3 processes; of 1 core and 2 processes each still gets a maker."""
    crews = [Scheduler(rank, 3) for rank in range(3)]
    for scheduler in crews:
        scheduler.present({"a": ("a", 5), "b": ("b", 3)})
    shares = [[m.wanted for m in scheduler.working] for scheduler in crews]
    assert [sum(share) for share in shares] == [3, 3, 2]
    assert [sum(column) for column in zip(*shares, strict=True)] == [5, 3]
    small = Scheduler(1, 2)
    small.present({"a": ("a", 1)})
    assert len(small.missing()) == 1


@pytest.mark.parametrize(
    ("cores", "processes", "makers"),
    [((4, 4), 8, 1), ((8, 2), 2, 5), ((2, 1), 4, 1), ((2, 1), 4, None), ((3, 2), 3, 4)],
)
def test_each_process_has_its_makers(
    cores: tuple[int, ...], processes: int, makers: int | None
) -> None:
    """However many: where there are fewer cores, several makers share one."""
    for rank in range(processes):
        scheduler = Scheduler(rank, processes, makers)
        scheduler.present({str(i): (str(i), n) for i, n in enumerate(cores)})
        assert sum(m.wanted for m in scheduler.working) == (makers or 1)


def test_a_batch_over_which_makers_end_is_to_blame_and_a_machine_on_which_all_end_is_left_out() -> (
    None
):
    scheduler = Scheduler(makers=1)
    scheduler.present({"a": ("a", 8), "b": ("b", 8)})
    stream = Stream(0, iter([[(7, 0)]]), 10)
    scheduler.streams.append(stream)
    blamed = []
    for _ in range(3):
        hire(scheduler)
        maker, _ = scheduler.give(0.0) or pytest.fail("nobody to give it to")
        blamed.append(scheduler.lost(maker))
    assert blamed[:2] == [None, None] and blamed[2] is not None and blamed[2].keys == [(7, 0)]
    assert [m.name for m in scheduler.working] == ["b"]


@pytest.mark.parametrize(
    ("items", "said"),
    [
        (
            ["data.engine=ray", "data.num_workers=0"],
            "data.num_workers: must be auto or >= 1 with engine=ray, got 0",
        ),
        (
            ["data.tier.address=ray://head:10001"],
            "data.tier.address: must be HOST:PORT or auto, got 'ray://head:10001'",
        ),
        (
            ["data.engine=ray", "data.tier.label=data"],
            "data.tier.label: must be NAME=VALUE, got 'data'",
        ),
        (["data.engine=ray", "data.tier.queue_mb=0"], "data.tier.queue_mb: must be >= 1, got 0"),
        (["config=remote_data"], f"data.engine: ray {needs_extra('ray')}"),
    ],
)
def test_mistakes_are_told_in_a_line(
    items: list[str],
    said: str,
    recipe,
    refusal: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "config=remote_data" in items:
        monkeypatch.setitem(sys.modules, "ray", None)
    else:
        pytest.importorskip("ray") if "data.engine=ray" in items and "tier" not in items[
            -1
        ] else None
    told = refusal("train", [f"recipe={recipe}", *items])
    assert said in told and len(told.strip().splitlines()) == 1
    assert not (recipe.parent / "runs").exists()


def test_the_settings() -> None:
    assert TierSpec().selector == {"kd-role": "data"}


def test_a_ray_that_can_not_be_started_here_names_no_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The message was "no Ray cluster at None"."""

    class Ray:
        def is_initialized(self) -> bool:
            return False

        def init(self, *_: object, **__: object) -> None:
            raise RuntimeError("no room")

        def shutdown(self) -> None:
            pass

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster, "_ray", Ray)
    with refuses("^data.tier.address: no Ray can be started here: .*no room"):
        cluster.RayCluster(TierSpec()).join()
