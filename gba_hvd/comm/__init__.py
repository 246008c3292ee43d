"""Horovod's world of a job: collectives, the launcher's slots, keys, and bytes on the wire."""
