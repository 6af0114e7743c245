"""What comes from elsewhere passes one gate: every reader in kd/ is listed here, with what makes it safe.

A reader is a call that turns a file, a bucket or a page into objects, or a name into code. A new one, or a new library,
fails these tests until it goes by :mod:`kd.storage.elsewhere` (sizes, names, places) or :mod:`kd.run.trust` (code), or
until a line here says why it need not.
"""

import ast
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from lightning_fabric.plugins import CheckpointIO
from pytorch_lightning import LightningDataModule, LightningModule

from kd.errors import UserError
from scripts.house import tree_of
from tests._helpers import ROOT

FILES = sorted((ROOT / "kd").rglob("*.py"))
READERS = {
    "json": {"load", "loads", "JSONDecoder"}, "yaml": {"load", "load_all", "safe_load", "safe_load_all", "full_load",
    "unsafe_load", "compose", "parse", "scan"}, "pickle": {"load", "loads", "Unpickler"}, "marshal": {"load", "loads"},
    "shelve": {"open"}, "sqlite3": {"connect"}, "tarfile": {"open", "TarFile"}, "zipfile": {"ZipFile"},
    "gzip": {"open", "GzipFile"}, "bz2": {"open"}, "lzma": {"open"}, "shutil": {"unpack_archive"},
    "configparser": {"ConfigParser"}, "tomllib": {"load", "loads"}, "plistlib": {"load", "loads"}, "runpy": {"*"},
    "xml": {"*"}, "urllib.request": {"urlopen", "urlretrieve"}, "importlib": {"import_module"}, "fsspec": {"*"},
    "importlib.util": {"spec_from_file_location", "module_from_spec"}, "PIL": {"Image.open"}, "PIL.Image": {"open"},
    "torch": {"load", "hub.load", "jit.load", "export.load", "package.PackageImporter", "from_file"},
    "safetensors": {"safe_open", "deserialize"}, "safetensors.torch": {"load", "load_file", "load_model"},
    "numpy": {"load", "loadtxt", "genfromtxt", "fromfile", "memmap"}, "onnx": {"load", "load_model"},
    "onnxruntime": {"InferenceSession"}, "openvino": {"Core"}, "optuna": {"load_study"},
    "csv": {"reader", "DictReader"},
    "timm": {"create_model"}, "webdataset": {"*"}, "requests": {"*"}, "httpx": {"*"}, "pandas": {"*"}, "joblib": {"*"},
    "jinja2": {"FileSystemLoader", "PackageLoader"},
    "huggingface_hub": {"*"}, "h5py": {"*"}, "pyarrow": {"*"}, "lmdb": {"*"}, "cloudpickle": {"*"}, "dill": {"*"},
}  # fmt: skip
METHODS = {"from_pretrained", "read_model", "cat_file", "get_file", "InferenceSession", "load_from_checkpoint",
           "load_checkpoint",
           "resume_start", "pl_load", "_load_state", "load_hparams_from_yaml", "load_hparams_from_tags_csv",
           "get_image_processor_dict", "download_file", "load_state_dict_from_url", "extractall", "urlopen",
           "unsafe_load", "load_program", "Interpreter", "MLModel", "load_spec", "for_model", "from_config",
           "cached_file", "load_dataset", "load_dataset_builder", "get_dataset_split_names", "load_from_disk",
           "get_dataset_config_names", "TraceAnalysis", "create_study", "load_study", "JournalStorage", "read_table",
           "ParquetFile", "ParquetDataset"}  # fmt: skip
BUILTIN = {"eval", "exec", "__import__", "compile"}

WEIGHTS = "tensors and plain values alone: safetensors, or weights_only"
NAMES = "the names are ours, or kd.run.trust has passed them"
WRITES = "it writes"
BYTES = (
    "bytes, whose size and place kd.storage.elsewhere.inside, the index or the listing has bounded"
)
XML = "a text of bounded size, refused if it declares entities"
ROWS = "text by lines, each checked by its reader"
BUILT = "arguments from files have passed kd.models.arguments.check_arguments"
PAGES = "plain numbers, of a file that the gate has opened"
COMES = "a program that comes with kd"
OURS = "what this process has written itself"
ALLOWED = {  # who reads what elsewhere than in the gate, and why that is safe
    "kd.storage.elsewhere": {"json.loads": "the gate", "yaml.load": "the gate",
                             "zipfile.ZipFile": "the names and methods of records"},
    "kd.storage.archives": {"tarfile.TarFile": "bounded there, the one place",
                            "tarfile.open": "bounded there, the one place"},
    "kd.callbacks.loggers": {"importlib.import_module": NAMES},
    "kd.muon": {"importlib.util.module_from_spec": "timm's own module"},
    "kd.monitor.watch": {"urllib.request.urlopen": "it posts to the user's address; the answer is not read"},
    "kd.storage.tensors": {"torch.load": WEIGHTS},
    "kd.storage.checkpoints": {"torch.load": "weights_only, without the tensors' data",
                               "zipfile.ZipFile": "checksums of a checkpoint; nothing is unpacked"},
    "kd.command_line": {"importlib.import_module": NAMES},
    "kd.commands.launch": {"importlib.import_module": NAMES},
    "kd.commands.train": {"importlib.import_module": NAMES},
    "kd.run.train_first": {"safetensors.safe_open": "a file that ships with its recipe"},
    "kd.run.trust": {"importlib.import_module": "the gate"},
    "kd.data.pack": {"tarfile.open": WRITES, "tarfile.TarFile": "the type of a shard that is written"},
    "kd.data.class_facts": {"csv.DictReader": ROWS},
    "kd.data.sources": {"importlib.import_module": NAMES},
    "kd.data.sources.arrays": {"numpy.memmap": PAGES},
    "kd.data.sources.shards": {"numpy.memmap": PAGES},
    "kd.data.sources.manifest": {"csv.reader": ROWS},
    "kd.data.datamodule": {"importlib.import_module": NAMES},
    "kd.storage.decoding": {"PIL.Image.open": "pictures, their kinds and sizes bounded there, the one place"},
    "kd.ship.export": {"importlib.import_module": NAMES},
    "kd.ship.export.formats.backbone": {"safetensors.torch.load_file": WEIGHTS, "timm.create_model": BUILT},
    "kd.ship.export.base": {"importlib.import_module": NAMES},
    "kd.data.sources.foodtag": {
        "importlib.util.module_from_spec": COMES,
        "importlib.util.spec_from_file_location": COMES,
    },
    "kd.ship.export.formats.executorch": {"runtime.Runtime.get().load_program": OURS},
    "kd.ship.export.formats.litert": {"litert.Interpreter": OURS},
    "kd.ship.export.formats.hub": {"timm.create_model": OURS},
    "kd.ship.export.fp16": {"runtime.InferenceSession": OURS},
    "kd.ship.export.formats.onnx": {"onnx.load": OURS,
                            "runtime.InferenceSession": "a graph without code, checked at the start"},
    "kd.ship.export.formats.openvino": {"openvino.Core": OURS},
    "kd.ship.export.formats.sagemaker": {"tarfile.open": WRITES},
    "kd.ship.export.student": {"safetensors.safe_open": WEIGHTS, "safetensors.torch.load_file": WEIGHTS,
                          "timm.create_model": BUILT},
    "kd.ship.export.formats.torch_export": {"torch.export.load": "exported here, or by --trust: kd-latency looks"},
    "kd.fleet.aws": {"importlib.import_module": NAMES},
    "kd.fleet.jobs.places.sagemaker": {"aws_session().client('s3').download_file": OURS},
    "kd.models.recognise": {"timm.create_model": BUILT, "json.loads": "timm_tensors.json, a file of ours"},
    "kd.models.build": {"timm.create_model": BUILT, "kd.models.loading.load_checkpoint": "kd.models.weights"},
    "kd.data.sources.hugging_face": dict.fromkeys(
        ("datasets.load_dataset_builder", "datasets.get_dataset_split_names"),
        "a folder's files and their reader, which kd has chosen; of the hub the format is one of kd's list",
    ),
    "kd.storage.parquet_files": dict.fromkeys(
        ("pyarrow.ArrowException", "pyarrow.parquet", "pyarrow.parquet.read_metadata", "pyarrow.parquet.ParquetFile",
         "pyarrow.compute", "pyarrow.compute.binary_length", "pyarrow.compute.max"), "sizes, a schema, dictionaries of texts"
    ),
    "kd.fleet.tuning.study": dict.fromkeys(
        ("optuna.storages.JournalStorage", "optuna.create_study"), "a journal that _check_journal has read"
    ),
    "kd.models.hub": {"huggingface_hub.try_to_load_from_cache": "whether a file is there: no content is read"},
    "kd.storage.hub": dict.fromkeys(
        (
            "huggingface_hub.constants",
            "huggingface_hub.constants.ENDPOINT",
            "huggingface_hub.constants.HF_HUB_OFFLINE",
            "huggingface_hub.get_session",
            "huggingface_hub.get_session().head",
            "huggingface_hub.HfApi",
            "huggingface_hub.HfApi().dataset_info",
            "huggingface_hub.errors.HFValidationError",
            "huggingface_hub.errors.RepositoryNotFoundError",
        ),
        "whether the hub answers, and has a data set of a name: what it says of the set is not used",
    ),
    "kd.models.hugging_face": {
        "transformers.AutoConfig.for_model": BUILT,
        "kind.from_config": BUILT,
        "kind.from_pretrained": "weights for a configuration that kd has made; trust_remote_code=False",
        "transformers.utils.cached_file": "the path of a file: no content is read",
    },
    "kd.storage.weights_files": {"safetensors.safe_open": WEIGHTS},
    "kd.models.weights": {"safetensors.safe_open": WEIGHTS,
                          "safetensors.torch.load_file": WEIGHTS},
    "kd.storage.objects": {"files.cat_file": BYTES, "files.get_file": BYTES, 
                           "fsspec.core": "one URL, of no list of URLs",
                        "fsspec.core.url_to_fs": "one URL, of no list of URLs",
                        "fsspec.utils.get_protocol": "reads the URL alone"},
    "kd.strategies.fsdp": {"self.checkpoint_io.load_checkpoint": "kd.strategies.checkpoint_files"},
    "kd.report.records": {"csv.DictReader": ROWS},
    "kd.teachers.answers_file": {"csv.DictReader": ROWS, "safetensors.safe_open": WEIGHTS,
                                 "pyarrow.parquet": "the user's own file of answers",
                                 "pyarrow.parquet.ParquetFile": "numbers and texts, each checked by its reader"},
    "kd.strategies.ddp": {"importlib.import_module": NAMES},
    "kd.callbacks.metrics_csv": {"csv.DictReader": ROWS, "csv.reader": ROWS},
    "kd.config.parts": dict.fromkeys(("eval", "json.loads"), "types and names in parts.json, a file of ours"),
    "kd.config.suggest": {"json.loads": "words.json, a file of ours"},
    "kd": {"importlib.import_module": NAMES},
}  # fmt: skip
LIBRARIES = {
    "jinja2",  # fills in the card's template, which is ours
    "PIL", "boto3", "botocore", "datasets", "deepspeed", "filelock", "fsspec", "google", "huggingface_hub",
    "lightning_fabric", "lightning_utilities", "mlflow", "numpy", "nvidia", "omegaconf", "onnx", "onnxruntime",
    "opentelemetry", "openvino", "optuna", "prometheus_client", "psutil", "pyarrow", "pydantic", "pydantic_core", "pynvml",
    "pytorch_lightning", "ray", "rich", "safetensors", "scipy", "starlette", "timm", "torch", "torchcodec", "torchmetrics",
    "torchvision", "tqdm", "transformers", "typing_extensions", "uvicorn", "wandb", "yaml",
}  # fmt: skip
"""All that kd/ imports beside the standard library."""


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def calls(file: Path) -> Iterator[tuple[str, str]]:
    """``(function, reader)`` of each call that reads, under the names of its imports."""
    tree = tree_of(file)
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0]
                for a in node.names
            }
        elif isinstance(node, ast.ImportFrom) and node.module:
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}

    def walk(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            inside = (
                child.name
                if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
                else function
            )
            if isinstance(child, (ast.Attribute, ast.Name)) and isinstance(child.ctx, ast.Load):
                dotted = ast.unparse(child)
                first, _, rest = dotted.partition(".")
                full = f"{known.get(first, first)}.{rest}".rstrip(".")
                if reads(full):
                    yield inside, full
            yield from walk(child, inside)

    yield from walk(tree, "")


def reads(full: str) -> bool:
    if full in BUILTIN or ("." in full and full.rpartition(".")[2] in METHODS):
        return True
    for module, names in READERS.items():
        if full.startswith(f"{module}.") and (
            "*" in names or full.removeprefix(f"{module}.") in names
        ):
            return True
    return False


@cache
def found() -> dict[str, set[str]]:
    places: dict[str, set[str]] = {}
    for file in FILES:
        for _, reader in calls(file):
            places.setdefault(name_of(file), set()).add(reader)
    return places


def test_every_reader_passes_the_gate() -> None:
    new = {name: readers - ALLOWED.get(name, {}).keys() for name, readers in found().items()}
    assert not {name: readers for name, readers in new.items() if readers}


def test_the_list_names_no_reader_that_is_gone() -> None:
    there = found()
    gone = {name: reasons.keys() - there.get(name, set()) for name, reasons in ALLOWED.items()}
    assert not {name: readers for name, readers in gone.items() if readers}


def libraries() -> set[str]:
    names: set[str] = set()
    for file in FILES:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - {"kd"}


def test_a_new_library_is_looked_at() -> None:
    """It may read files in ways that no list above knows: add it here once its readers are in :data:`READERS`."""
    assert libraries() <= LIBRARIES


def test_no_reader_of_a_base_class_is_called() -> None:
    """What Lightning's methods of these names read from a file is not listed anywhere."""
    assert not {
        (name, reader)
        for name, readers in found().items()
        for reader in readers
        if "super()" in reader
    }


def test_no_class_inherits_a_reader_of_lightning() -> None:
    """``load_from_checkpoint`` reads arguments, and names of classes, from the file: each class of kd has its own."""
    kinds = {LightningModule, LightningDataModule, CheckpointIO}
    for file in FILES:
        if "pytorch_lightning" in file.read_text() or "kd.module" in file.read_text():
            with suppress(ImportError, UserError):  # an extra that is not installed
                import_module(name_of(file))
    waiting, inherited = list(kinds), set[str]()
    while waiting:
        for made in waiting.pop().__subclasses__():
            waiting.append(made)
            for method in ("load_from_checkpoint", "load_checkpoint"):
                reader = getattr(made, method, None)
                if (
                    made.__module__.startswith("kd.")
                    and reader
                    and not reader.__module__.startswith("kd.")
                ):
                    inherited.add(f"{made.__module__}.{made.__qualname__}.{method}")
    assert inherited == {
        "kd.run.fill.Fill.load_from_checkpoint"
    }  # the loop of kd-cache, which has no checkpoints


READS = [
    "import json as j\nj.loads(x)", "from yaml import safe_load\nsafe_load(x)", "import torch\ntorch.load(f)",
    "from safetensors import safe_open as o\no(f)", "import numpy as np\nnp.load(f)", "eval(x)", "load = json.loads",
    "Model.from_pretrained(x)", "from importlib import import_module\nimport_module(x)",
    "import pickle\npickle.loads(x)",
    "from xml.etree import ElementTree\nElementTree.parse(f)", "files.cat_file(x)",
    "def f():\n    import json\n    json.load(x)",
]  # fmt: skip


@pytest.mark.parametrize("text", READS)
def test_a_reader_is_seen_under_any_name(text: str, tmp_path: Path) -> None:
    file = tmp_path / "kd" / "x.py"
    file.parent.mkdir()
    file.write_text(text)
    assert list(calls(file))


def test_transformers_is_told_each_time_to_run_no_code() -> None:
    makers = {"from_pretrained", "from_config"}
    told = []
    for file in FILES:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Call):
                parts = [node.func, *node.args[:1]]  # also partial(kind.from_config, ...)
                if any(isinstance(part, ast.Attribute) and part.attr in makers for part in parts):
                    told.append("trust_remote_code=False" in ast.unparse(node))
    assert told and all(told)


def test_torch_loads_weights_alone() -> None:
    for file, node in ((f, node) for f in FILES for node in ast.walk(tree_of(f))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            assert any(
                w.arg == "weights_only" and ast.unparse(w.value) == "True" for w in node.keywords
            ), file
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("from_pretrained"):
            assert any(
                w.arg == "trust_remote_code" and ast.unparse(w.value) == "False"
                for w in node.keywords
            ), file
