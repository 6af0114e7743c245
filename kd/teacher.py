"""The frozen teacher."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kd.models import Images, TeacherSpec, build_model, preprocess_for


class Teacher:
    """A frozen model that answers for uint8 pictures: always in eval mode, never with a gradient.

    Deliberately no ``nn.Module``: a LightningModule that holds one keeps it out of its checkpoints, its optimizer,
    DDP's broadcasts and ``train()`` without further care. It moves by :meth:`to` alone.

    Args:
        spec: architecture and weights.
        num_classes: classes of the data.
        classes: their names, compared with the checkpoint's where it has them.

    Raises:
        UserError: an unknown architecture, or a checkpoint that does not fit.
    """

    def __init__(self, spec: TeacherSpec, num_classes: int, classes: Sequence[str] = ()) -> None:
        self.spec = spec
        self.model: nn.Module = build_model(spec, num_classes, "model.teacher", classes, head=True)
        self.model.requires_grad_(False).eval()
        self.preprocess = preprocess_for(self.model, spec.img_size, spec.channels_last)
        self.dtype = torch.float32
        self._identity: dict[str, str] = {}

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32) -> "Teacher":
        """Moves the weights. With bfloat16 they are stored so: autocast would cast frozen weights anew each step."""
        self.identity()  # of the weights as loaded
        self.model.to(device=device, dtype=dtype)
        self.dtype = dtype
        self.spec.compile_in_place(self.model)
        return self

    @torch.no_grad()
    def __call__(self, images: Images) -> Tensor:
        """uint8 ``(N, 3, H, W)`` -> float32 logits ``(N, C)``."""
        self.model.eval()  # whatever was called on it in between: its dropout and BatchNorm never wake
        with torch.autocast(images.device.type, enabled=False):
            answers = self.model(self.preprocess(images).to(self.dtype))
        # a copy in any case: CUDA graphs (compile=reduce-overhead) write the next answers into the same memory
        return answers.to(torch.float32, copy=True)

    def identity(self) -> dict[str, str]:
        """Architecture and a hash of the weights, stored in checkpoints instead of the weights."""
        if self._identity:
            return self._identity
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().float().cpu().numpy().tobytes())
        self._identity = {"arch": self.spec.arch, "weights": digest.hexdigest()[:16]}
        return self._identity


def dtype_for(precision: str) -> torch.dtype:
    """What a teacher's weights are kept in beside a student that trains at Lightning's ``precision``."""
    return {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision, torch.float32)
