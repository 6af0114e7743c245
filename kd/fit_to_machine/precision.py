"""The precision of a run whose settings name none."""

import timeit
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn

from kd.errors import UserError

BFLOAT16 = ("amx_bf16", "avx512_bf16", "bf16")
"""Instructions for products in bfloat16: Intel's and AMD's, Arm's."""
EMULATED = 10.0  # times as long as in float32, or longer: nothing but software computes it
SIDE = 256  # of the matrices that are multiplied to measure
# by the precisions that kd chooses on CPUs
PLUGINS: dict[str, Callable[[], Precision]] = {
    "32-true": Precision,
    "bf16-mixed": partial(MixedPrecision, "bf16-mixed", "cpu"),
}


def choose_precision(accelerator: str) -> tuple[str, str]:
    """The Trainer's precision for this machine, where ``trainer.precision`` is not set.

    Args:
        accelerator: the Trainer's word: ``auto`` (counts as ``cpu`` without a GPU of NVIDIA's), ``gpu``, ``cpu``, ...

    Returns:
        The precision: ``bf16-mixed`` where the device has bfloat16, as any but CPUs and NVIDIA's GPUs is taken to have, else
            ``16-mixed`` on a GPU and ``32-true`` on a CPU. And a line for the user that says why; "" for such another
            device, and for a GPU with bfloat16.
    """
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bf16-mixed", ""
        name = torch.cuda.get_device_name()
        reason = f"{name} has no bfloat16: fp16 with loss scaling instead (trainer.precision=32-true for fp32)"
        return "16-mixed", reason
    if accelerator not in ("auto", "cpu"):
        return "bf16-mixed", ""
    read: Callable[[], dict] = getattr(torch.cpu, "get_capabilities", dict)  # not in torch 2.10
    return precision_of_cpu(read(), bfloat16_time)


def precision_of_cpu(
    capabilities: Mapping[str, object], measured: Callable[[], float]
) -> tuple[str, str]:
    """The precision of a CPU (``bf16-mixed`` or ``32-true``), and a line that says why.

    That oneDNN can compute in bfloat16 says nothing: it emulates it on any CPU with AVX512.

    Args:
        capabilities: of the CPU, as torch names them, with a truth value for each.
        measured: how many times as long a product of matrices takes in bfloat16 as in float32 (below 1: bfloat16 is
            faster, and is taken); called only where no capability decides.
    """
    named = next((name for name in BFLOAT16 if capabilities.get(name)), None)
    if named:
        return "bf16-mixed", f"precision: bf16-mixed, as this CPU has {named}"
    times = measured()
    reason = f"a product of matrices in bfloat16 takes {times:.1f} times as long as in float32 on this CPU"
    if times >= EMULATED:
        reason = "this CPU has no bfloat16 instructions"
    precision = "bf16-mixed" if times < 1 else "32-true"
    return precision, f"precision: {precision}, as {reason}"


@cache
def bfloat16_time() -> float:
    """How many times as long a product of matrices in bfloat16 takes as one in float32 on this CPU.

    It is measured once a process, which takes some 10 ms.
    """
    matrix = torch.ones(SIDE, SIDE)
    return _seconds_of_product(matrix.bfloat16()) / _seconds_of_product(matrix)


def _seconds_of_product(matrix: Tensor) -> float:
    """Seconds of the fastest of five products of a square matrix with itself, after one that warms up."""
    seconds = timeit.repeat(lambda: matrix @ matrix, number=1, repeat=6)
    return min(seconds[1:])


def choose_kernels(
    trainer: Trainer, models: Iterable[nn.Module], products: str, benchmark: bool
) -> None:
    """On a GPU, sets how float32 matrices are multiplied; cuDNN times its convolutions where ``benchmark`` allows it and a
    model is a CNN.

    These are process-wide settings of torch; on other devices nothing is done. A CNN is a model with two convolutions or
    more: a ViT's only one, its patch embedding, is not worth the timing.

    Args:
        trainer: whose device counts.
        models: of the run, teacher and students.
        products: ``highest``, ``high`` or ``medium``, as torch names precisions of products.
        benchmark: whether cuDNN may time its convolutions and take the fastest; which one that is may differ from run
            to run, and with it the last bits of results.
    """
    if trainer.strategy.root_device.type != "cuda":
        return
    torch.set_float32_matmul_precision(products)
    for model in models if benchmark else ():
        convolutions = [part for part in model.modules() if isinstance(part, nn.Conv2d)]
        if len(convolutions) > 1:
            torch.backends.cudnn.benchmark = True


def take_the_first(trainer: Trainer, chosen: Sequence[str]) -> None:
    """Makes all processes train in rank 0's precision: machines with other CPUs may have chosen another.

    Called on every rank before training; it changes nothing where all have chosen the same.

    Args:
        trainer: whose precision plugin is replaced.
        chosen: the Trainer's precision in each process (``bf16-mixed``), by rank; the same list on all ranks.

    Raises:
        UserError: the precisions differ, and one is not of :data:`PLUGINS`, or the strategy has a plugin of its own.
    """
    different = set(chosen)
    if len(different) == 1:
        return
    replaceable = type(trainer.precision_plugin) in (Precision, MixedPrecision)
    if not replaceable or not different <= PLUGINS.keys():
        raise UserError(
            f"trainer.precision: the machines differ ({', '.join(sorted(different))} chosen); give one"
        )
    trainer.strategy.precision_plugin = PLUGINS[chosen[0]]()
