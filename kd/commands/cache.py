"""``kd-cache``: computes the teacher's answers ahead."""

from kd.config.request import Request
from kd.errors import UserError

HELP = """\
kd-cache: computes the teacher's answers to a recipe's training pictures ahead, for model.teacher.cache=on or only.

  kd-cache recipe=NAME [config=OVERLAY ...] [key=value ...]

  The same line as for kd-train: data, augmentation, seed, teacher and precision must be those of the run to come.
  model.teacher.cache_views=N   views of a picture (default 4)
  model.teacher.cache_topk=K    keep the K largest logits and the mass of the rest, instead of all
  model.teacher.cache_dir=DIR   where; default: a folder of its own in the user's cache folder

What is there already is kept: a filling that was stopped goes on. config=ddp_8gpu shares the work.
"""


def run(request: Request) -> int:
    """Fills the cache."""
    if "help" in request.flags or not request.recipe:
        print(HELP, end="")
        return 0 if "help" in request.flags else 2
    if request.rest:
        raise UserError(f"what is '{request.rest[0]}'? Settings are key=value, recipes recipe=NAME")
    args = request.parser_args()
    from kd.config.parser import KDCLI
    from kd.config.quiet import quiet_libraries
    from kd.config.train_first import teacher_checkpoint
    from kd.fill import fill

    quiet_libraries()
    teacher = teacher_checkpoint(KDCLI(args, instantiate=False).as_dict())
    if teacher:
        args.append(f"--model.teacher.checkpoint={teacher}")
    cli = KDCLI(args)
    return fill(cli.model, cli.datamodule, cli.trainer)
