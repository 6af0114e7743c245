"""The guide for those who come from SageMaker Debugger and Profiler: what each row names is there."""

import re
from dataclasses import fields

import kd
from kd.commands.report import HELP
from kd.report.records import RunRecords
from kd.report.rules import RULES
from kd.settings import MonitorSettings
from kd.storage.control_file import parse
from tests._helpers import ROOT

TEXT = (ROOT / "kd" / "monitor" / "README.md").read_text()
GUIDE = TEXT[TEXT.index("## Coming from SageMaker Debugger") :]
ROWS = [line.split("|")[1:-1] for line in GUIDE.splitlines() if line.startswith("| ")][1:]


def test_each_rule_of_debuggers_has_one_of_the_same_name() -> None:
    listed = [row[0] for row in ROWS if "rules" in row[0].partition(" ")[0] + row[0]]
    names = {
        name.removesuffix("Rule")
        for row in listed
        for name in re.findall(r"\b[A-Z]\w+[a-z]\w*\b", row.partition("rules")[2])
    }
    assert len(names) >= 25
    assert names <= set(RULES), names - set(RULES)


def test_each_setting_and_word_of_the_guide_is_taken() -> None:
    known = {field.name for field in fields(MonitorSettings)}
    cells = " ".join(row[1] for row in ROWS)
    named = set(re.findall(r"`(\w+)=", cells)) | set(re.findall(r", (\w+)=(?:True|ARN)", cells))
    assert {"interval_s", "cloudwatch", "kernels_at", "prometheus_port", "otlp"} <= named
    assert named <= known, named - known
    kd.Monitor(
        "runs/mine",
        interval_s=0.5,
        thresholds={"BatchSize.low": 60},
        actions={"Overtraining": "stop"},
        cloudwatch="NAMESPACE",
        kernels_at=20,
    )
    for words in re.findall(r"--set ([\w=. ]+)`", GUIDE):
        assert parse(words)
    for flag in re.findall(r"kd-report \w+ (--\w+)", GUIDE):
        assert flag in HELP, flag
    assert "health" in RunRecords.__dataclass_fields__
    with kd.annotate("my part"):
        pass


def test_the_guide_is_found_from_the_first_page() -> None:
    assert "kd/monitor/README.md" in (ROOT / "README.md").read_text()
    for tool in ("PyTorch Lightning", "HTA", "W&B"):
        assert tool in GUIDE
