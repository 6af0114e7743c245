"""What is asked of an export: the options of ``kd-export``, as it and others hand them over."""

from typing import Annotated

from kd.config.kinds import Checked, Range

Percent = Annotated[float, Range(">= 0 and <= 100")]


class ExportSettings(Checked):
    """One export: its format, what shapes it, and how far it may be from the student in torch before it is refused."""

    to: str | None = None
    """The format, of those below."""
    int8: bool = False
    """int8 weights and activations, calibrated on training pictures (extra openvino, or the format's own)."""
    fp16: bool = False
    """FP16 weights and activations, proven on the CPU; layers that overflow stay in float32."""
    calibrate: Annotated[int, Range(">= 1")] = 300
    """Number of training pictures for the calibration."""
    min_agreement: Percent = 99.9
    """Per cent of the validation pictures for which a float export must answer as the student does."""
    max_drop: Percent = 1.0
    """Points of the main metric that an int8 export may lose."""

    @property
    def name(self) -> str:
        """Name of the export's folder and of its record: the format's name, of a class path the class, with ``_int8`` or
        ``_fp16``.
        """
        suffix = ""
        if self.int8:
            suffix = "_int8"
        elif self.fp16:
            suffix = "_fp16"
        return str(self.to).rpartition(".")[2] + suffix
