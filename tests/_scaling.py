"""A machine of known constants: what short runs on it record."""

from kd.fleet.scaling.model import Line, RingCost, ShortRun

RING = RingCost(alpha_ms=0.05, ms_per_mb=0.8)
RATES = {
    "teacher": Line(2.0, 1.5),
    "forward": Line(1.0, 0.5),
    "backward": Line(1.0, 1.0),
    "rest": Line(4.0, 0.1),
}
GRADIENT_MB = 40.0


def made(strategy: str, processes: int, batch: int, overlap: float = 0.25) -> ShortRun:
    """What a machine of these constants would record."""
    parts = {part: line(batch) for part, line in RATES.items()}
    passes = {"ddp": 2, "zero": 3, "fsdp": 3}[strategy]
    shown = max(0.0, passes * RING.pass_ms(processes, GRADIENT_MB) - overlap * parts["backward"])
    if strategy == "fsdp":  # it talks inside the passes, where no phase tells it apart
        parts = {part: ms + shown / 4 for part, ms in parts.items()}
        shown = 0.0
    return ShortRun(strategy, processes, batch, parts, shown if processes > 1 else 0.0)


def readings() -> list[ShortRun]:
    several = [
        made(s, n, b) for n in (2, 4) for s in ("ddp", "zero", "fsdp") for b in (64, 64 // n)
    ]
    return [made("ddp", 1, 64), *several]


def ring_times(ring: RingCost = RING) -> list[tuple[int, float, float]]:
    return [(n, mb, 2 * ring.pass_ms(n, mb)) for n in (2, 4) for mb in (0.004, 1.0, 16.0)]
