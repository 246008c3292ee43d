"""Replicas of the dense part, synchronised with each other: ShadowSync, EASGD, MA, BMUF."""
