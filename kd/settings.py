"""The settings of a run, without torch: each with its type, default, range and a line of help, once.

They are checked before anything heavy is imported (:mod:`kd.run.resolve`): a field by its type and range, several fields
against each other by their group's ``__post_init__``. The text under a field is its help.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any, Literal, TypeAlias

from kd.config.kinds import (
    AnyClass,
    Checked,
    Like,
    Range,
    TimeLimit,
    TimmName,
    group_of,
    refused,
)
from kd.config.parts import class_of, keys_in, positive_list
from kd.config.suggest import near
from kd.errors import REFUSED_LOSSES, UserError

LARGEST_SIDE = 4096
"""Pixels of a model's input, of each side: one picture is 200 MB as floats, the first layer's output some GB."""
# a side in pixels, or (height, width); the bound is LARGEST_SIDE
Size: TypeAlias = Annotated[int | tuple[int, int], Range(">= 1 and <= 4096")]
# a number for red, green and blue
Channels: TypeAlias = tuple[float, float, float]
Share: TypeAlias = Annotated[float, Range(">= 0 and <= 1")]
Positive: TypeAlias = Annotated[float, Range("> 0")]
Weight: TypeAlias = Annotated[float, Range(">= 0")]
Count: TypeAlias = Annotated[int, Range(">= 1")]
# an int: so many batches; a fraction: that share of an epoch; as Lightning reads them
Batches: TypeAlias = Annotated[
    int | float,
    Like(r"\d+(\.0)?|0?\.\d+|\d(\.\d+)?e-\d+", "must be a share up to 1 or a number of batches"),
]
# likewise, but not 0; also a time, DD:HH:MM:SS
SomeBatches: TypeAlias = Annotated[
    int | float,
    Like(
        r"(?!0*(\.0)?$)(\d+(\.0)?|0?\.\d+|\d(\.\d+)?e-\d+|\d+(:\d\d)+)",
        "must be > 0, a share up to 1 or a number of batches",
    ),
]
# an empty text would turn it off in silence
Text: TypeAlias = Annotated[str, Like(r"[\s\S]+", "must not be empty; null is none")]
Action: TypeAlias = Literal["log", "webhook", "stop"]
Check: TypeAlias = Literal["all", "headers", "off", False]
Standardization: TypeAlias = Literal["none", "variance", "phi_s"]
# where a teacher answers, as a pattern
DEVICE = r"same|shard|(cpu|cuda|mps|xpu|xla|hpu)(:\d+)?"
# a number of epochs or steps: any but 0
NOT_EMPTY = Like(
    r"(?!0(\.0)?$).+",
    "must be >= 1, or -1 for no limit (trainer.fast_dev_run=true tries all parts on one batch)",
)
FOLDER = Like(r"(?!\.)[\w.+-]{1,200}", "names the run's folder (letters, digits, . + - _)")
ADDRESS = Like(r"https?://.+", "must be an http(s) address")


def height_width(size: int | Sequence[int]) -> tuple[int, int]:
    """``(height, width)`` in pixels, from the side of a square or from height and width.

    >>> height_width(224), height_width([168, 224])
    ((224, 224), (168, 224))
    """
    if isinstance(size, int):
        return (size, size)
    return (int(size[0]), int(size[1]))


def teachers_in(model: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings of each of a run's teachers by key: ``model.teacher``, or ``model.teachers.NAME``; {} without a teacher.

    Args:
        model: the settings ``model``, resolved.
    """
    one = model.get("teacher")
    several = model.get("teachers") or {}
    if one:
        return {"model.teacher": one}
    return {f"model.teachers.{name}": spec for name, spec in several.items()}


NAMESPACE = Like(r"(?!AWS/)[\w.\-/#:]{1,255}", "must be a namespace other than AWS's own")
NAME = Like(
    r"(?!latest$)[A-Za-z_][\w.+-]{0,199}",
    "must be letters, digits, . + - _ alone, the first a letter",
)


class ModelSettings(Checked):
    """A model: a timm architecture and where its weights come from."""

    arch: Annotated[str, TimmName("models")] = ""
    """A timm model name (``timm/NAME`` and ``hf_hub:timm/NAME`` mean the same); a teacher's is
    taken from its checkpoint, by its words or its tensors, a student's where the settings name
    none. A student's may be ``auto``: its teacher's architecture in a quarter of its size, else a
    ViT-Ti or a ResNet-18.
    """

    img_size: Size | None = None
    """Side of its square input in pixels, or height and width; default: the architecture's own."""

    pretrained: bool = False
    """Load timm's pre-trained weights (downloads them)."""

    checkpoint: Text | None = None
    """A safetensors, ``.pth`` or ``.ckpt`` file, a run folder of ours, or a folder of timm's
    (``config.json`` and weights).
    """

    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of ``timm.create_model`` (``patch_size``, ``depth``, ``drop_path_rate``,
    ...); with ``patch_size: auto`` a student that starts from its teacher's layers has as many
    patches as its teacher.
    """

    compile: bool | Literal["auto", "default", "reduce-overhead", "max-autotune"] = "auto"
    """A mode of ``torch.compile`` (true: ``default``; ``reduce-overhead`` and ``max-autotune`` use CUDA graphs); ``auto``
    tries on a GPU which is fastest, where the run is long enough, and is false on a CPU.
    """

    channels_last: bool = False
    """Keep pictures and weights in channels-last order, which convolutions on a GPU like."""

    mean: Channels | None = None
    """What its input was normalised with, of each channel, of values in 0..1; default: the
    checkpoint's, else the architecture's own.
    """

    std: Annotated[Channels, Range("> 0")] | None = None
    """Likewise."""

    builder: Annotated[Any, AnyClass("builder")] | None = None
    """Makes a model of one's own, by class path (:class:`kd.models.own.Builder`; for a teacher of transformers
    ``kd.models.hugging_face.HuggingFaceBuilder``), in place of ``arch`` and ``kwargs``.
    """

    checkpoint_key: str | None = None
    """Which of several models in the checkpoint (or in a teacher's ``backbone``): a name before the
    names of its weights (``teacher``, ``encoder_q``, ``net.encoder``; ``.``: the one whose names
    begin first). Default: the one that fits; of two that fit equally well none is taken.
    """


class TeacherSettings(ModelSettings):
    """The teacher's model."""

    recipe: str | None = None
    """Without a checkpoint and not pre-trained: this recipe's teacher, which ships with it or is
    trained first (``checkpoint=train`` trains it in any case).
    """

    backbone: str | None = None
    """Weights that the training of ``recipe`` begins with, in place of those that it names: a file,
    or a folder as of ``checkpoint``, with or without a classifier.
    """

    head: bool = True
    """The teacher has a classifier; without one it teaches by its features alone."""

    weight: Positive = 1.0
    """Its share of the mean of logits, among several teachers with classifiers. A loss of one teacher
    has a weight of its own.
    """

    classes: list[str] | str | None = None
    """Names of the classes it knows, in its order, or a file with one a line (or a JSON list),
    where they are not the data's; a checkpoint of ours and timm's ImageNet models bring their own.
    """

    class_map: dict[str, str] = field(default_factory=dict)
    """The teacher's name of a class of the data, where the two differ."""

    cache: bool | Literal["off", "on", "auto", "only"] = "off"
    """``on`` keeps the teacher's answers (logits, and the features that losses read) on disk and
    reads them when a view comes again; ``only`` never runs the teacher in training (``kd-cache``
    has filled the cache); ``auto`` measures whether it pays.
    """

    cache_dir: str | None = None
    """Folder of the cache; default: one of its own in the user's cache folder."""

    cache_views: Annotated[int, Range(">= 1 and <= 10000")] = 4
    """Views of a picture before they come again. Few save more, many overfit less."""

    cache_topk: Count | None = None
    """Keep only so many logits and the mass of the rest; default: all."""

    cache_pixels: bool = False
    """Keep each cached view's uint8 pixels beside its answers, so that no picture is decoded and
    augmented twice.
    """

    cache_gb: Positive | None = None
    """Most disk that the cache may take, in GB; default: as much as is free."""

    placement: Annotated[str, Like(DEVICE, "must be same, shard or a device (cpu, cuda:1)")] = (
        "same"
    )
    """``same``: each process has it on the student's device; a device (``cpu``, ``cuda:1``);
    ``shard``: in shards over all processes (FSDP2), for one that fits no single device.
    """


class AskSettings(Checked):
    """How ``kd-cache from=ADDRESS`` asks for answers, each as ``from.NAME=VALUE``: no file of settings has them."""

    views: Annotated[int, Range(">= 1 and <= 10000")] = 4
    """Views of each training picture; a validation or test picture has one."""

    rate: Positive | None = None
    """Pictures a second at most; default: as fast as it answers."""

    budget: Count | None = None
    """Pictures that the command may ask for; it then ends, and the same command resumes with more."""

    price: Weight | None = None
    """Of 1,000 pictures, in any currency: what was spent is printed."""

    retries: Annotated[int, Range(">= 0")] = 8
    """How often a request is sent again after failures, with pauses that double up to 30 s."""

    timeout_s: Positive = 60.0
    """Of each try: seconds to connect, and to wait for data."""

    batch: Count | None = None
    """Pictures of a request (16); of a chat endpoint requests at once, of one picture each (4)."""

    output: Text | None = None
    """Name of the server's tensor with the logits or probabilities; default: ``logits``."""

    model: Text | None = None
    """A chat endpoint's name of the model."""

    key: Text | None = None
    """Name of the environment variable that holds a chat endpoint's key; default: no key is sent."""

    prompt: Text | None = None
    """The question to a chat model; ``{classes}`` in it stands for a line for each class, ``A: apple``."""


class StudentSettings(ModelSettings):
    """The student's model."""

    arch: Annotated[str, TimmName("models", also=("auto",))] = ""
    inherit: bool | Literal["auto"] = False
    """Start from the teacher's own layers, cut down to its size (:mod:`kd.distill.inherit`);
    ``auto``: where the pair allows and the student has no weights of its own.
    """

    inherit_pictures: Count = 256
    """Training pictures whose activations guide that, at most: the more, the better the start."""

    grad_checkpointing: bool = False
    """Compute activations twice instead of keeping them (timm's ``set_grad_checkpointing``)."""

    head: bool = True
    """The student has a classifier; without one it is its features, learnt from a teacher's,
    without labels.
    """

    freeze: Literal["backbone"] | None = None
    """``backbone`` trains the classifier alone, a linear probe; the rest keeps its weights, its
    statistics of norms, and computes as in evaluation.
    """

    def __post_init__(self) -> None:
        """Refuses ``freeze`` with ``head=false``, which leaves nothing to train.

        Raises:
            ValidationError: names ``freeze``.
        """
        if self.freeze and not self.head:
            problem = f"must be null where head=false leaves nothing else, got {self.freeze}"
            raise refused("freeze", problem)


class TapSpec(Checked):
    """The layers of each model that a feature loss reads.

    Module paths (``blocks.11``, ``norm``, ``layer3``) or shell-style patterns, in which ``*`` does not cross a dot
    (``blocks.*``, ``stages.[23]``), ``maps``, the layer of the last map (of a ViT its last patch tokens), ``maps@1/3``,
    that after a third of timm's blocks or stages (of a ViT as the next block's norm gives it), ``maps@stride16``, a
    CNN's last map with one position for 16 pixels a side, or ``prelogits``, the classifier's input.
    """

    student: str | list[str]
    """Paths below the student."""

    teacher: str | list[str]
    """Paths below the teacher."""

    tokens: Literal["patch", "class", "all"] = "patch"
    """Of a transformer's tokens: the patch tokens as a map (``patch``), the class token as a vector
    (``class``), or all as they are (``all``).
    """


OVER_LOGITS = (
    "BinaryKDLoss", "CWDLoss", "DISTLoss", "DKDLoss", "HardKDLoss", "KDLoss", "MLKDLoss", "NKDLoss", "PixelKDLoss",
    "RegressionKDLoss", "WSLDLoss",
)  # fmt: skip
"""kd's losses over logits, but for StandardizedLoss, where the loss inside decides."""
ALLOWED_LOSSES = {
    "MultiLabel": ("BinaryKDLoss", "CWDLoss", "DKDLoss", "NKDLoss", "PixelKDLoss", "RegressionKDLoss", "WSLDLoss"),
    "Segmentation": ("PixelKDLoss", "CWDLoss"),
    "Regression": ("RegressionKDLoss",),
}  # fmt: skip
"""By task the losses over logits that are defined for it, the likeliest first; other checks may still refuse them."""
WITHOUT_MIXING = ("MultiLabel", "Regression")
"""Tasks whose pictures can't be mixed."""
HEADLESS_WITHOUT_LOSSES = (
    "model.student.head: false needs model.distill_losses over a teacher's features, got none"
)
"""Said of a student without a classifier and without losses over features."""


def loss_refused_by(task: str, loss: str) -> bool:
    """Whether one of kd's losses over logits is not defined for a task.

    False for a loss that is not in :data:`OVER_LOGITS`, and for a task that is not in :data:`ALLOWED_LOSSES`.

    Args:
        task: the short name of its class (``Segmentation``).
        loss: likewise (``KDLoss``).
    """
    return loss in OVER_LOGITS and loss not in ALLOWED_LOSSES.get(task, OVER_LOGITS)


def teach(losses: Mapping[str, Any] | None) -> bool:
    """Whether one of ``model.distill_losses`` has a weight other than 0; False without any.

    Args:
        losses: their nodes (``class_path``, ``init_args``), by name.
    """
    weights = [(node.get("init_args") or {}).get("weight", 1) for node in (losses or {}).values()]
    return any(weights)


class LearningSettings(Checked):
    """What is learnt, by which model, from which."""

    student: StudentSettings
    """The model to train."""

    teacher: TeacherSettings | None = None
    """The model to learn from; without one the student learns from labels alone."""

    teachers: dict[str, TeacherSettings] | None = None
    """Several of them by name, in place of ``teacher``; their mean counts by each one's ``weight``.
    """

    task: Annotated[Any, AnyClass("task")] | None = None
    """What the labels mean."""

    task_loss_weight: Weight = 1.0
    """Weight of the task's own loss, >= 0. Without labels there is no such loss."""

    distill_losses: dict[str, Annotated[Any, AnyClass("loss")]] | None = None
    """Distillation losses by name, each with its weight."""

    taps: dict[str, TapSpec] | None = None
    """The layers that a feature loss of the same name reads."""

    teacher_of: dict[str, str] | None = None
    """The one of ``teachers`` that a loss of that name learns from; default: the mean of all."""

    ema_decay: Annotated[float, Range("> 0 and < 1")] | None = None
    """Keep an exponential moving average of the student, validate and export that."""

    def __post_init__(self) -> None:
        """Refuses ``teacher`` together with ``teachers``, and settings in which every loss has the weight 0, the task's own
        and each distillation loss.

        Raises:
            UserError: names the key, and what to give in its place.
        """
        if self.teacher and self.teachers:
            names = " and ".join(f"model.teachers.{name}" for name in self.teachers)
            raise UserError(
                f"model.teachers: give model.teacher or model.teachers, not both: the settings have {names}, so give "
                f"model.teachers.{next(iter(self.teachers))}.checkpoint=FILE, or model.teachers=null beside model.teacher"
            )
        losses = self.distill_losses
        if self.task_loss_weight or teach(losses):
            return
        if not losses and not self.student.head:
            raise UserError(HEADLESS_WITHOUT_LOSSES)
        instead = "model.task_loss_weight=1 learns from labels"
        if not losses:
            instead = "model.distill_losses.kd=KDLoss learns from the teacher, model.task_loss_weight=1 from labels"
        raise UserError(
            f"model.task_loss_weight: all loss weights are 0, there is nothing to learn from; {instead}"
        )


class OptimSettings(Checked):
    """How the student is optimized."""

    name: Annotated[str, TimmName("optim")] = "adamw"
    """A timm optimizer name (``adamw``, ``muon``, ...); momentum is 0.9, ``muon``'s 0.95, ``sgd``'s
    Nesterov's.
    """

    lr: Weight = 5e-4
    """Peak learning rate."""

    lr_scratch: Weight | None = None
    """That of a student with random first weights, neither inherited nor pre-trained; default:
    ``lr``.
    """

    weight_decay: Weight = 0.05
    """On weights alone; norms, biases, position embeddings and class tokens get none."""

    decay_norm_and_bias: bool = False
    """Whether these get it too."""

    layer_decay: Annotated[float, Range("> 0 and <= 1")] = 1.0
    """For fine-tuning: the rate of each layer as a share of that of the layer after it; the
    classifier has ``lr``. Common: 0.65 to 0.85. With 1 all layers have one rate.
    """

    warmup_epochs: Weight = 1.0
    """Linear warm-up, in epochs (fractions allowed); in a run that is no longer than it, a tenth of
    the steps.
    """

    schedule: Literal["cosine", "steps"] | Annotated[Any, AnyClass("schedule")] = "cosine"
    """After the warm-up a ``cosine`` to the run's end, ``steps``: a tenth of the rate at each
    milestone, or a class of your own with the method ``factor(progress)``
    (recipes/OWN_PARTS.md).
    """

    milestones: Annotated[list[float], Range("> 0")] | None = None
    """The epochs (fractions allowed) of ``steps``, ascending."""

    min_lr_ratio: Weight = 0.01
    """The cosine's end, as a share of ``lr``."""

    lr_batch: Count | None = None
    """The global batch size that ``lr`` is meant for; with another one ``lr`` grows in proportion
    (SGD) or with the square root (all others). Default: ``lr`` as it is.
    """

    zero: bool = False
    """Shard the optimizer's state over the processes (ZeroRedundancyOptimizer)."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer (``betas``, ``momentum``, ...)."""

    def __post_init__(self) -> None:
        """Refuses an unknown word as schedule, ``schedule=steps`` without milestones or milestones without it, and
        milestones that do not ascend.

        Raises:
            ValidationError: names ``schedule`` or ``milestones``.
        """
        words = ("cosine", "steps")
        is_word = isinstance(self.schedule, str | int | float | None)
        if is_word and self.schedule not in words:
            problem = (
                f"must be one of {', '.join(words)} or a class with the method factor(progress), "
                f"got '{self.schedule}'{near(str(self.schedule), words)}"
            )
            raise refused("schedule", problem)
        if (self.schedule == "steps") != bool(self.milestones):
            problem = (
                f"must go with schedule=steps alone, got {self.milestones} and {self.schedule}"
            )
            raise refused("milestones", problem)
        if self.milestones and sorted(set(self.milestones)) != list(self.milestones):
            raise refused("milestones", f"must ascend, got {self.milestones}")


class CheckpointSpec(Checked):
    """Which epoch is the best one, and how often the run is saved."""

    monitor: Text | None = None
    """The validation metric that decides (``val/acc1``); default: the task's main one."""

    mode: Literal["max", "min"] | None = None
    """Whether more (``max``) or less (``min``) of a metric of your own is better; default: as ours
    mean it.
    """

    every_n_steps: Annotated[int, Range("> 0")] | None = None
    """Save ``last.ckpt`` after so many optimizer steps, not only at an epoch's end."""

    every_n_minutes: Positive | None = None
    """Save it after so many minutes."""

    asynchronous: bool = False
    """Training continues, with a copy of its state in memory, while the file is written."""


class Augment(Checked):
    """The training views."""

    scale: Annotated[float, Range("> 0 and <= 1")] = 0.35
    """Smallest share of the picture's area that the random resized crop keeps."""

    pad: Annotated[int, Range(">= 0 and <= 4096")] = 0
    """The whole picture, resized, with so many black pixels on each side, of which a crop of the
    input's size is cut (CIFAR's padded random crop: 4), in place of the random resized crop. 0:
    none.
    """

    hflip: Share = 0.5
    """Probability of a horizontal flip."""

    vflip: Share = 0.0
    """Probability of a vertical flip."""

    rotation: Annotated[float, Range(">= 0 and <= 180")] = 0.0
    """Pictures are turned by up to so many degrees, either way; the corners are black. 0: none."""

    repeat: Annotated[int, Range(">= 1 and <= 1000")] = 1
    """So many times flips, rotation, RandAugment and colours are applied: the load of augmentation.
    """

    before_resize: bool = False
    """To the whole picture, before it is cut and resized."""

    color_jitter: Weight = 0.0
    """Strength of brightness, contrast and saturation changes; hue gets a quarter of it. 0: none.
    """

    rand_augment: Annotated[int, Range(">= 0 and <= 30")] = 0
    """Magnitude of RandAugment with two operations (timm and torchvision use 9), up to 30. 0: none.
    """

    random_erasing: Share = 0.0
    """Probability that a rectangle is erased."""

    transform: Annotated[Any, AnyClass("transform")] | None = None
    """A transform by class path with arguments, of torchvision.transforms.v2, albumentations or your
    own: each view, and its mask, goes through it in the loader, after the crop and the changes above
    and before the erasing (recipes/OWN_PARTS.md). It keeps uint8 and the size.
    """

    mixup: Weight = 0.0
    """Alpha of mixup's beta distribution. 0: none."""

    cutmix: Weight = 0.0
    """Alpha of cutmix's. 0: none. With both, each pair of pictures takes one of the two by chance.
    """

    mix_probability: Share = 1.0
    """Probability that a pair is mixed at all."""

    @property
    def mixes(self) -> bool:
        """Whether mixup or cutmix is on (``mix_probability`` is not read here)."""
        return bool(self.mixup or self.cutmix)


class TierSpec(Checked):
    """Machines that make batches for the training processes (``data.engine=ray``)."""

    address: Annotated[str, Like(r"auto|[^/]+:\d+", "must be HOST:PORT or auto")] | None = None
    """Of the Ray cluster (``HOST:6379``, or ``auto`` for the one that runs on this machine);
    default: the variable ``RAY_ADDRESS``, else a Ray of its own on this machine.
    """

    label: Annotated[str, Like(r"[^=]+=.+", "must be NAME=VALUE")] = "kd-role=data"
    """The node label of the machines that make batches."""

    queue_mb: Count = 2048
    """The most that one loader of a training process has asked for and not used yet, in MB; on the
    side of the makers and on the side of training no more than this waits.
    """

    @property
    def selector(self) -> dict[str, str]:
        """:attr:`label` (``NAME=VALUE``) as ``{NAME: VALUE}``, the form of Ray's ``label_selector``."""
        name, _, value = self.label.partition("=")
        return {name: value}


class Probe(Checked):
    """Where a student without a classifier is measured, by k nearest neighbours and a ridge probe of its features."""

    root: str | None = None
    """A folder of pictures with labels or its URL, ``root/train/<class>/*.jpg`` to look answers up
    in and ``root/val/<class>/*.jpg`` (``valid``, ``validation``, ``test``) to ask for.
    """


class DataSettings(Checked):
    """Pictures for distillation."""

    source: Annotated[Any, AnyClass("source")] | None = None
    """Where pictures and labels come from, by class name: ``FoodTagMini``, ``ImageFolder``,
    ``Food101``, ``Manifest``, ``HuggingFace``, ``SegmentationFolder``, ``Shards``, ``WebDataset``.
    """

    img_size: Size = 224
    """Side of a view in pixels, or height and width; teacher and student resize it to their own
    size on the device.
    """

    batch_size: Count | Literal["auto"] = 64
    """Pictures a step and process; ``auto`` takes the largest that fits (see ``optim.lr_batch``).
    Where a student begins with trained weights and an epoch would have fewer than 8 steps, a
    number that was not typed becomes smaller.
    """

    num_workers: Annotated[int, Range(">= 0 and <= 1024")] | Literal["auto"] = 1
    """Loader processes of each training process; 0 loads in the training process; ``auto`` tries 0,
    1, 2, ... under the real step on all processes at once, and takes the fewest that make it
    fastest.
    """

    crop_ratio: Annotated[float, Range(">= 0.1 and <= 1")] = 0.875
    """Validation crops the centre out of a picture that is scaled to ``img_size / crop_ratio``: its
    shorter side, or both of a view that is not square.
    """

    augment: Augment | None = None
    """The training views."""

    engine: Literal["torch", "device", "dali", "ray"] = "torch"
    """Who makes the training views: ``torch`` (the loader's processes), ``device`` (what follows
    crop and resize on the device), ``dali`` (NVIDIA DALI decodes too; extra ``dali``). The views
    are the same up to rounding. ``ray``: other machines make all batches (extra ``ray``), the same to the
    last bit; ``num_workers`` counts their processes for each training process, and ``auto`` takes
    all of their cores.
    """

    on_bad_image: Annotated[str, Like("stop|skip", "must be stop or skip")] = "stop"
    """A picture that can't be decoded stops the run before training (``stop``), or is left out
    (``skip``).
    """

    check: Check | None = None
    """How pictures are looked at before training, once a machine: ``all`` are decoded, ``headers``
    alone are read (a picture damaged further on ends the run when its turn comes, also under
    ``skip``), or ``off``; default: all up to 50,000 pictures of a split, headers above.
    """

    max_pixels: Count = 200_000_000
    """A picture whose header claims more is not decoded and counts as damaged."""

    val_fraction: Annotated[float, Range("> 0 and < 1")] = 0.1
    """This share of the training pictures, of each class, is held out for validation where the
    source has no validation pictures; drawn by the seed.
    """

    balance_classes: bool = False
    """Training sees all classes equally often, whatever their numbers of pictures."""

    sampler: Annotated[Any, AnyClass("sampler")] | None = None
    """Which labelled pictures an epoch shows, and how often, by a class of your own with the method
    ``draw(targets, epoch, rng)`` (recipes/OWN_PARTS.md). An epoch keeps its length.
    """

    unlabeled: Text | None = None
    """A folder or URL of pictures without labels (at any depth), to learn from the teacher's
    answers alone. Validation pictures of the source, and folders whose names say ``val`` or
    ``test``, are left out.
    """

    unlabeled_ratio: Annotated[float, Range("> 0 and <= 10000")] | None = None
    """That many unlabelled pictures to each labelled one in an epoch, with mixup or cutmix no more
    than there are; without it the unlabelled ones are all that is trained on.
    """

    tier: TierSpec | None = None
    """The machines of ``engine=ray``."""

    probe: Probe | None = None
    """Labelled pictures to measure features on, of a student without a classifier."""

    class_facts: str | None = None
    """A CSV file with a header, whose first column names a class and whose others are numbers about
    it (calories, a price): predictions show them.
    """

    def __post_init__(self) -> None:
        """Refuses ``unlabeled_ratio`` without ``unlabeled``, ``tier`` without ``engine=ray``, ``num_workers=0`` with it, and
        ``on_bad_image=skip`` where no picture is looked at.

        Raises:
            ValidationError: names the field.
        """
        if self.tier is not None and self.engine != "ray":
            problem = f"needs data.engine=ray, got {self.engine}; data.tier=null leaves it out"
            raise refused("tier", problem)
        if self.on_bad_image == "skip" and self.check in ("off", False):
            raise refused("on_bad_image", "skip needs data.check=headers or all, got off")
        if self.num_workers == 0 and self.engine == "ray":
            raise refused("num_workers", "must be auto or >= 1 with engine=ray, got 0")
        if self.unlabeled_ratio is not None and self.unlabeled is None:
            problem = f"must come with data.unlabeled, got {self.unlabeled_ratio} alone"
            raise refused("unlabeled_ratio", problem)


class MonitorSettings(Checked):
    """What is recorded below the run's ``records`` folder."""

    enabled: bool = True
    """Record at all."""

    interval_s: Annotated[float, Range(">= 0.05")] = 0.5
    """Seconds between two samples of the machine. Words in the run folder's file ``monitor``
    change this, the next two and ``nvtx`` in a running job, and turn the sampling off and on.
    """

    health_every: Annotated[int, Range(">= 0")] = 50
    """Batches between two readings of gradients, updates and agreement; 0: none."""

    activations: list[str] | None = None
    """Layers of the student whose activations are read: module paths or patterns
    (``[blocks.*.mlp.fc2, norm]``); default: a few of all kinds.
    """

    kernels_at: Count | None = None
    """Profile operations from this batch on (at least 1; later ones are past the warm-up)."""

    kernels_steps: Count = 5
    """Batches in that window."""

    kernels_memory: bool = False
    """Record allocations in it too."""

    nvtx: bool = False
    """Name the phases of a step as NVTX ranges, for Nsight."""

    communication: bool = True
    """Time DDP's all-reduces after the last gradient, by a Python hook on each bucket of gradients;
    without it they are part of ``backward``.
    """

    prometheus_port: Count | None = None
    """Serve the numbers to Prometheus on this port (extra ``prometheus``; ``scripts/monitor`` has
    Grafana's dashboard and alerts).
    """

    prometheus_host: str = "127.0.0.1"
    """Address to serve them at, on the first process of each machine; the default one is not seen
    from outside, ``0.0.0.0`` is on all interfaces.
    """

    otlp: Annotated[str, ADDRESS] | None = None
    """Send them to this OpenTelemetry collector (``http://host:4318``; extra ``otel``)."""

    cloudwatch: Annotated[str, NAMESPACE] | None = None
    """Print them in Amazon CloudWatch's embedded metric format, below this namespace: where the
    job's log goes to CloudWatch, as on SageMaker, they are metrics there.
    """

    send_every_s: Positive = 60.0
    """Seconds between two sendings."""

    price_per_hour: Weight | None = None
    """Of the whole job, in your currency: the report says what an epoch costs."""

    rules_every_s: Weight = 60.0
    """Seconds between two readings of the records by the rules; 0: only at the end."""

    actions: dict[str, Action] | None = None
    """What a rule that fires does: ``log`` (a line), ``webhook`` or ``stop`` (saves a checkpoint,
    status ``stopped: <rule>``); ``monitor.actions.Overtraining=stop`` is early stopping.
    """

    thresholds: dict[str, float | dict[str, float]] | None = None
    """Of rules, by argument: ``monitor.thresholds.Overtraining.patience=5``."""

    prices: str | None = None
    """A YAML table of instances and prices of an hour (``p4d.24xlarge: {on_demand: 37.688, spot:
    12.1}``); with ``vcpus`` those that could make batches, and with ``gpus`` train, for the
    report's advice.
    """

    instances: list[str] | None = None
    """The machines of the job, by that table: ``[4*p4d.24xlarge, 2*c5.18xlarge:spot]``."""

    webhook: str | None = None
    """http(s) address to which a rule is posted as JSON."""

    max_hours: Positive | None = None
    """The run stops after so many hours (those before a resume counted), as a rule would stop it.
    """

    budget: Positive | None = None
    """The run stops when it has cost so much at ``price_per_hour``."""


class TrainerSettings(group_of("Trainer", [*keys_in(positive_list()["trainer"]).values()])):  # type: ignore[misc]
    """Lightning's Trainer: its own arguments, and what a run says of them: other defaults, ranges, allowed words."""

    logger: Annotated[Any, AnyClass("logger")] = (
        False  # RunFolder adds metrics.csv; others by trainer.logger
    )
    enable_model_summary: bool | None = False
    num_sanity_val_steps: int | None = 0  # with a teacher the preflight reads these pictures
    use_distributed_sampler: bool = False  # the order of samples is ours: kd/data/sampler.py
    gradient_clip_val: Annotated[float, Range(">= 0")] | None = (
        1.0  # torch would turn every gradient round below 0
    )
    log_every_n_steps: Count | None = 10
    accumulate_grad_batches: Count = 1
    check_val_every_n_epoch: Count | None = 1
    precision: (
        Literal[
            "16-mixed",
            "bf16-mixed",
            "32-true",
            "bf16-true",
            "64-true",
            "transformer-engine",
            "16",
            "bf16",
            "32",
            "64",
            16,
            32,
            64,
        ]
        | None
    ) = None
    gradient_clip_algorithm: Literal["norm", "value"] | None = None
    deterministic: bool | Literal["warn"] | None = None
    num_nodes: Count = 1
    accelerator: Annotated[
        str | Annotated[Any, AnyClass("plugin")],
        Like(
            r"auto|cpu|gpu|cuda|mps|tpu|hpu|xpu|.*\..*", "must be auto, cpu, gpu, cuda, mps or tpu"
        ),
    ] = "auto"
    strategy: Annotated[
        str | Annotated[Any, AnyClass("strategy")],
        Like(
            r"auto|ddp|ddp_find_unused_parameters_(true|false)|ddp_(spawn|fork|notebook)\w*|fsdp\w*|deepspeed\w*|\w*xla\w*|"
            r".*\..*",
            "must be auto, ddp or a class path (config=fsdp, config=zero and config=deepspeed set one)",
        ),
    ] = "auto"
    devices: Annotated[
        int | str | list[int],
        Like(
            r"auto|(-1|[1-9]\d*)(\.0)?|\d+(, ?\d+)+,?|\d+,",
            "must be auto, -1 (all), a number >= 1 or a list ([0, 1])",
        ),
    ] = "auto"
    max_time: TimeLimit | None = None
    max_epochs: Annotated[int, Range(">= -1"), NOT_EMPTY] | None = None
    max_steps: Annotated[int, Range(">= -1"), NOT_EMPTY] = -1
    min_epochs: Annotated[int, Range(">= 0")] | None = None
    min_steps: Annotated[int, Range(">= 0")] | None = None
    fast_dev_run: bool | Annotated[int, Range(">= 0")] = False
    limit_train_batches: SomeBatches | None = None
    limit_val_batches: Batches | None = None
    overfit_batches: Batches = 0.0
    val_check_interval: SomeBatches | str | dict[str, int] | None = None
    plugins: (
        Annotated[
            list[Annotated[Any, AnyClass("plugin")]] | Annotated[Any, AnyClass("plugin")],
            Like(r".*\..*", "must be a class path: package.Class"),
        ]
        | None
    ) = None
    profiler: (
        Annotated[
            str | Annotated[Any, AnyClass("profiler")],
            Like(
                r"simple|advanced|pytorch|xla|.*\..*",
                "must be simple, advanced, pytorch or a class path",
            ),
        ]
        | None
    ) = None


class Settings(Checked):
    """All settings of a run."""

    recipe: Annotated[str, FOLDER] = "run"
    """Name of the run's folder below runs_dir."""

    seed: Annotated[int, Range(">= 0 and < 4294967296")] = 0
    """Seeds weights, order, views and dropout."""

    runs_dir: str = "runs"
    """Folder or URL of all runs."""

    name: Annotated[str, NAME] | None = None
    """Name of the run's folder in place of the next free number."""

    resume: str | None = None
    """A run folder to resume."""

    preflight: Literal["stop", "warn", "off", False] = "stop"
    """What a teacher near chance does; off does not measure it."""

    labels_alone: bool = False
    """Also trains the same student from the same start by labels alone, at two learning rates, and
    says what the teacher added (twice as long again; resume=RUN labels_alone=true: afterwards).
    """

    matmul_precision: Literal["highest", "high", "medium"] = "high"
    """How a GPU multiplies float32 matrices; highest is slower
    (torch.set_float32_matmul_precision).
    """

    rank_timeout_s: Annotated[float, Range("> 0 and < 1000000")] = 600.0
    """Seconds that processes wait for one that does not come to a step; then the run fails."""

    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    model: LearningSettings = field(kw_only=True)
    data: DataSettings = field(default_factory=DataSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    monitor: MonitorSettings = field(default_factory=MonitorSettings)

    def __post_init__(self) -> None:
        """Refuses settings of different groups that contradict each other: a second progress bar, an optimizer that computes
        wrongly on DeepSpeed's flat shards, a least number of epochs or steps above the largest, losses that are not defined
        for the task, ``labels_alone`` where it can't be done, CUDA graphs with accumulated gradients.

        Raises:
            UserError: names the key, and what to give in its place.
        """
        trainer: Any = self.trainer  # with Lightning's own settings
        callbacks = trainer.callbacks or []
        for node in callbacks if isinstance(callbacks, list) else [callbacks]:
            name = node["class_path"].rpartition(".")[2]
            if name.endswith("ProgressBar"):
                hides = "trainer.enable_progress_bar=false hides it"
                raise UserError(
                    f"trainer.callbacks: {name} can't be added to the run's own progress bar ({hides})"
                )
        is_deepspeed = "deepspeed.DeepSpeed" in str(trainer.strategy)
        if is_deepspeed and self.optim.name not in ("adamw", "adam", "sgd", "momentum"):
            raise UserError(
                "optim.name: must be adamw, adam, sgd or momentum with DeepSpeed, whose shards are flat (each optimizer "
                f"has its own optim.lr), got {self.optim.name}"
            )
        for kind in ("epochs", "steps"):
            least = getattr(trainer, f"min_{kind}") or 0
            most = getattr(trainer, f"max_{kind}")
            if most is not None and 0 <= most < least:
                raise UserError(
                    f"trainer.min_{kind}: {least} has no effect beyond trainer.max_{kind}={most}, which ends the run"
                )
        self._check_losses()
        if self.labels_alone:
            self._check_labels_alone()
        mode, accumulated = self.model.student.compile, trainer.accumulate_grad_batches
        if mode in ("reduce-overhead", "max-autotune") and accumulated > 1:
            raise UserError(
                f"model.student.compile: {mode} needs trainer.accumulate_grad_batches=1, got {accumulated}: its "
                "CUDA graphs write a batch's gradients over those of the batch before"
            )

    def _check_labels_alone(self) -> None:
        """Refuses ``labels_alone``, which trains the student by labels alone for comparison, where that can't be done.

        Raises:
            UserError: a student without a classifier, no distillation losses, no validation, or several machines.
        """
        trainer: Any = self.trainer  # with Lightning's own settings
        if not self.model.student.head:
            raise UserError(
                "labels_alone: a student without a classifier does not learn from labels"
            )
        if not self.model.distill_losses:
            raise UserError(
                "labels_alone: compares with a teacher's answers, and the run has no losses on them"
            )
        if trainer.limit_val_batches == 0:
            raise UserError(
                "labels_alone: compares on validation pictures, got trainer.limit_val_batches=0"
            )
        if (trainer.num_nodes or 1) > 1:
            raise UserError(
                f"labels_alone: trains on one machine, got trainer.num_nodes={trainer.num_nodes}; "
                "kd-train resume=RUN labels_alone=true does it after the run"
            )

    def _check_losses(self) -> None:
        """Refuses kd's losses over logits that are not defined for the task (:func:`loss_refused_by`), but nothing for a
        student without a classifier.

        Raises:
            UserError: names the first such loss, and the settings that would replace all of them by a loss that is defined;
                where the task allows no mixed pictures, also those that switch mixup and cutmix off.
        """
        task = class_of(self.model.task)
        refused_losses = {}
        losses = self.model.distill_losses or {}
        for name, node in losses.items():
            if loss_refused_by(task, class_of(node)):
                refused_losses[f"model.distill_losses.{name}"] = class_of(node)
        if not refused_losses or not self.model.student.head:
            return
        likeliest, *_ = ALLOWED_LOSSES[task]
        remedy = [f"{key}={likeliest}" for key in refused_losses]
        if task in WITHOUT_MIXING:
            for name in ("mixup", "cutmix"):
                if getattr(self.data.augment, name, 0):
                    remedy.append(f"data.augment.{name}=0")
        key, loss = next(iter(refused_losses.items()))
        raise UserError(f"{key}: {loss} {REFUSED_LOSSES[task]}: {' '.join(remedy)}")
