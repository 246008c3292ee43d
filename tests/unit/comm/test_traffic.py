"""What is said of bytes on the wire."""

from __future__ import annotations

from gba_hvd.comm.traffic import words


def test_bytes_are_reported_with_units_by_mode_and_direction() -> None:
    n_bytes = {"sent_allreduce_header": 720, "sent_allreduce_dense": 614_660, "received_allreduce_rows": 0}
    both = {"sent_hop_bs_rows": 1_500_000, "received_hop_bs_rows": 1_500_000}
    assert words({**n_bytes, **both}) == (
        "allreduce: sent 615.4 kB (dense 614.7 kB, header 720 B); hop_bs: sent 1.5 MB (rows 1.5 MB), received as much"
    )


def test_nothing_is_said_of_what_was_not_sent() -> None:
    assert words({"sent_allreduce_dense": 0}) == ""
