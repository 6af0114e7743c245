"""``python -m kd.report RUN_FOLDER``: verdict and findings of a run as JSON, for the run itself while it trains.

It also writes the run's page, which reloads itself.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from kd.report.html import write_report
from kd.report.records import read_run
from kd.report.rules import Explained
from kd.report.sections import status

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    found = Explained(read_run(folder))
    findings = [asdict(finding) for finding in found.findings]
    print(json.dumps({"verdict": found.verdict, "findings": findings, "failures": found.failures}))
    sys.stdout.flush()
    if status(read_run(folder)) == "running":  # it may have ended meanwhile: its last page stays
        write_report(found, folder / "report.html")
