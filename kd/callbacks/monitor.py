"""What a run watches: the ``monitor`` keys and the callbacks that they turn on."""

from dataclasses import dataclass

from pytorch_lightning import Callback

from kd.callbacks.phases import Phases
from kd.callbacks.run_folder import RunFolder
from kd.callbacks.system import System


@dataclass
class MonitorSpec:
    """What is recorded below the run's ``records`` folder.

    Attributes:
        enabled: record at all.
        interval_s: seconds between two samples of the machine; SIGUSR2 turns the sampling off and on.
        price_per_hour: of the whole job, in your currency: the report says what an epoch costs.
    """

    enabled: bool = True
    interval_s: float = 0.5
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        if not self.interval_s >= 0.05:
            raise ValueError(f"interval_s must be >= 0.05, got {self.interval_s}")
        if self.price_per_hour is not None and not self.price_per_hour >= 0:
            raise ValueError(f"price_per_hour must be >= 0, got {self.price_per_hour}")


def monitors(spec: MonitorSpec, folder: RunFolder) -> list[Callback]:
    """The callbacks that observe a run."""
    return [Phases(folder), System(folder, spec.interval_s)] if spec.enabled else []
