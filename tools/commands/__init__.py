"""The subcommands of `gba-hvd`, a file each."""
