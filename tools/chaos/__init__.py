"""`gba-hvd chaos`: random schedules of faults against a small real job, and an oracle that says what did not hold.

plan     seed -> what job, which faults at which steps           workload  the training script of the job
job      launcher, processes, notes of the workers               outside   faults that come from outside the job
oracle   what must hold, from recorded facts                     run       one schedule, and many that resume
summary  a table by kind of fault                                command   the command line
"""

from .command import add_parser

__all__ = ["add_parser"]
