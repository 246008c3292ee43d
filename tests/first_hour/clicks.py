"""Small data as a new user has it: ratings in the manner of MovieLens 1M, and a log with a field of several values."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def ratings(path: Path, n: int = 6000, n_users: int = 300, n_movies: int = 150) -> Path:
    """`user::movie::label::unix time`, without header; liking follows from user and movie, so it can be learnt."""
    rng = np.random.default_rng(7)
    user, movie = rng.integers(1, n_users + 1, n), rng.integers(1, n_movies + 1, n)
    taste = rng.normal(size=n_users + 1)[user] + rng.normal(size=n_movies + 1)[movie]
    label = (taste + 0.3 * rng.normal(size=n) > 0).astype(int)
    when = rng.integers(956_703_932, 1_046_454_590, n)
    lines = [f"{u}::{m}::{y}::{t}" for u, m, y, t in zip(user, movie, label, when, strict=True)]
    path.write_text("\n".join(lines) + "\n")
    return path


def tagged(path: Path, n: int = 3000) -> Path:
    """A CSV with a header: label, user, tags (separated by |, also none), price."""
    rng = np.random.default_rng(11)
    lines = ["label,user,tags,price"]
    for _ in range(n):
        tags = sorted({f"t{tag}" for tag in rng.integers(0, 20, rng.integers(0, 4))})
        label = int(bool({"t0", "t1", "t2", "t3"} & set(tags)) or rng.random() < 0.1)
        lines.append(f"{label},u{rng.integers(0, 50)},{'|'.join(tags)},{rng.random():.3f}")
    path.write_text("\n".join(lines) + "\n")
    return path
