"""What benchmarks share: workloads, peers' environments, emulated devices."""
