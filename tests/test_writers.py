"""What opens, makes, changes or removes a file passes one door: every such call outside kd/storage is listed here.

:mod:`kd.storage.elsewhere` opens files to read, :mod:`kd.storage.writing` writes. A new call elsewhere fails these
tests until it goes by them, or until a line here says why it need not. ``tests/test_readers.py`` is the same for what
turns files into objects, ``tests/test_places.py`` tries links and pipes in the place of every file of a run.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from scripts.house import tree_of
from tests._helpers import ROOT

FILES = [
    file for file in sorted((ROOT / "kd").rglob("*.py")) if file.parent != ROOT / "kd" / "storage"
]
READS = {
    "open",
    "read_text",
    "read_bytes",
    "fromfile",
    "memmap",
    "mmap",
    "safe_open",
    "load_file",
    "fdopen",
    "from_file",
}
WRITES = {
    "write_text", "write_bytes", "mkdir", "makedirs", "touch", "symlink_to", "hardlink_to", "link", "symlink", "mkfifo",
    "save", "savez", "savez_compressed", "save_file", "save_model", "savefig", "savetxt", "tofile", "to_csv",
    "save_pretrained", "unlink", "rmdir", "rmtree", "removedirs", "rename", "renames", "replace", "move", "copyfile",
    "copy2", "copytree", "truncate", "ftruncate", "chmod", "export_chrome_trace", "_dump_snapshot", "FileHandler",
    "mkdtemp", "mkstemp", "NamedTemporaryFile", "pipe_file", "put_file",
}  # fmt: skip
"""Names of functions and methods that open a file, or make, change or remove one."""
DOORS = {
    "write_text",
    "write_bytes",
    "move",
}  # functions of kd.storage.writing: by their bare names

SYSTEM = "the system's own files"
OURS = "files of kd's package"
DOOR = "its file has passed kd.storage.elsewhere.regular, or a file_for or folder_for of kd.storage.writing"
STREAM = "writes to an open stream, or through kd.storage.writing.write_whole"
NO_FILE = "no file of this machine: a run, a page, an exporter, a picture by its number"
NEW = "in a new folder of this process, made by kd.ship.export.gate or tempfile"
RUNS = "the folder of runs, above the run's; mkdir decides which of two runs gets a number"
CACHE = "the user's cache folder"
USERS = "the file or folder that the user names on the command line"
STORE = "an object store"
OWN_FILES = "opened without links, and refused unless regular and of one name (_plain_file)"
JOB = "a folder that kd-launch or kd-tune has just made, or the container's"
PAGES = "it maps a file to read"
ALLOWED = {  # module -> call -> why it need not go by a door
    "kd.callbacks.export": {"self.save": STREAM},
    "kd.callbacks.fidelity": {"small.save": STREAM},
    "kd.callbacks.last_checkpoint": {"self.save": STREAM},
    "kd.callbacks.preemption": {"self._last.save": STREAM},
    "kd.callbacks.run_folder": {
        "fresh.replace": RUNS,
        "fresh.symlink_to": RUNS,
        "path.mkdir": RUNS,
        "path.rmdir": RUNS,
        "self.parent.mkdir": RUNS,
    },
    "kd.cli": {"file.read_text": OURS},
    "kd.clock": {"Path('/proc/self/stat').read_text": SYSTEM, "os.open": SYSTEM},
    "kd.commands.report": {"webbrowser.open": NO_FILE},
    "kd.data.pack": {"files.makedirs": STORE, "files.open": STORE, "files.pipe_file": STORE, "tarfile.open": STREAM},
    "kd.data.pictures": {"Image.fromarray(pixels.contiguous().numpy()).save": STREAM},
    "kd.data.scan": {"lock.parent.mkdir": CACHE, "split.open": NO_FILE},
    "kd.data.sources.files": {"self.open": NO_FILE},
    "kd.data.sources.food101": {"root.mkdir": USERS},
    "kd.data.sources.places": {"Path(file).unlink": CACHE},
    "kd.data.sources.arrays": {"np.memmap": PAGES},
    "kd.data.sources.shards": {"np.memmap": PAGES},
    "kd.data.sources.webdataset": {"file.parent.mkdir": CACHE},
    "kd.data.tier.cluster": {"shutil.rmtree": NEW},
    "kd.fit_to_machine.memory": {"limit_file.read_text": SYSTEM, "(cgroup / 'memory.current').read_text": SYSTEM},
    "kd.fleet.jobs.places.sagemaker": {"part.rename": JOB},
    "kd.fleet.jobs.target": {
        "(folder / name).touch": JOB,
        "(folder / name).write_text": JOB,
        "folder.mkdir": JOB,
        "shutil.rmtree": JOB,
    },
    "kd.launch.ray_nodes": {"tempfile.NamedTemporaryFile": NEW, "self.log.unlink": NEW},
    "kd.fleet.sizing.timing": {"folder.mkdir": NEW},
    "kd.fleet.tuning.study": {"file.truncate": DOOR},
    "kd.launch.sagemaker": {
        "(folder / 'output' / 'failure').open": JOB,
        "(folder / 'output').mkdir": JOB,
        "shutil.copytree": JOB,
    },
    "kd.machine": {
        "Path('/proc/cpuinfo').open": SYSTEM,
        "file.read_text": SYSTEM,
        "quota.read_text": SYSTEM,
        "status.read_text": SYSTEM,
        "tempfile.mkdtemp": NEW,
    },
    "kd.models.hugging_face": {"model.save_pretrained": DOOR},
    "kd.models.weights": {"load_file": DOOR, "safe_open": DOOR},
    "kd.monitor.kernels": {"self._profile.export_chrome_trace": DOOR, "torch.cuda.memory._dump_snapshot": DOOR},
    "kd.monitor.numbers": {"self.open": NO_FILE},
    "kd.monitor.prometheus": {"self.open": NO_FILE},
    "kd.monitor.results": {"self._metrics.save": DOOR},
    "kd.monitor.system": {
        "Path(f'/proc/{pid}/task/{tid}/comm').read_text": SYSTEM,
        "Path(task.path, 'schedstat').read_text": SYSTEM,
    },
    "kd.models.recognise": {"FILE.read_text": OURS},
    "kd.report.card": {"TEMPLATE.read_text": OURS},
    "kd.report.html": {"PAGE.read_text": OURS},
    "kd.config.parts": {"FILE.read_text": OURS},
    "kd.config.suggest": {"FILE.read_text": OURS, "file.read_text": OURS},
    "kd.run.measure": {"options.out.write_text": USERS},
    "kd.run.paths": {"file.read_text": OURS},
    "kd.run.streams": {"os.open": SYSTEM},
    "kd.run.train_first": {"run.rename": CACHE, "safe_open": DOOR, "shutil.rmtree": CACHE},
    "kd.run.trust": {"note.parent.chmod": CACHE},
    "kd.ship.export.formats.cascade": {"program.save": NEW},
    "kd.ship.export.formats.backbone": {"load_file": DOOR, "save": STREAM},
    "kd.ship.export.base": {"(_FOLDER / f'{name}.py').read_text": OURS},
    "kd.ship.export.formats.coreml": {"model.save": NEW},
    "kd.ship.export.gate": {"kind.open": NO_FILE, "mkdtemp": NEW, "part.chmod": NEW, "shutil.rmtree": NEW},
    "kd.ship.export.formats.onnx": {"onnx_program(job).save": NEW, "onnx.save": NEW},
    "kd.ship.export.formats.openvino": {"openvino.save_model": NEW},
    "kd.ship.export.formats.sagemaker": {"Triton().open": NO_FILE, "tarfile.open": NEW},
    "kd.ship.export.stopwatch": {"find_format(to).open": NO_FILE},
    "kd.ship.export.student": {"load_file": DOOR, "safe_open": DOOR, "save": STREAM},
    "kd.ship.export.formats.torch_export": {"torch.export.save": NEW},
    "kd.ship.export.formats.triton": {"Onnx().open": NO_FILE, "self.open": NO_FILE},
    "kd.ship.predict": {"np.savez": STREAM},
    "kd.ship.serving.answers": {"Image.fromarray(ids_HW).save": STREAM},
    "kd.ship.serving.app": {"PAGE.read_text": OURS},
    "kd.strategies.checkpoint_files": {"torch.save": STREAM},
    "kd.teachers.answers_file": {"safe_open": USERS},
    "kd.teachers.answer_store": {"files.makedirs": STORE, "files.pipe_file": STORE,
                                 "os.open": OWN_FILES, "os.truncate": OWN_FILES},
    "kd.teachers.chat": {"Image.fromarray(view).save": STREAM},
}  # fmt: skip


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def calls(file: Path) -> Iterator[str]:
    """The functions of a file's calls that open or write, as they are written."""
    for node in ast.walk(tree_of(file)):
        if not isinstance(node, ast.Call):
            continue
        whole = ast.unparse(node.func)
        name = whole.rpartition(".")[2]
        if name not in READS | WRITES or (whole in DOORS):
            continue
        of_path = (
            len(node.args) == 1 and not node.keywords
        )  # text has two arguments, a dataclass names its fields
        if name == "replace" and not of_path and not whole.startswith("os."):
            continue
        yield whole if len(whole) < 50 else f"...{whole[-40:]}"


@cache
def listed() -> dict[str, set[str]]:
    found = {name_of(file): set(calls(file)) for file in FILES}
    return {name: each for name, each in found.items() if each}


def test_every_call_that_opens_or_writes_passes_a_door() -> None:
    new = {name: each - ALLOWED.get(name, {}).keys() for name, each in listed().items()}
    assert not {name: each for name, each in new.items() if each}


def test_the_list_names_no_call_that_is_gone() -> None:
    gone = {name: reasons.keys() - listed().get(name, set()) for name, reasons in ALLOWED.items()}
    assert not {name: each for name, each in gone.items() if each}


OPENS = [
    "open(x)", "Path(x).open('w')", "x.write_text('')", "os.replace(a, b)", "part.replace(file)", "torch.save(a, b)",
    "import io\nio.open(x)", "np.memmap(x)", "x.parent.mkdir()", "safe_open(x, 'pt')", "image.save(file)",
]  # fmt: skip


@pytest.mark.parametrize("text", OPENS)
def test_a_call_is_seen_in_any_way_it_is_written(text: str, tmp_path: Path) -> None:
    file = tmp_path / "kd" / "x.py"
    file.parent.mkdir()
    file.write_text(text)
    assert list(calls(file))


@pytest.mark.parametrize(
    "text", ["text.replace('a', 'b')", "replace(spec, lr=1)", "write_text(file, 'x')"]
)
def test_what_is_no_file_is_not_listed(text: str, tmp_path: Path) -> None:
    file = tmp_path / "kd" / "x.py"
    file.parent.mkdir()
    file.write_text(text)
    assert not list(calls(file))
