"""``python -m kd.report RUN_FOLDER``: verdict and findings of a run as JSON, for whoever watches it."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from kd.report.records import read_run
from kd.report.rules import Explained

if __name__ == "__main__":
    found = Explained(read_run(Path(sys.argv[1])))
    findings = [asdict(finding) for finding in found.findings]
    print(json.dumps({"verdict": found.verdict, "findings": findings, "failures": found.failures}))
