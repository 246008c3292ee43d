"""The companion server: a process per host that applies the steps of the asynchronous modes to shard memory."""
