"""What a job reports to the outside: MLflow and the progress line.

The way of a record to MLflow, and which process owns what:

    training loop -> MLflowCallback -> spool file -> sender process -> MLflow
    (worker process, training thread)  (local disk)  (one per host, and the chief's; started by the worker, niced)

- The worker only appends lines to a local file, so no server can stall, slow or kill training. It has no thread for
  tracking, does not import mlflow and holds nothing in memory. It owns the spool file until `end`, the sender owns
  the status file beside it. (It is no child
  of the worker: launchers kill those. A process, not a thread: importing mlflow and drawing plots would hold the
  interpreter lock for seconds, and a process can still deliver what a killed worker left.)
- The chief's sender finds the job's run by the tag `gba_hvd.job_id` or creates it; other hosts' senders only find it.
  Later chiefs take over by the tag `gba_hvd.chief`: the latest one sets the status, earlier ones only deliver.
- A job that resumes from a checkpoint has its name, so it continues its run; what the run holds of later steps is then
  superseded, see `recovery_records`. Of checkpoints the run has metrics and pointers (`checkpoints.json`), no rows.
- Order in which things become visible: the run (RUNNING), parameters, metrics, tags; `events.jsonl` every few seconds;
  at the end the last metrics, events, the final status, then the plots, `report.html` and the run's description, then
  the model, and the report again with it.
- A model (`log_model`) is written by the chief beside the spool, and logged after the run has ended: what fails then
  leaves the spool with the model, for `gba-hvd mlflow send`.

What each crash leaves behind:

- Worker killed: complete lines are in the spool; its sender delivers them, within 30 s, and marks the run FAILED if
  that worker still reported for it. A survivor that becomes chief sets it RUNNING again, in the same run.
- Sender killed between a batch and its status line: the batch is sent again. A point has the time of its writing, and
  MLflow's SQL stores keep a point (key, step, time, value) once; with the legacy file store the batch is there twice.
- Server down: the spool grows, on disk (up to a limit, then counted as lost). At the end it stays if it cannot be sent,
  and `gba-hvd mlflow send` sends it later, as the next job of that folder says too, into the same run.
- Host gone: the run stays RUNNING until another worker ends it; the tag `gba_hvd.heartbeat` shows since when.
"""

from __future__ import annotations

from gba_hvd.tracking.mlflow_callback import MLflowCallback
from gba_hvd.tracking.progress_line import ProgressLine

__all__ = ["MLflowCallback", "ProgressLine"]
