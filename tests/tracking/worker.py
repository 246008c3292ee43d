"""A process that owns an MLflowCallback and does what it is asked to, one JSON line at a time."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from pathlib import Path

# Without torch, which tracking does not need and the tests would wait for.
package = types.ModuleType("gba_hvd")
package.__path__ = [str(Path(__file__).resolve().parents[2] / "gba_hvd")]
sys.modules["gba_hvd"] = package

from gba_hvd.callbacks import Event, Job, StepRecord  # noqa: E402
from gba_hvd.tracking import MLflowCallback  # noqa: E402


def main() -> None:
    callback = MLflowCallback(**json.loads(sys.argv[1]))
    answers = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        kinds = {"on_job": Job, "on_step": StepRecord, "on_event": Event}
        if method in kinds:
            arguments = [kinds[method](**arguments[0])]
        answer = getattr(callback, method)(*arguments)
        if method == "state_dict" or answer is None or dataclasses.is_dataclass(answer):
            print(json.dumps(answer), file=answers, flush=True)


main()
