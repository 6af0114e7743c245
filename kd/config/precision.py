"""What a run computes in, where nothing is asked for."""

import torch


def choose_precision(accelerator: str) -> tuple[str, str | None]:
    """bf16 autocast; where the device has none something else, and a line that says so.

    Args:
        accelerator: ``trainer.accelerator``.
    """
    on_gpu = accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    if on_gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name()
        return (
            "16-mixed",
            f"{name} has no bfloat16: fp16 with loss scaling instead (trainer.precision=32-true for fp32)",
        )
    if not on_gpu and accelerator in ("auto", "cpu") and not cpu_has_bfloat16():
        told = "this CPU has no bfloat16 arithmetic: float32 instead (emulated it takes 10 to 20 times as long)"
        return "32-true", told
    return "bf16-mixed", None


def cpu_has_bfloat16() -> bool:
    """Whether matrix products in bfloat16 run on this CPU's own instructions (AVX512 or Arm's)."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
