"""What a strategy that cuts the students over the processes has in common with others of its kind."""

from typing import Protocol, runtime_checkable

from kd.distill.students import Students


@runtime_checkable
class Sharding(Protocol):
    """A strategy under which a process holds only a part of what is trained: all of them must run the students
    equally often. See :mod:`kd.strategies`.

    Attributes:
        shards_weights: whether weights and gradients lie in shards, or the optimizer's state alone.
        clips_gradients: whether its step clips them.
    """

    shards_weights: bool
    clips_gradients: bool

    def shard(self, students: Students) -> None:
        """Cuts the students, before their optimizers are made.

        Raises:
            UserError: what does not go with it.
        """
