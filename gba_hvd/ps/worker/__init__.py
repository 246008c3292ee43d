"""A worker's part towards the servers: lease, pull, push. Within an epoch it waits for no other worker.

    lease -> (rows of other hosts are pulled) -> newest dense values -> the user's forward and backward -> push
    lease_prefetch    remote_rows                dense_values                         push_encoder, push_window

The rows of this host are read straight from shared memory, which the server writes. A push goes to every server and,
once all have it, is reported to the coordinator; a few of them at most are on the way. Which pushes make a step, with
what weight, and who applies it, is decided by the coordinator (`ps.coordinator`) and done by the servers.

`modes.parameter_server` holds these together; `session` is what all workers agree on, `heartbeat` what goes to and fro
with heartbeats, `dense_export` what is taken back from the servers.
"""
