"""What a strategy that cuts the student over the processes has in common with others of its kind."""

from typing import Protocol, runtime_checkable

from kd.distill.student import Student


@runtime_checkable
class Sharding(Protocol):
    """A strategy that shards what is trained: all processes must run the student equally often.

    Attributes:
        shards_weights: whether weights and gradients lie in shards; False: the optimizer's state alone counts as sharded
            (DeepSpeed's, whose later stages shard them too).
        clips_gradients: whether its own step clips the gradients, so that nothing else may.
    """

    shards_weights: bool
    clips_gradients: bool

    def shard(self, student: Student) -> None:
        """Cuts the student in place; DeepSpeed only checks it here, and cuts when it sets up the optimizer.

        The module calls it on every rank in each of Lightning's calls (fit, validate, test, predict): in a fit after the
        first weights are set and before the optimizers are made. What is cut already stays as it is.

        Raises:
            UserError: a student with a moving average or ``optim.zero`` that the strategy can't have.
        """
