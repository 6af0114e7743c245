"""What kd's settings are called in a training that is not kd's."""

import re
from collections.abc import Mapping

WORDS: Mapping[str, str] = {
    r"data\.engine=device \(or dali\)": "decoding and augmentation on the GPU (NVIDIA DALI)",
    r"data\.engine=device, or dali": "decoding and augmentation on the GPU (NVIDIA DALI)",
    r": kd-pack short_side=": "",
    r"data\.num_workers=auto tries 0, 1, 2, \.\.\. under the real step": "a smaller num_workers",
    r"data\.num_workers": "num_workers",
    r"a larger data\.batch_size": "a larger batch",
    r"data\.balance_classes=true": "a sampler that draws all classes equally often",
    r"data\.augment": "augmentation",
    r"model\.student\.compile=reduce-overhead": 'torch.compile(mode="reduce-overhead")',
    r"model\.student\.compile=true": "torch.compile",
    r"data\.engine=torch makes": "one of torch makes",
    r"config=bf16_gradients \(half the traffic\) or config=powersgd": (
        "gradients in bfloat16 (DDP's bf16_compress_hook, half the traffic) or PowerSGD"
    ),
    r"\(optim\.name=adamw, with an optim\.lr of its own\)": "(AdamW(fused=True))",
    r"optim\.lr": "learning rate",
    r"optim\.warmup_epochs": "warm-up",
    r"optim\.weight_decay": "weight decay",
    r"trainer\.": "",
    r"the student's own training": "the model's own training",
    r"the student's initial weights": "the model's initial weights",
    r"or a smaller student": "or a smaller model",
    r"; the best epoch is exported anyway": "",
    r"stop here: the best epoch is exported; or": "stop here, or",
    r" \(kd/[\w/]+\.md\)": "",
}
"""A pattern -> what takes its place; the longer of two that begin alike comes first."""


def in_plain_words(text: str) -> str:
    """A limit's or rule's text with kd's keys replaced by what the thing is called elsewhere.

    >>> in_plain_words("data.num_workers=4 instead of 0")
    'num_workers=4 instead of 0'
    >>> in_plain_words("a lower optim.lr, trainer.gradient_clip_val")
    'a lower learning rate, gradient_clip_val'
    """
    for pattern, words in WORDS.items():
        text = re.sub(pattern, words, text)
    return text
