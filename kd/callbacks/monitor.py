"""What a run watches: the ``monitor`` keys and the callbacks that they turn on."""

from dataclasses import dataclass

from pytorch_lightning import Callback

from kd.callbacks.health import Health
from kd.callbacks.kernels import Kernels
from kd.callbacks.phases import Phases
from kd.callbacks.prometheus import Prometheus
from kd.callbacks.run_folder import RunFolder
from kd.callbacks.system import System


@dataclass
class MonitorSpec:
    """What is recorded below the run's ``records`` folder.

    Attributes:
        enabled: record at all.
        interval_s: seconds between two samples of the machine; SIGUSR2 turns the sampling off and on.
        health_every: batches between two readings of gradients, updates and agreement; 0: none.
        activations: layers of the student whose activations those readings look at: module paths or patterns
            (``[blocks.*.mlp.fc2, norm]``); default: a few of all kinds.
        kernels_at: profile operations from this batch on (at least 1; later ones are past the warm-up).
        kernels_steps: batches in that window.
        kernels_memory: record allocations in it too.
        prometheus_port: serve the numbers to Prometheus on this port of the loopback interface (extra
            ``prometheus``; scripts/grafana.json shows them).
        price_per_hour: of the whole job, in your currency: the report says what an epoch costs.
    """

    enabled: bool = True
    interval_s: float = 0.5
    health_every: int = 50
    activations: list[str] | None = None
    kernels_at: int | None = None
    kernels_steps: int = 5
    kernels_memory: bool = False
    prometheus_port: int | None = None
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        if not self.interval_s >= 0.05:
            raise ValueError(f"interval_s must be >= 0.05, got {self.interval_s}")
        for name, low in (("health_every", 0), ("kernels_at", 1), ("kernels_steps", 1), ("prometheus_port", 1)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"{name} must be >= {low}, got {value}")
        if self.price_per_hour is not None and not self.price_per_hour >= 0:
            raise ValueError(f"price_per_hour must be >= 0, got {self.price_per_hour}")


def monitors(spec: MonitorSpec, folder: RunFolder) -> list[Callback]:
    """The callbacks that observe a run."""
    if not spec.enabled:
        return []
    phases, system = Phases(folder), System(folder, spec.interval_s)
    watching: list[Callback] = [phases, system]
    if spec.health_every:
        watching.append(Health(folder, spec.health_every, spec.activations))
    if spec.kernels_at is not None:
        watching.append(Kernels(folder, spec.kernels_at, spec.kernels_steps, spec.kernels_memory))
    if spec.prometheus_port is not None:
        watching.append(Prometheus(phases, system, spec.prometheus_port))
    return watching
