"""What a run watches: the ``monitor`` keys and the callbacks that they turn on."""

from dataclasses import dataclass

from pytorch_lightning import Callback

from kd.callbacks.phases import Phases
from kd.callbacks.run_folder import RunFolder


@dataclass
class MonitorSpec:
    """What is recorded below the run's ``records`` folder.

    Attributes:
        enabled: record at all.
    """

    enabled: bool = True


def monitors(spec: MonitorSpec, folder: RunFolder) -> list[Callback]:
    """The callbacks that observe a run."""
    return [Phases(folder)] if spec.enabled else []
