"""Which GPUs this installation of torch has code for; others are refused before anything is loaded onto them."""

import re
from collections.abc import Sequence

import torch

from kd.errors import UserError

ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")
"""An NVIDIA architecture as torch lists it: its kind, major and minor number, and perhaps a letter."""


def check_gpus(accelerator: str) -> None:
    """Refuses a run on a GPU that torch has no code for, where the run would use one.

    Args:
        accelerator: the setting ``trainer.accelerator``: ``auto``, ``gpu``, ``cpu``, ...; with any but ``auto``, ``gpu``
            and ``cuda`` nothing is checked.

    Raises:
        UserError: one of the visible GPUs is too old or too new; names the GPU, and what torch has code for.
    """
    if accelerator not in ("auto", "gpu", "cuda") or not torch.cuda.is_available():
        return
    # under ROCm names are of another form (gfx90a), of which nothing is known here
    built_for = [name for name in torch.cuda.get_arch_list() if ARCHITECTURE.fullmatch(name)]
    for number in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(number)
        if built_for and not has_code(capability, built_for):
            name = torch.cuda.get_device_name(number)
            raise UserError(
                f"trainer.accelerator: {name} (compute capability {_shown(capability)}) is not among the GPUs that "
                f"torch {torch.__version__} has code for ({', '.join(built_for)}); a newer GPU, a torch that was "
                "built for this one, or trainer.accelerator=cpu"
            )


def has_code(capability: tuple[int, int], built_for: Sequence[str]) -> bool:
    """Whether a GPU can run code that was built for some architectures.

    Machine code (``sm_75``) runs on GPUs of the same major number and an equal or higher minor one (its family),
    portable code (``compute_75``) on all that are as new or newer. With ``a`` at its end either runs on that very
    architecture alone, with ``f`` on its family alone.

    Args:
        capability: of the GPU, (major, minor): ``(7, 5)`` is ``sm_75``.
        built_for: names of architectures, as torch lists them; a name of another form is passed over.

    >>> has_code((7, 0), ["sm_75", "sm_80"]), has_code((8, 6), ["sm_75", "sm_80"])
    (False, True)
    >>> has_code((9, 0), ["sm_80"]), has_code((9, 0), ["sm_80", "compute_80"])
    (False, True)
    >>> has_code((12, 0), ["compute_100f"]), has_code((10, 3), ["compute_100f"])
    (False, True)
    """
    for architecture in built_for:
        match = ARCHITECTURE.fullmatch(architecture)
        if match is None:
            continue
        kind = match[1]
        major = int(match[2])
        minor = int(match[3])
        ending = match[4]
        if ending == "a":
            runs = capability == (major, minor)
        elif kind == "sm" or ending == "f":
            runs = capability[0] == major and capability[1] >= minor
        else:
            runs = capability >= (major, minor)
        if runs:
            return True
    return False


def _shown(capability: tuple[int, int]) -> str:
    """As NVIDIA writes it: ``7.5``."""
    return ".".join(str(number) for number in capability)
