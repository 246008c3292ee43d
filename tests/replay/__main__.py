"""`python -m tests.replay TRACE RESULT.npz PLAN.json`: one JSON line; exit code 0 same, 1 wrong, 3 not replayable."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from .facts import NotReplayable, Wrong
from .replay import replay


def main() -> int:
    trace, result, plan = map(Path, sys.argv[1:])
    try:
        steps, worst = replay(trace, result, json.loads(plan.read_text()))
    except NotReplayable as why:
        print(json.dumps({"replayed": False, "why": str(why)}))
        return 3
    except Wrong as wrong:
        print(json.dumps({"replayed": True, "wrong": str(wrong)}))
        return 1
    print(json.dumps({"replayed": True, "steps": steps, "worst": worst}))
    return 0


sys.exit(main())
