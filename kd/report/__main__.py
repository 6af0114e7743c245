"""``python -m kd.report RUN_FOLDER``: verdict and findings of a run as JSON, for whoever watches it."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from kd.report.facts import Facts
from kd.report.records import read_run
from kd.report.rules import findings_of
from kd.report.verdict import verdict_of

if __name__ == "__main__":
    facts = Facts(read_run(Path(sys.argv[1])))
    print(json.dumps({"verdict": verdict_of(facts), "findings": [asdict(f) for f in findings_of(facts)]}))
