"""The decisions of server 0: leases, which pushes make a step with what weight, who is alive."""
