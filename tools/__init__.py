"""The command line `gba-hvd`, the Horovod build and the benchmarks; installed as the import package `gba_hvd_tools`."""
