"""Settings of files and a command line, merged once."""

from kd.run.resolve import Word, change, check_meant, class_nodes, merged, resolve
from kd.run.trust import Trust
from tests._helpers import refuses

RECIPE = {
    "model": {
        "student": {"arch": "vit_tiny_patch16_224", "kwargs": {"depth": 3}},
        "distill_losses": {"kd": {"class_path": "KDLoss", "init_args": {"temperature": "2"}}},
    },
    "data": {"source": {"class_path": "Pictures", "init_args": {"root": "a", "val": "b"}}},
}


def test_groups_and_classes_are_merged_and_dicts_replaced() -> None:
    overlay = {
        "model": {"student": {"kwargs": {"num_heads": 2}}, "distill_losses": {"kd": "DKDLoss"}}
    }
    config = resolve([RECIPE, overlay, {"optim.kwargs.betas": [0.9, 0.99]}])
    student, losses = config["model"]["student"], config["model"]["distill_losses"]
    assert student["arch"] == "vit_tiny_patch16_224" and student["kwargs"] == {"num_heads": 2}
    assert losses["kd"]["class_path"] == "kd.losses.DKDLoss"
    assert losses["kd"]["init_args"]["temperature"] == 2.0  # the argument that both take
    assert config["optim"]["kwargs"] == {"betas": [0.9, 0.99]}
    assert RECIPE["model"]["student"]["kwargs"] == {"depth": 3}  # type: ignore[index]


def test_a_list_gets_more_and_the_last_one_gets_arguments() -> None:
    words = [{"trainer.callbacks+": "Timer"}, {"trainer.callbacks+": "EarlyStopping"}]
    config = resolve([*words, {"trainer.callbacks.monitor": "val/acc1"}])
    timer, stopping = config["trainer"]["callbacks"]
    assert timer == {"class_path": "pytorch_lightning.callbacks.Timer", "init_args": {}}
    assert stopping["init_args"] == {"monitor": "val/acc1"}


def test_values_are_typed_and_refer_to_each_other() -> None:
    config = resolve([{"data.img_size": [32, 48], "data.batch_size": "${seed}", "seed": 7}])
    assert config["data"]["img_size"] == (32, 48) and config["data"]["batch_size"] == 7
    assert resolve([{"optim.lr": "1e-3"}])["optim"]["lr"] == 0.001


def test_what_is_looked_up_names_no_class() -> None:
    with refuses(r"model.distill_losses.kd: no class '\$\{name\}'"):
        resolve([{"model.distill_losses": {"kd": "${name}"}, "name": "KDLoss"}])


def test_a_folder_may_be_called_007() -> None:
    words = [{"data.source": "ImageFolder"}, {"data.source.root": Word("007", 7)}]
    assert resolve(words)["data"]["source"]["init_args"]["root"] == "007"
    assert resolve([{"seed": Word("007", 7)}])["seed"] == 7
    assert resolve([{"runs_dir": Word("a: b", {"a": "b"})}])["runs_dir"] == "a: b"
    config = resolve(
        [{"data.class_facts": Word("", None)}, {"model.ema_decay": Word("null", None)}]
    )
    assert config["data"]["class_facts"] == "" and config["model"]["ema_decay"] is None


def test_a_class_of_ones_own_is_imported_where_it_replaces_one_with_arguments() -> None:
    overlay = {"model": {"distill_losses": {"kd": "tests.losses.test_losses.Nothing"}}}
    loss = merged([RECIPE, overlay])["model"]["distill_losses"]["kd"]
    assert loss == {"class_path": "tests.losses.test_losses.Nothing", "init_args": {}}
    with refuses("which is not among the classes"):
        resolve([RECIPE, overlay])
    with refuses("no class 'tests.losses.test_losses.Nothing'"):
        resolve([RECIPE, overlay], Trust(["tests"]))


def test_resolved_settings_change() -> None:
    config = resolve([RECIPE])
    changed = change(config, [{"model.student.kwargs.depth": 5}])
    assert changed["model"]["student"]["kwargs"] == {"depth": 5}
    assert config["model"]["student"]["kwargs"] == {"depth": 3}
    assert change(changed, [{"model.student.kwargs.depth": 3}]) == config


def test_what_other_programs_mean_is_said() -> None:
    for key, given, meant in [
        ("optim", "SGD", "optim.name=sgd"),
        ("monitor", "val/acc1", "checkpoint.monitor=val/acc1"),
        ("trainer.logger", "wandb", "trainer.logger=WandbLogger"),
    ]:
        with refuses(f"got '{given}'; did you mean '{meant}'"):
            check_meant(key, given)


def test_one_walk_finds_all_that_is_built() -> None:
    """Also a class in the arguments of one, listed or not; a class path anywhere else is plain data."""
    inner = {"class_path": "os.system", "init_args": {}}
    tree = merged([
        {"model.distill_losses": {"a": {"class_path": "StandardizedLoss", "init_args": {"loss": inner}}}},
        {"data.source": {"class_path": "mine.Pictures", "init_args": {"deep": inner, "plain": 3}}},
        {"model.student.kwargs": {"depth": inner}, "optim.kwargs": inner},
    ])  # fmt: skip
    found = [(key, kind, node["class_path"]) for key, kind, node in class_nodes(tree)]
    assert found == [
        ("model.distill_losses.a", "loss", "kd.losses.StandardizedLoss"),
        ("model.distill_losses.a.loss", "loss", "os.system"),
        ("data.source", "source", "mine.Pictures"),
        ("data.source.deep", "", "os.system"),
    ]


def test_arguments_that_are_none_are_a_mistake_at_any_depth() -> None:
    inner = {"class_path": "b", "init_args": [1]}
    tree = merged([{"data.source": {"class_path": "mine.X", "init_args": {"a": inner}}}])
    with refuses("data.source.a.init_args: must be settings"):
        list(class_nodes(tree))
