"""What a strategy that cuts the students over the processes has in common with others of its kind."""

from typing import Protocol, runtime_checkable

from kd.distill.students import Students


@runtime_checkable
class Sharding(Protocol):
    """A strategy that shards what is trained: all processes must run the students equally often.

    Attributes:
        shards_weights: whether weights and gradients lie in shards; False: the optimizer's state alone does.
        clips_gradients: whether its own step clips the gradients, so that nothing else may.
    """

    shards_weights: bool
    clips_gradients: bool

    def shard(self, students: Students) -> None:
        """Cuts the students, before their optimizers are made.

        Raises:
            UserError: what does not go with it.
        """
